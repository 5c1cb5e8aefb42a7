"""Filters that Spark pushes down, and the option `filter`: as a filter on rows, a range of keys, and a range of times.

What is translated keeps every row that Spark's filter keeps; Spark applies all filters once more. So a filter that is
not understood, or whose value the column's type does not hold exactly, is left out and only costs time. For Spark NaN
equals itself and is the greatest, and for Arrow it does not compare: so floats are compared in Spark's way.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource as d

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME
from persist_lib.relation.row_selection import KeyRange
from persist_lib.schema.schema import TIME, Schema
from persist_lib.times import PER_SECOND

_is = pa.types
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_COMPARE: dict[type[d.Filter], Callable[[Any, Any], pc.Expression]] = {
    d.EqualTo: lambda a, b: a == b, d.GreaterThan: lambda a, b: a > b, d.GreaterThanOrEqual: lambda a, b: a >= b,
    d.LessThan: lambda a, b: a < b, d.LessThanOrEqual: lambda a, b: a <= b,
}  # fmt: skip
_TEXT: dict[type[d.Filter], Callable[[Any, str], pc.Expression]] = {
    d.StringStartsWith: lambda a, b: pc.starts_with(a, pattern=b),
    d.StringEndsWith: lambda a, b: pc.ends_with(a, pattern=b),
    d.StringContains: lambda a, b: pc.match_substring(a, pattern=b),
}


@dataclass(frozen=True)
class AllOf(d.Filter):
    """True where all of its filters are. Spark pushes it into sources in Java alone."""

    filters: tuple[d.Filter | None, ...]
    """None: one that is not understood."""


@dataclass(frozen=True)
class AnyOf(d.Filter):
    """True where one of its filters is."""

    filters: tuple[d.Filter | None, ...]


class Pushed(NamedTuple):
    """What filters leave to be read: rows, keys, and times in `[lower, upper)` (None: no end)."""

    where: Where | None = None
    keys: KeyRange = KeyRange()
    lower: int = 0
    upper: int | None = None

    def has(self, time: int) -> bool:
        return self.lower <= time and (self.upper is None or time < self.upper)

    def both(self, other: Pushed) -> Pushed:
        where = other.where if self.where is None else self.where.both(other.where)
        ends = [end for end in (self.upper, other.upper) if end is not None]
        return Pushed(where, self.keys.meet(other.keys), max(self.lower, other.lower), min(ends) if ends else None)


def pushed_down(filters: Sequence[d.Filter], schema: Schema) -> Pushed:
    """What these filters, all of which are true of a row that counts, leave of a shard's history."""
    found = [expression for one in filters if (expression := _wider(one, schema.data)) is not None]
    where = None
    for expression in found:
        one = Where.of(schema.data, expression)
        where = one if where is None or one is None else where.both(one)
    return Pushed(where, _keys(filters, schema), *_times(filters, schema))


def is_exact(one: d.Filter, schema: Schema) -> bool:
    """Whether what is left of a shard's history by this filter is exactly what it is true of."""
    child = one.child if isinstance(one, d.Not) else one
    if _name(child) == TIME:
        is_range = type(one) in _COMPARE
        return is_range and _time(getattr(one, "value", None), schema) is not None
    return _expression(one, schema.data) is not None


def _wider(one: d.Filter | None, columns: pa.Schema) -> pc.Expression | None:
    """An expression that is true of the rows that the filter is true of, and perhaps of others; None for all rows."""
    if isinstance(one, AllOf):
        known = [found for part in one.filters if (found := _wider(part, columns)) is not None]
        return reduce(operator.and_, known) if known else None
    if isinstance(one, AnyOf):
        found = [_wider(part, columns) for part in one.filters]
        return None if any(part is None for part in found) else reduce(operator.or_, found)
    return None if one is None else _expression(one, columns)


