"""What in some stored bytes a release does not know: to tell a newer program's row from a damaged one."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect


def find_unknown(body: bytes, kind: type) -> str | None:
    """A field of `body` that the struct `kind`, or one within it, does not have; None if there is none.

    Names it for people. Bytes that are no msgpack hold no field.
    """
    try:
        value = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return _find(value, inspect.type_info(kind))


def _find(value: Any, kind: inspect.Type) -> str | None:
    match kind:
        case inspect.StructType(cls, fields, array_like=is_list) if isinstance(value, list if is_list else dict):
            return _find_in_struct(value, cls.__name__, fields)
        case inspect.UnionType(types):
            found = [_find(value, one) for one in types]
            return next((one for one in found if one), None)
        case inspect.TupleType(types) if isinstance(value, list):
            return _first(_find(item, one) for item, one in zip(value, types, strict=False))
        case inspect.VarTupleType(item) if isinstance(value, list):
            return _first(_find(one, item) for one in value)
        case inspect.DictType(_, item) if isinstance(value, dict):
            return _first(_find(one, item) for one in value.values())
        case _:
            return None


def _find_in_struct(value: Any, name: str, fields: tuple[inspect.Field, ...]) -> str | None:
    if isinstance(value, list):
        if len(value) > len(fields):
            return f"{name} with {len(value)} fields, not {len(fields)}"
        return _first(_find(item, field.type) for item, field in zip(value, fields, strict=False))
    known = {field.encode_name: field.type for field in fields}
    unknown = [key for key in value if key not in known]
    if unknown:
        return f"{name} with the field {unknown[0]!r}"
    return _first(_find(item, known[key]) for key, item in value.items())


def _first(found: Any) -> str | None:
    return next((one for one in found if one), None)
