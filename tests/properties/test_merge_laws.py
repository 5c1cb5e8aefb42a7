"""Laws of the kernel: however updates are dealt to runs, and in whatever windows, they add up to the same."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persist_lib.format.parts import PartRun, StoredPart, decode_part, encode_inline, encode_part, parts_of
from persist_lib.kernel.columns import plain_table
from persist_lib.kernel.consolidate import FEW, consolidate
from persist_lib.kernel.fingerprint import fingerprint
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.merge import merge_contents, merge_runs
from persist_lib.kernel.order import is_sorted, sort_updates
from persist_lib.schema.schema import Schema
from tests.properties.kernel_updates import TYPES, build, in_order, read, schemas, totals, updates_of
from tests.properties.runs import dealt


def streamed(data: st.DataObject, run: pa.Table) -> Iterator[pa.Table]:
    """A run in tables of any sizes, empty ones too, some with dictionaries."""
    cuts = sorted(data.draw(st.lists(st.integers(0, run.num_rows), max_size=4)))
    pieces = [run.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, run.num_rows], strict=True)]
    return iter([dictionaried(piece) if data.draw(st.booleans()) else piece for piece in pieces])


def dictionaried(table: pa.Table) -> pa.Table:
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(index, field.name, table.column(index).combine_chunks().dictionary_encode())
    return table


@given(st.data())
def test_any_deal_of_updates_to_runs_merges_to_the_sum_of_them_in_order(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    runs = dealt(data, schema, updates)
    advance_to = data.draw(st.sampled_from([None, 0, 2, 9]))
    merged = list(
        merge_runs(
            [streamed(data, run) for run in runs], schema, advance_to=advance_to,
            window_rows=data.draw(st.sampled_from([None, 1, 7])),
        )
    )  # fmt: skip
    found = [update for window in merged for update in read(schema, window)]
    expected = totals(updates, advance_to or 0)
    assert found == in_order(schema, [(row, time, diff) for (row, time), diff in expected.items()])
    assert all(window.num_rows and window.schema.equals(schema.updates) for window in merged)


@given(st.data())
def test_contents_are_the_sums_over_all_times(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    runs = dealt(data, schema, updates)
    window_rows = data.draw(st.sampled_from([None, 1, 7]))
    windows = list(merge_contents([streamed(data, run) for run in runs], schema, window_rows=window_rows))
    found = [update for window in windows for update in read(schema, window)]
    expected = totals((row, 0, diff) for row, _, diff in updates)
    assert found == in_order(schema, [(row, 0, diff) for (row, _), diff in expected.items()])
    assert all(window.schema.equals(schema.contents) for window in windows)


def both(kind: str) -> Schema:
    """Keys and values of one type."""
    return Schema({"k": kind}, {"v": kind})


@pytest.mark.parametrize("kind", sorted(TYPES))
@settings(max_examples=30)
@given(st.data())
def test_each_type_is_ordered_and_merged_by_its_bits(kind, data):
    schema = both(kind)
    updates = data.draw(updates_of(schema))
    ordered = in_order(schema, updates)
    result = read(schema, sort_updates(schema, build(schema, updates)))
    assert [update[:2] for update in result] == [update[:2] for update in ordered]
    runs = [streamed(data, run) for run in dealt(data, schema, updates)]
    found = [
        update for window in merge_runs(runs, schema, advance_to=2, window_rows=3) for update in read(schema, window)
    ]
    expected = totals(updates, advance_to=2)
    assert found == in_order(schema, [(row, time, diff) for (row, time), diff in expected.items()])


@given(st.data())
def test_sorting_puts_updates_in_the_contracts_order_and_knows_when_they_are(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    table = build(schema, updates)
    ordered = in_order(schema, updates)
    result = read(schema, sort_updates(schema, table))
    assert [update[:2] for update in result] == [update[:2] for update in ordered]
    assert sorted(update[2] for update in result) == sorted(update[2] for update in updates)
    assert is_sorted(schema, table) == ([u[:2] for u in updates] == [u[:2] for u in ordered])


@given(st.data())
def test_the_fingerprint_is_conserved_by_merging_and_adds_up_over_runs_and_parts(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    runs = dealt(data, schema, updates)
    whole = fingerprint(schema, build(schema, updates))
    assert sum(fingerprint(schema, run) for run in runs) % 2**64 == whole
    streams = [streamed(data, run) for run in runs]
    windows = merge_runs(streams, schema, advance_to=3, window_rows=4, on_overflow="split", dictionaries=True)
    parts = list(parts_of(windows, schema, 0, 1))
    assert sum(part.said.sums.fingerprint for part in parts) % 2**64 == whole
    assert (sum(part.said.sums.diff_sum for part in parts) - sum(diff for _, _, diff in updates)) % 2**64 == 0
    decoded = [decode_part("k", part.data, part.digests, schema) for part in parts]
    assert totals(update for table in decoded for update in read(schema, table)) == totals(updates, 3)


@given(st.data())
def test_a_merge_of_stored_runs_is_a_merge_of_what_counts_in_them(data):
    schema = data.draw(schemas())
    newer = Schema(schema.key, (*schema.value, *Schema({"k": "bool"}, {"added": "string"}).value))
    updates = data.draw(updates_of(schema))
    lower, upper = data.draw(st.sampled_from([(None, None), (1, None), (None, 3), (1, 3)]))
    runs = [run for run in dealt(data, schema, updates) if run.num_rows]
    sources = [stored(schema, run, lower, upper, inline=data.draw(st.booleans())) for run in runs]
    opened = [PartRun([source], newer, batch_rows=3) for source in sources]
    found = [update for window in merge_runs(opened, newer, window_rows=5) for update in read(newer, window)]
    kept = [
        ((*row, None), time, diff)
        for row, time, diff in updates
        if (lower is None or time >= lower) and (upper is None or time < upper)
    ]
    assert totals(found) == totals(kept)


def stored(schema: Schema, run: pa.Table, lower: int | None, upper: int | None, *, inline: bool) -> StoredPart:
    part = (encode_inline if inline else encode_part)(schema, 0, run)
    data = bytes(part.data)
    return StoredPart(
        "k", len(data), part.digests, schema, lower, upper, lambda start, end: data[start:end], inline=inline
    )


@given(st.data())
def test_a_few_rows_are_consolidated_and_found_as_many_are(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema, max_size=FEW))
    table = plain_table(consolidate(schema, dictionaried(build(schema, updates))))
    expected = in_order(schema, [(row, time, diff) for (row, time), diff in totals(updates).items()])
    assert read(schema, table) == expected
    keys = Keys.of(schema, build(schema, data.draw(updates_of(schema, max_size=FEW)) + updates[:1]))
    many = pa.concat_tables([table] * (FEW + 1))
    alone = {place for place in range(table.num_rows) if len(keys.find(table.slice(place, 1)))}
    assert set(keys.find(table).tolist()) == alone
    assert set(keys.find(sort_updates(schema, many)).tolist()) == {
        place * (FEW + 1) + copy for place in alone for copy in range(FEW + 1)
    }
