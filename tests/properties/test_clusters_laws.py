"""Laws of clusters: every row is in one, each is a sorted run, and no two share a value, whatever the values are."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.core.plan.clusters import By, Clusters, are_apart, by_name, cuts_of, in_clusters, split
from persist_lib.core.state import Batch
from persist_lib.format.parts import decode_part, parts_of_clusters
from persist_lib.format.value_bounds import where_of
from persist_lib.frontier import at
from persist_lib.ids import PartKey
from persist_lib.kernel.order import is_sorted
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import as_part

ENDS = {
    "int8": (-(2**7), 2**7 - 1), "uint8": (0, 2**8 - 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1),
    "date32": (-(2**31), 2**31 - 1), "timestamp[us]": (-(2**63), 2**63 - 1), "time64[us]": (0, 86_400_000_000 - 1),
    "duration[s]": (-(2**63), 2**63 - 1),
}  # fmt: skip


def made(kind: str, values: list[int | None]) -> tuple[Schema, pa.Table]:
    """Updates of rows whose keys are their places."""
    schema = Schema({"id": "int64"}, {"made": kind})
    wanted = schema.updates.field("made").type
    raw = pa.array(values, f"{'u' if kind.startswith('uint') else ''}int{wanted.bit_width}").view(wanted)
    count = len(values)
    columns = [pa.array(range(count), pa.int64()), raw, pa.array([3] * count, pa.uint64()), pa.array([1] * count)]
    return schema, pa.table(columns, schema=schema.updates)


def number(column: pa.ChunkedArray) -> list[int | None]:
    """Values as the state says them."""
    array = column.combine_chunks()
    sign = "u" if pa.types.is_unsigned_integer(array.type) else ""
    found: list[int | None] = array.view(f"{sign}int{array.type.bit_width}").to_pylist()
    return found


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[int | None]]:
    kind = draw(st.sampled_from(sorted(ENDS)))
    few = draw(st.booleans())
    one = st.sampled_from([*ENDS[kind], 0, 1, 2]) if few else st.integers(*ENDS[kind])
    return kind, draw(st.lists(st.none() | one, min_size=1, max_size=40))


@given(tables(), st.integers(1, 6), st.integers(1, 9))
def test_parts_of_clusters_are_sorted_runs_that_lie_apart_and_have_all_rows(given_, count, window):
    kind, values = given_
    schema, table = made(kind, values)
    cuts = cuts_of([(one, 1.0) for one in values if one is not None], count)
    windows = (table.slice(start, window) for start in range(0, table.num_rows, window))
    encoded = list(parts_of_clusters(windows, schema, 0, 1, 1, cuts))
    parts = [as_part(one, PartKey(f"w/{place}"), 0) for place, one in enumerate(encoded)]
    data = {part.key: one for part, one in zip(parts, encoded, strict=True)}
    ordered, runs = in_clusters(parts, Clusters(1, count, cuts))
    batch = Batch(0, 1, at(0), at(4), at(3), len(values), len(values), 0, ordered, runs)
    seen: list[tuple[int, int | None]] = []
    for run in batch.run_parts():
        tables_ = [decode_part(one.key, data[one.key].data, data[one.key].digests, schema) for one in run]
        whole = pa.concat_tables(tables_)
        assert is_sorted(schema, whole)
        found = number(whole.column("made"))
        assert len({len(cuts) if one is None else bisect_right(cuts, one) for one in found}) == 1
        seen += zip(whole.column("id").to_pylist(), found, strict=True)
    assert sorted(seen, key=lambda row: row[0]) == list(enumerate(values))
    by = by_name([schema], "made")
    assert by == By(schema.columns[1].id, kind)
    assert are_apart(batch, [schema], by) is (len(runs) > 1)
    for one, other in pairwise(cuts):
        assert one < other


@given(tables(), st.integers(1, 16), st.integers(0, 5))
def test_each_row_belongs_to_one_task(given_, count, most):
    kind, values = given_
    schema, table = made(kind, values)
    cuts = cuts_of([(one, 1.0) for one in values if one is not None], count)
    tasks = split(Clusters(1, count, cuts), lambda one: len(one.cuts) <= most)
    assert all(len(one.cuts) <= most for one in tasks)
    ids = []
    for one in tasks:
        where = where_of(schema, one)
        ids += (table if where is None else where.kept(table)).column("id").to_pylist()
    assert sorted(ids) == list(range(len(values)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tasks), type=list[Clusters]) == tasks
