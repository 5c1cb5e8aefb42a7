"""Values as those of a wider or narrower type, bit by bit: what columns that were widened are read and hashed by."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.kernel.columns import Flags, fixed, validity

_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}
Values = npt.NDArray[Any]


def converted(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Flags | None]:
    """The values as those of another type, one of which widens the other, and which of them it holds (None: all do).

    What it does not hold is undefined. Nulls stay null, and count as held.
    """
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
    """Floats as doubles. SUBTLE: not as the machine converts them, which makes other NaNs of some."""
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
    """Doubles as floats, where a float has that very value."""
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
    try:
        return array.cast(kind), None
    except pa.ArrowInvalid:
        return array, np.zeros(len(array), np.bool_)
