"""Laws of the byte layer: keys compare as bytes, parts come back as they were, hashes depend on bits alone."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from persist_lib.format import descriptions
from persist_lib.format.parts import decode_inline, decode_part, encode_inline, encode_part
from persist_lib.kernel.columns import plain_table
from persist_lib.kernel.fingerprint import FEW, fingerprint, hash_rows
from persist_lib.kernel.hashing import hash_few
from persist_lib.kernel.keys import decode_key, encode_key, encode_row, lower_bound, slice_sorted, upper_bound
from persist_lib.kernel.order import sort_updates
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import is_nested
from tests.properties.kernel_updates import build, in_order, order_of, read, rows_of, schemas, updates_of


def keyed(schema: Schema) -> Schema:
    """The same with keys only. Nested columns cannot be some."""
    return Schema([column for column in schema.columns if not is_nested(column.type)])


@given(st.data())
def test_keys_compare_as_bytes_as_their_values_do_and_decode(data):
    schema = keyed(data.draw(schemas()))
    first, second = data.draw(rows_of(schema)), data.draw(rows_of(schema))
    table = build(schema, [(first, 0, 1), (second, 0, 1)])
    one, two = encode_row(schema, table, 0), encode_row(schema, table, 1)
    assert (one < two) == (order_of(schema, first) < order_of(schema, second))
    assert (one == two) == (first == second)
    assert encode_key(schema, decode_key(schema, one)) == one


@given(st.data())
def test_cut_bounds_hold_all_keys_between_them_and_still_decode(data):
    schema = keyed(data.draw(schemas()))
    updates = data.draw(updates_of(schema))
    assume(updates)
    table = sort_updates(schema, build(schema, updates))
    limit = data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 64]))
    lower, upper = lower_bound(schema, table, limit), upper_bound(schema, table, limit)
    keys = [encode_row(schema, table, index) for index in range(table.num_rows)]
    assert lower <= keys[0] <= keys[-1] <= upper
    for bound, key, is_lower in ((lower, keys[0], True), (upper, keys[-1], False)):
        values = decode_key(schema, bound)
        same_columns = encode_key(schema, decode_key(schema, key)[: len(values)])
        assert (
            (encode_key(schema, values) <= same_columns) if is_lower else (encode_key(schema, values) >= same_columns)
        )


@given(st.data())
def test_ranges_that_meet_cut_sorted_rows_into_a_disjoint_union(data):
    schema = keyed(data.draw(schemas()))
    updates = data.draw(updates_of(schema))
    table = sort_updates(schema, build(schema, updates))
    keys = [encode_row(schema, table, index) for index in range(table.num_rows)]
    cuts = sorted(data.draw(st.lists(st.one_of(st.binary(max_size=6), st.sampled_from([*keys, b""])), max_size=4)))
    slices = [slice_sorted(schema, table, lo, hi) for lo, hi in zip([None, *cuts], [*cuts, None], strict=True)]
    assert [u for piece in slices for u in read(schema, piece)] == read(schema, table)
    for piece, lo, hi in zip(slices, [None, *cuts], [*cuts, None], strict=True):
        inside = [encode_row(schema, piece, index) for index in range(piece.num_rows)]
        assert all((lo is None or lo <= key) and (hi is None or key < hi) for key in inside)


@given(st.data())
def test_parts_and_inline_bytes_give_back_what_was_stored(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    assume(updates)
    table = sort_updates(schema, build(schema, updates))
    for stored, decoded in (
        ((part := encode_part(schema, 3, table)), decode_part("k", part.data, part.digests, schema)),
        ((inline := encode_inline(schema, 3, table)), decode_inline("k", bytes(inline.data), schema)),
    ):
        assert decoded.schema.equals(schema.updates)
        assert read(schema, decoded) == read(schema, table)
        assert (stored.said.sums.count, stored.schema_id) == (len(updates), 3)
        assert stored.said.time_lower == min(time for _, time, _ in updates)
        assert stored.said.time_upper == max(time for _, time, _ in updates)
        assert stored.said.sums.diff_sum == sum(diff for _, _, diff in updates)
        assert stored.said.sums.fingerprint == fingerprint(schema, table)


@given(st.data())
def test_a_few_updates_are_described_as_many_are(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema, max_size=FEW))
    assume(updates)
    table = sort_updates(schema, build(schema, updates))
    few = descriptions.describe(schema, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptions, "FEW", 0)
        assert descriptions.describe(schema, table) == few


@given(st.data())
def test_a_key_range_of_a_part_is_what_slicing_all_of_it_gives(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    assume(updates)
    table = sort_updates(schema, build(schema, updates))
    part = encode_part(schema, 0, table)
    keys = [encode_row(schema, table, index) for index in range(table.num_rows)]
    lo = data.draw(st.one_of(st.none(), st.sampled_from(keys)))
    hi = data.draw(st.one_of(st.none(), st.sampled_from(keys)))
    ranged = decode_part("k", part.data, part.digests, schema, lo=lo, hi=hi)
    assert read(schema, ranged) == read(schema, slice_sorted(schema, table, lo, hi))


@given(st.data())
def test_the_hash_of_a_row_depends_on_its_bits_alone(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema, max_size=60))
    table = build(schema, updates)
    whole = hash_rows(schema, table).tolist()
    assert whole == hash_few(schema, table)
    assert hash_rows(schema, pa.concat_tables([table] * 20)).tolist() == whole * 20  # beyond the few
    assert hash_rows(schema, table.slice(1)).tolist() == whole[1:]
    if updates:
        assert hash_rows(schema, pa.concat_tables([table.slice(0, 1), table.slice(1)])).tolist() == whole
    by_row = dict(zip([row for row, _, _ in updates], whole, strict=True))
    assert whole == [by_row[row] for row, _, _ in updates]
    assert len(set(by_row.values())) == len(by_row)
    encoded = table
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
            encoded = encoded.set_column(index, field.name, encoded.column(index).dictionary_encode())
    assert hash_rows(schema, pa.concat_tables([encoded] * 20)).tolist() == whole * 20
    assert read(schema, plain_table(encoded)) == updates


@given(st.data())
def test_a_new_nullable_column_changes_no_fingerprint(data):
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema))
    added = Schema({"k": "bool"}, {"new": data.draw(st.sampled_from(["string", "float64", "fixed_size_binary[3]"]))})
    newer = Schema(schema.key, (*schema.value, *added.value))
    table = build(newer, [((*row, None), time, diff) for row, time, diff in updates])
    assert fingerprint(newer, table) == fingerprint(schema, build(schema, updates))
    assert fingerprint(newer, build(schema, updates)) == fingerprint(schema, build(schema, updates))


def test_the_reference_orders_floats_totally():
    schema = Schema({"k": "float64"})
    bits = [0xFFF8000000000000, 0xFFF0000000000000, 1 << 63, 0, 1, 0x7FF0000000000000, 0x7FF8000000000000]
    assert in_order(schema, [((bit,), 0, 1) for bit in reversed(bits)]) == [((bit,), 0, 1) for bit in bits]
