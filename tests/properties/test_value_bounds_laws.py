"""What parts say of their values: no row that a filter keeps is ever in a part that is left out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import example, given
from hypothesis import strategies as st

from persist_lib.core.state import Part
from persist_lib.format.parquet import PartEncoder
from persist_lib.format.predicate import Where
from persist_lib.format.value_bounds import condition_of, is_within
from persist_lib.ids import PartKey
from persist_lib.kernel.order import sort_updates
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import parse_type
from persist_lib.shard.batches import as_part

ODD = st.sampled_from([float("nan"), 0.0, -0.0, float("inf")])
KINDS = {
    "bool": st.booleans(), "int8": st.integers(-128, 127), "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1), "float32": st.floats(width=32) | ODD, "float64": st.floats() | ODD,
    "date32": st.integers(-1000, 1000), "time64[us]": st.integers(0, 86_399_999_999),
    "timestamp[s]": st.integers(-(2**40), 2**40), "timestamp[us, UTC]": st.integers(-(2**55), 2**55),
    "duration[ns]": st.integers(-(2**62), 2**62),
}  # fmt: skip
WIDE = {"int8": "int32", "float32": "float64", "date32": "timestamp[us]", "timestamp[s]": "timestamp[us]"}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[list[Any]], list[Any], bool]:
    """A type, the values of some row groups, values to compare with, and whether the reader has a wider type."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    pool = draw(st.lists(KINDS[kind], min_size=1, max_size=5))
    value = st.sampled_from([*pool, None])
    groups = draw(st.lists(st.lists(value, min_size=1, max_size=4), min_size=1, max_size=3))
    literals = draw(st.lists(st.one_of(st.sampled_from(pool), KINDS[kind]), min_size=2, max_size=3))
    return kind, groups, literals, draw(st.booleans())


def filters(field: pc.Expression, literals: pa.Array) -> list[pc.Expression]:
    one, other, *_ = literals
    return [
        field == one, field != one, field < one, field > one, ~(field <= one), ~(field > one), field.is_null(),
        field.is_valid(), (field >= one) & (field <= other), (field < one) | (field > other),
        field.is_null() | (field > one),
        *([] if pa.types.is_duration(literals.type) else [field.isin(literals)]),
        pc.coalesce(field, other) == one, ~((field > one) & (field < other)),
    ]  # fmt: skip


@example(case=("float32", [[0.0]], [float("nan"), 0.0], False))
@given(cases())
def test_a_part_that_is_left_out_has_no_row_that_the_filter_keeps(
    case: tuple[str, list[list[Any]], list[Any], bool],
) -> None:
    kind, groups, literals, is_wider = case
    schema = Schema({"id": "int64 not null"}, {"v": kind})
    encoder, tables, count = PartEncoder(schema, 0), list[pa.Table](), 0
    for values in groups:
        columns = [pa.array(range(count, count + len(values))), pa.array(values, parse_type(kind))]
        rest = [pa.array([0] * len(values), pa.uint64()), pa.array([1] * len(values), pa.int64())]
        tables.append(sort_updates(schema, pa.table([*columns, *rest], schema=schema.updates)))
        encoder.write(tables[-1])
        count += len(values)
    part: Part = as_part(encoder.finish(), PartKey("w/1"), 0)
    wanted = schema.widen({"v": WIDE[kind]}) if is_wider and kind in WIDE else schema
    table = pa.concat_tables(tables).cast(wanted.updates)
    assert is_within(part, schema, wanted, table)
    condition = condition_of(part, schema, wanted, ("v",))
    for one in filters(pc.field("v"), pa.array(literals, parse_type(kind)).cast(wanted.data.field("v").type)):
        if table.filter(one).num_rows:
            assert Where(one, ("v",)).holding([condition], wanted.data) == [0], (one, part.values)