def _expression(one: d.Filter, columns: pa.Schema) -> pc.Expression | None:
    """An expression that is true of exactly the rows that the filter is true of; None where none is known."""
    if isinstance(one, AllOf | AnyOf):
        parts = [None if part is None else _expression(part, columns) for part in one.filters]
        join = operator.and_ if isinstance(one, AllOf) else operator.or_
        return None if any(part is None for part in parts) else reduce(join, parts)
    child = one.child if isinstance(one, d.Not) else one
    name = _name(child)
    if name is None or name not in columns.names:
        return None
    field, kind = pc.field(name), columns.field(name).type
    found = _positive(child, field, kind)
    if found is None or child is one:
        return found
    if isinstance(child, d.EqualNullSafe) and child.value is not None:
        return ~found | field.is_null()
    if isinstance(child, d.In) and any(value is None for value in child.value):
        return None
    # Where the column is null, the comparison is, and so is its negation: neither keeps the row. Only `isin`
    # says false of null.
    return ~found & field.is_valid() if isinstance(child, d.In) else ~found


def _positive(one: d.Filter, field: pc.Expression, kind: pa.DataType) -> pc.Expression | None:
    if isinstance(one, d.IsNull):
        return field.is_null()
    if isinstance(one, d.IsNotNull):
        return field.is_valid()
    if isinstance(one, d.In):
        values = [_scalar(value, kind) for value in one.value if value is not None]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        if _is.is_integer(kind) or _is.is_string(kind) or _is.is_binary(kind) or _is.is_date32(kind):
            return field.isin(pa.array([value.as_py() for value in known], kind))
        return reduce(operator.or_, [_compared(d.EqualTo, field, value) for value in known]) & field.is_valid()
    if isinstance(one, d.EqualNullSafe):
        if one.value is None:
            return field.is_null()
        value = _scalar(one.value, kind)
        return None if value is None else _compared(d.EqualTo, field, value)
    if type(one) in _TEXT:
        return _TEXT[type(one)](field, one.value) if _is.is_string(kind) else None  # type: ignore[attr-defined]
    if type(one) in _COMPARE:
        value = _scalar(one.value, kind)  # type: ignore[attr-defined]
        return None if value is None else _compared(type(one), field, value)
    return None


def _compared(how: type[d.Filter], field: pc.Expression, value: pa.Scalar) -> pc.Expression:
    """A comparison as Spark makes it: NaN equals itself, and is greater than all else."""
    found = _COMPARE[how](field, value)
    if not _is.is_floating(value.type):
        return found
    is_nan = pc.is_nan(field)
    if not math.isnan(value.as_py()):
        return found | is_nan if how in {d.GreaterThan, d.GreaterThanOrEqual} else found
    # Each is null where the field is, so that its negation is too.
    none = field > value
    return {d.LessThan: ~is_nan, d.GreaterThan: none, d.LessThanOrEqual: ~none}.get(how, is_nan)


def _scalar(value: object, kind: pa.DataType) -> pa.Scalar | None:
    """A value of Spark's as exactly that value of the column's type; None where that is not certain."""
    if _is.is_boolean(kind):
        fits = isinstance(value, bool)
    elif _is.is_integer(kind):
        if isinstance(value, Decimal) and value == value.to_integral_value():
            value = int(value)
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif _is.is_string(kind):
        fits = isinstance(value, str)
    elif _is.is_binary(kind) or _is.is_fixed_size_binary(kind):
        fits = isinstance(value, (bytes, bytearray))
        value = bytes(value) if isinstance(value, bytearray) else value
    elif _is.is_date32(kind):
        fits = isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    elif _is.is_timestamp(kind):
        fits = isinstance(value, dt.datetime) and (value.utcoffset() is None) == (kind.tz is None)
    elif _is.is_decimal(kind):
        fits = isinstance(value, (Decimal, int)) and not isinstance(value, bool)
        value = Decimal(value) if fits else value  # type: ignore[arg-type]
    elif _is.is_float32(kind) or _is.is_float64(kind):
        fits = isinstance(value, float)
    else:
        fits = False
    if not fits:
        return None
    try:
        found = pa.scalar(value, kind)
        is_nan = isinstance(value, float) and math.isnan(value)
        return found if is_nan or found.as_py() == value else None
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None


def _name(one: object) -> str | None:
    path = getattr(one, "attribute", None)
    return path[0] if isinstance(path, tuple) and len(path) == 1 else None


# --- ranges -----------------------------------------------------------------------------------------------------------


