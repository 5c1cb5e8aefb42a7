"""Differences that were computed once and kept, for listeners to read at a handover instead of merging renditions.

They are rows of one shard beside those of the old rendition, and go with it: (new rendition, the times of both sides,
chunk) -> an Arrow stream of the difference, in order of keys, in the columns of the new rendition. Chunk -1 says that
it is whole, and in which columns. All of one difference is one append.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.records import LAYER, RenditionRecord
from persist_lib.catalog.renditions import is_additive
from persist_lib.client import Client
from persist_lib.errors import DiffOverflow, InvalidUsage, NotFound, ShardFinished, SinceViolation
from persist_lib.kernel.columns import array_of, at_time, integers, packed, unpacked
from persist_lib.kernel.consolidate import I64_MIN
from persist_lib.kernel.merge import merge_runs
from persist_lib.relation.stage import Staged
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, Schema
from persist_lib.shard.admin import claim

if TYPE_CHECKING:
    from persist_lib.catalog.reader import RenditionReader


def difference(
    schema: Schema, old: Sequence[Iterator[pa.Table]], new: Sequence[Iterator[pa.Table]], time: int, merge_bytes: int
) -> Iterator[pa.Table]:
    """The updates at `time` that make the contents `new` of the contents `old`, in order: tables of `schema.updates`.

    Both sides are tables of `schema.contents`, each run in key order.
    """
    runs = [_timed(retracted(run), time) for run in old] + [_timed(run, time) for run in new]
    return merge_runs(runs, schema, merge_bytes=merge_bytes)


def retracted(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows with their diffs turned around."""
    for table in tables:
        diffs = integers(table.column(DIFF))
        if diffs.size and diffs.min() == I64_MIN:
            raise DiffOverflow(
                f"a row has the multiplicity {I64_MIN}, and no one update can retract that", total=I64_MIN
            )
        yield table.set_column(table.schema.get_field_index(DIFF), DIFF_FIELD, array_of(np.negative(diffs)))


def _timed(tables: Iterator[pa.Table], time: int) -> Iterator[pa.Table]:
    return (at_time(table, time) for table in tables)


SCHEMA = Schema(
    key={"new": "int64 not null", "was": "uint64 not null", "is": "uint64 not null", "chunk": "int64 not null"},
    value={"rows": "binary not null"},
)
WHOLE = -1
CHUNK_ROWS = 1 << 14
PER_TASK = 1 << 32
"""How many chunks a task may write: they are numbered in the order of the tasks."""


class Keeping:
    """A difference that is being kept. Tasks write its chunks for `stage`, and `commit` makes them readable."""

    def __init__(
        self, client: Client, old: RenditionRecord, new: RenditionRecord, was: int, is_: int, schema: Schema
    ) -> None:
        self._pair = {"new": new.number, "was": was, "is": is_}
        self._schema = schema
        try:
            self._write = client.open_writer(old.kept, SCHEMA, layer=LAYER)
            claim(self._write.machine, LAYER)
        except ShardFinished as error:
            raise NotFound(f"rendition {old.number} is being dropped, so no difference to it is kept") from error
        self.stage = self._write.stage()
        self._is_there = _mark(client, old, new, was, is_) is not None

    def commit(self, staged: list[Staged]) -> None:
        """Append all chunks and the mark. A difference is definite: one that is there already is left as it is."""
        if self._is_there:
            return
        mark = [{**self._pair, "chunk": WHOLE, "rows": packed(self._schema.contents.empty_table())}]
        self._write.append_staged([*staged, self.stage.write(mark)])

    def close(self) -> None:
        self.stage.close()
        self._write.close()


def check_can_be_kept(reader: RenditionReader, old: Schema, new: Schema) -> None:
    """Raise InvalidUsage where listeners could not use the difference."""
    if not is_additive(old, new):
        raise InvalidUsage(
            f"collection {reader.name!r}: a difference can only be kept where the columns are the same, or the new "
            f"rendition has some more at the end: {old} and {new}. Compare without keeping it",
            collection=reader.name,
        )


def chunks(tables: Iterator[pa.Table], new: int, was: int, is_: int, task: int) -> Iterator[pa.Table]:
    """The rows of the shard that one task writes: updates of the difference, in the order of their keys."""
    place = task * PER_TASK
    for table in tables:
        for start in range(0, table.num_rows, CHUNK_ROWS):
            rows = packed(table.slice(start, CHUNK_ROWS).drop_columns([TIME]))
            yield pa.table(
                [pa.array([value], kind) for value, kind in
                 ((new, pa.int64()), (was, pa.uint64()), (is_, pa.uint64()), (place, pa.int64()), (rows, pa.binary()))],
                schema=SCHEMA.data,
            )  # fmt: skip
            place += 1


def kept_difference(
    reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, time: int
) -> Iterator[pa.Table] | None:
    """What a handover at `time` changes, if that was kept: tables of `schema.updates`, in order. None if it was not.

    It is that of the contents of `old` as of `time - 1`, and of `new` as of `time`. Or of `new` as of `time - 1`, as
    compared before the handover: then what was written to it at `time` is added, as long as that is kept apart.
    """
    found = _table_run(reader, old, new, time - 1, time)
    if found is not None:
        return (at_time(table, time) for table in found)
    found = _table_run(reader, old, new, time - 1, time - 1)
    if found is None:
        return None
    since = [handle for handle in reader.shards_of(new) if handle.schema == reader.schema]
    if len(since) < new.shards:
        return None
    try:
        written = [handle.changes(time - 1, time, timeout=0) for handle in since]
    except SinceViolation:  # what was written at `time` is not apart any more
        return None
    runs = [(at_time(table.drop_columns([TIME]), time) for table in one.batches()) for one in written]
    return merge_runs(
        [(at_time(table, time) for table in found), *runs], reader.schema, merge_bytes=reader.client.config.merge_bytes
    )


def _table_run(
    reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, was: int, is_: int
) -> Iterator[pa.Table] | None:
    rows = _mark(reader.client, old, new, was, is_)
    if rows is None:
        return None
    tables = (unpacked(value.as_py()) for table in rows for value in table.column("rows"))
    first = next(tables)
    if first.schema != reader.schema.contents:
        return None
    return (table for table in tables if table.num_rows)


def _mark(client: Client, old: RenditionRecord, new: RenditionRecord, was: int, is_: int) -> Iterator[pa.Table] | None:
    """The rows of a difference, whose mark is the first of them; None where it is not there."""
    if client.machine(old.kept).try_fetch() is None:
        return None
    with suppress(ShardFinished, NotFound, SinceViolation):
        snapshot = unheld(client, old.kept, SCHEMA).snapshot(key=(new.number, was, is_), timeout=0, diff=True)
        rows = (table for table in snapshot.batches() if table.num_rows)
        first = next(rows, None)
        if first is not None and first.column("chunk")[0].as_py() == WHOLE:
            return chain([first], rows)
    return None
