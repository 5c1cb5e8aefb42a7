"""Values as those of a wider or narrower type, bit by bit: what columns that were widened are read and hashed by."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.convert.nested import assembled
from persist_lib.kernel.columns import Flags, fixed, flat_bodies, mask_of, present, validity
from persist_lib.kernel.nested import First, bodies, ends_of, entry_of, is_nested

_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}
Values = npt.NDArray[Any]


def converted(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Flags | None]:
    """The values as those of another type that is alike (`widening`), and which of them it holds (None: all do).

    What it does not hold is undefined. Nulls stay null, and count as held.
    """
    if array.type == kind:
        return array, None
    if is_nested(kind):
        return (_structs if pa.types.is_struct(kind) else _lists)(array, kind)
    valid = validity(array)
    if pa.types.is_decimal(kind):
        return _decimals(array, kind)
    if pa.types.is_integer(kind) and pa.types.is_integer(array.type):
        values, fits = _integers(_numbers(array), kind.to_pandas_dtype())
    elif pa.types.is_floating(kind):
        values, fits = (_doubles if kind.bit_width == 64 else _floats)(_numbers(array))
    elif (unit := _ticks(kind) // _ticks(array.type)) > 1:
        coarse = _numbers(array).astype(np.int64)
        values, fits = coarse * unit, np.abs(coarse) <= np.iinfo(np.int64).max // unit
    else:
        times, unit = _numbers(array), _ticks(array.type) // _ticks(kind)
        coarse = np.floor_divide(times, unit)
        values, fits = _integers(coarse, np.int32 if pa.types.is_date32(kind) else np.int64)
        fits = (coarse * unit == times) & (True if fits is None else fits)
    if fits is not None and valid is not None:
        fits |= ~valid
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    made = pa.Array.from_buffers(kind, len(array), [bits, pa.py_buffer(np.ascontiguousarray(values))])
    return made, None if fits is None or fits.all() else fits


def as_at_first(array: pa.Array, first: pa.DataType) -> pa.Array:
    """Nested values as the bytes by which they are hashed, whatever wider type they have: `first` is what it was."""
    return bodies(array, flat_bodies, First(first, _split))


def _split(array: pa.Array, first: pa.DataType) -> tuple[pa.Array, pa.Array | None, Values]:
    narrow, held = converted(array, first)
    if pa.types.is_integer(array.type):  # whatever its width and sign, as an integer may become wider again
        rest = _numbers(array).astype(np.int64).view(np.uint64)
    else:
        rest = np.asarray(flat_bodies(array))
    return narrow, None if held is None else mask_of(held), rest


def _structs(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Flags | None]:
    """Fields that are not there are null. Those that the other type lacks have to be."""
    columns, valid = array.flatten(), validity(array)
    found, held = list[pa.Array](), list[Flags]()
    for at, field in enumerate(kind):
        values, fits = (
            converted(columns[at], field.type) if at < len(columns) else (pa.nulls(len(array), field.type), None)
        )
        found.append(values)
        held += [] if fits is None else [fits]
    held += [~valid_of for column in columns[kind.num_fields :] if (valid_of := present(column)).any()]
    mask = None if valid is None else array.is_null()
    made = pa.StructArray.from_arrays(found, fields=list(kind), mask=mask)
    return made, np.logical_and.reduce(held) if held else None


def _lists(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Flags | None]:
    """Lists and maps: a list is held if all of its items are."""
    is_map = pa.types.is_map(kind)
    lists = array.cast(pa.list_(entry_of(array.type))) if is_map else array
    ends = ends_of(lists)
    items, fits = converted(lists.flatten(), entry_of(kind) if is_map else kind.value_type)
    made = assembled(kind, items, np.diff(ends), present(array))
    if fits is None:
        return made, None
    lost = np.concatenate([[0], np.cumsum(~fits)]).take(ends)
    return made, lost[1:] == lost[:-1]


def _ticks(kind: pa.DataType) -> int:
    """How many steps of a date or a timestamp make a day."""
    return _A_DAY[kind.unit] if pa.types.is_timestamp(kind) else 1


def _numbers(array: pa.Array) -> Values:
    """The values as numpy has them; floats as their bits."""
    kind = array.type
    sign = "u" if pa.types.is_unsigned_integer(kind) or pa.types.is_floating(kind) else "i"
    return fixed(array, f"<{sign}{kind.bit_width // 8}")


def _integers(values: Values, kind: Any) -> tuple[Values, Flags | None]:
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    here = np.iinfo(values.dtype)
    if least <= here.min and here.max <= most:
        return values.astype(kind), None
    fits = np.ones(len(values), np.bool_)
    if here.min < least:
        fits &= values >= least
    if here.max > most:
        fits &= values <= most
    return values.astype(kind), fits


def _doubles(bits: Values) -> tuple[Values, Flags | None]:
    """Floats as doubles. Not as the machine converts them, which makes other NaNs of some."""
    with np.errstate(invalid="ignore"):
        made = bits.view(np.float32).astype(np.float64).view(np.uint64)
    nan = np.isnan(bits.view(np.float32))
    if nan.any():
        wide = bits[nan].astype(np.uint64)
        made[nan] = (
            (wide >> np.uint64(31) << np.uint64(63)) | np.uint64(0x7FF << 52) | (wide << np.uint64(41) >> np.uint64(12))
        )
    return made, None


def _floats(bits: Values) -> tuple[Values, Flags | None]:
    with np.errstate(over="ignore", invalid="ignore"):
        made = bits.view(np.float64).astype(np.float32).view(np.uint32)
    nan = np.isnan(bits.view(np.float64))
    if nan.any():
        wide = bits[nan]
        low = (wide >> np.uint64(29)) & np.uint64((1 << 23) - 1)
        made[nan] = ((wide >> np.uint64(63) << np.uint64(31)) | np.uint64(0xFF << 23) | low).astype(np.uint32)
    back, _ = _doubles(made)
    return made, back == bits


def _decimals(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Flags | None]:
    if kind.precision >= array.type.precision:
        return array.cast(kind), None
    least = pa.scalar(Decimal(1).scaleb(kind.precision - kind.scale), array.type)  # that is too much
    fits = np.asarray(pc.less(pc.abs(array), least).fill_null(True))
    narrow = pa.Array.from_buffers(kind, len(array), array.buffers(), offset=array.offset)
    return narrow, None if fits.all() else fits
