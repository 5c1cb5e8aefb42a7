"""Nested values in JSON: lists, objects with fixed fields (structs) and with any (maps), at every level.

Arrow reads neither maps nor lists of a fixed length from JSON, and drops zones of times within. So nested fields are
taken out of the lines, decoded by msgspec with the types that the column says, and made a column as Python values are.
So are floats where one is not finite, for which JSON has no number: "NaN", "Infinity" and "-Infinity" are their text.
And so are documents, which are any JSON at all.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Collection, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from persist_lib.convert.casts import UUID_BYTES, fixed_of_json
from persist_lib.convert.json_columns import canonical_column
from persist_lib.convert.rows import build_column
from persist_lib.schema.types import is_json

_is = pa.types
_objects, _encoder = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Encoder()
_PLACE = re.compile(r"`\$\[(\d+)\]([^`]*)`")
_KEPT = (bytes, dt.datetime, dt.date, dt.time, dt.timedelta, Decimal)
_ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXTS = {str(odd): text for text, odd in _ODD.items()}
Raws = Sequence["bytes | str | msgspec.Raw | None"]


def without(data: bytes, names: Collection[str]) -> tuple[bytes, dict[str, list[msgspec.Raw | None]]]:
    """Lines of objects without these fields, and what each line had in them; None where it lacks one."""
    rows = _objects.decode_lines(data)
    taken = {name: [row.pop(name, None) for row in rows] for name in names}
    return _encoder.encode_lines(rows), taken


def is_apart(field: pa.Field) -> bool:
    """Whether what a column holds is taken out of the lines."""
    return bool(_is.is_nested(field.type) or is_json(field))


def column_of(raws: Raws, field: pa.Field, first_row: int = 0, *, is_text: bool = False) -> pa.Array:
    """JSON values, one a row, as a column. `is_text`: of documents, a text is that of a document.

    Raises msgspec's errors for what is no JSON of the type, and InvalidUsage for a value that it cannot hold.
    """
    if is_json(field):
        documents = pa.array([_text_of(raw, is_text=is_text) for raw in raws], pa.string())
        return canonical_column(pa.chunked_array([documents]), field.name, first_row).chunk(0)
    texts = [b"null" if raw is None else raw.encode() if isinstance(raw, str) else bytes(raw) for raw in raws]
    try:
        data = b"[" + b",".join(texts) + b"]"
        found = _decoder(field.type, odd=has_odd_floats(data)).decode(data)
    except msgspec.ValidationError as error:
        where = _PLACE.sub(lambda match: f"row {first_row + int(match[1])}{match[2]}", str(error))
        raise msgspec.ValidationError(f"column {field.name!r}: {where}") from error
    if len(found) != len(texts):
        raise msgspec.ValidationError(f"column {field.name!r}: a value is no single JSON value")
    values = msgspec.to_builtins(found, builtin_types=_KEPT, enc_hook=lambda value: value.held)
    return build_column(values, field, first_row)


def _text_of(raw: bytes | str | msgspec.Raw | None, *, is_text: bool) -> str | None:
    """A document as it was written."""
    text = raw if raw is None or isinstance(raw, str) else bytes(raw).decode()
    return msgspec.json.decode(text, type=str) if is_text and text is not None and text[:1] == '"' else text


def has_odd_floats(data: bytes) -> bool:
    """Whether there may be the text of a float that is not finite."""
    return b'"NaN"' in data or b'Infinity"' in data


def with_odd_floats(values: Any) -> Any:
    """Python's values with such floats as their text, at every level."""
    if isinstance(values, float):
        return values if math.isfinite(values) else _TEXTS[str(values)]
    if isinstance(values, dict):
        return {name: with_odd_floats(value) for name, value in values.items()}
    return [*map(with_odd_floats, values)] if isinstance(values, list) else values


class _Read:
    """A value that is not read as msgspec does."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class _Float(_Read):
    """A float, or the text of one that is not finite."""


class _Sixteen(_Read):
    """16 bytes."""


class _Duration(_Read):
    """A duration: how many of the column's units, or as ISO 8601 has it."""

    a_second = 1


_DURATIONS = {
    unit: type(f"_{unit}", (_Duration,), {"a_second": a_second})
    for unit, a_second in {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}.items()
}


def _hook(kind: type[_Read], value: Any) -> _Read:
    if kind is _Float and (type(value) in (int, float) or value in _ODD):
        return kind(_ODD.get(value, value))
    if kind is _Sixteen and isinstance(value, str):
        return kind(fixed_of_json(value))
    if issubclass(kind, _Duration) and isinstance(value, str):
        return kind(msgspec.convert(value, dt.timedelta))
    if issubclass(kind, _Duration) and type(value) is int:
        whole, rest = divmod(value * 10**6, kind.a_second)
        if not rest:
            return kind(dt.timedelta(microseconds=whole))
    raise ValueError(f"got {value!r}")


@lru_cache(maxsize=256)
def _decoder(kind: pa.DataType, *, odd: bool) -> msgspec.json.Decoder[Any]:
    """`odd`: floats that are not finite are among the values, for which each is looked at."""
    return msgspec.json.Decoder(list[_python(kind, odd) | None], dec_hook=_hook)  # type: ignore[misc]


def _python(kind: pa.DataType, odd: bool) -> Any:
    """What JSON of a column type is decoded as."""
    if _is.is_struct(kind):
        named = {f"f{at}": field for at, field in enumerate(kind)}
        return msgspec.defstruct(
            "Fields", [(name, _python(field.type, odd) | None, None) for name, field in named.items()],
            rename={name: field.name for name, field in named.items()}, forbid_unknown_fields=True,
        )  # fmt: skip
    if _is.is_map(kind):
        return dict[_python(kind.key_type, odd), _python(kind.item_type, odd) | None]  # type: ignore[misc]
    if _is.is_nested(kind):
        return list[_python(kind.value_type, odd) | None]  # type: ignore[misc]
    tests = [
        (_is.is_string, str), (_is.is_boolean, bool), (_is.is_integer, int),
        (_is.is_floating, _Float if odd else float),
        (_is.is_decimal, Decimal), (_is.is_timestamp, dt.datetime), (_is.is_date, dt.date), (_is.is_time, dt.time),
    ]  # fmt: skip
    if _is.is_duration(kind):
        return _DURATIONS[kind.unit]
    return next((python for test, python in tests if test(kind)), _Sixteen if kind == pa.binary(UUID_BYTES) else bytes)
