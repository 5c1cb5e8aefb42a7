"""Laws of changes that meet contents: it is what putting both in order and adding them up comes to, bit for bit."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persist_lib.kernel import meeting, order, search
from persist_lib.kernel.columns import joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.meeting import count_through, is_wide, met
from persist_lib.kernel.search import equal_ranges
from persist_lib.schema.schema import Schema
from tests.properties.kernel_updates import TYPES, Update, build, order_of, read, rows_of, schemas, updates_of


def contents(schema: Schema, updates: list[Update]) -> pa.Table:
    return consolidate(schema, build(schema, updates).drop_columns(["_time"]))


def both(data: st.DataObject, schema: Schema) -> tuple[pa.Table, pa.Table]:
    """Contents and changes over the same few rows; the changes retract some of them wholly."""
    one, other = data.draw(updates_of(schema)), data.draw(updates_of(schema))
    old = contents(schema, one)
    taken = [update for update in read(schema, old) if data.draw(st.booleans())]
    again = [(row, 0, data.draw(st.sampled_from([-diff, 1]))) for row, _, diff in taken]
    return old, contents(schema, [*other, *again])


def check(schema: Schema, old: pa.Table, changes: pa.Table) -> None:
    found = met(schema, old, changes)
    found.validate(full=True)
    assert found.schema.equals(schema.contents)
    assert read(schema, found) == read(schema, consolidate(schema, pa.concat_tables([old, changes])))


@settings(max_examples=150)
@given(st.data())
def test_what_meets_is_what_both_add_up_to(data):
    schema = data.draw(schemas())
    old, changes = both(data, schema)
    with (
        mock.patch.object(meeting, "STRETCH", data.draw(st.sampled_from([0, 1, 3, 8192]))),
        mock.patch.object(search, "DENSE", data.draw(st.sampled_from([0, 1, 16]))),
        mock.patch.object(search, "SPARSE", data.draw(st.sampled_from([0, 1, 128]))),
    ):
        check(schema, old, changes)


@pytest.mark.parametrize("kind", sorted(TYPES))
@settings(max_examples=20)
@given(st.data())
def test_each_type_meets_by_its_bits(kind, data):
    schema = Schema({"k": kind}, data.draw(st.sampled_from([{}, {"v": kind}])))
    check(schema, *both(data, schema))


@pytest.mark.parametrize("kind", ["string", "binary", "fixed_size_binary[300]"])
@settings(max_examples=30)
@given(st.data())
def test_long_values_that_start_alike_meet(kind, data):
    """As words up to a depth, and by their place among all of them from there on."""
    schema = Schema({"k": data.draw(st.sampled_from([kind, "bool"]))}, {"v": kind})
    with mock.patch.object(order, "DEEP", 1), mock.patch.object(search, "DEEP", data.draw(st.sampled_from([1, 2]))):
        check(schema, *both(data, schema))


@settings(max_examples=60)
@given(st.data())
def test_pieces_with_the_changes_up_to_their_last_rows_are_the_whole(data):
    schema = data.draw(schemas())
    old, changes = both(data, schema)
    cuts = sorted(data.draw(st.sets(st.integers(0, old.num_rows), max_size=4)))
    expected = read(schema, met(schema, old, changes))
    found: list[Update] = []
    for start, end in pairwise([0, *cuts, old.num_rows]):
        piece = old.slice(start, end - start)
        count = count_through(schema, changes, piece) if piece.num_rows else 0
        found += read(schema, met(schema, piece, changes.slice(0, count)))
        changes = changes.slice(count)
    assert [*found, *read(schema, changes)] == expected


@settings(max_examples=60)
@given(st.data())
def test_rows_are_found_where_they_are_or_would_be(data):
    schema = data.draw(schemas())
    some = data.draw(st.lists(rows_of(schema), max_size=30))
    sides = [sorted(data.draw(st.lists(st.sampled_from(some or [()]), max_size=20)) if some else [],
                    key=lambda row: order_of(schema, row)) for _ in range(2)]  # fmt: skip
    rows, wanted = (
        [joined(build(schema, [(row, 0, 1) for row in side]).column(n)) for n in schema.names] for side in sides
    )
    with (
        mock.patch.object(search, "DENSE", data.draw(st.sampled_from([0, 1, 16]))),
        mock.patch.object(search, "SPARSE", data.draw(st.sampled_from([0, 1, 128]))),
    ):
        low, high = equal_ranges(rows, wanted, data.draw(st.integers(1, len(schema.names))))
    places = [order_of(schema, row) for row in sides[0]]
    keys = [order_of(schema, row) for row in sides[1]]
    assert list(low) == [sum(place < key for place in places) for key in keys]
    assert list(high) == [sum(place <= key for place in places) for key in keys]


def test_diffs_whose_sum_may_not_fit_are_wide():
    schema = Schema({"k": "int64"})
    for diff in (2**62, -(2**62), 2**63 - 1, -(2**63)):
        assert is_wide(contents(schema, [((1,), 0, diff), ((2,), 0, 1)]))
    assert not is_wide(contents(schema, [((1,), 0, 2**62 - 1), ((2,), 0, 1 - 2**62)]))
    assert not is_wide(schema.contents.empty_table())
