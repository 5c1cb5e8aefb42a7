"""The writer puts objects, and does nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.core.pending import parse_pending_key
from persist_lib.errors import DiffOverflow, InvalidName, InvalidUsage, NotFound
from persist_lib.frontier import TOP, at
from persist_lib.pending_area import Writer
from persist_lib.pending_area.objects import decode, encode, name_digest
from tests.unit.pending_area.areas import NAME, Area, name_of, said
from tests.worlds import SCHEMA, World, row


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
