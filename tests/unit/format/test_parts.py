"""Parts: what is read was written, and what is damaged is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist_lib.core.trace import GROUP_ROWS
from persist_lib.errors import Corrupt, InvalidUsage, NewerFormat
from persist_lib.format.digest import CHUNK, chunk_count, digest
from persist_lib.format.parquet import PartFile
from persist_lib.format.parts import (
    PartRun,
    StoredPart,
    decode_inline,
    decode_part,
    encode_inline,
    encode_part,
)
from persist_lib.format.range_reader import ChunkedReader
from persist_lib.kernel.keys import encode_key
from persist_lib.schema.schema import Schema
from tests.counted import count

SCHEMA = Schema({"id": "int64"}, {"name": "string"})


def small(rows: int = 20) -> pa.Table:
    columns = [
        np.arange(rows),
        [f"name {i}" for i in range(rows)],
        np.arange(rows).astype("u8") + 5,
        np.ones(rows, "i8"),
    ]
    return pa.table([pa.array(column) for column in columns], schema=SCHEMA.updates)


BYTES = Schema({"id": "int64"}, {"payload": "fixed_size_binary[64]"})


@pytest.fixture(scope="module")
def large() -> tuple[pa.Table, bytes, bytes]:
    """Some 26 MiB that do not compress: four chunks, four row groups."""
    rows = 3 * GROUP_ROWS + 1000
    payload = pa.Array.from_buffers(
        pa.binary(64), rows, [None, pa.py_buffer(np.random.default_rng(1).bytes(64 * rows))]
    )
    columns = [pa.array(np.arange(rows)), payload, pa.array(np.full(rows, 7, "u8")), pa.array(np.ones(rows, "i8"))]
    table = pa.table(columns, schema=BYTES.updates)
    part = encode_part(BYTES, 0, table)
    assert chunk_count(part.size) >= 3
    return table, bytes(part.data), part.digests


def test_every_flipped_byte_is_detected_before_a_value_is_returned():
    part = encode_part(SCHEMA, 0, small())
    for position in range(part.size):
        damaged = bytearray(part.data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(Corrupt, match="the/key"):
            decode_part("the/key", bytes(damaged), part.digests, SCHEMA)
    count("corruptions", made=part.size)


def test_a_truncated_an_empty_and_another_object_are_detected():
    part, other = encode_part(SCHEMA, 0, small()), encode_part(SCHEMA, 0, small(21))
    for data in (bytes(part.data)[:-1], b"", bytes(other.data), bytes(part.data) + b"\0"):
        with pytest.raises(Corrupt, match="the/key"):
            decode_part("the/key", data, part.digests, SCHEMA)


def test_a_foreign_object_is_named_even_if_its_digest_is_right():
    sink = pa.BufferOutputStream()
    pq.write_table(small(), sink)
    for data in (sink.getvalue().to_pybytes(), b"PAR1 not parquet PAR1", b"", b"\0" * 100):
        with pytest.raises(Corrupt, match="the/key"):
            decode_part("the/key", data, digest(data), SCHEMA)


def test_damage_inside_a_part_whose_digest_was_taken_too_late_is_never_a_crash():
    part = encode_part(SCHEMA, 0, small())
    rng = np.random.default_rng(3)
    for _ in range(300):
        damaged = bytearray(part.data)
        for position in rng.integers(0, part.size, 3):
            damaged[position] = rng.integers(256)
        try:
            decode_part("the/key", bytes(damaged), digest(damaged), SCHEMA)
        except (Corrupt, NewerFormat) as error:
            assert "the/key" in str(error)  # noqa: PT017 - either outcome is fine, a crash is not


def test_a_part_of_a_newer_format_is_refused():
    sink = pa.BufferOutputStream()
    pq.write_table(small().replace_schema_metadata({b"persist.part": b"2"}), sink)
    data = sink.getvalue().to_pybytes()
    with pytest.raises(NewerFormat) as caught:
        decode_part("the/key", data, digest(data), SCHEMA)
    assert (caught.value.found, caught.value.known) == (2, 1)


def test_another_schema_is_damage_but_newer_nullable_columns_are_null():
    part = encode_part(SCHEMA, 0, small())
    with pytest.raises(Corrupt, match="name"):
        decode_part("k", part.data, part.digests, Schema({"id": "int64"}, {"name": "int64"}))
    newer = Schema({"id": "int64"}, {"name": "string", "colour": "string"})
    assert decode_part("k", part.data, part.digests, newer).column("colour").null_count == 20


def test_projection_reads_the_wanted_columns_and_always_time_and_diff():
    part = encode_part(SCHEMA, 0, small())
    found = decode_part("k", part.data, part.digests, SCHEMA, columns=["name"], lo=encode_key(SCHEMA, [18]))
    assert found.to_pydict() == {"name": ["name 18", "name 19"], "_time": [23, 24], "_diff": [1, 1]}


def test_an_empty_part_is_never_written():
    with pytest.raises(InvalidUsage):
        encode_part(SCHEMA, 0, small(0))


def test_every_damaged_inline_byte_is_detected():
    inline = bytes(encode_inline(SCHEMA, 0, small(3)).data)
    assert decode_inline("shard", inline, SCHEMA).equals(small(3))
    for position in range(len(inline)):
        damaged = bytearray(inline)
        damaged[position] ^= 0x10
        with pytest.raises((Corrupt, NewerFormat), match="shard"):
            decode_inline("shard", bytes(damaged), SCHEMA)
    with pytest.raises(Corrupt):
        decode_inline("shard", inline[:-8], SCHEMA)


def test_a_key_range_fetches_and_verifies_only_the_chunks_it_needs(large):
    table, data, digests = large
    fetched: list[tuple[int, int]] = []

    def fetch(start: int, end: int) -> bytes:
        fetched.append((start, end))
        return data[start:end]

    source = StoredPart("k", len(data), digests, BYTES, None, None, fetch)
    lo, hi = encode_key(BYTES, [10]), encode_key(BYTES, [20])
    found = pa.concat_tables(PartRun([source], BYTES, lo=lo, hi=hi))
    assert found.equals(table.slice(10, 10))
    assert {start // CHUNK for start, _ in fetched} <= {0, 1, chunk_count(len(data)) - 1}
    assert len(fetched) < chunk_count(len(data)) + 1
    assert all(start % CHUNK == 0 and end - start <= CHUNK for start, end in fetched)


def test_a_damaged_chunk_is_named_when_it_is_needed_and_only_then(large):
    _, data, digests = large
    damaged = bytearray(data)
    damaged[2 * CHUNK + 77] ^= 1
    source = StoredPart("k", len(data), digests, BYTES, None, None, lambda start, end: bytes(damaged[start:end]))
    first = PartRun([source], BYTES, hi=encode_key(BYTES, [5]))
    assert sum(found.num_rows for found in first) == 5
    with pytest.raises(Corrupt, match="chunk 2"):
        list(PartRun([source], BYTES))


def test_chunks_are_prefetched_in_parallel_and_read_as_a_file(large):
    table, data, digests = large
    with ThreadPoolExecutor(2) as pool:
        reader = ChunkedReader("k", len(data), digests, lambda start, end: data[start:end], parallel=pool.map)
        file = PartFile("k", reader, BYTES)
        reader.prefetch(file.byte_ranges(range(2)))
    assert file.rows == table.num_rows
    assert file.read(hi=encode_key(BYTES, [1000])).num_rows == 1000
    reader.seek(CHUNK - 5)
    assert reader.read(10) == data[CHUNK - 5 : CHUNK + 5]
    assert (reader.seek(-3, 2), reader.read()) == (len(data) - 3, data[-3:])


def test_too_few_digests_for_the_size_are_damage(large):
    _, data, digests = large
    with pytest.raises(Corrupt):
        ChunkedReader("k", len(data), digests[:-16], lambda start, end: data[start:end])


def test_time_bounds_keep_what_lies_in_them_only():
    part = encode_part(SCHEMA, 0, small())
    data = bytes(part.data)
    source = StoredPart("k", len(data), part.digests, SCHEMA, 10, 12, lambda start, end: data[start:end])
    assert pa.concat_tables(PartRun([source], SCHEMA)).column("_time").to_pylist() == [10, 11]


def test_a_short_answer_for_a_whole_object_is_damage():
    part = encode_part(SCHEMA, 0, small())
    source = StoredPart(
        "k", part.size, part.digests, SCHEMA, None, None, lambda start, end: bytes(part.data)[: end - 9]
    )
    with pytest.raises(Corrupt, match="k"):
        list(PartRun([source], SCHEMA))
