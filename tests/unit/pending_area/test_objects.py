"""Whatever lies under a batch's name is what the name says, or it is no batch. Nothing else is believed."""

from __future__ import annotations

import pyarrow as pa
import pytest
from msgspec.structs import replace

import persist_lib as persist
from persist_lib.errors import Corrupt
from persist_lib.format.parts import encode_part
from persist_lib.frontier import at
from persist_lib.kernel.consolidate import consolidate
from persist_lib.pending_area.objects import decode, encode, name_digest
from tests.unit.pending_area.areas import said
from tests.worlds import SCHEMA, WIDER, row

TABLE = pa.Table.from_pylist(said(0, 9), SCHEMA.updates)
NAME, ENCODED = encode(SCHEMA, TABLE, "a", 0, at(9))
DATA = bytes(ENCODED)


def test_a_sound_batch_can_be_adopted_as_it_is():
    batch = decode(NAME, DATA, [SCHEMA], adopt_from=0)
    assert batch.part is not None
    assert (batch.part.key, batch.part.size, batch.part.rows) == (NAME.key, len(DATA), 9)
    assert (batch.part.time_lower, batch.part.time_upper, batch.part.digests.hex()) == (0, 8, NAME.digest)
    assert batch.table.equals(consolidate(SCHEMA, TABLE))


@pytest.mark.parametrize("place", range(0, len(DATA), 97))
def test_every_flipped_bit_is_found(place):
    flipped = bytearray(DATA)
    flipped[place] ^= 4
    with pytest.raises(Corrupt, match="digest"):
        decode(NAME, bytes(flipped), [SCHEMA], adopt_from=0)


@pytest.mark.parametrize("data", [b"", b"x", DATA[:-1], DATA + b"x", DATA[: len(DATA) // 2]])
def test_other_lengths_are_found(data):
    with pytest.raises(Corrupt):
        decode(NAME, data, [SCHEMA], adopt_from=0)


@pytest.mark.parametrize("data", [b"no parquet", b"PAR1PAR1", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_true_digest_of_something_else_does_not_help(data):
    with pytest.raises(Corrupt, match="decode"):
        decode(replace(NAME, digest=name_digest(data)), data, [SCHEMA], adopt_from=0)


@pytest.mark.parametrize("change", [{"count": 8}, {"lower": 1}, {"upper": at(8)}, {"count": 0}])
def test_a_name_that_says_something_else_is_found(change):
    with pytest.raises(Corrupt):
        decode(replace(NAME, **change), DATA, [SCHEMA], adopt_from=0)


def test_an_empty_object_with_updates_in_its_name_is_found():
    with pytest.raises(Corrupt):
        decode(replace(NAME, digest=name_digest(b"")), b"", [SCHEMA], adopt_from=0)


def test_columns_of_another_collection_are_found():
    other = persist.Schema(key={"name": "string"})
    name, data = encode(
        other, pa.Table.from_pylist([{"name": "x", "_time": 0, "_diff": 1}], other.updates), "a", 0, at(9)
    )
    with pytest.raises(Corrupt, match="columns"):
        decode(name, bytes(data), [SCHEMA], adopt_from=0)


def test_types_of_another_collection_are_found():
    other = persist.Schema(key={"id": "string not null"}, value={"word": "string"})
    rows = [{"id": "x", "word": "w", "_time": 0, "_diff": 1}]
    name, data = encode(other, pa.Table.from_pylist(rows, other.updates), "a", 0, at(9))
    with pytest.raises(Corrupt):
        decode(name, bytes(data), [SCHEMA], adopt_from=0)


def test_nulls_where_the_shard_allows_none_are_found():
    other = persist.Schema(key={"id": "int64"}, value={"word": "string"})
    rows = [{"id": None, "word": "w", "_time": 0, "_diff": 1}]
    name, data = encode(other, pa.Table.from_pylist(rows, other.updates), "a", 0, at(9))
    with pytest.raises(Corrupt, match="nulls"):
        decode(name, bytes(data), [SCHEMA], adopt_from=0)


def named(table: pa.Table, schema: persist.Schema = SCHEMA) -> tuple[object, bytes]:
    data = bytes(encode_part(schema, 0, table).data)
    return replace(NAME, count=table.num_rows, digest=name_digest(data)), data


def test_updates_of_no_diff_are_found():
    name, data = named(pa.Table.from_pylist([row(1, "w", 0, 0)], SCHEMA.updates))
    with pytest.raises(Corrupt, match="diff"):
        decode(name, data, [SCHEMA], adopt_from=0)  # type: ignore[arg-type]


def test_what_is_not_sorted_or_not_consolidated_is_read_and_never_adopted():
    for rows in ([row(2), row(1)], [row(1), row(1)]):
        name, data = named(pa.Table.from_pylist(rows, SCHEMA.updates))
        batch = decode(name, data, [SCHEMA], adopt_from=0)  # type: ignore[arg-type]
        assert (batch.table.num_rows, batch.part) == (2, None)


def test_what_was_written_with_another_key_is_read_and_never_adopted():
    """It has the same columns in the same order, and its notes of keys would lead readers of ranges astray."""
    other = persist.Schema(key={"id": "int64 not null", "word": "string"})
    table = pa.Table.from_pylist([row(i, "w") for i in range(3)], SCHEMA.updates)
    assert other.updates.equals(SCHEMA.updates)
    name, data = encode(other, table, "a", 0, at(9))
    batch = decode(name, bytes(data), [SCHEMA], adopt_from=0)
    assert (batch.table.num_rows, batch.part) == (3, None)


def test_a_batch_of_an_older_schema_is_read_in_the_newest_and_not_adopted():
    batch = decode(NAME, DATA, [SCHEMA, WIDER], adopt_from=0)
    assert batch.table.schema.names == WIDER.updates.names
    assert batch.table.column("more").null_count == 9
    assert batch.part is None
