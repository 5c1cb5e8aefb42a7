"""Keys as bytes: comparing the bytes compares the keys, in the order in which everything is sorted.

Each column is `00` for null, or `01` and its value: fixed-width values big-endian (sign flipped, floats by the total
order of their bits), text and binary with `00` escaped as `00 FF` and closed by `00 00`. So any encoding may be cut
short and still bound a range: a cut one is at most every key that starts like it.

Bounds in a state are cut to a limit, and still decode to a tuple of values: `lower_bound` is at or below every key of
the rows, `upper_bound` at or above, both inclusive. Ranges for splits are `[lo, hi)` of such bytes.

A bound of a range may continue behind the key, with the encodings of the value columns and of `_time`. It then cuts
between the updates of one key. No encoding of a value is the start of another's, so a bound that ends with the key, or
within it, means the same either way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import comparable, plain
from persist_lib.kernel.nested import is_nested
from persist_lib.schema.schema import TIME, Schema

LIMIT = 64  # bytes of a bound in the state: enough to tell parts apart, little enough to keep thousands of them

LONGEST_START = 1024
"""Bytes of the encoding of an update (key, value) that a part keeps of the first of a row group."""

NULL, VALUE = b"\x00", b"\x01"
_ESCAPED, _END = b"\x00\xff", b"\x00\x00"
_LAST_POINT, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)

Rows: TypeAlias = pa.RecordBatch | pa.Table
Encode = Callable[[pa.Scalar], bytes]


def encode_key(schema: Schema, values: Sequence[object]) -> bytes:
    """The encoding of the leading key columns' values (Python values or Arrow scalars); all of them, or a prefix."""
    if len(values) > len(schema.key):
        raise InvalidUsage(f"the key has {len(schema.key)} columns, got {len(values)} values", values=values)
    pairs = zip(schema.data, values, strict=False)
    return b"".join(_encode(_scalar(value, field), field.type) for field, value in pairs)


def decode_key(schema: Schema, data: bytes) -> tuple[pa.Scalar, ...]:
    """The values of a key or bound. Of a bound that was cut, the leading ones, the last as far as it goes."""
    found: list[pa.Scalar] = []
    at = 0
    for field in list(schema.data)[: len(schema.key)]:
        if at >= len(data):
            break
        value, at = _decode(data, at, field.type)
        found.append(value)
    return tuple(found)


def encode_row(schema: Schema, rows: Rows, index: int) -> bytes:
    """The encoding of one row's key."""
    return b"".join([encode_cell(rows.column(column.name), index) for column in schema.key])


def encode_data(schema: Schema, rows: Rows, index: int) -> bytes:
    """The encoding of one row's key and value."""
    return b"".join([encode_cell(rows.column(name), index) for name in schema.names])


def encode_time(time: int) -> bytes:
    """The encoding of a time, which follows those of the key and the value."""
    return VALUE + time.to_bytes(8, "big")


class Start(NamedTuple):
    """Where an update stands in the order: its key and value, encoded, and its time; without a time if they are cut."""

    data: bytes
    time: int | None = None

    @classmethod
    def of(cls, schema: Schema, rows: Rows, index: int) -> Start:
        """The place of one row, in at most LONGEST_START bytes."""
        data = encode_data(schema, rows, index)
        return cls(data, rows.column(TIME)[index].as_py()) if len(data) <= LONGEST_START else cls(data[:LONGEST_START])

    def cut(self, settled: int | None) -> bytes:
        """The bound of a range that starts here. Updates of the same data up to the time `settled` stay together."""
        if self.time is None or (settled is not None and self.time <= settled):
            return self.data
        return self.data + encode_time(self.time)


def may_reach(upper: bytes, lo: bytes | None) -> bool:
    """Whether one of the rows whose keys are at or below `upper` may be at or beyond `lo`."""
    return lo is None or upper >= lo[: len(upper)]


def encode_cell(column: pa.Array | pa.ChunkedArray, index: int) -> bytes:
    """The encoding of one value of a column; of a nested one, that of its bytes."""
    if is_nested(column.type):
        column, index = comparable(column.slice(index % len(column), 1)).cast(pa.binary()), 0
    scalar = column[index]
    if isinstance(scalar, pa.DictionaryScalar) and scalar.is_valid:
        scalar = scalar.value
    return _encode(scalar, column.type)


def bounds(schema: Schema, rows: Rows) -> tuple[bytes, bytes]:
    """`lower_bound` and `upper_bound` of sorted rows."""
    if rows.num_rows == 1 and len(key := encode_row(schema, rows, 0)) <= LIMIT:
        return key, key
    return lower_bound(schema, rows), upper_bound(schema, rows)


