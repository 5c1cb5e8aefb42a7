"""Types that hold all values of another one, a column's default, and what fills it. By canonical texts of types."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Any

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.schema.json_text import NULL, canonical, text_of
from persist_lib.schema.types import JSON, format_type, is_nested, parse_type

NOW, NEW_ID, NUMBER = "now()", "uuid()", "identity()"
FILLS = (NOW, NEW_ID, NUMBER)
"""What a writer can fill in."""
_DEFAULT = re.compile(r"\s+default\s+")
_IDENTITY = re.compile(r"\s+identity\s*$")
_CALL = re.compile(r"\w+\(.*\)", re.DOTALL)
FINER = {("s", "ms"), ("s", "us"), ("ms", "us")}
"""Units of timestamps that become finer ones. Nanoseconds end in the year 2262, so they hold less."""


@lru_cache(maxsize=1024)
def widens(narrow: str, wide: str) -> bool:
    """Whether a column of one type may become one of the other: it holds every value, in the same order.

    Integers become wider ones (unsigned ones also signed ones that are wider), float32 becomes float64, decimals get
    more digits before the point (up to 38), dates become timestamps without a zone, at midnight, and timestamps get a
    finer unit, up to microseconds. Within nested types the same holds at every level, but for keys of maps, and structs
    get fields at their end.
    """
    one, other = parse_type(narrow), parse_type(wide)
    return one != other and _holds(one, other)


@lru_cache(maxsize=1024)
def is_alike(stored: str, wanted: str) -> bool:
    """Whether two types differ by what widens alone, at each place in the one or the other direction."""
    one, other = parse_type(stored), parse_type(wanted)
    return one != other and _is_alike(one, other)


def _holds(one: pa.DataType, other: pa.DataType) -> bool:
    if (pairs := _within(one, other)) is not None:
        return one.num_fields <= other.num_fields and all(_holds(*pair) for pair in pairs)
    return bool(one == other or _leaf_widens(one, other))


def _is_alike(one: pa.DataType, other: pa.DataType) -> bool:
    if (pairs := _within(one, other)) is not None:
        return all(_is_alike(*pair) for pair in pairs)
    return bool(one == other or _leaf_widens(one, other) or _leaf_widens(other, one))


def _within(one: pa.DataType, other: pa.DataType) -> list[tuple[pa.DataType, pa.DataType]] | None:
    """What may differ within two nested types of one kind, side by side; None where they are no two such types."""
    if one.id != other.id or not pa.types.is_nested(one):
        return None
    if pa.types.is_struct(one):
        pairs = list(zip(one, other, strict=False))
        return [(a.type, b.type) for a, b in pairs] if all(a.name == b.name for a, b in pairs) else None
    if pa.types.is_map(one):
        return [(one.item_type, other.item_type)] if one.key_type == other.key_type else None
    is_fixed = pa.types.is_fixed_size_list(one)
    return [(one.value_type, other.value_type)] if not is_fixed or one.list_size == other.list_size else None


def _leaf_widens(one: pa.DataType, other: pa.DataType) -> bool:
    test = pa.types
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

    A default is a text in quotes, or bare up to the end; `now()`, `uuid()` and `identity()` without quotes are what a
    writer fills; `int64 identity` says the last one, too.
    """
    if isinstance(text, str) and _IDENTITY.search(text) and not _DEFAULT.search(text):
        return _IDENTITY.sub("", text), None, NUMBER
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
        fits = fits and type_ != JSON
    elif fill == NUMBER:
        wanted, fits = "for int64", pa.types.is_int64(kind)
    else:
        wanted, fits = f"not what a writer fills in ({' or '.join(FILLS)})", False
    if not fits:
        raise InvalidUsage(
            f"column {name!r} of type {type_} cannot have the default {shown(fill)}, which is {wanted}",
            problem="default", column=name, value=fill,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def first_type(first: str, wide: str) -> str:
    """As what type values are hashed that were made as one type, and now have a wider one; empty if as that.

    A nested type says so at each place. What was added to structs is of the type that it was added with.
    """
    found = _first(parse_type(first), parse_type(wide), is_within=False)
    return "" if found == parse_type(wide) else format_type(found)


def _first(one: pa.DataType, other: pa.DataType, *, is_within: bool) -> pa.DataType:
    if (pairs := _within(one, other)) is None:
        return one if _hashes_otherwise(one, other, is_within) else other
    found = [_first(*pair, is_within=True) for pair in pairs]
    if pa.types.is_struct(other):
        fields = list(other)
        return pa.struct([*map(pa.Field.with_type, fields, found), *fields[len(found) :]])
    if pa.types.is_map(other):
        return pa.map_(other.key_type, found[0])
    return pa.list_(found[0], other.list_size) if pa.types.is_fixed_size_list(other) else pa.list_(found[0])


def _hashes_otherwise(one: pa.DataType, other: pa.DataType, is_within: bool) -> bool:
    """Whether values of the wider type are hashed otherwise than the same ones of the narrow type.

    A number within a nested value is as many bytes as its type has.
    """
    test = pa.types
    if one == other or test.is_decimal(one):
        return False
    return is_within or not test.is_integer(one) or test.is_signed_integer(one) != test.is_signed_integer(other)


@lru_cache(maxsize=1024)
def is_once_more(first: str, narrow: str, wide: str) -> bool:
    """Whether a date or a timestamp that was made as another one would get a finer unit once more, at any place."""
    return _is_once_more(*map(parse_type, (first, narrow, wide)))


def _is_once_more(first: pa.DataType, narrow: pa.DataType, wide: pa.DataType) -> bool:
    before, after = _within(first, narrow), _within(narrow, wide)
    if before is None or after is None:
        return bool(narrow not in (first, wide) and pa.types.is_timestamp(wide))
    return any(_is_once_more(made, was, is_) for (made, was), (_, is_) in zip(before, after, strict=True))


def default_text(name: str, type_: str, value: Any) -> str:
    """A default as text, from which `default_of` makes the same value. Raises InvalidUsage for a value of another type.

    Text is taken for every type, as it is stored: of JSON, the text of a document.
    """
    kind = parse_type(type_)
    try:
        if is_nested(type_):
            raise TypeError("nested columns have no defaults; null is what older rows have")
        if type_ == JSON:
            value = canonical(value) if isinstance(value, str) else text_of(value)
            if value == NULL:
                raise TypeError("it is null, which rows have anyway that do not say the column")
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
