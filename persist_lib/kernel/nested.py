"""Nested values as bytes: comparing the bytes compares the values, and equal bytes are equal values.

A *cell* is `01` for null, or `02` and a body. The body of a number is its bits, big-endian, such that they compare as
the numbers do (`columns`); of text and binary its bytes, `00` written as `00 FF`, and `00 00`; of a list the cells of
its items and `00`; of a struct the cells of its fields in their order, without nulls at the end, and `00`; of a map the
one of a list of structs of key and value. No body is the start of another one of its type.

So nulls come first, a list comes before those that it is the start of, and a field that is added to the end of a struct
changes the bytes of no value that lacks it: neither its order nor its fingerprint. The bytes are part of fingerprints,
and therefore durable.

They are made a column at a time: what is of fixed width by numpy, the rest by Arrow, which lays strings end to end much
faster than numpy gathers bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Places = npt.NDArray[np.int64]
Pieces = list[pa.Array | pa.Scalar]
Flat = Callable[[pa.Array], pa.Array]

STRINGS = pa.large_binary()
MARK = 0x02
NULL, VALUE, END, TEXT_END, NOTHING = (pa.scalar(each, STRINGS) for each in (b"\1", b"\2", b"\0", b"\0\0", b""))


def is_nested(kind: pa.DataType) -> bool:
    """Whether values of this type hold others."""
    return bool(pa.types.is_nested(kind))


def bodies(array: pa.Array, flat: Flat) -> pa.Array:
    """The bodies of nested values as `STRINGS`; nulls stay.

    `flat` gives values that hold no others: text and binary as `STRINGS`, and what is of fixed width as cells, for
    nulls, too.
    """
    found = _joined(_body(array, flat))
    if array.null_count == 0:
        return found
    bitmap = pa.concat_arrays([array.is_valid()]).buffers()[1]
    return pa.Array.from_buffers(STRINGS, len(array), [bitmap, *found.buffers()[1:]])


def _body(array: pa.Array, flat: Flat) -> Pieces:
    """What the bodies of nested values consist of, one behind the other. What it is for a null does not matter."""
    if pa.types.is_struct(array.type):
        return [*_fields(array, flat), END] if array.type.num_fields else [pa.repeat(END, len(array))]
    if pa.types.is_map(array.type):
        entry = pa.struct([pa.field("key", array.type.key_type), pa.field("value", array.type.item_type)])
        array = array.cast(pa.list_(entry))
    # `flatten` leaves out what lies under nulls and outside of a slice.
    return [_grouped(_joined(_cell(array.flatten(), flat)), _ends(array)), END]


def _fields(array: pa.Array, flat: Flat) -> Pieces:
    columns = array.flatten()
    cells = [_cell(column, flat) for column in columns]
    # Nulls at the end are left out, so that a field may be added.
    trailing = pc.is_null(columns[-1])
    for at in reversed(range(len(columns))):
        trailing = pc.and_(trailing, columns[at].is_null())
        if not trailing.true_count:
            break
        cells[at] = [pc.if_else(trailing, NOTHING, _as_strings(_joined(cells[at])))]
    return [piece for pieces in cells for piece in pieces]


def _cell(array: pa.Array, flat: Flat) -> Pieces:
    """What the cells of values consist of, one behind the other."""
    if is_nested(array.type):
        pieces = [VALUE, *_body(array, flat)]
    else:
        found = flat(array)
        pieces = [VALUE, _escaped(found), TEXT_END] if found.type == STRINGS else [found]
    if array.null_count == 0:
        return pieces
    return [pc.if_else(array.is_valid(), _as_strings(_joined(pieces)), NULL)]


def _joined(pieces: Pieces) -> pa.Array:
    """The pieces of each value as one string; of one piece, as it is."""
    if len(pieces) == 1:
        return pieces[0]
    return pc.binary_join_element_wise(*map(_as_strings, pieces), NOTHING)


def _as_strings(piece: pa.Array | pa.Scalar) -> pa.Array | pa.Scalar:
    if piece.type == STRINGS:
        return piece
    width = piece.type.byte_width
    offsets = np.arange(piece.offset * width, (piece.offset + len(piece) + 1) * width, width)
    return _strings(offsets, piece.buffers()[1])


def _strings(offsets: Places, data: pa.Buffer | None) -> pa.Array:
    return pa.Array.from_buffers(STRINGS, len(offsets) - 1, [None, pa.py_buffer(offsets), data or pa.py_buffer(b"")])


def _grouped(cells: pa.Array, ends: Places) -> pa.Array:
    """The cells between one end and the next as one string each."""
    if cells.type != STRINGS:
        return _strings(ends * cells.type.byte_width, cells.buffers()[1])
    return _strings(_offsets(cells).take(ends), cells.buffers()[2])


def _ends(array: pa.Array) -> Places:
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
