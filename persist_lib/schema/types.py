"""Column types as canonical text: `int64`, `timestamp[us, UTC]`, `list<struct<sku: string, count: int32>>`.

Durable state holds these texts and not Arrow's own, so that a schema is the same bytes in every release of Arrow.
`parse_type(format_type(t)) == t` for every type that Persist stores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

import pyarrow as pa

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage

_SIMPLE: dict[str, pa.DataType] = {
    "bool": pa.bool_(), "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "string": pa.string(), "binary": pa.binary(),
    "date32": pa.date32(), "time64[us]": pa.time64("us"), "uuid": pa.binary(16),
    "json": pa.string(),
}  # fmt: skip
# What people, Arrow and other libraries call them. One meaning each: `float` is Python's, which is 64 bits wide.
_ALIASES = {
    "int": "int64", "float": "float64", "double": "float64", "boolean": "bool",
    "date": "date32", "date32[day]": "date32", "date64": "date32", "date64[ms]": "date32",
    "timestamp": "timestamp[us, UTC]", "str": "string", "utf8": "string",
    "large_string": "string", "large_utf8": "string", "string_view": "string", "utf8_view": "string",
    "bytes": "binary", "large_binary": "binary", "binary_view": "binary",
}  # fmt: skip
_EXTENSIONS = {"arrow.uuid": "uuid", "arrow.json": "json"}
"""Arrow's canonical extension types that are taken."""
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, *(?:tz=)?([\w/+:-]+))?\]")
_DURATION = re.compile(r"duration\[(s|ms|us|ns)\]")
_DECIMAL = re.compile(r"decimal(?:128|256)?\((\d+), *(\d+)\)")
_FIXED = re.compile(r"fixed_size_binary\[(\d+)\]")
_NESTED = re.compile(r"(list|struct|map)<(.*)>(?:\[(\d+)\])?", re.DOTALL)
_FIXED_LIST, _ITEM = re.compile(r"fixed_size_list<(.*)>(\[\d+\])", re.DOTALL), re.compile(r"(?:item|element): *")
_OTHER_LISTS = re.compile(r"(?:large_list|list_view|large_list_view)<")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_EXAMPLES = (
    "timestamp[us]", "timestamp[us, UTC]", "duration[us]", "decimal128(18, 2)", "fixed_size_binary[16]",
    "list<int64>", "list<float32>[3]", "struct<name: string>", "map<string, int64>",
)  # fmt: skip
NOT_NULL = " not null"
UUID = "uuid"
"""The type whose values are Python's UUIDs. In Arrow it is what it is stored as, 16 bytes, which say less than it."""
JSON = "json"
"""The type whose values are JSON documents. In Arrow it is their canonical text."""
JSON_FIELD = {b"persist.type": JSON.encode()}
"""What the fields of such columns say beside their type, so that what enters becomes canonical wherever it does."""
DEEPEST = 16
"""How deep types may be nested."""
LONGEST_LIST = 1 << 16
"""How many items lists of a fixed length may have."""

SUPPORTED = (
    f"{', '.join(_SIMPLE)}, timestamp[s|ms|us|ns] (no zone) or timestamp[us, UTC] (instants), duration[s|ms|us|ns], "
    "decimal128(precision, scale) with 0 <= scale <= precision <= 38, decimal256 up to 76, fixed_size_binary[1 to "
    "4096], and in values list<type>, list<type>[length], struct<name: type, …> and map<key type, type>"
)


@lru_cache(maxsize=1024)
def parse_type(text: str) -> pa.DataType:
    """The Arrow type of a type's text, canonical or an alias; InvalidUsage names the supported ones."""
    text = _ALIASES.get(text, text)
    if text in _SIMPLE:
        return _SIMPLE[text]
    if match := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(match[1], tz=match[2])
    if match := _DURATION.fullmatch(text):
        return pa.duration(match[1])
    if match := _DECIMAL.fullmatch(text):
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= 76 and scale <= precision:
            return (pa.decimal128 if precision <= 38 else pa.decimal256)(precision, scale)
    if (match := _FIXED.fullmatch(text)) and 1 <= int(match[1]) <= 4096:
        return pa.binary(int(match[1]))
    if (found := _parse_nested(text)) is not None:
        return found
    meant = did_you_mean(text, (*_SIMPLE, *_ALIASES, *_EXAMPLES))
    raise InvalidUsage(
        f"column type {shown(text)} is not supported. {meant}Use {SUPPORTED}", problem="unsupported type", type=text
    )


@lru_cache(maxsize=1024)
def format_type(type_: pa.DataType) -> str:
    """The canonical text of an Arrow type; InvalidUsage where Persist cannot store it.

    Other encodings of the same values (dictionary, large and view layouts, date64, small decimals) give the same text,
    and so do nested types that say that something within is not null.
    """
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return format_type(type_.value_type)
    if isinstance(type_, pa.BaseExtensionType) and (plain := _EXTENSIONS.get(type_.extension_name)):
        return plain
    if pa.types.is_timestamp(type_):
        text = f"timestamp[{type_.unit}{', ' + type_.tz if type_.tz else ''}]"
    elif pa.types.is_decimal(type_):
        text = f"decimal{128 if type_.precision <= 38 else 256}({type_.precision}, {type_.scale})"
    elif pa.types.is_nested(type_):
        text = _format_nested(type_)
    elif pa.types.is_fixed_size_binary(type_):
        text = f"fixed_size_binary[{type_.byte_width}]"
    elif pa.types.is_float32(type_):  # Arrow writes `float` for it, which is the alias of another
        text = "float32"
    else:
        text = _ALIASES.get(str(type_), str(type_))
    parse_type(text)
    return text


