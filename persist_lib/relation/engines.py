"""Query engines over snapshots: DuckDB by a dataset of Arrow's, polars by a source of rows.

Both say which columns and rows they need, and get no others. What they filter by is also applied exactly: DuckDB's
filters are Arrow's expressions; of polars' filters some are translated, to read less, and polars applies all of them.
Neither has decimals of more than 38 digits: these are their exact text there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from persist_lib.format.predicate import Where
from persist_lib.relation.conversions import reader_of
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME

if TYPE_CHECKING:
    import polars as pl

    from persist_lib.relation.conversions import Doors


def dataset_of(source: Doors[Any], failed: Callable[[BaseException], None] | None = None) -> ds.Dataset:
    """What DuckDB reads `source` from. `failed` is called with each error of reading, whose type DuckDB would lose."""
    return _Dataset(source, failed)


class _Dataset(ds.Dataset):  # type: ignore[misc] # pyarrow has no types
    """A dataset of which only the schema and the scanner are asked for, with columns and a filter."""

    def __init__(self, source: Doors[Any], failed: Callable[[BaseException], None] | None) -> None:
        # Not super's, which refuses. What super would answer by its own state must not be asked for.
        self._source, self._failed = source, failed

    @property
    def schema(self) -> pa.Schema:
        return engine_schema(self._source.schema)

    def scanner(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, **_options: object
    ) -> _Scanner:
        names = self.schema.names if columns is None else list(columns)
        return _Scanner(self._source, names, filter, self._failed)


class _Scanner:
    """One reading of a dataset."""

    def __init__(
        self, source: Doors[Any], names: list[str], filter_: pc.Expression | None,
        failed: Callable[[BaseException], None] | None,
    ) -> None:  # fmt: skip
        self._source, self._names, self._filter, self._failed = source, names, filter_, failed

    @property
    def projected_schema(self) -> pa.Schema:
        return engine_schema(self._source.schema, self._names)

    def to_reader(self) -> pa.RecordBatchReader:
        return reader_of(self.projected_schema, self._tables())

    def _tables(self) -> Iterator[pa.Table]:
        try:
            yield from filtered(self._source, self._names, self._filter)
        except GeneratorExit:
            raise
        except BaseException as error:
            if self._failed is not None:
                self._failed(error)
            raise


def filtered(source: Doors[Any], names: Sequence[str], expression: pc.Expression | None) -> Iterator[pa.Table]:
    """Some columns of the rows for which the expression is true, with the types that engines have.

    The expression may be about `_diff` and `_time` too.
    """
    columns = engine_schema(source.schema)
    where, late = Where.of(columns, expression), None
    others = {field.name for field in columns if field.type != source.schema.field(field.name).type}
    if where is not None and not others.union((DIFF, TIME)).isdisjoint(where.names):
        where, late = None, where
    read = names if late is None else [*names, *(name for name in late.names if name not in names)]
    tables = source._selected(read, where)
    while True:
        source._check_readable()
        if (table := next(tables, None)) is None:
            return
        table = for_engines(table) if others else table
        yield table if late is None else late.kept(table).select(names)


def for_engines(table: pa.Table) -> pa.Table:
    """The same rows with the types that engines have."""
    columns = engine_schema(table.schema)
    return table if columns.equals(table.schema) else table.cast(columns)


def engine_schema(columns: pa.Schema, names: Iterable[str] | None = None) -> pa.Schema:
    """These columns, or some of them, with the types that engines have."""
    fields = columns if names is None else (columns.field(name) for name in names)
    return pa.schema([_engine_field(field) for field in fields])


def _engine_field(field: pa.Field) -> pa.Field:
    return field.with_type(_engine_type(field.type))


def _engine_type(kind: pa.DataType) -> pa.DataType:
    is_ = pa.types
    if is_.is_decimal256(kind):
        return pa.string()
    if is_.is_struct(kind):
        return pa.struct([_engine_field(field) for field in kind])
    if is_.is_map(kind):
        return pa.map_(_engine_field(kind.key_field), _engine_field(kind.item_field))
    if is_.is_fixed_size_list(kind):
        return pa.list_(_engine_field(kind.value_field), kind.list_size)
    return pa.list_(_engine_field(kind.value_field)) if is_.is_list(kind) else kind


def lazy_frame_of(source: Doors[Any]) -> pl.LazyFrame:
    """A lazy frame of the source's rows."""
    import polars as pl  # noqa: PLC0415 - an optional dependency
    from polars.io.plugins import register_io_source  # noqa: PLC0415

    def read(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        shown = source.schema.names if with_columns is None else with_columns
        looked_at = [] if predicate is None else predicate.meta.root_names()
        names = list(dict.fromkeys((*shown, *looked_at)))
        left = n_rows
        empty = empty_table(engine_schema(source.schema, names))  # so that there is always one
        for table in chain([empty], filtered(source, names, pushed_down(predicate, source.schema))):
            frame = pl.DataFrame(table)
            if predicate is not None:
                frame = frame.filter(predicate)
            frame = frame.select(shown) if left is None else frame.select(shown).head(left)
            yield frame
            if left is not None and (left := left - frame.height) <= 0:
                return

    return register_io_source(read, schema=pl.DataFrame(empty_table(engine_schema(source.schema))).schema)


# --- polars' filters as Arrow's ---------------------------------------------------------------------------------------

_COMPARE: dict[str, Callable[[Any, Any], pc.Expression]] = {
    "Eq": lambda a, b: a == b, "NotEq": lambda a, b: a != b, "Lt": lambda a, b: a < b, "LtEq": lambda a, b: a <= b,
    "Gt": lambda a, b: a > b, "GtEq": lambda a, b: a >= b,
}  # fmt: skip
_INTEGERS = {f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)}
_UNITS = {"Milliseconds": "ms", "Microseconds": "us", "Nanoseconds": "ns"}


