"""Rows of a column, chosen by their places: as Arrow's `take`, but items of lists are copied a whole list at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.kernel.columns import POOL, Rows, array_of, fixed_offsets, integers, mask_of, validity
from persist_lib.kernel.nested import STRINGS

MOST_OFFSETS = 2**31 - 1


def as_places(rows: Rows, count: int) -> pa.Array:
    """Places among `count` rows, for `rows_of`, as Arrow. Raises IndexError for others, before memory is read there."""
    if rows.size and not 0 <= rows.min() <= rows.max() < count:
        raise IndexError(f"there are {count} rows, and places from {rows.min()} to {rows.max()} were asked for")
    return array_of(rows)


def rows_of(column: pa.Array, chosen: pa.Array) -> pa.Array:
    """The chosen rows of a column, in that order. `as_places` has checked them, once for all columns."""
    if _is_list(column.type):
        rows, offsets, valid = integers(chosen), fixed_offsets(column, "<i4"), validity(column)
        counts, there, bitmap = np.diff(offsets).take(rows), rows, None
        if valid is not None:
            known = valid.take(rows)
            counts, there, bitmap = np.where(known, counts, 0), rows[known], mask_of(known).buffers()[1]
        ends = _ends(counts)
        if ends[-1] <= MOST_OFFSETS:
            buffers, items = [bitmap, _offsets_of(ends)], _spans(column.values, offsets, there)
            return pa.Array.from_buffers(column.type, len(rows), buffers, children=[items])
    return pc.take(column, chosen, boundscheck=False, memory_pool=POOL)


def _spans(array: pa.Array, offsets: Rows, rows: Rows) -> pa.Array:
    """What lies from one offset to the next, of each of the rows: end to end."""
    kind = array.type
    if array.null_count:
        return _one_by_one(array, offsets, rows)
    if pa.types.is_struct(kind):
        fields = [_spans(array.field(at), offsets, rows) for at in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, len(fields[0]), [None], children=fields)
    if _is_list(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind):
        own = fixed_offsets(array, "<i4")
        counts = pa.py_buffer(np.diff(own).astype(np.int32))
        ends = _ends(np.frombuffer(_bytes(4 * offsets, counts, rows), np.int32))
        if ends[-1] > MOST_OFFSETS:
            return _one_by_one(array, offsets, rows)
        within, count = own.take(offsets), len(ends) - 1
        if _is_list(kind):
            items = _spans(array.values, within, rows)
            return pa.Array.from_buffers(kind, count, [None, _offsets_of(ends)], children=[items])
        return pa.Array.from_buffers(kind, count, [None, _offsets_of(ends), _bytes(within, array.buffers()[2], rows)])
    count = int(np.diff(offsets).take(rows).sum())
    if pa.types.is_fixed_size_list(kind):
        items = _spans(array.values, (offsets + array.offset) * kind.list_size, rows)
        return pa.Array.from_buffers(kind, count, [None], children=[items])
    if not _is_in_bytes(kind):
        return _one_by_one(array, offsets, rows)
    data = _bytes((offsets + array.offset) * (kind.bit_width // 8), array.buffers()[1], rows)
    return pa.Array.from_buffers(kind, count, [None, data])


def _one_by_one(array: pa.Array, offsets: Rows, rows: Rows) -> pa.Array:
    starts, counts = offsets.take(rows), np.diff(offsets).take(rows)
    ends = _ends(counts)
    places = np.repeat(starts - ends[:-1], counts) + np.arange(ends[-1])
    return pc.take(array, array_of(places), memory_pool=POOL)


def _bytes(offsets: Rows, data: pa.Buffer | None, rows: Rows) -> pa.Buffer:
    nothing = pa.py_buffer(b"")
    strings = pa.Array.from_buffers(STRINGS, len(offsets) - 1, [None, pa.py_buffer(offsets), data or nothing])
    return pc.take(strings, array_of(rows), memory_pool=POOL).buffers()[2] or nothing


def _ends(counts: Rows) -> Rows:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _offsets_of(ends: Rows) -> pa.Buffer:
    return pa.py_buffer(ends.astype(np.int32))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_map(kind))


def _is_in_bytes(kind: pa.DataType) -> bool:
    """Whether values are so many whole bytes each."""
    fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind)
    return fixed and not pa.types.is_boolean(kind)
