"""Pydantic models as columns: the fields of a model in Arrow, an instance's values, and the instance again.

Optional fields are nullable, others are not. Models within models are structs, `list[T]` is a list, and `dict[K, V]` a
map; as columns, what is within may always be null, and the model checks it again as it makes an instance. Enums and
literals are stored as their values, UUIDs as text, datetimes as instants in UTC (`NaiveDatetime`: without a zone),
`JsonValue`, and lists and dicts of it, as JSON documents, decimals need `Field(max_digits=…, decimal_places=…)`. To
choose a column type, annotate the field with it: `Annotated[int, pa.int32()]`.
"""

from __future__ import annotations

import datetime as dt
import types
from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import pyarrow as pa

from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = type[BaseModel]
else:
    Model = type  # pydantic is loaded by programs that use it, not by every import of Persist

_TYPES: dict[object, pa.DataType] = {
    bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary(),
    dt.datetime: pa.timestamp("us", tz="UTC"), dt.date: pa.date32(), dt.time: pa.time64("us"),
    dt.timedelta: pa.duration("us"),
}  # fmt: skip
# Types that are known by name, so that neither pydantic nor anything that makes ids is imported here.
_BY_NAME = {
    ("pydantic.types", "AwareDatetime"): pa.timestamp("us", tz="UTC"),
    ("pydantic.types", "NaiveDatetime"): pa.timestamp("us"),
    ("pydantic.types", "JsonValue"): pa.json_(),
    ("uuid", "UUID"): pa.string(),
}


def is_model(side: object) -> TypeGuard[Model]:
    """Whether this is a pydantic model class."""
    return isinstance(side, type) and isinstance(getattr(side, "__pydantic_fields__", None), dict)


def is_instance(row: object) -> TypeGuard[BaseModel]:
    """Whether this is an instance of a pydantic model."""
    return is_model(type(row))


def model_fields(model: Model) -> Iterator[tuple[str, pa.DataType, bool]]:
    """Name, Arrow type and nullability of each field; InvalidUsage for what cannot be a column."""
    if model.model_config.get("extra") == "allow":
        name = model.__name__
        hint = "set extra='forbid' or 'ignore'"
        raise InvalidUsage(f"{name} allows extra fields, which have no column; {hint}", problem="model", model=name)
    for name, field in model.model_fields.items():
        try:
            kind, nullable = _resolve(field.annotation, tuple(field.metadata))
        except RecursionError as error:
            raise InvalidUsage(
                f"{model.__name__}.{name} holds itself, and a column's type ends somewhere",
                problem="unsupported type", model=model.__name__, column=name,
            ) from error  # fmt: skip
        if kind is None:
            raise InvalidUsage(
                f"{model.__name__}.{name}: no column type for {field.annotation!r}. Use bool, int, float, str, bytes, "
                "datetime, date, time, timedelta, UUID, Enum, Literal, Decimal with max_digits and decimal_places, an "
                "Optional, JsonValue, a list or a dict of these, a model of them, or name the type: Annotated[int, "
                "pa.int32()]",
                problem="unsupported type", model=model.__name__, column=name, type=str(field.annotation),
            )  # fmt: skip
        yield name, kind, nullable


def values_of(row: BaseModel) -> dict[str, object]:
    """An instance's fields as values of columns."""
    try:
        return {name: _value(getattr(row, name)) for name in type(row).model_fields}
    except AttributeError as error:  # made by model_construct, which checks nothing
        raise InvalidUsage(f"an instance of {type(row).__name__} lacks a field: {error}", problem="row") from error


def rebuild(model: Model, values: Mapping[str, object]) -> BaseModel:
    """The instance with these values of columns."""
    names = _input_names(model)
    return model.model_validate({names[name]: value for name, value in values.items()}, strict=False)


@lru_cache(maxsize=256)
def _input_names(model: Model) -> dict[str, str]:
    """What validation calls each field."""
    found = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias or field.alias or name
        choices = [choice for choice in (alias, *getattr(alias, "choices", ())) if isinstance(choice, str)]
        found[name] = choices[0] if choices else name
    return found


def _value(value: object) -> object:
    if is_instance(value):
        return values_of(value)
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {_value(key): _value(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return str(value) if _name(type(value)) == ("uuid", "UUID") else value


def _name(kind: object) -> tuple[str, str]:
    return getattr(kind, "__module__", ""), getattr(kind, "__name__", "")


def _resolve(annotation: Any, metadata: tuple[object, ...]) -> tuple[pa.DataType | None, bool]:
    """The column type of an annotation and whether it is nullable; no type if there is none for it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _resolve(arguments[0], metadata + arguments[1:])
    if origin in (Union, types.UnionType):
        rest = [argument for argument in arguments if argument is not type(None)]
        kinds = {_resolve(argument, metadata)[0] for argument in rest}
        return (kinds.pop() if len(rest) == 1 else None), len(rest) < len(arguments)
    nullable = origin is Literal and None in arguments
    named = next((item for item in metadata if isinstance(item, pa.DataType)), None)
    return named or _simple(annotation, origin, arguments, metadata), nullable


def _simple(
    annotation: Any, origin: Any, arguments: tuple[Any, ...], metadata: tuple[object, ...]
) -> pa.DataType | None:
    if origin is Literal:
        return _common(argument for argument in arguments if argument is not None)
    if hasattr(annotation, "__supertype__"):  # NewType
        return _resolve(annotation.__supertype__, metadata)[0]
    if annotation is Decimal:
        return _decimal(metadata)
    if origin in (list, dict):
        return _nested(origin, arguments)
    if is_model(annotation):
        fields = [pa.field(name, kind) for name, kind, _ in model_fields(annotation)]
        return None if any(field.type == pa.json_() for field in fields) else pa.struct(fields)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _common(member.value for member in annotation)
    return _BY_NAME.get(_name(annotation)) or _TYPES.get(annotation)


def _nested(origin: type, arguments: tuple[Any, ...]) -> pa.DataType | None:
    kinds = [_resolve(argument, ())[0] for argument in arguments]
    if None in kinds:
        return None
    if pa.json_() in kinds:  # such as dict[str, JsonValue], which is a document itself
        return pa.json_()
    return pa.list_(*kinds) if origin is list else pa.map_(*kinds)


def _common(values: Iterator[object]) -> pa.DataType | None:
    """The type that all values have, if it is one."""
    kinds = {type(_value(value)) for value in values}
    return _TYPES.get(kinds.pop()) if len(kinds) == 1 else None


def _decimal(metadata: tuple[object, ...]) -> pa.DataType | None:
    found: dict[str, int] = {}
    for item in metadata:
        for each in (item, *getattr(item, "metadata", ())):  # constraints, or a Field(...) that holds some
            found |= {name: value for name in ("max_digits", "decimal_places")
                      if isinstance(value := getattr(each, name, None), int)}  # fmt: skip
    if len(found) < 2 or not 0 <= found["decimal_places"] <= found["max_digits"] <= 38:
        return None
    return pa.decimal128(found["max_digits"], found["decimal_places"])
