"""Nested values as bytes: comparing the bytes compares the values, and equal bytes are equal values.

A *cell* is `01` for null, or `02` and a body. The body of a number is its bits, big-endian, such that they compare as
the numbers do (`columns`); of text and binary its bytes, `00` written as `00 FF`, and `00 00`; of a list the cells of
its items and `00`; of a struct the cells of its fields in their order, without nulls at the end, and `00`; of a map the
one of a list of structs of key and value. No body is the start of another one of its type.

So nulls come first, a list comes before those that it is the start of, and a field that is added to the end of a struct
changes the bytes of no value that lacks it: neither its order nor its fingerprint. The bytes are part of fingerprints,
and therefore durable.

A number within has as many bytes as its type, so that a wider type changes them. Fingerprints are of bytes that do not
change: numbers that the first type has are as in that, and others have the mark `03` and the body of the widest type.
Those bytes tell values apart, and do not order them.

They are made a column at a time: what is of fixed width by numpy, the rest by Arrow, which lays strings end to end much
faster than numpy gathers bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Places = npt.NDArray[np.int64]
Values = npt.NDArray[Any]
Pieces = list[pa.Array | Values | bytes]
"""What strings consist of, one behind the other: `STRINGS`, values of fixed width, or bytes that all of them have."""
Flat = Callable[[pa.Array], pa.Array | Values]
Split = Callable[[pa.Array, pa.DataType], tuple[pa.Array, pa.Array | None, Values]]

STRINGS = pa.large_binary()
NULL, VALUE, WIDE, END, TEXT_END = b"\x01", b"\x02", b"\x03", b"\x00", b"\x00\x00"


@dataclass(frozen=True, slots=True)
class First:
    """The type that nested values were made with, and how to tell the numbers that it has from others.

    `split` gives the numbers as the first type has them, which of them it has (None: all), and the bodies of the
    others, which are the same for each wider type.
    """

    type: pa.DataType
    split: Split

    def within(self, at: int = 0) -> First:
        """The same of what is within: the fields of a struct, the items of a list, the entries of a map."""
        if pa.types.is_map(self.type):
            return First(entry_of(self.type), self.split)
        return First(self.type.field(at).type, self.split)


def is_nested(kind: pa.DataType) -> bool:
    """Whether values of this type hold others."""
    return bool(pa.types.is_nested(kind))


def entry_of(kind: pa.MapType) -> pa.StructType:
    """A map as a list has such entries."""
    return pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])


def bodies(array: pa.Array, flat: Flat, first: First | None = None) -> pa.Array:
    """The bodies of nested values as `STRINGS`; nulls stay. With `first`, those that fingerprints are of.

    `flat` gives values that hold no others: text and binary as `STRINGS`, and what is of fixed width as numpy's, such
    that their bytes are the bodies, the highest one first. What it gives for nulls does not matter.
    """
    found = _as_strings(_joined(_body(array, flat, first), len(array)))
    if array.null_count == 0:
        return found
    bitmap = pa.concat_arrays([array.is_valid()]).buffers()[1]
    return pa.Array.from_buffers(STRINGS, len(array), [bitmap, *found.buffers()[1:]])


def _body(array: pa.Array, flat: Flat, first: First | None) -> Pieces:
    """The bodies of values. What it is for a null does not matter."""
    if pa.types.is_struct(array.type):
        return [*_fields(array, flat, first), END]
    if pa.types.is_map(array.type):
        array = array.cast(pa.list_(entry_of(array.type)))
    if is_nested(array.type):  # `flatten` leaves out what lies under nulls and outside of a slice
        items = array.flatten()
        cells = _cell(items, flat, first and first.within())
        return [_grouped(_joined(cells, len(items)), ends_of(array)), END]
    body = flat(array)
    return [body] if isinstance(body, np.ndarray) else [_escaped(body), TEXT_END]


def _cell(array: pa.Array, flat: Flat, first: First | None) -> Pieces:
    if first is None or first.type == array.type:
        pieces = [VALUE, *_body(array, flat, None)]
    elif is_nested(array.type):
        pieces = [VALUE, *_body(array, flat, first)]
    else:
        pieces = _number(array, flat, first)
    if array.null_count == 0:
        return pieces
    cells = _as_strings(_joined(pieces, len(array)))
    return [pc.if_else(array.is_valid(), cells, pa.scalar(NULL, STRINGS))]  # what lies under nulls does not count


def _number(array: pa.Array, flat: Flat, first: First) -> Pieces:
    narrow, fits, rest = first.split(array, first.type)
    pieces: Pieces = [VALUE, flat(narrow)]
    if fits is None:
        return pieces
    both = (_as_strings(_joined(some, len(array))) for some in (pieces, [WIDE, rest]))
    return [pc.if_else(fits, *both)]


def _fields(array: pa.Array, flat: Flat, first: First | None) -> Pieces:
    """The cells of a struct's fields. Nulls at the end are left out, so that a field may be added."""
    found: list[Pieces] = []
    trailing: pa.Array | None = pa.repeat(True, len(array))
    for at, column in reversed(list(enumerate(array.flatten()))):
        cell = _cell(column, flat, first and first.within(at))
        if trailing is not None:
            trailing = pc.and_(trailing, column.is_null()) if column.null_count else None
        if trailing is not None:
            cell = [pc.if_else(trailing, pa.scalar(b"", STRINGS), cell[0])]
        found.append(cell)
    return [piece for cell in reversed(found) for piece in cell]