def lower_bound(schema: Schema, rows: Rows, limit: int = LIMIT) -> bytes:
    """At most `limit` bytes (or a little more for fixed-width keys) that are at or below the first row's key."""
    cells = [encode_cell(rows.column(column.name), 0) for column in schema.key]
    kept, room = _fitting(cells, limit)
    if kept == len(cells):
        return b"".join(cells)
    raw = _variable(rows.column(schema.key[kept].name), 0)
    if raw is None:
        return b"".join(cells[: kept + 1])
    return b"".join(cells[:kept]) + VALUE + _cut(raw, room, schema.key[kept].type)


def upper_bound(schema: Schema, rows: Rows, limit: int = LIMIT) -> bytes:
    """The same at or above the last row's key; the whole key where nothing shorter is above it."""
    last = rows.num_rows - 1
    cells = [encode_cell(rows.column(column.name), last) for column in schema.key]
    kept, room = _fitting(cells, limit)
    if kept == len(cells):
        return b"".join(cells)
    for index in range(kept, -1, -1):
        raw = _variable(rows.column(schema.key[index].name), last)
        above = _above(cells[index], raw, room if index == kept else limit, schema.key[index].type)
        if above is not None:
            return b"".join(cells[:index]) + above
    return b"".join(cells)


def slice_sorted(schema: Schema, rows: Rows, lo: bytes | None, hi: bytes | None) -> Rows:
    """The rows with `lo <= key < hi`, of rows sorted by key; None is no bound. Copies nothing."""
    start, end = 0, rows.num_rows
    # Most rows that are cut lie within the range: their ends tell.
    if lo is not None and end and _is_below(schema, rows, 0, lo):
        start = search(schema, rows, lo)
    if hi is not None and end and not _is_below(schema, rows, end - 1, hi):
        end = search(schema, rows, hi)
    return rows if start == 0 and end == rows.num_rows else rows.slice(start, max(0, end - start))


def search(schema: Schema, rows: Rows, bound: bytes) -> int:
    """How many rows of sorted `rows` are below `bound`, which may continue behind the key."""
    return bisect_left(range(rows.num_rows), True, key=lambda index: not _is_below(schema, rows, index, bound))


def _is_below(schema: Schema, rows: Rows, index: int, bound: bytes) -> bool:
    key = encode_row(schema, rows, index)
    if len(key) >= len(bound) or not bound.startswith(key):
        return key < bound
    names = [name for name in (*schema.names[len(schema.key) :], TIME) if name in rows.schema.names]
    return key + b"".join([encode_cell(rows.column(name), index) for name in names]) < bound


