"""What the catalog pushes down, as JSON (`PersistCatalog.java`): nested lists of Spark's V2 predicates, as filters.

    ["OR", ["=", {"column": "id"}, {"value": "7", "type": "bigint"}], ["STARTS_WITH", {"column": "name"}, …]]

Values are those that Spark has inside: dates in days and timestamps in microseconds since 1970. Spark casts literals to
the column's type, so that one of another type is not understood, and left out.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from pyspark.sql import datasource as d
from pyspark.sql.types import StructType

from persist_lib.spark.filters import EPOCH, AllOf, AnyOf

_COMPARE: dict[str, type[Any]] = {
    "=": d.EqualTo, "<=>": d.EqualNullSafe, "<": d.LessThan, "<=": d.LessThanOrEqual, ">": d.GreaterThan,
    ">=": d.GreaterThanOrEqual, "STARTS_WITH": d.StringStartsWith, "ENDS_WITH": d.StringEndsWith,
    "CONTAINS": d.StringContains,
}  # fmt: skip
_FLIPPED = {"=": "=", "<=>": "<=>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_VALUES: dict[str, Callable[[str], Any]] = {
    "boolean": lambda text: text == "true", **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), int),
    "float": float, "double": float, "string": str, "binary": bytes.fromhex,
    "date": lambda text: (EPOCH + dt.timedelta(days=int(text))).date(),
    "timestamp": lambda text: EPOCH + dt.timedelta(microseconds=int(text)),
    "timestamp_ntz": lambda text: (EPOCH + dt.timedelta(microseconds=int(text))).replace(tzinfo=None),
}  # fmt: skip

ALWAYS = (["ALWAYS_TRUE"], {"value": "true", "type": "boolean"})
"""Predicates that say nothing."""


def parse_predicates(text: str, columns: StructType) -> list[d.Filter | None]:
    """The filters, all of which are true of a row that counts; None for one that is not understood."""
    types = {field.name: field.dataType.simpleString() for field in columns}
    return [_filter(one, types) for one in json.loads(text) if one not in ALWAYS]


def _filter(node: Any, types: dict[str, str]) -> d.Filter | None:
    if not isinstance(node, list):
        return None
    name, *children = node
    if name in {"AND", "OR"}:
        return (AllOf if name == "AND" else AnyOf)(tuple(_filter(child, types) for child in children))
    if name == "NOT":
        child = _filter(children[0], types)
        return None if child is None or isinstance(child, AllOf | AnyOf) else d.Not(child)
    if name in _FLIPPED and isinstance(children[0], dict) and "value" in children[0]:
        name, children = _FLIPPED[name], children[::-1]
    if name == "<>":
        child = _filter(["=", *children], types)
        return None if child is None else d.Not(child)
    column = children[0].get("column") if children and isinstance(children[0], dict) else None
    if column not in types:
        return None
    path = (column,)
    if name in {"IS_NULL", "IS_NOT_NULL"}:
        return d.IsNull(path) if name == "IS_NULL" else d.IsNotNull(path)
    try:
        values = tuple(_value(child, types[column]) for child in children[1:])
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    if name == "IN":
        return d.In(path, values)
    return _COMPARE[name](path, *values) if name in _COMPARE and len(values) == 1 else None


def _value(node: Any, kind: str) -> Any:
    """A literal of the column's type. Raises what says that it is not one, or has a value that Python does not hold."""
    if node["type"] != kind:
        raise ValueError(kind)
    if node["value"] is None:
        return None
    return Decimal(node["value"]) if kind.startswith("decimal") else _VALUES[kind](node["value"])