def canonical_type(text: str) -> str:
    """The canonical text of a type's text. Raises InvalidUsage where Persist cannot store it."""
    return text if text in _SIMPLE else format_type(parse_type(text))


def is_json(field: pa.Field) -> bool:
    """Whether a field is that of a column of JSON documents."""
    metadata = field.metadata
    return metadata is not None and JSON_FIELD.items() <= metadata.items()


def said_type(field: pa.Field) -> str:
    """The type of a field as errors name it."""
    return JSON if is_json(field) else str(field.type)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """What values of a canonical extension type that is taken are stored as; the type itself if it is another."""
    if isinstance(type_, pa.BaseExtensionType) and type_.extension_name in _EXTENSIONS:
        return type_.storage_type
    return type_


def is_nested(text: str) -> bool:
    """Whether the type of a canonical text holds others."""
    return text.startswith(("list<", "struct<", "map<"))


_BOUNDED = re.compile(r"bool|u?int\d+|float\d+|date32|(time64|timestamp|duration)\[.*")


def has_bounds(text: str) -> bool:
    """Whether parts can say between which values those of a canonical type lie: of a small fixed width, and ordered."""
    return _BOUNDED.fullmatch(text) is not None


def depth_of(type_: pa.DataType) -> int:
    """How deep a type is nested: 0 for one that holds no others."""
    return max((1 + depth_of(type_.field(at).type) for at in range(type_.num_fields)), default=0)


def _parse_nested(text: str) -> pa.DataType | None:
    """The nested type of a text; None where it is not one. What is within may be an alias, or Arrow's own text."""
    text = _OTHER_LISTS.sub("list<", _FIXED_LIST.sub(r"list<\1>\2", text), count=1)
    match = _NESTED.fullmatch(text)
    if match is None or (match[3] and match[1] != "list") or text.count("<") > DEEPEST * DEEPEST:
        return None
    within = list(_pieces(match[2]))
    if not within or not all(piece.strip() for piece in within):
        return None
    if match[1] == "struct":
        named = [_named(piece) for piece in within]
        if not all(name and kind.strip() for name, kind in named):
            return None
        fields = [_parse_field(name, kind) for name, kind in named]
        found = pa.struct(fields)
        is_right = len({field.name for field in fields}) == len(fields) > 0
    elif match[1] == "map":
        is_right = len(within) == 2
        key, item = [_parse_field("value", piece) for piece in (within if is_right else ["int64"] * 2)]
        found = pa.map_(key.type, item)
        is_right = is_right and not pa.types.is_nested(key.type) and not pa.types.is_floating(key.type)
    else:
        item = _parse_field("item", _ITEM.sub("", within[0], count=1))
        found = pa.list_(item, int(match[3])) if match[3] else pa.list_(item)
        is_right = len(within) == 1 and (not match[3] or 1 <= int(match[3]) <= LONGEST_LIST)
    return found if is_right and depth_of(found) <= DEEPEST else None


def _parse_field(name: str, text: str) -> pa.Field:
    text = text.strip()
    if text.endswith(NOT_NULL):
        raise InvalidUsage(
            f"{shown(text)} is within another type, and what is within may always be null: leave{NOT_NULL} out",
            problem="unsupported type", type=text,
        )  # fmt: skip
    if text == JSON:
        raise InvalidUsage(
            "json is the type of a column, and not of what is within another type: make all of the column json, or "
            "what is within it string, which is text as it was written",
            problem="unsupported type", type=text,
        )  # fmt: skip
    return pa.field(name, parse_type(text))


def _named(piece: str) -> tuple[str, str]:
    piece = piece.strip()
    if not piece.startswith('"'):
        name, _, text = piece.partition(":")
        return name.strip(), text
    try:
        name, end = json.JSONDecoder().raw_decode(piece)
    except ValueError:
        name, end = piece, len(piece)
    return name, piece[end:].lstrip().removeprefix(":")


def _pieces(text: str) -> Iterator[str]:
    """The text cut at commas that are within no brackets and no quotes."""
    start = depth = 0
    quoted = escaped = False
    for at, letter in enumerate(text):
        if quoted:
            quoted, escaped = escaped or letter != '"', letter == "\\" and not escaped
        elif letter == '"':
            quoted = True
        elif letter in "<([":
            depth += 1
        elif letter in ">)]":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:at]
            start = at + 1
    if text.strip():
        yield text[start:]


def _format_nested(type_: pa.DataType) -> str:
    if pa.types.is_struct(type_):
        return f"struct<{', '.join(f'{_quoted(field.name)}: {_format_inner(field.type)}' for field in type_)}>"
    if pa.types.is_map(type_):
        return f"map<{_format_inner(type_.key_type)}, {_format_inner(type_.item_type)}>"
    if not hasattr(type_, "value_field"):  # a union
        return str(type_)
    length = f"[{type_.list_size}]" if pa.types.is_fixed_size_list(type_) else ""
    return f"list<{_format_inner(type_.value_type)}>{length}"


def _format_inner(type_: pa.DataType) -> str:
    """The text of a type within another, where JSON is text."""
    text = format_type(type_)
    return "string" if text == JSON else text


def _quoted(name: str) -> str:
    return name if _NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def check_zone(type_: pa.DataType) -> None:
    """Refuse a time zone that this machine does not know: its times could be stored, but not read as Python values."""
    for at in range(type_.num_fields):
        check_zone(type_.field(at).type)
    if not pa.types.is_timestamp(type_) or type_.tz is None:
        return
    try:
        pa.scalar(0, pa.timestamp("s", tz=type_.tz)).as_py()
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InvalidUsage(
            f"time zone {type_.tz!r} is not known here; use UTC, an offset like +02:00, or a name like Europe/Berlin",
            problem="unsupported type", type=str(type_),
        ) from error  # fmt: skip
