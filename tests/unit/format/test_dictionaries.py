"""What is written from dictionaries is what would have been written from the values spelt out."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.core.trace import GROUP_ROWS
from persist_lib.format.dictionaries import as_stored, compacted, stored_as
from persist_lib.format.parquet import PartEncoder
from persist_lib.format.parts import decode_part
from persist_lib.schema.schema import Schema

SCHEMA = Schema({"k": "int64"}, {"state": "string", "raw": "binary", "note": "string"})


def updates(rows: int) -> pa.Table:
    states = [None if n % 50 == 7 else f"state {n * 7 // rows}" for n in range(rows)]
    raws = [b"%d" % (n % 3) for n in range(rows)]
    notes = [f"note {n}" for n in range(rows)]
    numbers = [pa.array(range(rows)), pa.array(states), pa.array(raws, pa.binary()), pa.array(notes)]
    times, diffs = pa.array([5] * rows, pa.uint64()), pa.array([1] * rows, pa.int64())
    return pa.table([*numbers, times, diffs], schema=SCHEMA.updates)


def with_dictionaries(table: pa.Table, names: list[str]) -> pa.Table:
    for name in names:
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, table.column(index).combine_chunks().dictionary_encode())
    return table


def encoded(*tables: pa.Table) -> bytes:
    encoder = PartEncoder(SCHEMA, 3)
    for table in tables:
        encoder.write(table)
    return bytes(encoder.finish().data)


def facts(data: bytes) -> list[object]:
    """What a reader sees of an object: its schema with metadata, and each column of each row group."""
    file = pq.ParquetFile(pa.BufferReader(data))
    groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
    columns = [group.column(index).to_dict() for group in groups for index in range(group.num_columns)]
    for column in columns:
        for name in ("file_offset", "data_page_offset", "dictionary_page_offset"):
            column.pop(name)
    return [
        file.schema_arrow,
        file.schema_arrow.metadata,
        file.metadata.metadata,
        str(file.schema).partition("\n")[2],
        columns,
    ]


def test_the_object_is_the_same_with_and_without_dictionaries() -> None:
    plain = updates(2 * GROUP_ROWS + 10)
    assert facts(encoded(with_dictionaries(plain, ["state", "raw"]))) == facts(encoded(plain))


def test_a_reader_finds_text_and_the_same_rows() -> None:
    plain = updates(5000)
    encoder = PartEncoder(SCHEMA, 3)
    encoder.write(with_dictionaries(plain, ["state", "raw", "note"]))
    part = encoder.finish()
    read = decode_part("p", part.data, part.digests, SCHEMA)
    assert read.schema.equals(SCHEMA.updates)
    assert read.equals(plain)
    assert pq.read_table(pa.BufferReader(part.data)).schema.types == list(SCHEMA.updates.types)


def test_later_tables_may_have_dictionaries_or_not() -> None:
    plain = updates(4000)
    first, second = plain.slice(0, 2000), plain.slice(2000)
    for tables in [
        (with_dictionaries(first, ["state"]), second),
        (first, with_dictionaries(second, ["state", "note"])),
        (with_dictionaries(first, ["raw"]), with_dictionaries(second, ["state"])),
    ]:
        assert pq.read_table(pa.BufferReader(encoded(*tables))).equals(plain)


def test_a_row_group_stores_the_values_that_are_in_it_and_no_others() -> None:
    rows = 4 * GROUP_ROWS  # sorted by state, of which each group has two of seven at most
    data = encoded(with_dictionaries(updates(rows), ["state"]))
    for index in range(4):
        group = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["state"]).read_row_group(index)
        assert all(len(chunk.dictionary) <= 3 for chunk in group.column("state").chunks)


VALUES = st.lists(st.one_of(st.none(), st.sampled_from(["a", "b", "", "long" * 9])), max_size=30)


@given(VALUES, st.integers(0, 5), st.integers(0, 30))
def test_a_compacted_column_has_the_same_values(values: list[str | None], start: int, length: int) -> None:
    column = pa.array(values, pa.string()).dictionary_encode().slice(start, length)
    found = compacted(column)
    assert found.to_pylist() == column.to_pylist()
    used = found.dictionary.to_pylist()
    assert sorted(used) == sorted({value for value in column.to_pylist() if value is not None})


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None], pa.int32()), pa.array(["a", "a", "b"])),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None], pa.int32()), pa.array(["a", None, "b"])),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), pa.array(["a", "b"])),
        pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string())),
        pa.array(["a", None, "a"]),
    ],
)
def test_odd_dictionaries_become_plain_ones(column: pa.Array) -> None:
    found = compacted(column)
    assert found.to_pylist() == column.to_pylist()
    assert found.type == pa.dictionary(pa.int32(), pa.string())
    assert found.dictionary.null_count == 0


def test_only_named_text_columns_are_stored_from_dictionaries() -> None:
    table = with_dictionaries(updates(10), ["state", "note"])
    stored = stored_as(table, SCHEMA.updates, {"state"})
    assert [field.name for field in stored if pa.types.is_dictionary(field.type)] == ["state"]
    assert as_stored(table, stored).schema.equals(stored)