def _scalar(value: object, field: pa.Field) -> pa.Scalar:
    if isinstance(value, pa.Scalar) and value.type == field.type:
        return value
    try:
        given = value.as_py() if isinstance(value, pa.Scalar) else value
        if isinstance(given, bool) and not pa.types.is_boolean(field.type):
            raise TypeError("a bool is no number")  # for Arrow it is
        return pa.scalar(given, type=field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidUsage(f"key column {field.name!r} is {field.type}, got {shown(value)}", value=value) from error


def _encode(scalar: pa.Scalar, kind: pa.DataType) -> bytes:
    if not scalar.is_valid:
        return NULL
    return VALUE + _encoder(kind)(scalar)


@lru_cache(maxsize=256)
def _encoder(kind: pa.DataType) -> Encode:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_variable(kind):
        return lambda scalar: _escape(scalar.as_buffer().to_pybytes()) + _END
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return lambda scalar: scalar.as_buffer().to_pybytes()
    if pa.types.is_boolean(kind):
        return lambda scalar: b"\x01" if scalar.as_py() else b"\x00"
    width = kind.bit_width // 8
    top = 1 << (8 * width - 1)
    if pa.types.is_unsigned_integer(kind):
        return lambda scalar: scalar.as_py().to_bytes(width, "big")
    if pa.types.is_integer(kind):
        return lambda scalar: (scalar.as_py() + top).to_bytes(width, "big")
    if pa.types.is_floating(kind):
        return lambda scalar: _float_bits(_raw(scalar, width), top).to_bytes(width, "big")
    return lambda scalar: (_raw(scalar, width) ^ top).to_bytes(width, "big")


def _raw(scalar: pa.Scalar, width: int) -> int:
    """The bits of a scalar of fixed width, as Arrow stores them."""
    values = pa.repeat(scalar, 1).buffers()[1]
    return int.from_bytes(values.to_pybytes()[:width], "little")


def _float_bits(bits: int, top: int) -> int:
    return bits ^ (2 * top - 1) if bits & top else bits | top


def _decode(data: bytes, at: int, kind: pa.DataType) -> tuple[pa.Scalar, int]:
    if data[at : at + 1] == NULL:
        return pa.scalar(None, kind), at + 1
    at += 1
    if _is_variable(kind):
        raw, at = _unescape(data, at)
        return pa.scalar(raw, pa.binary()).cast(kind), at
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        raw = data[at : at + kind.byte_width]
        return pa.scalar(raw.ljust(kind.byte_width, b"\0"), kind), at + kind.byte_width
    if pa.types.is_boolean(kind):
        return pa.scalar(data[at : at + 1] == b"\x01", kind), at + 1
    width = kind.bit_width // 8
    number = int.from_bytes(data[at : at + width].ljust(width, b"\0"), "big")
    return _from_raw(_unflip(number, kind, 1 << (8 * width - 1)), kind, width), at + width


def _unflip(number: int, kind: pa.DataType, top: int) -> int:
    if pa.types.is_unsigned_integer(kind):
        return number
    if pa.types.is_floating(kind) and not number & top:
        return number ^ (2 * top - 1)
    return number ^ top


def _from_raw(raw: int, kind: pa.DataType, width: int) -> pa.Scalar:
    buffer = pa.py_buffer(raw.to_bytes(width, "little"))
    return pa.Array.from_buffers(kind, 1, [None, buffer])[0]


def _is_variable(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _escape(raw: bytes) -> bytes:
    return raw.replace(b"\x00", _ESCAPED) if b"\x00" in raw else raw


def _unescape(data: bytes, at: int) -> tuple[bytes, int]:
    """The text that starts at `at`, up to its end mark or the end of the data, and where the next column starts."""
    raw = bytearray()
    while True:
        zero = data.find(b"\x00", at)
        if zero < 0:
            return bytes(raw + data[at:]), len(data)
        raw += data[at:zero]
        if data[zero : zero + 2] != _ESCAPED:
            return bytes(raw), zero + 2
        raw += b"\x00"
        at = zero + 2


def _fitting(cells: list[bytes], limit: int) -> tuple[int, int]:
    """How many leading cells fit, and the bytes left for the contents of the one that does not."""
    room = limit
    for index, cell in enumerate(cells):
        if len(cell) > room:
            return index, max(1, room - len(VALUE))
        room -= len(cell)
    return len(cells), room


def _variable(column: pa.Array | pa.ChunkedArray, index: int) -> bytes | None:
    """The bytes of a value that may be cut, None for others."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not _is_variable(kind) and not (pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)):
        return None
    scalar = plain(column.slice(index, 1))[0]
    return scalar.as_buffer().to_pybytes() if scalar.is_valid else None


def _cut(raw: bytes, room: int, kind: str) -> bytes:
    """The escaped start of a value, in at most `room` bytes; whole characters of text."""
    while len(escaped := _escape_as(kind, _whole(raw[:room], kind))) > room > 1:
        room //= 2
        raw = raw[:room]
    return escaped


def _whole(raw: bytes, kind: str) -> bytes:
    return raw.decode("utf-8", errors="ignore").encode() if kind == "string" else raw


def _escape_as(kind: str, raw: bytes) -> bytes:
    """Values of fixed width have no end mark, and so nothing to escape."""
    return _escape(raw) if kind in ("string", "binary") else raw


def _above(cell: bytes, raw: bytes | None, room: int, kind: str) -> bytes | None:
    """The encoded start of a value above all that start like this one; None where there is none.

    For text the last *character* is incremented, not the last byte, so that the bound still decodes.
    """
    if raw is None:
        return _above_fixed(cell)
    start = _whole(raw[:room], kind)
    above = _next_text(start) if kind == "string" else after_prefix(start)
    return None if above is None else VALUE + _escape_as(kind, above)


def _above_fixed(cell: bytes) -> bytes | None:
    """The next value of a fixed-width column; the one after null is the least there is, which may be cut short."""
    if cell == NULL:
        return VALUE
    if len(cell) == 2 and cell[1] == 1:  # true, or an 8-bit value for which we need not try
        return None
    above = after_prefix(cell[1:])
    return None if above is None else VALUE + above.ljust(len(cell) - 1, b"\0")


def after_prefix(raw: bytes) -> bytes | None:
    """The least bytes above everything that starts with these; None for none."""
    stem = raw.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def _next_text(raw: bytes) -> bytes | None:
    stem = raw.decode().rstrip(chr(_LAST_POINT))
    if not stem:
        return None
    point = ord(stem[-1]) + 1
    return (stem[:-1] + chr(_SURROGATES[1] + 1 if point == _SURROGATES[0] else point)).encode()