def pushed_down(predicate: pl.Expr | None, columns: pa.Schema) -> pc.Expression | None:
    """An expression that is true wherever polars' predicate is, and is as narrow as it can be told; None for none."""
    if predicate is None:
        return None
    try:
        return _wider(json.loads(predicate.meta.serialize(format="json")), columns)
    except Exception:  # noqa: BLE001 - what polars writes differs by release, and polars applies the filter anyway
        return None


def _wider(node: Any, columns: pa.Schema) -> pc.Expression | None:
    """An expression that is true wherever the node is.

    There is no negation in here. Under one, an expression that is too wide would become one that is too narrow.
    """
    if not isinstance(node, dict) or len(node) != 1:
        return None
    ((kind, inner),) = node.items()
    if kind == "Function":
        return _function(inner, columns)
    if kind != "BinaryExpr":
        return None
    operator = inner["op"]
    if operator in ("And", "LogicalAnd", "Or", "LogicalOr"):
        sides = [_wider(inner[side], columns) for side in ("left", "right")]
        known = [side for side in sides if side is not None]
        if operator in ("Or", "LogicalOr"):
            return known[0] | known[1] if len(known) == 2 else None
        return known[0] & known[1] if len(known) == 2 else (known or [None])[0]
    return _comparison(operator, inner["left"], inner["right"], columns)


def _comparison(operator: str, left: Any, right: Any, columns: pa.Schema) -> pc.Expression | None:
    if operator not in _COMPARE:
        return None
    if "Column" in left:
        value = _value(right, columns.field(left["Column"]).type)
        return None if value is None else _COMPARE[operator](pc.field(left["Column"]), value)
    if "Column" in right:
        value = _value(left, columns.field(right["Column"]).type)
        return None if value is None else _COMPARE[operator](value, pc.field(right["Column"]))
    return None


def _function(node: Any, columns: pa.Schema) -> pc.Expression | None:
    kind, inputs = node["function"].get("Boolean"), node["input"]
    if kind is None or "Column" not in inputs[0]:
        return None
    field = pc.field(inputs[0]["Column"])
    if kind == "IsNull":
        return field.is_null()
    if kind == "IsNotNull":
        return field.is_valid()
    if isinstance(kind, dict) and "IsBetween" in kind:
        closed = kind["IsBetween"]["closed"]
        low = _comparison("GtEq" if closed in ("Both", "Left") else "Gt", inputs[0], inputs[1], columns)
        high = _comparison("LtEq" if closed in ("Both", "Right") else "Lt", inputs[0], inputs[2], columns)
        return low & high if low is not None and high is not None else (low if high is None else high)
    return None


def _value(node: Any, kind: pa.DataType) -> pc.Expression | None:
    """A constant as a value of the column's type; None for others, and where equality differs in both."""
    ((name, value),) = node["Literal"]["Scalar"].items()
    is_ = pa.types
    if name in _INTEGERS and is_.is_integer(kind):
        return pc.scalar(pa.scalar(int(value), kind))
    if name == "String" and is_.is_string(kind):
        return pc.scalar(pa.scalar(str(value), kind))
    if name == "Boolean" and is_.is_boolean(kind):
        return pc.scalar(pa.scalar(bool(value), kind))
    if name == "Date" and is_.is_date32(kind):
        return pc.scalar(pa.scalar(int(value), pa.int32()).cast(kind))
    if name == "Datetime" and is_.is_timestamp(kind):
        ticks, unit, zone = value
        if _UNITS.get(unit) == kind.unit and (zone is None) == (kind.tz is None):
            return pc.scalar(pa.scalar(int(ticks), pa.int64()).cast(kind))
    return None
