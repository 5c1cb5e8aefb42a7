"""The fingerprint is durable and sees every change that matters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from persist_lib.kernel.fingerprint import BLOCK, fingerprint, hash_rows
from persist_lib.schema.schema import Schema

SCHEMA = Schema({"id": "int64", "name": "string"}, {"price": "float64", "note": "string"})


def table(rows: Sequence[tuple[object, ...]], schema: Schema = SCHEMA) -> pa.Table:
    updates = [dict(zip(schema.updates.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(updates, schema.updates)


GOLDEN = [
    (1, "a", 1.5, None, 0, 1),
    (-1, "", -0.0, "exactly-8", 3, 2),
    (2**62, "x" * 300, float("inf"), "é" * 20, 2**63, -3),
    (0, None, None, None, 1, 1),
]


def test_hashes_are_these_for_ever():
    assert [f"{value:016x}" for value in hash_rows(SCHEMA, table(GOLDEN)).tolist()] == GOLDEN_HASHES
    assert f"{fingerprint(SCHEMA, table(GOLDEN)):016x}" == GOLDEN_FINGERPRINT
    assert hash_rows(SCHEMA, table(GOLDEN * 10)).tolist() == hash_rows(SCHEMA, table(GOLDEN)).tolist() * 10


GOLDEN_HASHES = ["65b3454ef1f8fd20", "339e6e2f1ba744ba", "0d7b93a7146e15ca", "9051f218704470f7"]
GOLDEN_FINGERPRINT = "34cf58d05c41b62d"


def test_every_type_hashes_to_this_for_ever():
    kinds = {
        "bool": True, "int8": -1, "uint64": 2**64 - 1, "float32": 0.5, "binary": b"\0\xff",
        "date32": date(2022, 1, 8), "timestamp[us, UTC]": datetime(2001, 9, 9, tzinfo=UTC),
        "decimal128(20, 3)": Decimal("12345.678"), "fixed_size_binary[20]": bytes(range(20)),
    }  # fmt: skip
    found = {}
    for kind, value in kinds.items():
        schema = Schema({"k": kind})
        found[kind] = f"{int(hash_rows(schema, pa.table([[value]], schema=schema.data))[0]):016x}"
    assert found == GOLDEN_TYPES


GOLDEN_TYPES = {
    "bool": "c5e3eeed39e570e8",
    "int8": "be39c2fbc04ed904",
    "uint64": "8a7f337e610632e7",
    "float32": "cd213918facf393a",
    "binary": "1612f9b403de56c7",
    "date32": "297e324a4f782b30",
    "timestamp[us, UTC]": "b7aab4cb287b646e",
    "decimal128(20, 3)": "470db3d038f53a1c",
    "fixed_size_binary[20]": "918e301bcfaad8db",
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_another_process_with_another_hash_seed_agrees(seed):
    code = """
import pyarrow as pa
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.schema.schema import Schema
schema = Schema({"k": "string"}, {"v": "int8"})
print(hash_rows(schema, pa.table({"k": ["key"], "v": pa.array([3], "int8")}))[0])
"""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    schema = Schema({"k": "string"}, {"v": "int8"})
    assert int(said.stdout) == int(hash_rows(schema, pa.table({"k": ["key"], "v": pa.array([3], "int8")}))[0])


def test_flipping_any_one_bit_changes_about_half_of_the_hash():
    schema = Schema({"k": "uint64"}, {"v": "fixed_size_binary[24]"})
    rng = np.random.default_rng(1)
    key, value = int(rng.integers(2**63)), rng.bytes(24)
    rows = [(key, value)] + [(key ^ (1 << bit), value) for bit in range(64)]
    as_int = int.from_bytes(value, "big")
    rows += [(key, (as_int ^ (1 << bit)).to_bytes(24, "big")) for bit in range(192)]
    batch = pa.table([[k for k, _ in rows], pa.array([v for _, v in rows], pa.binary(24))], schema=schema.data)
    hashes = hash_rows(schema, batch).tolist()
    flipped = [(hashes[0] ^ other).bit_count() for other in hashes[1:]]
    assert min(flipped) >= 12
    assert 30 < sum(flipped) / len(flipped) < 34


def test_values_swapped_between_rows_or_columns_are_seen():
    pairs = [("a", "b"), ("c", "d"), ("ab", "c"), ("a", "bc"), ("", "abc")]
    schema = Schema({"k": "string"}, {"v": "string"})
    before = table([("a", "b", 0, 1), ("c", "d", 0, 1)], schema)
    swapped_rows = table([("a", "d", 0, 1), ("c", "b", 0, 1)], schema)
    swapped_columns = table([("b", "a", 0, 1), ("d", "c", 0, 1)], schema)
    found = {fingerprint(schema, some) for some in (before, swapped_rows, swapped_columns)}
    assert len(found) == 3
    hashes = hash_rows(schema, table([(*pair, 0, 1) for pair in pairs], schema)).tolist()
    assert len(set(hashes)) == len(pairs)


def test_null_the_empty_string_nan_and_negative_zero_are_all_different():
    schema = Schema({"k": "string"})
    assert len(set(hash_rows(schema, pa.table([[None, "", "\0", "\0\0"]], schema=schema.data)).tolist())) == 4
    schema = Schema({"k": "float64"})
    bits = np.array([0, 1 << 63, 0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000], np.uint64)
    assert len(set(hash_rows(schema, pa.table([pa.array(bits.view(np.float64))], schema=schema.data)).tolist())) == 5


def test_blocks_chunks_and_slices_make_no_difference():
    schema = Schema({"k": "int64"}, {"v": "string"})
    rows = 2 * BLOCK + 100
    whole = pa.table([np.arange(rows), [f"v{i % 77}" * (i % 5) for i in range(rows)]], schema=schema.data)
    expected = hash_rows(schema, whole)
    chunked = pa.concat_tables([whole.slice(0, 5), whole.slice(5, BLOCK + 3), whole.slice(BLOCK + 8)])
    assert (hash_rows(schema, chunked) == expected).all()
    assert (hash_rows(schema, whole.slice(3)) == expected[3:]).all()
    assert len(np.unique(expected)) == rows
