"""From a file's lines and columns to the shard's: bad lines, names, types, and what may not be null."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.convert.casts import UNREADABLE, UUID_BYTES, fixed_of_json, unreadable, uuid_bytes, wrong_places
from persist_lib.schema.schema import TIME_FIELD, Schema
from persist_lib.schema.widening import default_of

EpochUnit = Literal["s", "ms", "us", "ns", "days"]
Changes = Literal["by-key", "before"]


class Reading(Protocol):
    """How lines are read. `epochs`: columns of moments that are numbers, and their unit."""

    @property
    def delimiter(self) -> str: ...
    @property
    def quote(self) -> str: ...
    @property
    def nulls(self) -> tuple[str, ...]: ...
    @property
    def encoding(self) -> str: ...
    @property
    def multiline(self) -> bool: ...
    @property
    def extra(self) -> Literal["refuse", "ignore", "add"]: ...
    @property
    def missing(self) -> Literal["refuse", "null"]: ...
    @property
    def epochs(self) -> Mapping[str, EpochUnit]: ...
    @property
    def changes(self) -> Changes: ...
    def source(self, column: str) -> str:
        """The name that a column has in the lines."""


Flags = npt.NDArray[np.bool_]
Parse = Callable[[Sequence[bytes]], pa.Table]
"""Makes one row of each line, or raises Refused."""
Suspect = Callable[[Sequence[bytes]], Iterable[int]]

ODD = "it does not make one row: a quote is not closed, or there is a line end inside"


class Refused(Exception):
    """Lines do not parse. The text says why, in words for the one who made the file."""


class Sifted(NamedTuple):
    """The rows of the good lines, which of the lines they are, and why the others are bad."""

    table: pa.Table
    lines: npt.NDArray[np.int64]
    bad: dict[int, str]

    def at(self, places: npt.NDArray[np.int64]) -> Sifted:
        """The same of lines that are the ones at these places."""
        return Sifted(self.table, places[self.lines], {int(places[n]): why for n, why in self.bad.items()})

    def in_order(self) -> Sifted:
        """The same with the rows in the order of their lines."""
        order = np.argsort(self.lines, kind="stable")
        return Sifted(self.table.take(pa.array(order)), self.lines[order], dict(sorted(self.bad.items())))


def sift(parse: Parse, suspect: Suspect, lines: Sequence[bytes], empty: pa.Table) -> Sifted:
    """Parse the good lines, and say why the others are bad. A line is good if it parses alone, into one row.

    A block that parses whole, into as many rows as it has lines, is good. Only of one that does not are lines looked
    at: first those that a quick look suspects, each by itself, then the others by halves of halves. The parser alone
    decides; a suspicion only saves time.
    """
    everything = list(range(len(lines)))
    bad: dict[int, str] = {}
    table = _attempt(parse, lines, everything)
    if isinstance(table, pa.Table):
        return Sifted(table, np.arange(len(lines)), bad)
    for index in sorted(set(suspect(lines))):
        found = _attempt(parse, lines, [index])
        if not isinstance(found, pa.Table):
            bad[index] = str(found)
    tables: list[pa.Table] = []
    rows: list[int] = []
    rest = [index for index in everything if index not in bad]
    waiting = [rest] if rest else []
    while waiting:
        some = waiting.pop()
        found = _attempt(parse, lines, some)
        if isinstance(found, pa.Table):
            tables.append(found)
            rows += some
        elif len(some) == 1:
            bad[some[0]] = str(found)
        else:
            middle = len(some) // 2
            waiting += [some[middle:], some[:middle]]
    table = pa.concat_tables(tables) if tables else empty
    return Sifted(table, np.array(rows, np.int64), dict(sorted(bad.items())))


def _attempt(parse: Parse, lines: Sequence[bytes], indices: Sequence[int]) -> pa.Table | Refused:
    some = lines if len(indices) == len(lines) else [lines[index] for index in indices]
    try:
        table = parse(some)
    except Refused as refused:
        return refused
    if table.num_rows != len(some):
        return Refused(f"{len(some)} lines make {table.num_rows} rows" if len(some) > 1 else ODD)
    return table


_is = pa.types


def no_rows(schema: Schema) -> pa.Table:
    """An empty table like those that are parsed: any column may be null there."""
    return pa.schema([(field.name, field.type) for field in schema.data]).empty_table()


def fitted(
    table: pa.Table,
    settings: Reading,
    schema: Schema,
    lacks: Callable[[str, pa.ChunkedArray], Flags],
    read: Callable[[pa.ChunkedArray, pa.Field], pa.ChunkedArray] = lambda column, _: column,
) -> pa.Table:
    """The columns of a file that the schema names, in its order. `read` makes values of those that are no epochs.

    `lacks` says in which rows a column, which is null there, is not: these have its default.
    """
    columns, defaults = [], defaults_of(schema)
    for field in schema.data:
        source, unit = settings.source(field.name), settings.epochs.get(field.name)
        column = table.column(source)
        made = read(column, field) if unit is None else from_epoch(column, unit, field.type)
        default = defaults.get(field.name)
        if default is not None and column.null_count:
            made = pc.if_else(pa.array(lacks(source, column)), default, made)
        columns.append(made)
    return pa.table(columns, names=schema.names)


@lru_cache(maxsize=256)
def defaults_of(schema: Schema) -> dict[str, pa.Scalar]:
    """What columns have in rows that do not say them, where that is not null and no writer fills it in."""
    return {one.name: default_of(one.type, one.default) for one in schema.columns if one.default is not None}


def from_epoch(column: pa.ChunkedArray, unit: EpochUnit, target: pa.DataType) -> pa.ChunkedArray:
    """Integers since 1970 as dates or timestamps. Raises ArrowInvalid for what does not fit exactly."""
    if unit == "days":
        return column.cast(pa.int32()).cast(pa.date32()).cast(target)
    zone = target.tz if _is.is_timestamp(target) else None
    moments = column.cast(pa.timestamp(unit, zone))
    if _is.is_date(target):
        days = moments.cast(target, safe=False)
        if not pc.all(pc.equal(days.cast(moments.type), moments)).as_py():
            raise pa.ArrowInvalid("a time that is not midnight is no date")
        return days
    return moments.cast(target)


def from_text(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """What JSON holds as text: ISO dates and times, UUIDs, bytes in base64. Raises ArrowInvalid or ValidationError."""
    if _is.is_timestamp(target) or _is.is_date(target):
        return pc.cast(column, target)
    if target == pa.binary(UUID_BYTES):
        found = [None if text is None else fixed_of_json(text) for text in column.to_pylist()]
        return pa.chunked_array([pa.array(found, target)], target)
    kind: Any = dt.time if _is.is_time(target) else bytes
    values = msgspec.convert(column.to_pylist(), list[kind | None])
    return pa.chunked_array([pa.array(values, target)], target)


def csv_type(target: pa.DataType) -> pa.DataType:
    """What Arrow reads a column of CSV as, of which `from_csv` makes values of its type."""
    if target == pa.binary(UUID_BYTES):
        return pa.binary()
    return pa.string() if _is.is_decimal256(target) else target


def from_csv(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """What CSV holds as text that Arrow does not read: UUIDs, and decimals of more than 38 digits."""
    if target != pa.binary(UUID_BYTES):
        return column if column.type == target else column.cast(target)
    found = [
        uuid_bytes(value.decode()) if value is not None and len(value) != UUID_BYTES else value
        for value in column.to_pylist()
    ]
    return pa.chunked_array([pa.array(found, target)], target)


def without_nulls(schema: Schema, sifted: Sifted) -> Sifted:
    """Those rows that have a value in each column that must have one, and moments that can be read again.

    The other lines are bad.
    """
    bad, keep = dict(sifted.bad), np.ones(sifted.table.num_rows, bool)
    for field in schema.data:
        column, wrong = sifted.table.column(field.name), []
        if not field.nullable and column.null_count:
            wrong.append((pc.is_null(column), "there is no value, and null is not allowed"))
        if (beyond := unreadable(column)) is not None:
            wrong.append((beyond, f"the value is {UNREADABLE}"))
        for mask, why in wrong:
            for index in sifted.lines[np.asarray(mask) & keep].tolist():
                bad[index] = f"column {field.name}: {why}"
            keep &= ~np.asarray(mask)
    if keep.all():
        return sifted
    return Sifted(sifted.table.filter(pa.array(keep)), sifted.lines[keep], dict(sorted(bad.items())))


def with_times(schema: Schema, sifted: Sifted, name: str, bounds: tuple[int, int]) -> Sifted:
    """The rows at the times that a column says. A time that is missing, too fine or out of bounds makes a line bad."""
    lower, upper = bounds
    column = sifted.table.column(name)
    exact = pa.chunked_array([pa.repeat(pa.scalar(True), len(column))])
    times = column
    if schema.times is not None:
        coarse = column.cast(pa.timestamp(schema.times, "UTC"), safe=False)
        exact = pc.equal(coarse.cast(column.type), column)
        times = coarse.cast(pa.int64())
    inside = pc.and_(pc.greater_equal(times, lower), pc.less(times, upper))
    keep = np.asarray(pc.fill_null(pc.and_(exact, inside), False))
    bad = dict(sifted.bad)
    for row in np.flatnonzero(~keep).tolist():
        value = column[row].as_py()
        why = "is no whole step of the shard's clock" if value is not None and not exact[row].as_py() else (
            f"is not in [{schema.show(lower)}, {schema.show(upper)})"
        )  # fmt: skip
        bad[int(sifted.lines[row])] = f"its time, {value} in column {name}, {why}"
    table = sifted.table.append_column(TIME_FIELD, times.cast(pa.uint64(), safe=False))
    return Sifted(table.filter(pa.array(keep)), sifted.lines[keep], dict(sorted(bad.items())))


def failing(column: pa.ChunkedArray, target: pa.DataType) -> npt.NDArray[np.int64]:
    """The places of values of text that Arrow does not cast to a type, by halves of the distinct ones."""
    distinct = pc.unique(column).drop_null()

    def convert(some: pa.Array) -> pa.Array:
        return pc.cast(pc.utf8_trim_whitespace(some.cast(pa.string())), target)

    wrong = wrong_places(distinct, convert, (pa.ArrowException, UnicodeDecodeError))
    if not wrong:
        return np.array([], np.int64)
    return np.flatnonzero(np.asarray(pc.is_in(column, value_set=distinct.take(pa.array(wrong)))))


_NOISE = (
    (re.compile(r"^(CSV|JSON) parse error: "), ""),
    (re.compile(r"Row #\d+: "), ""),
    (re.compile(r"CSV conversion error to "), "no "),
    (re.compile(r" in row \d+$"), ""),
    (re.compile(r"Failed to convert JSON to (\S+), couldn't parse:\s*"), r"no \1: "),
    (re.compile(r"Failed to parse string: '(.*)' as a scalar of type ([^:]+)(:?.*)", re.DOTALL), r"no \2: '\1'\3"),
)
_COLUMN = re.compile(r"In CSV column #(\d+): ")


def said(error: Exception, names: Sequence[str] = ()) -> Refused:
    """What a parser says of lines, in fewer words."""
    text = str(error)
    if (match := _COLUMN.match(text)) and int(match[1]) < len(names):
        text = f"column {names[int(match[1])]}: {text[match.end() :]}"
    for pattern, instead in _NOISE:
        text = pattern.sub(instead, text)
    return Refused(text.strip()[:500])
