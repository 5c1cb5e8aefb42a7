"""Slices: what one task of Spark reads. A key range of a section of a shard's history, planned from one state.

A section is the contents as of one time, or the updates between two. It is the same in every state whose since allows
it, and comes in the same order. So a slice does not rely on the state that it was planned from: when a part is gone,
the task plans its key range again from the newest state, and continues after the last row that it has yielded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.client import Client, for_layers
from persist_lib.core.plan.cutting import cut_evenly
from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.state import State
from persist_lib.errors import Missing
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME, at
from persist_lib.ids import ShardId
from persist_lib.kernel.merge import merge_runs
from persist_lib.location.api import Blob
from persist_lib.relation.held import kept_of, resuming
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.restore import complete
from persist_lib.relation.row_selection import KeyRange
from persist_lib.relation.snapshot import Split, streamed
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.shard.runs import Stored, inputs_of, may_keep, newest_schema, overlapping
from persist_lib.shard.stretches import stretches

DEFAULT_BYTES = 32 << 20
"""Of stored parts in one slice. Decoded they are some times that, and Python hands them to the JVM at some 100 MB/s."""
LEAST_BYTES = 4 << 20
"""Of a slice that is cut only because there are tasks to spare: it still outweighs the start of a task."""
MOST_SLICES = 10_000
"""Slices of one plan: Spark's driver keeps some kilobytes of each. A larger section has larger slices."""
MERGE_BYTES = 96 << 20
"""Memory for merging in a task, of which an executor may run several at a time."""


class Section(NamedTuple):
    """The contents as of `as_of`, or (where that is None) the updates with times in `[lower, upper)`; None: no end."""

    as_of: int | None = None
    lower: int = 0
    upper: int | None = None

    @property
    def since(self) -> int:
        """The last time that since may be at for this section to be exact."""
        return max(0, self.lower - 1) if self.as_of is None else self.as_of

    def is_empty(self) -> bool:
        return self.as_of is None and self.upper is not None and self.upper <= self.lower

    def between(self, lower: int, upper: int | None) -> Section:
        """Its updates with times in `[lower, upper)` too."""
        ends = [end for end in (self.upper, upper) if end is not None]
        return Section(None, max(self.lower, lower), min(ends) if ends else None)

    def inputs(self, state: State) -> tuple[TaskInput, ...]:
        if self.as_of is not None:
            as_of = self.as_of
            batches = (batch for batch in state.batches_at(as_of) if batch.count and batch.lower.is_before(as_of))
            return inputs_of(batches, 0, None if as_of == MAX_TIME else as_of + 1)
        first, end = self.lower, self.upper
        batches = (
            batch
            for batch in state.trace
            if batch.count
            and not batch.upper <= at(first)
            and (end is None or (end and batch.lower.is_before(end - 1)))
        )
        return inputs_of(batches, first, end)


class Slice(msgspec.Struct, frozen=True):
    """A key range of a section, and from which parts to read it. It pickles, and any process can read it.

    `names` are the columns to read; `_diff` comes along, and `_time` does in a section of updates.
    """

    urls: tuple[str, str]
    shard: str
    schema: Schema
    schemas: tuple[Schema, ...]
    section: Section
    inputs: tuple[TaskInput, ...]
    keys: KeyRange
    names: tuple[str, ...]
    where: Where | None = None

    def tables(self, blob: Blob, pool: Executor, merge_bytes: int = MERGE_BYTES) -> Iterator[pa.Table]:
        if self.section.as_of is not None:
            split = Split(
                self.urls, self.shard, self.section.as_of, self.schema, self.schemas, self.inputs, *self.keys, None,
                merge_bytes, self.where, (*self.names, DIFF),
            )  # fmt: skip
            return streamed(split, blob, pool)
        return self._updates(blob, merge_bytes)

    def _updates(self, blob: Blob, merge_bytes: int) -> Iterator[pa.Table]:
        written = newest_schema(self.schema, self.schemas, self.inputs)
        stored = Stored(blob, ShardId(self.shard), self.schemas, written, *self.keys, self.where)
        wanted = [name for name in self.schema.changes.names if name in {*self.names, *self.schema.updates.names[-2:]}]
        for table in merge_runs(stored.streams(self.inputs), written, merge_bytes=merge_bytes):
            kept = table if self.where is None else self.where.kept(table)
            if kept.num_rows:
                yield kept.select(wanted)

    def read(self, client: Client, pool: Executor) -> Iterator[pa.Table]:
        """Its rows in order, in a task. Where a part is gone, continue from the newest state."""
        return read_slice(client, self, pool)

    def again(self, state: State) -> Slice:
        return msgspec.structs.replace(
            self, schemas=state.schemas,
            inputs=wanted_of(state, self.section, self.schema, where=self.where, keys=self.keys),
        )  # fmt: skip


def plan_slices(
    handle: ReadHandle,
    section: Section,
    *,
    names: Sequence[str],
    where: Where | None = None,
    keys: KeyRange = KeyRange(),  # noqa: B008 - a tuple
    slice_bytes: int | None = None,
    slots: int = 1,
) -> list[Slice]:
    """Cut a section into slices of about `slice_bytes` of stored bytes, in key order; none where there is nothing.

    Without `slice_bytes` it depends on how many tasks run at a time (`slots`), so that none of them waits for another.
    Raises SinceViolation where its history is gone.
    """
    whole = whole_slice(handle, section, names=names, where=where, keys=keys)
    if not whole.inputs:
        return []
    edges = cuts(handle.machine.reads, [whole], slice_bytes, slots)
    return [piece for piece in cut_at(whole, edges) if piece is not None]


