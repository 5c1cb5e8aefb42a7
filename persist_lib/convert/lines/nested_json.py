"""Nested values in JSON: lists, objects with fixed fields (structs) and with any (maps), at every level.

Arrow reads neither maps nor lists of a fixed length from JSON, and drops zones of times within. So nested fields are
taken out of the lines, decoded by msgspec with the types that the column says, and made a column as Python values are.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from persist_lib.convert.rows import build_column

_is = pa.types
_objects, _encoder = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Encoder()
_PLACE = re.compile(r"`\$\[(\d+)\]([^`]*)`")
_KEPT = (bytes, dt.datetime, dt.date, dt.time, dt.timedelta, Decimal)
Raws = Sequence["bytes | str | msgspec.Raw | None"]


def without(data: bytes, names: Collection[str]) -> tuple[bytes, dict[str, list[msgspec.Raw | None]]]:
    """Lines of objects without these fields, and what each line had in them; None where it lacks one."""
    rows = _objects.decode_lines(data)
    taken = {name: [row.pop(name, None) for row in rows] for name in names}
    return _encoder.encode_lines(rows), taken


def column_of(raws: Raws, field: pa.Field, first_row: int = 0) -> pa.Array:
    """JSON values, one a row, as a column.

    Raises msgspec's errors for what is no JSON of the type, and InvalidUsage for a value that it cannot hold.
    """
    texts = [b"null" if raw is None else raw.encode() if isinstance(raw, str) else bytes(raw) for raw in raws]
    try:
        found = _decoder(field.type).decode(b"[" + b",".join(texts) + b"]")
    except msgspec.ValidationError as error:
        where = _PLACE.sub(lambda match: f"row {first_row + int(match[1])}{match[2]}", str(error))
        raise msgspec.ValidationError(f"column {field.name!r}: {where}") from error
    if len(found) != len(texts):
        raise msgspec.ValidationError(f"column {field.name!r}: a value is no single JSON value")
    values = msgspec.to_builtins(found, builtin_types=_KEPT)
    return build_column(values, field, first_row)


@lru_cache(maxsize=256)
def _decoder(kind: pa.DataType) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(list[_python(kind) | None])  # type: ignore[misc]


def _python(kind: pa.DataType) -> Any:
    """What JSON of a column type is decoded as."""
    if _is.is_struct(kind):
        named = {f"f{at}": field for at, field in enumerate(kind)}
        return msgspec.defstruct(
            "Fields", [(name, _python(field.type) | None, None) for name, field in named.items()],
            rename={name: field.name for name, field in named.items()}, forbid_unknown_fields=True,
        )  # fmt: skip
    if _is.is_map(kind):
        return dict[_python(kind.key_type), _python(kind.item_type) | None]  # type: ignore[misc]
    if _is.is_nested(kind):
        return list[_python(kind.value_type) | None]  # type: ignore[misc]
    tests = [
        (_is.is_string, str), (_is.is_boolean, bool), (_is.is_integer, int), (_is.is_floating, float),
        (_is.is_decimal, Decimal), (_is.is_timestamp, dt.datetime), (_is.is_date, dt.date), (_is.is_time, dt.time),
        (_is.is_duration, dt.timedelta),
    ]  # fmt: skip
    return next((python for test, python in tests if test(kind)), bytes)
