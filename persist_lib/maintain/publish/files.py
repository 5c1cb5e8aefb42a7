"""Which files have a table's rows as of a time, each of them once, and no others.

A file of ours is such a file where each of its `_diff` is 1 and all of its times count. What a reader of the file alone
would get wrong is written once more, as a copy that belongs to the publication: rows that are there several times, and
updates that the state itself carries.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from persist_lib.core.plan.requests import MergeTask, TaskInput
from persist_lib.core.state import Batch, Part, State
from persist_lib.errors import Unpublishable
from persist_lib.format.parquet import PartFile
from persist_lib.format.parts import decode_inline
from persist_lib.format.paths import blob_key
from persist_lib.format.predicate import statistics_columns
from persist_lib.format.range_reader import ChunkedReader
from persist_lib.ids import PartKey, is_published
from persist_lib.kernel.columns import integers
from persist_lib.kernel.multiplicity import repeated
from persist_lib.maintain.merge_tasks import merged
from persist_lib.maintain.publish.columns import Columns
from persist_lib.maintain.publish.folder import COPIES, Folder
from persist_lib.schema.evolution import evolved
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.runs import inputs_of, source_of

AS_OF = "persist.as_of"
"""The property of a snapshot that says which time it stands for: as an integer, as the shard counts."""


COPIED_ROWS = 1 << 16
"""Rows of a table that a copy is made of."""


Bounds = Mapping[str, tuple[Any, Any]]
"""The least and the greatest value of a file by the ids of columns, both inclusive, as far as its footer says them."""


class File(NamedTuple):
    """One file of a publication: its key in Blob, its size in bytes, and its rows. `bounds` are of new files alone."""

    key: str
    size: int
    rows: int
    bounds: Bounds = MappingProxyType({})


class Known(NamedTuple):
    """What is published: the time, what the engine calls that version, and its files by key."""

    as_of: int
    version: str
    files: dict[str, File]


class Chosen(NamedTuple):
    """The parts that are published where they are, with the bounds of those that are new, and those that are copied."""

    in_place: list[Part]
    copied: list[Part]
    bounds: dict[PartKey, Bounds]


def choose(
    folder: Folder, machine: Machine, state: State, as_of: int, columns: Columns, *, below_folder: bool,
    known: set[str],
) -> Chosen | None:  # fmt: skip
    """The objects that are the contents as of a time; None where there are none, and contents have to be written.

    `known` are keys in Blob that were found to have no row several times. `below_folder`: only what is there will do;
    of a shard whose parts never stand there, they are copied.
    """
    batches = [one for one in state.batches_at(as_of) if one.count and one.lower.is_before(as_of)]
    parts = [part for one in batches for part in one.parts]
    is_whole = all(one.exact for one in batches) and all(part.time_upper <= as_of for part in parts)
    objects = [part for part in parts if part.inline is None]
    if not is_whole or (below_folder and folder.has(machine.shard) and not all(is_published(p.key) for p in objects)):
        return None
    if not is_contents(batches, state) and any(one.count > one.diff_sum for one in batches):
        return None  # some take others back; where the sum does not tell, the column does
    chosen = Chosen([], [part for part in parts if part.inline is not None], {})
    for part in objects:
        diffs = np.ones(1, np.int64)
        if blob_key(machine.shard, part.key) not in known:
            file = opened(machine, state, part, state.schemas[part.schema])
            diffs, chosen.bounds[part.key] = _diffs_of(file), bounds_of(file.footer, columns)
        if (diffs < 1).any():
            if is_contents(batches, state):
                raise _negative(folder)
            return None
        is_there = not below_folder or blob_key(machine.shard, part.key).startswith(folder.prefix)
        is_plain = is_there and (diffs == 1).all() and columns.can_read(part.schema)
        (chosen.in_place if is_plain else chosen.copied).append(part)
    for part in chosen.copied:
        if part.inline is not None and (integers(_inline(state, part).column(DIFF)) != 1).any():
            return None
    return chosen


def is_contents(batches: Sequence[Batch], state: State) -> bool:
    """Whether these are one run of updates which were added up: contents that are kept, or what is all of one time."""
    if len(batches) != 1 or len(batches[0].runs) != 1:
        return False
    times = {time for part in batches[0].parts for time in (part.time_lower, part.time_upper)}
    return batches[0] is state.contents or (len(times) == 1 and batches[0].since.time in times)


def opened(machine: Machine, state: State, part: Part, schema: Schema) -> PartFile:
    """An object, open to be read as `schema` has it, verified by its digests."""
    source = source_of(machine.blob, machine.shard, part, TaskInput((part,), 0, None), state.schemas)
    reader = ChunkedReader(source.key, source.size, source.digests, source.fetch)
    return PartFile(source.key, reader, schema, at=part.at)


def _diffs_of(file: PartFile) -> np.ndarray:
    groups = [integers(file.read_group(group, [DIFF]).column(DIFF)) for group in range(len(file.bounds))]
    return np.concatenate([np.zeros(0, np.int64), *groups])


def bounds_of(footer: pq.FileMetaData, columns: Columns) -> dict[str, tuple[Any, Any]]:
    """What a file's footer says of its columns' values, in the types that are published.

    Nothing is said of floats, as engines differ in where they order NaN, nor where a row group says nothing.
    """
    stored = {field.name: field.type for field in footer.schema.to_arrow_schema()}
    shown = dict(zip(columns.ids, columns.shown.types, strict=True))
    found: dict[str, tuple[Any, Any]] = {}
    for at in range(footer.num_columns):
        name = footer.schema.column(at).path
        id_ = columns.names.get(name, "")
        if id_ not in shown or name not in stored or not _is_same(stored[name], shown[id_]):
            continue
        each = [footer.row_group(group).column(at).statistics for group in range(footer.num_row_groups)]
        filled = [one for one in each if one is None or one.num_values]  # a row group may have only nulls there
        try:
            if filled and all(one is not None and one.has_min_max for one in filled):
                found[id_] = min(one.min for one in filled), max(one.max for one in filled)
        except (pa.ArrowException, ValueError, OverflowError):
            continue  # no value of Python has it, as a year of six digits
    return found


def _is_same(stored: pa.DataType, shown: pa.DataType) -> bool:
    return stored == shown or (pa.types.is_integer(stored) and pa.types.is_integer(shown))


def file_of(machine: Machine, part: Part, bounds: Bounds | None = None) -> File:
    """A part as a file that is published where it is."""
    return File(blob_key(machine.shard, part.key), part.size, part.rows, bounds or {})


def copies_of(
    folder: Folder, machine: Machine, state: State, parts: Sequence[Part], columns: Columns, known: Mapping[str, File]
) -> list[File]:
    """Copies of parts, each row as often as it is there: one of each object, and one of all that is inline."""
    newest = state.schemas[-1]
    of = f"-{len(columns.schemas)}" if evolved(columns.schemas) else ""  # columns are others since
    of += "-signed" * columns.has_unsigned  # earlier copies had unsigned numbers
    found = []
    for part in (one for one in parts if one.inline is None):
        key = f"{folder.prefix}{COPIES}{part.key.replace('/', '-')}{of}"  # a part never changes, nor does its copy
        if (file := known.get(key)) is None:
            file = _put(folder, key, columns, opened(machine, state, part, newest).batches(COPIED_ROWS))
        found.append(file)
    if inline := [one for one in parts if one.inline is not None]:
        digest = np.bitwise_xor.reduce([int.from_bytes(one.digests[:8]) for one in inline])
        key = f"{folder.prefix}{COPIES}inline-{len(inline)}-{digest:016x}{of}.parquet"
        found.append(known.get(key) or _put(folder, key, columns, (_inline(state, part) for part in inline)))
    return found


def whole(folder: Folder, machine: Machine, state: State, as_of: int, columns: Columns) -> Iterator[File]:
    """Copies of the whole contents as of a time, which no run has: merged, added up, and each row as often as it is."""
    newest = len(state.schemas) - 1
    batches = (one for one in state.batches_at(as_of) if one.count and one.lower.is_before(as_of))
    inputs, config = inputs_of(batches, 0, as_of + 1), machine.config
    task = MergeTask(
        machine.shard, "", inputs, state.schemas, newest, as_of, None, None, config.part_bytes, config.merge_bytes
    )
    with machine.runtime.pool(config.read_threads, "persist-publish") as pool:
        for encoded in merged(task, machine.blob, pool) if inputs else ():
            name = f"{folder.prefix}{COPIES}{machine.runtime.entropy() % 2**64:016x}.parquet"
            reader = PartFile(name, pa.BufferReader(encoded.data), state.schemas[newest])
            yield _put(folder, name, columns, reader.batches(COPIED_ROWS))


def _put(folder: Folder, key: str, columns: Columns, tables: Iterable[pa.Table]) -> File:
    """A file of these rows; its columns are called by their ids, as no other column ever is."""
    out, rows, schema = io.BytesIO(), 0, columns.copied
    what, named = f"table {folder.table}", columns.by_ids(schema)
    plain = (table.drop_columns([TIME]) for table in tables)
    told = statistics_columns(named) or False
    with pq.ParquetWriter(out, named, compression="zstd", write_statistics=told) as writer:
        for table in repeated(plain, what):
            writer.write_table(table.select(schema.names).cast(schema).rename_columns(named.names))
            rows += table.num_rows
    folder.put(key, out.getvalue())
    return File(key, out.tell(), rows, bounds_of(pq.read_metadata(out), columns))


def _inline(state: State, part: Part) -> pa.Table:
    return decode_inline("inline rows", part.inline or b"", state.schemas[part.schema], state.schemas[-1], at=part.at)


def _negative(folder: Folder) -> Unpublishable:
    return Unpublishable(
        f"table {folder.table} cannot be published: some of its rows are there fewer than zero times, which other "
        "engines cannot say. Nothing was published; see them by client.table(...).read(diff=True)",
        table=folder.table,
    )