def whole_slice(
    handle: ReadHandle, section: Section, *, names: Sequence[str], where: Where | None, keys: KeyRange
) -> Slice:
    """All of a section, as one slice. Raises SinceViolation where its history is gone.

    From a state that is read now. Another process may have decided what the section is, and this one may know
    an older state, in which that time was not complete.
    """
    state = _newest(handle, section)
    return Slice(
        handle.urls, handle.shard, handle.schema, state.schemas, section,
        wanted_of(state, section, handle.schema, where=where, keys=keys), keys, tuple(names), where,
    )  # fmt: skip


def _newest(handle: ReadHandle, section: Section) -> State:
    """A state that is read now, and has the history of the section. Raises SinceViolation where that is gone."""
    handle.fetch_upper()
    return kept_of(handle).acquire(section.since).version.state


def wanted_of(
    state: State, section: Section, schema: Schema, *, where: Where | None, keys: KeyRange
) -> tuple[TaskInput, ...]:
    """The runs of a section, with the parts that may hold some of these keys and rows that the filter keeps."""
    return tuple(may_keep(where, overlapping(section.inputs(state), *keys), state.schemas, schema))


def cut_at(whole: Slice, edges: Sequence[bytes]) -> list[Slice | None]:
    """The slices between these keys, one more than there are edges; None where there is nothing."""
    runs = [_Run(run) for run in whole.inputs]
    found: list[Slice | None] = []
    for lower, upper in pairwise([whole.keys.lower, *edges, whole.keys.upper]):
        inputs = tuple(part for run in runs if (part := run.between(lower, upper)) is not None)
        piece = msgspec.structs.replace(whole, keys=KeyRange(lower, upper), inputs=inputs)
        found.append(piece if inputs else None)
    return found


class _Run:
    """A run that is cut many times: its parts are in the order of keys, so that their places are found by bisection."""

    def __init__(self, run: TaskInput) -> None:
        self._run = run
        self._lowers = [part.key_lower for part in run.parts]
        self._uppers = [part.key_upper for part in run.parts]

    def between(self, lower: bytes | None, upper: bytes | None) -> TaskInput | None:
        """Its parts that may hold keys in `[lower, upper)`; None for none. A part's upper bound is inclusive."""
        first = 0 if lower is None else bisect_left(self._uppers, lower)
        end = len(self._lowers) if upper is None else bisect_left(self._lowers, upper)
        return msgspec.structs.replace(self._run, parts=self._run.parts[first:end]) if first < end else None


def slices_of(size: int, slice_bytes: int | None, slots: int) -> int:
    """Into how many slices to cut so many stored bytes: a multiple of `slots`, unless a size was asked for."""
    if slice_bytes is None:
        most = -(-size // LEAST_BYTES)
        wanted = max(-(-size // DEFAULT_BYTES), min(slots, most))
        return min(MOST_SLICES, most, -(-wanted // slots) * slots)
    return min(MOST_SLICES, -(-size // slice_bytes))


def cuts(blob: Blob, wholes: Sequence[Slice], slice_bytes: int | None, slots: int) -> list[bytes]:
    """The keys at which to cut slices of the same keys. Large parts are cut too, by the keys that they note."""
    size = sum(part.size for whole in wholes for run in whole.inputs for part in run.parts)
    n = slices_of(size, slice_bytes, slots)
    if n < 2:
        return []
    lower, upper = wholes[0].keys
    found = [
        stretch
        for whole in wholes
        for stretch in stretches(blob, ShardId(whole.shard), whole.inputs, whole.schemas, size // n)
    ]
    inside = [s for s in found if (lower is None or s.lower > lower) and (upper is None or s.lower < upper)]
    return cut_evenly(inside, n)


def read_slice(client: Client, planned: Slice, pool: Executor, merge_bytes: int = MERGE_BYTES) -> Iterator[pa.Table]:
    """The rows of a slice, in order. Where a part is gone, continue from the newest state.

    A section is the same in every state that it may be read from, and comes in key order. So it is exact to go
    on after the last row. Raises SinceViolation where its history is gone.
    """
    found = planned

    def look_again(missing: Missing) -> None:
        nonlocal found
        found = _newer(client, found, missing)

    return resuming(lambda: found.tables(client.reads, pool, merge_bytes), look_again)


def _newer(client: Client, gone: Slice, missing: Missing) -> Slice:
    client = for_layers(client)
    if member := client.machine(gone.shard).fetch().state.member:  # what was planned is read, whose ever it is by now
        client.know_members([gone.shard], member)
    found = gone.again(_newest(handle_of(client, gone.shard, gone.schema), gone.section))
    if found.inputs == gone.inputs:
        raise missing
    return found


def handle_of(client: Client, shard: str, schema: Schema) -> ReadHandle:
    """A handle that reads and has no lease of its own: those who plan take one, which outlives their process."""
    machine = client.machine(shard)
    completes = None if client.read_only else partial(complete, machine, partial(client.open_writer, shard))
    return ReadHandle(
        machine, client.leases, schema, (client.url, client.consensus_url), read_only=True, completes=completes
    )