def _keys(filters: Sequence[d.Filter], schema: Schema) -> KeyRange:
    """The range of keys that the filters on leading key columns leave: equalities, then one column's bounds."""
    prefix: list[object] = []
    whole = KeyRange()
    for field in list(schema.data)[: len(schema.key)]:
        own = [one for one in filters if _name(one) == field.name]
        same = next((v for one in own if isinstance(one, d.EqualTo) and (v := _known(one, field)) is not None), None)
        if same is not None:
            prefix.append(same)
            continue
        for one in own:
            whole = whole.meet(_bound(schema, prefix, one, field))
        break
    return whole.meet(KeyRange.of(schema, prefix, None, None)) if prefix else whole


def _bound(schema: Schema, prefix: list[object], one: d.Filter, field: pa.Field) -> KeyRange:
    try:
        value = _known(one, field)
        if value is not None and isinstance(one, (d.GreaterThan, d.GreaterThanOrEqual)):
            return KeyRange.of(schema, None, [*prefix, value], None)
        if value is not None and isinstance(one, d.LessThan):
            return KeyRange.of(schema, None, None, [*prefix, value])
        if value is not None and isinstance(one, d.LessThanOrEqual):
            return KeyRange(None, KeyRange.of(schema, [*prefix, value], None, None).upper)
        if isinstance(one, d.In):
            values = [_scalar(value, field.type) for value in one.value if value is not None]
            ranges = [KeyRange.of(schema, [*prefix, value], None, None) for value in values if value is not None]
            if values and len(ranges) == len(values) and all(r.lower is not None and r.upper for r in ranges):
                return KeyRange(min(r.lower or b"" for r in ranges), max(r.upper or b"" for r in ranges))
    except InvalidUsage:  # a value that is no key rules nothing out
        pass
    return KeyRange()


def _known(one: d.Filter, field: pa.Field) -> pa.Scalar | None:
    return _scalar(getattr(one, "value", None), field.type)


def _times(filters: Sequence[d.Filter], schema: Schema) -> tuple[int, int | None]:
    lower, upper = 0, MAX_TIME + 1
    for one in filters:
        if _name(one) != TIME or (at := _time(getattr(one, "value", None), schema)) is None:
            continue
        whole, exact = at
        if isinstance(one, (d.EqualTo, d.GreaterThan, d.GreaterThanOrEqual)):
            lower = max(lower, whole + (isinstance(one, d.GreaterThan) or not exact))
        if isinstance(one, (d.EqualTo, d.LessThan, d.LessThanOrEqual)):
            upper = min(upper, whole + (not isinstance(one, d.LessThan) or not exact))
    return min(max(lower, 0), MAX_TIME), None if upper > MAX_TIME else max(upper, 0)


