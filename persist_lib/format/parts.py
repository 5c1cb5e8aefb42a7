"""Parts: sorted updates as one Parquet object, or inline in the state for a few of them; and runs of parts.

A part is encoded with all that the state will say about it. Bytes are verified against the state's digests before
anything is decoded. A run is parts that follow each other in canonical order; `PartRun` streams it lazily, cut to a
key range and to the registered time bounds, in bounded memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.core.trace import GROUP_BYTES, GROUP_ROWS
from persist_lib.errors import Corrupt, NewerFormat
from persist_lib.format.conform import counted_at, cut, names_of
from persist_lib.format.descriptions import EncodedPart, describe
from persist_lib.format.digest import CHUNK, digest, verify
from persist_lib.format.parquet import Describing, PartEncoder, PartFile, groups_of, undamaged
from persist_lib.format.predicate import Where
from persist_lib.format.range_reader import ChunkedReader
from persist_lib.kernel.columns import integers, joined, mask_of, one_batch, validity
from persist_lib.kernel.keys import slice_sorted
from persist_lib.kernel.merge import end_to_end
from persist_lib.schema.schema import TIME, Schema

PART_BYTES = 128 << 20


def parts_of(
    windows: Iterable[pa.Table], schema: Schema, schema_id: int, part_bytes: int, parallel: Describing = map
) -> Iterator[EncodedPart]:
    """One run of parts of about `part_bytes` from tables that follow one another in order and are consolidated.

    A part ends where one more row group like those in it would not fit: a few bytes of one more chunk are a GET more.
    """
    run = _OneRun(schema, schema_id, part_bytes, parallel)
    for window in windows:
        yield from run.add(window)
        del window  # what is given away is not kept
    yield from run.finish()


def parts_of_clusters(
    windows: Iterable[pa.Table], schema: Schema, schema_id: int, part_bytes: int, column: int, cuts: Sequence[int]
) -> Iterator[EncodedPart]:
    """The same as several runs, of one cluster each: rows whose value in a column is below the first cut, and so on.

    A row with null is in the last one. Parts come as they are full, each of one cluster and in order within it.
    """
    runs = [_OneRun(schema, schema_id, part_bytes, map) for _ in range(len(cuts) + 1)]
    name = schema.names[column]
    for window in windows:
        places = places_of(window.column(name), cuts)
        for place in np.unique(places).tolist():
            flags = places == place
            yield from runs[place].add(window if flags.all() else window.filter(mask_of(flags)))
    for run in runs:
        yield from run.finish()


def places_of(column: pa.ChunkedArray, cuts: Sequence[int]) -> npt.NDArray[np.int64]:
    """The cluster of each value, where they are cut so: integers, dates or times, or null, which is in the last one."""
    array = joined(column)
    values = integers(array)
    places = np.searchsorted(np.array(cuts, values.dtype), values, side="right")
    return places if (valid := validity(array)) is None else np.where(valid, places, len(cuts))


class _OneRun:
    """Parts of about `part_bytes` of one run, from tables that follow one another in order."""

    def __init__(self, schema: Schema, schema_id: int, part_bytes: int, parallel: Describing) -> None:
        self._schema, self._schema_id, self._part_bytes, self._parallel = schema, schema_id, part_bytes, parallel
        self._encoder, self._groups = PartEncoder(schema, schema_id), 0
        self._gathering = Gathering(part_bytes)

    def add(self, window: pa.Table) -> Iterator[EncodedPart]:
        """The parts that are full with these rows."""
        tables = self._gathering.add(window)
        del window
        for table in tables:
            yield from self._write(table)

    def finish(self) -> Iterator[EncodedPart]:
        """What is left."""
        for table in self._gathering.finish():
            yield from self._write(table)
        if self._encoder.rows:
            yield self._encoder.finish()

    def _write(self, table: pa.Table) -> Iterator[EncodedPart]:
        for group in groups_of(table):
            self._encoder.write(group, self._parallel)
            self._groups += 1
            if self._encoder.size * (self._groups + 1) > self._part_bytes * self._groups:
                yield self._encoder.finish()
                self._encoder, self._groups = PartEncoder(self._schema, self._schema_id), 0


class Gathering:
    """Rows that are held until they are most of a row group, or of a part, however large the windows are.

    A row group a window would put every column of wide rows into every chunk of a part, so that leaving columns out
    saved nothing.
    """

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._held: list[pa.Table] = []
        # A part is somewhat larger than its rows, where these do not shrink.
        self._most = min(GROUP_BYTES, part_bytes * 15 // 16)

    def add(self, window: pa.Table) -> Iterator[pa.Table]:
        """The tables that are full with these rows."""
        held, most = self._held, self._most
        held.append(window)
        del window  # what is given away is not kept
        while held and ((size := sum(one.nbytes for one in held)) >= most * 3 // 4 or _rows(held) >= GROUP_ROWS):
            table = _taken(held)
            if size > most and (fits := table.num_rows * most // size):
                held.append(table.slice(fits))
                table = table.slice(0, fits)
            yield table

    def finish(self) -> Iterator[pa.Table]:
        """What is left."""
        if self._held:
            yield _taken(self._held)


def _rows(tables: Iterable[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)


def _taken(held: list[pa.Table]) -> pa.Table:
    table = end_to_end(held) if len(held) > 1 else held[0]
    held.clear()
    return table


# Inline: an Arrow record batch without its schema, which the state knows. Cheap above all: a small append is one
# compare-and-set, and these bytes are what it has to build. The state's own checksum covers them once more.
VERSION: Final = 1
_HEADER = struct.Struct("<3sBI")  # magic, version, CRC-32 of the rest; 8 bytes, as Arrow wants its buffers aligned
_MAGIC = b"PIB"


def pack_inline(batch: pa.RecordBatch) -> bytes:
    """Sorted updates, in columns of `schema.updates`, as bytes."""
    body = batch.serialize().to_pybytes()
    return _HEADER.pack(_MAGIC, VERSION, zlib.crc32(body)) + body


def decode_inline(
    where: str,
    data: bytes,
    written: Schema,
    schema: Schema | None = None,
    *,
    columns: Sequence[str] | None = None,
    lo: bytes | None = None,
    hi: bytes | None = None,
    at: int | None = None,
) -> pa.Table:
    """The updates with `lo <= key < hi`; `written` is the schema they were written with, `schema` the reader's.

    `where` names them in errors. With `at`, all updates are at that time.
    """
    body = memoryview(data)[_HEADER.size :]
    _check(where, data, body)
    with undamaged(where):
        batch = pa.ipc.read_record_batch(pa.py_buffer(body), written.updates)
        # A client sends these bytes as they are. Offsets that point elsewhere would make a reader read there.
        batch.validate(full=True)
    table = counted_at(pa.Table.from_batches([batch]), at)
    if schema is not None and not (schema.all_plain and written.all_plain):
        names = names_of(table.column_names, [column.id for column in written.columns], schema)
        table = table.rename_columns(names)
    if schema is None and columns is None:
        return slice_sorted(written, table, lo, hi)
    return cut(where, table, schema or written, columns, lo, hi)


def _check(where: str, data: bytes, body: memoryview) -> None:
    if len(data) < _HEADER.size or data[:3] != _MAGIC:
        raise Corrupt(f"{where}: not an inline batch", key=where)
    _, version, checksum = _HEADER.unpack_from(data)
    if version > VERSION:
        raise NewerFormat(
            f"{where}: inline format {version}, this release knows up to {VERSION}; upgrade first",
            key=where, found=version, known=VERSION,
        )  # fmt: skip
    if zlib.crc32(body) != checksum:
        raise Corrupt(f"{where}: inline bytes do not match their checksum", key=where)


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
    at: int | None = None,
) -> pa.Table:
    """The updates of a part with `lo <= key < hi`, as the reader's schema has them; other arguments as in `PartFile`.

    `_diff` and `_time` always come along.
    """
    return PartFile(key, verified(key, data, digests), schema, columns, at=at).read(lo, hi)


def verified(key: str, data: bytes | memoryview | pa.Buffer, digests: bytes) -> pa.BufferReader:
    """The bytes of a whole part for `PartFile`, which are what the digests were taken of. Raises Corrupt."""
    verify(key, memoryview(data), digests)
    return pa.BufferReader(data if isinstance(data, pa.Buffer) else pa.py_buffer(data))


class PartRun:
    """The updates of a run in order, as `schema` has them: tables. A part is opened once the one before has been read.

    Only keys in `[lo, hi)` come. Of some `columns` only these are read, with `_time` and `_diff`. `where` leaves out
    rows that it does not keep, as far as they are easily told.
    """

    def __init__(
        self,
        parts: Sequence[StoredPart],
        schema: Schema,
        *,
        lo: bytes | None = None,
        hi: bytes | None = None,
        batch_rows: int = BATCH_ROWS,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> None:
        self._parts, self._schema, self._lo, self._hi, self._batch_rows = parts, schema, lo, hi, batch_rows
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
        source: pa.BufferReader | ChunkedReader
        if part.size <= CHUNK:
            source = pa.BufferReader(pa.py_buffer(_whole(part)))
        else:
            source = ChunkedReader(part.key, part.size, part.digests, part.fetch, forward=True)
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


def _whole(part: StoredPart) -> bytes:
    data = part.fetch(0, part.size)
    if len(data) != part.size:
        raise Corrupt(
            f"{part.key}: {len(data)} bytes where the state says {part.size}. The object was damaged, truncated or "
            "replaced; restore it from a copy",
            key=part.key,
        )
    verify(part.key, data, part.digests)
    return data
