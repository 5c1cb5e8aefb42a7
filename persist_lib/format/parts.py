"""Parts: sorted updates as one Parquet object, or inline in the state for a few of them; and runs of parts.

A part is encoded with all that the state will say about it. Bytes are verified against the state's digests before
anything is decoded. A run is parts that follow each other in canonical order; `open_run` streams it lazily, cut to a
key range and to the registered time bounds, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from persist_lib.errors import Corrupt
from persist_lib.format.digest import CHUNK, digest, verify
from persist_lib.format.encoded import EncodedPart, describe
from persist_lib.format.inline import decode_inline, pack_inline
from persist_lib.format.parquet import Describing, PartEncoder, PartFile
from persist_lib.format.predicate import Where
from persist_lib.format.ranged import ChunkedReader
from persist_lib.kernel.columns import integers, mask_of, one_batch
from persist_lib.kernel.order import is_sorted, sort_updates
from persist_lib.schema.schema import TIME, Schema

__all__ = [
    "EncodedPart", "PartEncoder", "StoredPart", "decode_inline", "decode_part", "encode_inline", "encode_part",
    "is_sorted", "open_run", "sort_updates",
]  # fmt: skip

BATCH_ROWS = 1 << 14
"""Rows of a table that a run yields where many runs are read side by side."""
ALONE_ROWS = 1 << 16
"""The same of a run that is read alone: a table costs something, however few rows it has."""
BATCH_BYTES = 1 << 20
"""Bytes of a table of BATCH_ROWS at most; it has fewer rows then. Of more rows, as many times that."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a part can be read, and which of its updates count.

    `schema` is what it was written with. Only times in `[time_lower, time_upper)` count; None is no bound. `fetch`
    answers bytes `[start, end)` of the object, or raises (Missing, say). `inline` bytes come whole. With `at`, all
    updates count at that time, whatever the bytes say.
    """

    key: str
    size: int
    digests: bytes
    schema: Schema
    time_lower: int | None
    time_upper: int | None
    fetch: Callable[[int, int], bytes]
    inline: bool = False
    at: int | None = None


def encode_part(schema: Schema, schema_id: int, table: pa.Table, parallel: Describing = map) -> EncodedPart:
    """One object of a table in canonical order that is not empty. An executor's map makes use of one core more."""
    encoder = PartEncoder(schema, schema_id)
    encoder.write(table, parallel)
    return encoder.finish()


def encode_inline(schema: Schema, schema_id: int, table: pa.Table | pa.RecordBatch) -> EncodedPart:
    """The same as inline bytes."""
    batch = one_batch(table)
    data = pack_inline(batch)
    return EncodedPart(data, schema_id, digest(data), describe(schema, batch))


def decode_part(
    key: str,
    data: bytes | memoryview | pa.Buffer,
    digests: bytes,
    schema: Schema,
    *,
    columns: Sequence[str] | None = None,
    lo: bytes | None = None,
    hi: bytes | None = None,
    use_threads: bool = True,
    times: bool = True,
    where: Where | None = None,
    at: int | None = None,
) -> pa.Table:
    """The updates of a part with `lo <= key < hi`, as the reader's schema has them.

    `columns` are the wanted ones of the schema's; `_diff` always comes along, `_time` unless no `times` are wanted.
    Columns that are newer than the part are null. Row groups without a row that `where` keeps are not decoded; the
    others come whole. With `at`, all updates are at that time.
    """
    verify(key, memoryview(data), digests)
    file = PartFile(key, _source(data), schema, columns, times=times, where=where, at=at)
    return file.read(lo, hi, use_threads=use_threads)


def open_run(
    parts: Sequence[StoredPart],
    schema: Schema,
    *,
    key_lower: bytes | None = None,
    key_upper: bytes | None = None,
    batch_rows: int = BATCH_ROWS,
    columns: Sequence[str] | None = None,
    where: Where | None = None,
) -> PartRun:
    """The updates of a run in order, as `schema` has them; a part is opened when the one before has been read.

    Of some `columns` only these are read, `_time` and `_diff` besides. `where` leaves out rows that it does not keep,
    as far as they are easily told.
    """
    return PartRun(parts, schema, (key_lower, key_upper), batch_rows, columns, where)


class PartRun:
    """A stream of tables from the parts of one run. Nothing is fetched before the first is asked for."""

    def __init__(
        self,
        parts: Sequence[StoredPart],
        schema: Schema,
        keys: tuple[bytes | None, bytes | None],
        batch_rows: int,
        columns: Sequence[str] | None,
        where: Where | None,
    ) -> None:
        self._parts, self._schema, (self._lo, self._hi), self._batch_rows = parts, schema, keys, batch_rows
        self._columns, self._where = columns, where
        self._dictionaries = False
        self._tables = self._read()

    def __iter__(self) -> Iterator[pa.Table]:
        return self

    def __next__(self) -> pa.Table:
        return next(self._tables)

    def keep_dictionaries(self) -> None:
        """Yield text columns that have short dictionaries as such: what repeats is compared and hashed once."""
        self._dictionaries = True

    def _read(self) -> Iterator[pa.Table]:
        for part in self._parts:
            for table in self._batches(part):
                kept = within(table, part.time_lower, part.time_upper)
                if self._where is not None:
                    kept = self._where.roughly(kept)
                if kept.num_rows:
                    yield kept

    def _batches(self, part: StoredPart) -> Iterator[pa.Table]:
        if part.inline:
            yield decode_inline(
                part.key, _whole(part), part.schema, self._schema,
                columns=self._columns, lo=self._lo, hi=self._hi, at=part.at,
            )  # fmt: skip
            return
        source = _source(_whole(part)) if part.size <= CHUNK else _ranged(part)
        file = PartFile(
            part.key, source, self._schema, self._columns,
            dictionaries=self._dictionaries, where=self._where, at=part.at,
        )  # fmt: skip
        bytes_ = BATCH_BYTES * max(1, self._batch_rows // BATCH_ROWS)
        yield from file.batches(max(1, min(self._batch_rows, bytes_ // file.row_bytes)), self._lo, self._hi)


def within(table: pa.Table, lower: int | None, upper: int | None) -> pa.Table:
    """The updates with times in `[lower, upper)`, in the order they are in."""
    if lower is None and upper is None:
        return table
    times = integers(table.column(TIME))
    if times.size == 0 or ((lower is None or times.min() >= lower) and (upper is None or times.max() < upper)):
        return table
    kept = times >= (lower or 0)
    if upper is not None:
        kept &= times < upper
    return table.filter(mask_of(kept))


def _ranged(part: StoredPart) -> ChunkedReader:
    return ChunkedReader(part.key, part.size, part.digests, part.fetch, forward=True)


def _whole(part: StoredPart) -> bytes:
    data = part.fetch(0, part.size)
    if len(data) != part.size:
        raise Corrupt(f"{part.key}: {len(data)} bytes where the state says {part.size}", key=part.key)
    verify(part.key, data, part.digests)
    return data


def _source(data: bytes | memoryview | pa.Buffer) -> pa.BufferReader:
    return pa.BufferReader(data if isinstance(data, pa.Buffer) else pa.py_buffer(data))