def _joined(pieces: Pieces, count: int) -> pa.Array | Values:
    """So many strings of these pieces, of fixed width if the pieces are."""
    if not any(isinstance(piece, pa.Array) for piece in pieces):
        return _side_by_side(pieces, count)
    fused: list[pa.Array | pa.Scalar] = []
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, pa.Array)):
        some = list(group)
        fused += some if is_text else [_as_string(some, count)]
    return fused[0] if len(fused) == 1 else pc.binary_join_element_wise(*fused, pa.scalar(b"", STRINGS))


def _as_string(pieces: Pieces, count: int) -> pa.Array | pa.Scalar:
    constants = [piece for piece in pieces if isinstance(piece, bytes)]
    if len(constants) == len(pieces):
        return pa.scalar(b"".join(constants), STRINGS)
    return _as_strings(_side_by_side(pieces, count))


def _side_by_side(pieces: Pieces, count: int) -> Values:
    """Pieces of fixed width as one, which numpy does several times as fast as Arrow joins them."""
    # Bytes are put one by one, as integers. numpy copies void values several times as slowly.
    given: list[Any] = []
    for piece in pieces:
        given += map(np.uint8, piece) if isinstance(piece, bytes) else [piece]
    rows = np.empty(count, [(str(at), each.dtype.newbyteorder(">")) for at, each in enumerate(given)])
    for at, each in enumerate(given):
        rows[str(at)] = each
    return rows.view(f"V{rows.itemsize}")


def _as_strings(values: pa.Array | Values) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    width = values.itemsize
    return _strings(np.arange(0, (len(values) + 1) * width, width), pa.py_buffer(values))


def _strings(offsets: Places, data: pa.Buffer | None) -> pa.Array:
    return pa.Array.from_buffers(STRINGS, len(offsets) - 1, [None, pa.py_buffer(offsets), data or pa.py_buffer(b"")])


def _grouped(cells: pa.Array | Values, ends: Places) -> pa.Array:
    """The cells between one end and the next as one string each."""
    if isinstance(cells, np.ndarray):
        return _strings(ends * cells.itemsize, pa.py_buffer(cells))
    return _strings(_offsets(cells).take(ends), cells.buffers()[2])


def ends_of(array: pa.Array) -> Places:
    """Where each list ends among the items of all of them that are not null, behind a 0."""
    if pa.types.is_fixed_size_list(array.type):
        counts = np.where(np.asarray(array.is_valid()), array.type.list_size, 0)
    else:
        counts = np.asarray(array.value_lengths().fill_null(0))
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _escaped(strings: pa.Array) -> pa.Array:
    offsets = _offsets(strings)
    data = np.frombuffer(strings.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    if not len(data) or data.min() > 0:
        return strings
    return pc.replace_substring(strings, pattern=b"\0", replacement=b"\0\xff")


def _offsets(strings: pa.Array) -> Places:
    buffer = strings.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64, count=strings.offset + len(strings) + 1)[strings.offset :]
