"""Nested values as bytes: comparing the bytes compares the values, and equal bytes are equal values.

A *cell* is `01` for null, or `02` and a body. The body of a number is its bits, big-endian, such that they compare as
the numbers do (`columns`); of text and binary its bytes, `00` written as `00 FF`, and `00 00`; of a list the cells of
its items and `00`; of a struct the cells of its fields in their order, without nulls at the end, and `00`; of a map the
one of a list of structs of key and value. No body is the start of another one of its type.

So nulls come first, a list comes before those that it is the start of, and a field that is added to the end of a struct
changes the bytes of no value that lacks it: neither its order nor its fingerprint. The bytes are part of fingerprints,
and therefore durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Flat = Callable[[pa.Array], "Ragged"]

NULL, VALUE, END = 0x01, 0x02, 0x00
MOST_OFFSETS = 2**31 - 1


class Ragged(NamedTuple):
    """Byte strings that lie one after the other: `data[offsets[i] : offsets[i + 1]]`."""

    data: Bytes
    offsets: Places

    @property
    def lengths(self) -> Places:
        return np.diff(self.offsets)


def is_nested(kind: pa.DataType) -> bool:
    """Whether values of this type hold others."""
    return bool(pa.types.is_nested(kind))


def bodies(array: pa.Array, flat: Flat) -> pa.Array:
    """The bodies of nested values as binary; nulls stay. `flat` gives those of values that hold no others."""
    valid = array.is_valid()
    found = _bodies(array, flat)
    wide = int(found.offsets[-1]) > MOST_OFFSETS
    offsets = found.offsets if wide else found.offsets.astype(np.int32)
    bitmap = None if array.null_count == 0 else pa.concat_arrays([valid]).buffers()[1]
    buffers = [bitmap, pa.py_buffer(offsets), pa.py_buffer(found.data)]
    return pa.Array.from_buffers(pa.large_binary() if wide else pa.binary(), len(array), buffers)


def _bodies(array: pa.Array, flat: Flat) -> Ragged:
    """A body for each value; what it is for a null does not matter."""
    kind = array.type
    if pa.types.is_struct(kind):
        return _struct(array, flat)
    if pa.types.is_map(kind):
        array = _as_list_of_structs(array)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _list(array, flat)
    return flat(array)


def _cells(array: pa.Array, flat: Flat) -> Ragged:
    """A cell for each value."""
    inner = _bodies(array, flat)
    lengths = inner.lengths
    if array.null_count == 0:
        return _with_marks(inner, lengths + 1, np.full(len(array), VALUE, np.uint8))
    valid = np.asarray(array.is_valid())
    if not np.all(lengths[~valid] == 0):  # what lies under nulls does not count
        kept = np.repeat(valid, lengths)
        lengths = np.where(valid, lengths, 0)
        inner = Ragged(inner.data[kept], _offsets(lengths))
    return _with_marks(inner, lengths + 1, np.where(valid, VALUE, NULL).astype(np.uint8))


def _with_marks(inner: Ragged, lengths: Places, marks: Bytes) -> Ragged:
    """Each body behind its mark."""
    offsets = _offsets(lengths)
    data = np.empty(int(offsets[-1]), np.uint8)
    is_mark = np.zeros(len(data), np.bool_)
    is_mark[offsets[:-1]] = True
    data[is_mark] = marks
    data[~is_mark] = inner.data
    return Ragged(data, offsets)


def _list(array: pa.Array, flat: Flat) -> Ragged:
    items, counts = _items(array)
    cells = _cells(items, flat)
    ends = np.concatenate([[0], np.cumsum(counts)])
    lengths = np.diff(cells.offsets[ends]) + 1
    offsets = _offsets(lengths)
    data = np.empty(int(offsets[-1]), np.uint8)
    is_end = np.zeros(len(data), np.bool_)
    is_end[offsets[1:] - 1] = True
    data[is_end] = END
    data[~is_end] = cells.data
    return Ragged(data, offsets)


def _items(array: pa.Array) -> tuple[pa.Array, Places]:
    """The items of lists one after the other, without those that lie under nulls, and how many each list has."""
    valid = np.asarray(array.is_valid())
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten(), np.where(valid, array.type.list_size, 0).astype(np.int64)
    # `flatten` leaves out what lies under nulls and outside of a slice.
    lengths = np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
    return array.flatten(), lengths


def _as_list_of_structs(array: pa.Array) -> pa.Array:
    entry = pa.struct([pa.field("key", array.type.key_type), pa.field("value", array.type.item_type)])
    return array.cast(pa.list_(entry))


def _struct(array: pa.Array, flat: Flat) -> Ragged:
    fields = [_cells(column, flat) for column in array.flatten()]
    lengths = np.stack([field.lengths for field in fields]) if fields else np.zeros((0, len(array)), np.int64)
    # Nulls at the end are left out, so that a field may be added.
    is_null = np.stack([field.lengths == 1 for field in fields]) if fields else np.zeros((0, len(array)), np.bool_)
    trailing = np.logical_and.accumulate(is_null[::-1], axis=0)[::-1]
    lengths = np.where(trailing, 0, lengths)
    offsets = _offsets(lengths.sum(axis=0) + 1)
    data = np.full(int(offsets[-1]), END, np.uint8)
    places = offsets[:-1]
    for field, count in zip(fields, lengths, strict=True):
        _scatter(data, places, field, count)
        places = places + count
    return Ragged(data, offsets)


def _scatter(data: Bytes, places: Places, strings: Ragged, counts: Places) -> None:
    """Put the first `counts` bytes of each string at its place."""
    total = int(counts.sum())
    if not total:
        return
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    data[np.repeat(places, counts) + within] = strings.data[np.repeat(strings.offsets[:-1], counts) + within]


def fixed_bodies(rows: Bytes) -> Ragged:
    """Equally long strings, given as a matrix."""
    count, width = rows.shape
    return Ragged(np.ascontiguousarray(rows).reshape(-1), np.arange(0, (count + 1) * width, width, dtype=np.int64))


def text_bodies(data: Bytes, offsets: Places) -> Ragged:
    """Byte strings of any length, escaped and ended."""
    data = data[: int(offsets[-1]) if len(offsets) else 0]
    zeros = np.flatnonzero(data == 0)
    if len(zeros):
        data = np.insert(data, zeros + 1, 0xFF)
        offsets = offsets + np.searchsorted(zeros, offsets)
    lengths = np.diff(offsets) + 2
    ended = _offsets(lengths)
    out = np.zeros(int(ended[-1]), np.uint8)
    _scatter(out, ended[:-1], Ragged(data, offsets), lengths - 2)
    return Ragged(out, ended)


def _offsets(lengths: Places | Sequence[int]) -> Places:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
