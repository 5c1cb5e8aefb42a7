"""Types that hold all values of another one, and the text of a column's default. By canonical texts of types."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.schema.types import is_nested, parse_type


@lru_cache(maxsize=1024)
def widens(narrow: str, wide: str) -> bool:
    """Whether a column of one type may become one of the other: it holds every value, in the same order.

    Integers become wider ones (unsigned ones also signed ones that are wider), float32 becomes float64, decimals get
    more digits before the point (up to 38), and dates become timestamps without a zone, at midnight.
    """
    one, other, test = parse_type(narrow), parse_type(wide), pa.types
    if one == other:
        return False
    if test.is_integer(one) and test.is_integer(other):
        more = int(other.bit_width) > int(one.bit_width)
        return more and (test.is_signed_integer(other) or test.is_unsigned_integer(one))
    if test.is_decimal(one) and test.is_decimal(other):
        return bool(one.scale == other.scale and one.precision < other.precision <= 38)
    if test.is_date32(one) and test.is_timestamp(other):
        return other.tz is None and other.unit != "ns"  # which ends in the year 2262
    return bool(test.is_float32(one) and test.is_float64(other))


@lru_cache(maxsize=1024)
def hashes_otherwise(narrow: str, wide: str) -> bool:
    """Whether values of the wider type are hashed otherwise than the same ones of the narrow type."""
    one, other, test = parse_type(narrow), parse_type(wide), pa.types
    if test.is_decimal(one):
        return False
    return not test.is_integer(one) or test.is_signed_integer(one) != test.is_signed_integer(other)


def default_text(name: str, type_: str, value: Any) -> str:
    """A default as text, from which `default_of` makes the same value. Raises InvalidUsage for a value of another type.

    Text is taken for every type, as it is stored.
    """
    kind = parse_type(type_)
    try:
        if is_nested(type_):
            raise TypeError("nested columns have no defaults; null is what older rows have")
        if pa.types.is_integer(kind) and not isinstance(value, (int, str)):
            raise TypeError("it is no integer")
        scalar = pa.scalar(value, pa.string() if isinstance(value, str) else kind).cast(kind)
        text = value if pa.types.is_string(kind) else scalar.cast(pa.string()).as_py()
        if pa.types.is_floating(kind) and scalar.as_py() == 0:
            text = str(scalar.as_py())  # -0.0 is another value
        if not isinstance(text, str) or not pa.scalar(text, pa.string()).cast(kind).equals(scalar):
            raise TypeError("its text is not the same value")
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidUsage(
            f"column {name!r}: {shown(value)} cannot be the default of a column of type {type_}: {error}",
            problem="default", column=name, value=value,
        ) from error  # fmt: skip
    return text


@lru_cache(maxsize=1024)
def default_of(type_: str, text: str) -> pa.Scalar:
    """The value of a default."""
    return pa.scalar(text, pa.string()).cast(parse_type(type_))
