"""A few updates as bytes in the state itself: an Arrow record batch without its schema, which the state knows.

Cheap above all: a small append is one compare-and-set, and these bytes are what it has to build. The header is a
magic, a version and a CRC; the state's own checksum covers them once more.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from persist_lib.errors import Corrupt, NewerFormat
from persist_lib.format.parquet import conform, counted_at, undamaged
from persist_lib.kernel.keys import slice_sorted
from persist_lib.schema.schema import Schema

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
    table = counted_at(pa.Table.from_batches([batch]), at)
    if lo is not None or hi is not None:
        table = slice_sorted(written, table, lo, hi)
    if schema is None and columns is None:
        return table
    if columns is not None:
        kept = {*columns, "_time", "_diff"}
        table = table.select([name for name in table.schema.names if name in kept])
    return conform(where, table, schema or written, columns)


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
