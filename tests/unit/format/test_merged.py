"""Row groups of a compaction are as large as they should be, whatever is merged at a time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist_lib.core.trace import CHUNK_BYTES, GROUP_BYTES, GROUP_ROWS
from persist_lib.format.parts import Gathering, parts_of
from persist_lib.schema.schema import Schema

SCHEMA = Schema(key={"id": "int64"}, value={"payload": "binary", "word": "string"})
WIDTH = 4096


def gathered(given: Iterable[pa.Table], part_bytes: int = 128 << 20) -> Iterator[pa.Table]:
    """All tables of a `Gathering`."""
    held = Gathering(part_bytes)
    for window in given:
        yield from held.add(window)
    yield from held.finish()


def windows(count: int, rows: int, width: int = WIDTH) -> list[pa.Table]:
    """Tables that follow one another, each of `rows` rows of `width` bytes that do not compress."""
    random = np.random.default_rng(7)
    return [
        pa.table(
            {
                "id": pa.array(range(n * rows, (n + 1) * rows), pa.int64()),
                "payload": pa.array([random.bytes(width) for _ in range(rows)], pa.binary()),
                "word": pa.array([f"{n} {row % 3}" for row in range(rows)]),
                "_time": pa.array([0] * rows, SCHEMA.updates.field("_time").type),
                "_diff": pa.array([1] * rows, pa.int64()),
            },
            schema=SCHEMA.updates,
        )
        for n in range(count)
    ]


def test_small_windows_of_wide_rows_become_whole_row_groups():
    one = 2 << 20
    (part,) = parts_of(iter(windows(16, one // WIDTH)), SCHEMA, 0, 128 << 20)
    found = pq.ParquetFile(io.BytesIO(part.data)).metadata
    sizes = [found.row_group(group).total_byte_size for group in range(found.num_row_groups)]
    assert len(sizes) > 1
    assert all(GROUP_BYTES // 2 < size < GROUP_BYTES * 3 // 2 for size in sizes), sizes


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (5, 3), (4, GROUP_ROWS // 3 + 1)])
def test_gathering_changes_no_row_and_keeps_nothing_that_it_gave(count: int, rows: int):
    given = windows(count, rows, 8)
    found = list(gathered(iter(given)))
    assert pa.concat_tables(found).combine_chunks() == pa.concat_tables(given).combine_chunks()
    assert len(found) == -(-count * rows // GROUP_ROWS)


def test_windows_of_which_only_some_have_a_dictionary_are_gathered_as_one():
    """As where rows follow on those of a large run."""
    plain = windows(1, 100, 8)[0]
    column = plain.schema.names.index("word")
    packed = plain.set_column(column, "word", plain.column(column).dictionary_encode())
    (found,) = gathered(iter([packed, plain]))
    assert found.num_rows == 200
    assert found.column("word").to_pylist() == plain.column("word").to_pylist() * 2


def test_dictionaries_that_differ_are_gathered_as_one():
    given = [one.set_column(2, "word", one["word"].dictionary_encode()) for one in windows(3, 5, 8)]
    (found,) = gathered(iter(given))
    assert found["word"].to_pylist() == [word for one in given for word in one["word"].to_pylist()]


def test_small_parts_do_not_wait_for_a_row_group():
    assert len(list(gathered(iter(windows(4, 100, 8)), part_bytes=1))) == 4


@pytest.mark.parametrize("window", [1 << 19, 3 << 20, 5 << 20, 8 << 20, 20 << 20])
def test_parts_of_a_chunk_are_no_larger_and_most_of_one(window: int):
    """A few bytes more are a second GET, whether windows are small or large, and however little rows shrink."""
    count = -(-(40 << 20) // window)
    given = windows(count, window // WIDTH)
    *found, last = parts_of(iter(given), SCHEMA, 0, CHUNK_BYTES)
    sizes = [len(part.data) for part in found]
    assert all(CHUNK_BYTES // 2 < size <= CHUNK_BYTES for size in sizes), sizes
    rows = [pq.ParquetFile(io.BytesIO(part.data)).metadata.num_rows for part in (*found, last)]
    assert sum(rows) == count * (window // WIDTH)
    assert len(sizes) <= 40 // 5
