"""The writer puts objects, and does nothing else.

Whatever lies under a batch's name is what the name says, or it is no batch. Nothing else is believed.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

import persist_lib as persist
from persist_lib.core.pending import parse_pending_key
from persist_lib.errors import Corrupt, DiffOverflow, InvalidName, InvalidUsage, NotFound
from persist_lib.format.parts import encode_part
from persist_lib.frontier import TOP, at
from persist_lib.kernel.consolidate import consolidate
from persist_lib.pending_area import Writer
from persist_lib.pending_area.objects import decode, encode, name_digest
from tests.unit.pending_area.areas import NAME, Area, name_of, said
from tests.worlds import SCHEMA, WIDER, World, row


def test_it_loads_no_database_driver_and_no_client():
    program = (
        "import sys, persist_lib.pending_area as area; area.Writer; unwanted = {'apsw', 'sqlite3', 'psycopg', 'boto3', "
        "'pyspark', 'duckdb', 'persist_lib.client'}; print(sorted(unwanted & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_batch_is_one_object_whose_name_says_all(area: Area):
    put = area.writer("edge-7").put(said(3, 6), 3, 6)
    assert area.pending() == [put.key]
    name = name_of(put.key)
    data = area.world.inner.blob.get(f"-pending/{NAME}/{put.key.partition('/')[2]}")
    assert (name.writer, name.lower, name.upper, name.count) == ("edge-7", 3, at(6), 3)
    assert data is not None
    assert (put.count, put.size, name.digest) == (3, len(data), name_digest(data))
    assert decode(name, data, [SCHEMA]).table.num_rows == 3


def test_a_batch_without_updates_says_that_nothing_happened(area: Area):
    put = area.writer("a").put([], 3, 6)
    assert (put.count, put.size) == (0, 0)
    assert decode(name_of(put.key), b"", [SCHEMA]).table.num_rows == 0


def test_the_same_updates_are_the_same_object_however_they_come(area: Area):
    rows = [row(i % 50, "w", i % 9) for i in range(3000)]
    first = area.writer("a").put(rows, 0, 9)
    shuffled = random.Random(1).sample(rows, len(rows))
    table = pa.Table.from_pylist(rows, SCHEMA.updates)
    chunked = pa.concat_tables([table.slice(start, 700) for start in range(0, 3000, 700)])
    again = [area.writer("a").put(updates, 0, 9) for updates in (shuffled, table, chunked, iter([rows[:9], rows[9:]]))]
    assert {put.key for put in again} == {first.key}
    assert area.pending() == [first.key]


def test_sorted_updates_in_chunks_are_the_same_object():
    """Nothing is sorted then, so that the chunks would reach the encoder."""
    columns = {"id": np.arange(5000), "word": ["w"] * 5000, "_time": np.zeros(5000, "u8"), "_diff": np.ones(5000, "i8")}
    table = pa.table(columns, schema=SCHEMA.updates)
    chunked = pa.concat_tables([table.slice(0, 100), table.slice(100, 3000), table.slice(3100)])
    assert encode(SCHEMA, table, "a", 0, at(1)) == encode(SCHEMA, chunked, "a", 0, at(1))


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(5, 5), (6, 5), (-1, 5), (5, TOP), (TOP, TOP), ("x", 5), (None, 5), (0, 2**64), (0.5, 5), (True, 5)],
)
def test_bad_bounds_are_refused_and_nothing_is_stored(area: Area, lower, upper):
    with pytest.raises(InvalidUsage):
        area.writer("a").put([], lower, upper)
    assert area.pending() == []


def test_numbers_of_numpy_are_bounds(area: Area):
    assert name_of(area.writer("a").put([], np.int64(3), np.uint64(5)).key).upper == at(5)


def test_updates_outside_of_the_bounds_are_refused(area: Area):
    with pytest.raises(InvalidUsage, match="times must be in"):
        area.writer("a").put([row(1, "w", 9)], 0, 9)
    with pytest.raises(InvalidUsage):
        area.writer("a").put([{"id": 1}], 0, 9)
    assert area.pending() == []


def test_a_sum_that_does_not_fit_is_refused(area: Area):
    with pytest.raises(DiffOverflow):
        area.writer("a").put([row(1, "w", 0, 2**62), row(1, "w", 0, 2**62)], 0, 1)
    assert area.pending() == []


def test_more_than_a_batch_may_have_is_refused(area: Area, monkeypatch):
    monkeypatch.setattr("persist_lib.pending_area.objects.MOST_BYTES", 1000)
    with pytest.raises(InvalidUsage, match="take more"):
        area.writer("a").put(pa.Table.from_pylist([row(i) for i in range(99)], SCHEMA.updates), 0, 1)
    assert area.pending() == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "ä", "x" * 101, None, 7, b"a", "a\n", "rollup/"])
def test_bad_names_are_refused(world: World, name):
    with pytest.raises(InvalidName):
        Writer(world.inner.url, NAME, name, SCHEMA)
    with pytest.raises(InvalidName):
        Writer(world.inner.url, name, "a", SCHEMA)


def test_a_schema_with_constraints_is_refused(world: World):
    schema = persist.Schema(SCHEMA.key, SCHEMA.value, unique=True)
    with pytest.raises(InvalidUsage, match="constraints"):
        Writer(world.inner.url, NAME, "a", schema)
    with pytest.raises(InvalidUsage, match="schema"):
        Writer(world.inner.url, NAME, "a", {"id": "int64"})  # type: ignore[arg-type]


def test_a_location_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(NotFound):
        Writer(f"file:{tmp_path}/none", NAME, "a", SCHEMA)
    with pytest.raises(InvalidUsage):
        Writer("nowhere://x", NAME, "a", SCHEMA)


def test_a_closed_writer_says_so(area: Area):
    write = area.writer("a")
    write.close()
    write.close()
    with pytest.raises(InvalidUsage, match="was closed"):
        write.put([], 0, 1)
    assert area.pending() == []


def test_it_writes_below_a_directory_as_well(tmp_path: Path):
    url = f"file:{tmp_path}/data"
    with persist.open(url) as client, Writer(url, NAME, "a", SCHEMA) as write:
        for _ in range(2):
            key = write.put(said(0, 3), 0, 3).key
        found = [entry.key for entry in client.blob.list(f"-pending/{NAME}/")]
    assert [parse_pending_key(key)] == [parse_pending_key(one.replace(f"/{NAME}/", "/", 1)) for one in found]


TABLE = pa.Table.from_pylist(said(0, 9), SCHEMA.updates)
BATCH_NAME, ENCODED = encode(SCHEMA, TABLE, "a", 0, at(9))
DATA = bytes(ENCODED)


def test_a_sound_batch_can_be_adopted_as_it_is():
    batch = decode(BATCH_NAME, DATA, [SCHEMA], adopt_from=0)
    assert batch.part is not None
    assert (batch.part.key, batch.part.size, batch.part.rows) == (BATCH_NAME.key, len(DATA), 9)
    assert (batch.part.time_lower, batch.part.time_upper, batch.part.digests.hex()) == (0, 8, BATCH_NAME.digest)
    assert batch.table.equals(consolidate(SCHEMA, TABLE))


@pytest.mark.parametrize("place", range(0, len(DATA), 97))
def test_every_flipped_bit_is_found(place):
    flipped = bytearray(DATA)
    flipped[place] ^= 4
    with pytest.raises(Corrupt, match="digest"):
        decode(BATCH_NAME, bytes(flipped), [SCHEMA], adopt_from=0)


@pytest.mark.parametrize("data", [b"", b"x", DATA[:-1], DATA + b"x", DATA[: len(DATA) // 2]])
def test_other_lengths_are_found(data):
    with pytest.raises(Corrupt):
        decode(BATCH_NAME, data, [SCHEMA], adopt_from=0)


@pytest.mark.parametrize("data", [b"no parquet", b"PAR1PAR1", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_true_digest_of_something_else_does_not_help(data):
    with pytest.raises(Corrupt, match="decode"):
        decode(replace(BATCH_NAME, digest=name_digest(data)), data, [SCHEMA], adopt_from=0)


@pytest.mark.parametrize("change", [{"count": 8}, {"lower": 1}, {"upper": at(8)}, {"count": 0}])
def test_a_name_that_says_something_else_is_found(change):
    with pytest.raises(Corrupt):
        decode(replace(BATCH_NAME, **change), DATA, [SCHEMA], adopt_from=0)


def test_an_empty_object_with_updates_in_its_name_is_found():
    with pytest.raises(Corrupt):
        decode(replace(BATCH_NAME, digest=name_digest(b"")), b"", [SCHEMA], adopt_from=0)


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
    return replace(BATCH_NAME, count=table.num_rows, digest=name_digest(data)), data


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
    batch = decode(BATCH_NAME, DATA, [SCHEMA, WIDER], adopt_from=0)
    assert batch.table.schema.names == WIDER.updates.names
    assert batch.table.column("more").null_count == 9
    assert batch.part is None
