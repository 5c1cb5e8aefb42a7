"""Column types as canonical text: `int64`, `timestamp[us, UTC]`, `decimal128(18, 2)`.

Durable state holds these texts and not Arrow's own, so that a schema is the same bytes in every release of Arrow.
`parse_type(format_type(t)) == t` for every type that Persist stores.
"""

from __future__ import annotations

import re
from functools import lru_cache

import pyarrow as pa

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage

_SIMPLE: dict[str, pa.DataType] = {
    "bool": pa.bool_(), "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "string": pa.string(), "binary": pa.binary(),
    "date32": pa.date32(), "time64[us]": pa.time64("us"),
}  # fmt: skip
# What people, Arrow and other libraries call them. One meaning each: `float` is Python's, which is 64 bits wide.
_ALIASES = {
    "int": "int64", "float": "float64", "double": "float64", "boolean": "bool",
    "date": "date32", "date32[day]": "date32", "date64": "date32", "date64[ms]": "date32",
    "timestamp": "timestamp[us, UTC]", "str": "string", "utf8": "string",
    "large_string": "string", "large_utf8": "string", "string_view": "string", "utf8_view": "string",
    "bytes": "binary", "large_binary": "binary", "binary_view": "binary",
}  # fmt: skip
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, *(?:tz=)?([\w/+:-]+))?\]")
_DURATION = re.compile(r"duration\[(s|ms|us|ns)\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), *(\d+)\)")
_FIXED = re.compile(r"fixed_size_binary\[(\d+)\]")
_EXAMPLES = (
    "timestamp[us]", "timestamp[us, UTC]", "duration[us]", "decimal128(18, 2)", "fixed_size_binary[16]",
)  # fmt: skip

SUPPORTED = (
    f"{', '.join(_SIMPLE)}, timestamp[s|ms|us|ns] (no zone) or timestamp[us, UTC] (instants), duration[s|ms|us|ns], "
    "decimal128(precision, scale) with 0 <= scale <= precision <= 38, fixed_size_binary[1 to 4096]"
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
        if 1 <= precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    if (match := _FIXED.fullmatch(text)) and 1 <= int(match[1]) <= 4096:
        return pa.binary(int(match[1]))
    meant = did_you_mean(text, (*_SIMPLE, *_ALIASES, *_EXAMPLES))
    raise InvalidUsage(
        f"column type {shown(text)} is not supported. {meant}Use {SUPPORTED}", problem="unsupported type", type=text
    )


@lru_cache(maxsize=1024)
def format_type(type_: pa.DataType) -> str:
    """The canonical text of an Arrow type; InvalidUsage where Persist cannot store it.

    Other encodings of the same values (dictionary, large and view layouts, date64, small decimals) give the same text.
    """
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return format_type(type_.value_type)
    if pa.types.is_timestamp(type_):
        text = f"timestamp[{type_.unit}{', ' + type_.tz if type_.tz else ''}]"
    elif pa.types.is_decimal(type_) and not pa.types.is_decimal256(type_):
        text = f"decimal128({type_.precision}, {type_.scale})"
    elif pa.types.is_fixed_size_binary(type_):
        text = f"fixed_size_binary[{type_.byte_width}]"
    elif pa.types.is_float32(type_):  # Arrow writes `float` for it, which is the alias of another
        text = "float32"
    else:
        text = _ALIASES.get(str(type_), str(type_))
    parse_type(text)
    return text


def check_zone(type_: pa.DataType) -> None:
    """Refuse a time zone that this machine does not know: its times could be stored, but not read as Python values."""
    if not pa.types.is_timestamp(type_) or type_.tz is None:
        return
    try:
        pa.scalar(0, pa.timestamp("s", tz=type_.tz)).as_py()
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InvalidUsage(
            f"time zone {type_.tz!r} is not known here; use UTC, an offset like +02:00, or a name like Europe/Berlin",
            problem="unsupported type", type=str(type_),
        ) from error  # fmt: skip