def _time(value: object, schema: Schema) -> tuple[int, bool] | None:
    """A value of `_time` in times of the shard, rounded down, and whether it was a whole one."""
    if schema.times is None:
        return (value, True) if isinstance(value, int) and not isinstance(value, bool) else None
    if not isinstance(value, dt.datetime) or value.utcoffset() is None:
        return None
    micros = (value - EPOCH) // dt.timedelta(microseconds=1)
    whole, rest = divmod(micros, 1_000_000 // PER_SECOND[schema.times])
    return whole, rest == 0


_TOKEN = re.compile(r"\s*(?:(`[^`]+`|[^\W\d]\w*)|('(?:[^']|'')*')|([+-]?\d+(?:\.\d+)?)|(<=|>=|<>|!=|=|<|>|\(|\)|,))")
_OPERATORS: dict[str, type[Any]] = {
    "=": d.EqualTo, "<": d.LessThan, "<=": d.LessThanOrEqual, ">": d.GreaterThan, ">=": d.GreaterThanOrEqual,
}  # fmt: skip


def parse_where(text: str, schema: Schema, columns: pa.Schema) -> Pushed:
    """What the option `filter` leaves of a shard: comparisons joined by AND, applied exactly. `columns` may be in it.

        order_id BETWEEN 100 AND 200 AND state IN ('paid', 'shipped') AND placed >= '2026-01-01' AND note IS NOT NULL

    Spark can push filters down to a source in Python, but forgets whose they were: see the option `pushdown`. This one
    is part of what a DataFrame is of.

    Raises InvalidUsage for what is not of this form, and for what cannot be applied exactly.
    """
    filters = list(_Parser(text, columns).terms())
    for one in filters:
        if not is_exact(one, schema):
            raise _inexact(one, columns)
    return pushed_down(filters, schema)


def _inexact(one: Any, columns: pa.Schema) -> InvalidUsage:
    child: Any = one.child if isinstance(one, d.Not) else one
    name, value = child.attribute[0], getattr(child, "value", None)
    return InvalidUsage(
        f"the option filter cannot apply a comparison with {shown(list(value) if isinstance(value, tuple) else value)} "
        f"exactly to column {shown(name)}, which is {columns.field(name).type}. Correct it, or leave it out and filter "
        "the DataFrame by it",
        option="filter", column=name,
    )  # fmt: skip


class _Parser:
    """Reads the text from left to right."""

    def __init__(self, text: str, columns: pa.Schema) -> None:
        self._text, self._columns = text, columns
        self._tokens = self._split()
        self._at = 0

    def terms(self) -> Iterator[d.Filter]:
        yield from self._term()
        while self._at < len(self._tokens):
            self._word("AND")
            yield from self._term()

    def _term(self) -> Iterator[d.Filter]:
        name = self._name()
        path = (name,)
        token = self._next()
        if token in _OPERATORS:
            yield _OPERATORS[token](path, self._value(name))
        elif token in {"<>", "!="}:
            yield d.Not(d.EqualTo(path, self._value(name)))
        elif token.upper() == "IS":
            is_null = not self._take("NOT")
            self._word("NULL")
            yield d.IsNull(path) if is_null else d.IsNotNull(path)
        elif token.upper() == "BETWEEN":
            yield d.GreaterThanOrEqual(path, self._value(name))
            self._word("AND")
            yield d.LessThanOrEqual(path, self._value(name))
        elif token.upper() == "IN":
            yield d.In(path, self._values(name))
        elif token.upper() == "NOT":
            self._word("IN")
            yield d.Not(d.In(path, self._values(name)))
        else:
            raise self._wrong(f"{shown(token)} after {name}")

    def _values(self, name: str) -> tuple[Any, ...]:
        self._word("(")
        found = [self._value(name)]
        while self._take(","):
            found.append(self._value(name))
        self._word(")")
        return tuple(found)

    def _name(self) -> str:
        token = self._next()
        name = token.strip("`")
        if name not in self._columns.names:
            meant = did_you_mean(name, self._columns.names)
            raise self._wrong(f"{shown(name)} is no column. {meant}There are {self._columns.names}")
        return name

    def _value(self, name: str) -> Any:
        token, kind = self._next(), self._columns.field(name).type
        text = token[1:-1].replace("''", "'") if token.startswith("'") else token
        try:
            if token.upper() in {"TRUE", "FALSE"}:
                return token.upper() == "TRUE"
            if not token.startswith("'"):
                return int(text) if pa.types.is_integer(kind) else Decimal(text)
            if pa.types.is_timestamp(kind):
                stamp = dt.datetime.fromisoformat(text)
                return stamp.replace(tzinfo=stamp.tzinfo or dt.UTC) if kind.tz else stamp
            return dt.date.fromisoformat(text) if pa.types.is_date(kind) else text
        except (ValueError, ArithmeticError) as error:
            raise self._wrong(f"{shown(token)} is no value of the column {name}, which is {kind}") from error

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise self._wrong("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, word: str) -> bool:
        is_there = self._at < len(self._tokens) and self._tokens[self._at].upper() == word
        self._at += is_there
        return is_there

    def _word(self, word: str) -> None:
        if not self._take(word):
            found = shown(self._tokens[self._at]) if self._at < len(self._tokens) else "the end"
            raise self._wrong(f"{word} is expected, and there is {found}")

    def _split(self) -> list[str]:
        found, place = [], 0
        while place < len(self._text.rstrip()):
            match = _TOKEN.match(self._text, place)
            if match is None:
                raise self._wrong(f"{shown(self._text[place:])} is not understood")
            found.append(next(group for group in match.groups() if group is not None))
            place = match.end()
        return found

    def _wrong(self, why: str) -> InvalidUsage:
        return InvalidUsage(
            f"the option filter is comparisons joined by AND, as in order_id >= 5 AND state IN ('paid', 'shipped') AND "
            f"{TIME} < 40: got {shown(self._text)}, and {why}",
            option="filter", value=self._text,
        )  # fmt: skip
