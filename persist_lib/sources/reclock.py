"""Reclocking: messages get the times that bindings say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.order import take
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import TIME, TIME_FIELD
from persist_lib.sources.bindings import Bound, Step
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.pipeline import NO_SCHEMAS
from persist_lib.sources.protocol import START, Mark, SourceReader
from persist_lib.sources.schema_registry import Schemas, Written

Estimate = Callable[[str, int, int], int]


class Window(NamedTuple):
    """Whole times `[start, end)`, and what was bound in them. `before` are the marks as of just before `start`."""

    start: int
    end: int
    before: Mapping[str, Mark]
    steps: tuple[Step, ...]

    def ranges(self) -> dict[str, tuple[Mark, Mark]]:
        """From where to where to read each partition, in the order of their names."""
        last: dict[str, Mark] = {}
        for step in self.steps:
            last |= step.marks
        return {partition: (self.before.get(partition, START), last[partition]) for partition in sorted(last)}

    def halves(self) -> tuple[Window, Window]:
        """Two windows of the same times, one after the other. It has to have two steps at least."""
        middle = len(self.steps) // 2
        first, second = self.steps[:middle], self.steps[middle:]
        between = dict(self.before)
        for step in first:
            between |= step.marks
        at = second[0].time
        return Window(self.start, at, self.before, first), Window(at, self.end, between, second)

    def times_of(self, partition: str, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The time of each message: the first at which its address is covered."""
        steps = [(step.marks[partition].address, step.time) for step in self.steps if partition in step.marks]
        bounds = np.array([address for address, _ in steps], np.uint64)
        times = np.array([time for _, time in steps], np.uint64)
        return times[np.searchsorted(bounds, addresses, side="right")]


def windows(bound: Bound, start: int, most_bytes: int, estimate: Estimate) -> Iterator[Window]:
    """Cut `[start, bound.upper)` into windows of about `most_bytes` of messages, at least one time each."""
    before = dict(bound.start)
    some: list[Step] = []
    marks, size = dict(before), 0
    for step in bound.steps:
        weight = sum(
            estimate(partition, marks.get(partition, START).address, mark.address)
            for partition, mark in step.marks.items()
        )
        if some and size + weight > most_bytes:
            yield Window(start, step.time, before, tuple(some))
            start, before, some, size = step.time, dict(marks), [], 0
        some.append(step)
        marks |= step.marks
        size += weight
    if start < bound.upper:
        yield Window(start, bound.upper, before, tuple(some))


def in_order(times: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
    """The order of the messages of all partitions, given one after the other: by time, then as they were given."""
    return np.argsort(np.concatenate(times), kind="stable") if times else np.array([], np.int64)


def read(reader: SourceReader, window: Window, most_bytes: int) -> pa.Table | None:
    """The messages of a window with their times, in the order of times, partitions and addresses.

    None if they are more than `most_bytes`, and the window could be a shorter one.
    """
    tables, times, size = [], [], 0
    for partition, (start, end) in window.ranges().items():
        for table in reader.read(partition, start, end):
            indices = pa.array(np.zeros(table.num_rows, np.int32))
            names = pa.DictionaryArray.from_arrays(indices, pa.array([partition]))
            some = table.append_column("partition", names)
            if TIME not in table.column_names:
                mine = window.times_of(partition, integers(table.column("address")))
                some = some.append_column(TIME_FIELD, array_of(mine))
            times.append(integers(some.column(TIME)))
            tables.append(some)
            size += table.nbytes
            if size > most_bytes and len(window.steps) > 1:
                return None
    if not tables:
        return pa.table({"partition": pa.array([], pa.string())})
    whole = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    order = in_order(times)
    return whole if (order[1:] > order[:-1]).all() else take(whole, order)


def read_parts(reader: SourceReader, window: Window, most_bytes: int) -> Iterable[tuple[Window, pa.Table]]:
    """The window with its messages; in parts, if these turn out to be much more than was estimated."""
    some = read(reader, window, most_bytes)
    if some is not None:
        yield window, some
        return
    for half in window.halves():
        yield from read_parts(reader, half, most_bytes)


def schemas_of(
    schemas: Schemas | None, decoding: Decoding, messages: pa.Table, deadline: Deadline
) -> Mapping[int, Written]:
    """The schemas that messages name, as they are committed."""
    if schemas is None:
        return NO_SCHEMAS
    from persist_lib.sources.avro import ids_of  # noqa: PLC0415 - fastavro is an extra

    return schemas.learn(ids_of(decoding, messages), deadline)
