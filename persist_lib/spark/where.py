"""The option `where`: comparisons joined by AND, applied exactly, and used to prune parts, row groups and keys.

    order_id BETWEEN 100 AND 200 AND state IN ('paid', 'shipped') AND placed >= '2026-01-01' AND note IS NOT NULL

Spark can push filters down to a source in Python, but forgets whose they were: see the option `pushdown`. This one is
part of what a DataFrame is of.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as d

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import TIME, Schema
from persist_lib.spark.filters import Pushed, is_exact, pushed_down

_TOKEN = re.compile(r"\s*(?:(`[^`]+`|[^\W\d]\w*)|('(?:[^']|'')*')|([+-]?\d+(?:\.\d+)?)|(<=|>=|<>|!=|=|<|>|\(|\)|,))")
_COMPARE: dict[str, type[Any]] = {
    "=": d.EqualTo, "<": d.LessThan, "<=": d.LessThanOrEqual, ">": d.GreaterThan, ">=": d.GreaterThanOrEqual,
}  # fmt: skip
_is = pa.types


def parse_where(text: str, schema: Schema, columns: pa.Schema) -> Pushed:
    """What the text leaves of a shard. `columns` are those that it may be about.

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
        f"the option where cannot apply a comparison with {shown(list(value) if isinstance(value, tuple) else value)} "
        f"exactly to column {shown(name)}, which is {columns.field(name).type}. Correct it, or leave it out and filter "
        "the DataFrame by it",
        option="where", column=name,
    )  # fmt: skip


class _Parser:
    """Reads the text from left to right."""

    def __init__(self, text: str, columns: pa.Schema) -> None:
        self._text, self._columns = text, columns
        self._tokens = self._split()
        self._at = 0

    def terms(self) -> Iterator[d.Filter]:
        """The comparisons, all of which have to be true."""
        yield from self._term()
        while self._at < len(self._tokens):
            self._word("AND")
            yield from self._term()

    def _term(self) -> Iterator[d.Filter]:
        name = self._name()
        path = (name,)
        token = self._next()
        if token in _COMPARE:
            yield _COMPARE[token](path, self._value(name))
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
                return int(text) if _is.is_integer(kind) else Decimal(text)
            if _is.is_timestamp(kind):
                stamp = dt.datetime.fromisoformat(text)
                return stamp.replace(tzinfo=stamp.tzinfo or dt.UTC) if kind.tz else stamp
            return dt.date.fromisoformat(text) if _is.is_date(kind) else text
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
            f"the option where is comparisons joined by AND, as in order_id >= 5 AND state IN ('paid', 'shipped') AND "
            f"{TIME} < 40: got {shown(self._text)}, and {why}",
            option="where", value=self._text,
        )  # fmt: skip
