"""Types that hold all values of another one, a column's default, and what fills it. By canonical texts of types."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Any

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.schema.types import is_nested, parse_type

NOW, NEW_ID = "now()", "uuid()"
FILLS = (NOW, NEW_ID)
"""What a writer can fill in."""
_DEFAULT = re.compile(r"\s+default\s+")
_CALL = re.compile(r"\w+\(.*\)", re.DOTALL)
FINER = {("s", "ms"), ("s", "us"), ("ms", "us")}
"""Units of timestamps that become finer ones. Nanoseconds end in the year 2262, so they hold less."""


@lru_cache(maxsize=1024)
def widens(narrow: str, wide: str) -> bool:
    """Whether a column of one type may become one of the other: it holds every value, in the same order.

    Integers become wider ones (unsigned ones also signed ones that are wider), float32 becomes float64, decimals get
    more digits before the point (up to 38), dates become timestamps without a zone, at midnight, and timestamps get a
    finer unit, up to microseconds.
    """
    one, other, test = parse_type(narrow), parse_type(wide), pa.types
    if one == other:
        return False
    if test.is_integer(one) and test.is_integer(other):
        more = int(other.bit_width) > int(one.bit_width)
        return more and (test.is_signed_integer(other) or test.is_unsigned_integer(one))
    if test.is_decimal(one) and test.is_decimal(other):
        return bool(one.scale == other.scale and one.precision < other.precision <= 38)
    if test.is_timestamp(one) and test.is_timestamp(other):
        return one.tz == other.tz and (one.unit, other.unit) in FINER
    if test.is_date32(one) and test.is_timestamp(other):
        return other.tz is None and other.unit != "ns"  # which ends in the year 2262
    return bool(test.is_float32(one) and test.is_float64(other))


def read_default(text: object) -> tuple[object, str | None, str]:
    """A type's text without its default, the default, and what fills the column: `string default 'new'`.

    A default is a text in quotes, or bare up to the end; `now()` and `uuid()` without quotes are what a writer fills.
    """
    found = [_DEFAULT.split(text, 1)] if isinstance(text, str) and _DEFAULT.search(text) else []
    if not found or not _is_whole(found[0][0]):
        return text, None, ""
    kind, said = found[0][0], found[0][1].strip()
    if said in FILLS:
        return kind, None, said
    if said[:1] in {"'", '"'}:
        try:
            said = ast.literal_eval(said)
        except (SyntaxError, ValueError) as error:
            raise InvalidUsage(f"the default {shown(said)} is no text in quotes", problem="default") from error
    elif _CALL.fullmatch(said):
        raise InvalidUsage(
            f"a writer fills {' or '.join(FILLS)}: got {shown(said)}. A text that looks like that is put in quotes",
            problem="default", value=said,
        )  # fmt: skip
    return kind, said, ""


def _is_whole(text: str) -> bool:
    """Whether a text ends within no brackets and no quotes, as fields may have any name."""
    return text.count("<") == text.count(">") and text.count('"') % 2 == 0


def check_fill(name: str, type_: str, fill: object) -> None:
    """Raise InvalidUsage unless a writer can fill a column of this type so."""
    kind = parse_type(type_)
    if fill == NOW:
        wanted, fits = "for timestamps and dates", pa.types.is_timestamp(kind) or pa.types.is_date32(kind)
    elif fill == NEW_ID:
        wanted, fits = "for uuid, fixed_size_binary[16] and string", kind in {pa.binary(16), pa.string()}
    else:
        wanted, fits = f"not what a writer fills in ({' or '.join(FILLS)})", False
    if not fits:
        raise InvalidUsage(
            f"column {name!r} of type {type_} cannot have the default {shown(fill)}, which is {wanted}",
            problem="default", column=name, value=fill,
        )  # fmt: skip


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
