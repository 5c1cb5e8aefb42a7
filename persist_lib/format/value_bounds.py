"""Between which values those of a part's columns lie: made as it is encoded, and as conditions that all its rows meet.

The conditions are in the columns of who reads, which may have other names, wider types, and more columns than the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.core.plan.clusters import Clusters
from persist_lib.core.state import Part, ValueBounds
from persist_lib.format.predicate import Where, evaluated
from persist_lib.kernel.columns import plain
from persist_lib.kernel.converting import converted
from persist_lib.kernel.keys import decode_key, encode_row
from persist_lib.schema.evolution import column_of, fill
from persist_lib.schema.schema import TIME, Column, Schema, bounded
from persist_lib.schema.types import has_bounds, parse_type

Ends = tuple[pa.Scalar, pa.Scalar]


def bounds_of(schema: Schema, table: pa.Table) -> tuple[ValueBounds, ...]:
    """The bounds of the values of some updates, of which there must be some, in columns of `schema.updates`."""
    found = [_bounds(place, plain(table.column(schema.names[place]))) for place in bounded(schema)]
    return tuple(one for one in found if one is not None)


def _bounds(place: int, column: pa.Array) -> ValueBounds | None:
    """None for floats of which one is NaN, which lies between no two values."""
    if column.null_count == len(column):
        return ValueBounds(place, None, None, has_null=True)
    if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
        return None
    if pa.types.is_duration(column.type):
        column = column.cast(pa.int64())  # Arrow has no least duration
    ends = pc.min_max(column)
    return ValueBounds(place, _number(ends["min"]), _number(ends["max"]), column.null_count > 0)


def _number(scalar: pa.Scalar) -> int | float:
    value = scalar.value if pa.types.is_temporal(scalar.type) else scalar.as_py()
    return value + 0.0 if isinstance(value, float) else int(value)  # -0.0 becomes 0.0


def join(said: Sequence[tuple[ValueBounds, ...]]) -> tuple[ValueBounds, ...]:
    """The bounds of all of some pieces: of the columns of which each says some."""
    first, *others = [{one.column: one for one in values} for values in said]
    return tuple(
        reduce(_both, (other[place] for other in others), one)
        for place, one in first.items()
        if all(place in other for other in others)
    )


def _both(one: ValueBounds, other: ValueBounds) -> ValueBounds:
    lower = [end for end in (one.lower, other.lower) if end is not None]
    upper = [end for end in (one.upper, other.upper) if end is not None]
    return ValueBounds(
        one.column, min(lower, default=None), max(upper, default=None), one.has_null or other.has_null
    )  # fmt: skip


def is_within(part: Part, written: Schema, wanted: Schema, table: pa.Table) -> bool:
    """Whether some updates of a part, in order, lie within all bounds that the state says of it."""
    if not table.num_rows:
        return True
    if (
        not part.key_lower <= encode_row(wanted, table, 0)
        or encode_row(wanted, table, table.num_rows - 1) > part.key_upper
    ):
        return False
    times = pc.min_max(table.column(TIME))
    if times["min"].as_py() < part.time_lower or times["max"].as_py() > part.time_upper:
        return False
    # No filter leaves out what is inline.
    condition = None if part.inline is not None else condition_of(part, written, wanted, wanted.names)
    return condition is None or pc.all(evaluated(table, {"met": condition}).column(0), min_count=0).as_py()


def condition_of(part: Part, written: Schema, wanted: Schema, names: Iterable[str]) -> pc.Expression | None:
    """What the state says of these columns in all rows of a part, in the columns of `wanted`; None for nothing.

    `written` is the schema of the part. Both are of one shard.
    """
    columns = [column for name in names if (column := column_of(wanted, name)) is not None]
    told = [one for column in columns if (one := _told(part, written, column)) is not None]
    return reduce(and_, told) if told else None


def where_of(schema: Schema, wanted: Clusters) -> Where | None:
    """Which rows belong into these clusters, in the schema that is written; None for all."""
    column = schema.columns[wanted.column]
    kind, field = parse_type(column.type), pc.field(column.name)
    told = [] if wanted.lower is None else [field >= scalar_of(wanted.lower, kind)]
    if wanted.upper is not None:
        told.append(field < scalar_of(wanted.upper, kind))
    elif told:
        told = [told[0] | field.is_null()]
    return Where(reduce(and_, told), (column.name,)) if told else None


def _told(part: Part, written: Schema, column: Column) -> pc.Expression | None:
    place = next((at for at, other in enumerate(written.columns) if other.id == column.id), None)
    if place is None:
        return _constant(column)
    kind, field = parse_type(written.columns[place].type), pc.field(column.name)
    if place == 0:
        return _told_by_key(part, written, field) if has_bounds(column.type) else None
    said = next((one for one in part.values if one.column == place), None)
    if said is None:
        return None
    if said.lower is None or said.upper is None:
        return field.is_null()
    ends = pa.array([scalar_of(said.lower, kind), scalar_of(said.upper, kind)], kind)
    ends, fits = converted(ends, parse_type(column.type))
    if fits is not None:
        return None  # the reader is of an older schema, and cannot read all of it
    return _between(field, (ends[0], ends[1]), has_null=said.has_null)


def _constant(column: Column) -> pc.Expression | None:
    """Rows that were written before the column was there have its default, or null."""
    if column.default is None:
        return pc.field(column.name).is_null() if column.nullable else None
    value = fill(column, 1)[0]
    return _between(pc.field(column.name), (value, value), has_null=False) if has_bounds(column.type) else None


def _told_by_key(part: Part, written: Schema, field: pc.Expression) -> pc.Expression | None:
    """What the bounds of keys say of the first key column. Null is the least key, and floats have another order."""
    lower, upper = (next(iter(decode_key(written, bound)), None) for bound in (part.key_lower, part.key_upper))
    if lower is None or upper is None or pa.types.is_floating(lower.type):
        return None
    if not upper.is_valid:
        return field.is_null()
    return _between(field, (lower, upper), has_null=False) if lower.is_valid else (field <= upper) | field.is_null()


def _between(field: pc.Expression, ends: Ends, *, has_null: bool) -> pc.Expression:
    """Arrow goes by comparisons, which may say `or null`, and by an `and` of these; by no other `or`."""
    if has_null:
        return ((field >= ends[0]) | field.is_null()) & ((field <= ends[1]) | field.is_null())
    return (field >= ends[0]) & (field <= ends[1])


def scalar_of(end: float, kind: pa.DataType) -> pa.Scalar:
    """The end of a bound as a value of its column."""
    return pa.scalar(bool(end) if pa.types.is_boolean(kind) else end, kind)
