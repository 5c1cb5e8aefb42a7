"""Names of pending batches: one spelling for each, and nothing else is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.core.pending import PendingName, parse_pending_key
from persist_lib.format.paths import blob_key, pending_key, pending_prefix
from persist_lib.frontier import MAX_TIME, TOP, at
from persist_lib.ids import NAME, ShardId
from persist_lib.location.contract import check_key

DIGEST = "0123456789abcdef" * 2
SOUND = f"-pending/edge-7/{5:020d}-{9:020d}-3-{DIGEST}.parquet"


def test_a_name_says_writer_bounds_count_and_digest():
    assert parse_pending_key(SOUND) == PendingName("edge-7", 5, at(9), 3, DIGEST)
    assert parse_pending_key(SOUND.replace(f"{9:020d}", "top")) == PendingName("edge-7", 5, TOP, 3, DIGEST)


@given(
    st.from_regex(NAME, fullmatch=True).filter(str.isascii),
    st.integers(0, MAX_TIME - 1),
    st.integers(1, MAX_TIME),
    st.integers(0, 2**62),
)
def test_each_name_is_read_as_what_was_written(writer, lower, step, count):
    upper = at(lower + step) if lower + step <= MAX_TIME else TOP
    name = PendingName(writer, lower, upper, count, DIGEST)
    assert parse_pending_key(name.key) == name
    stored = blob_key(ShardId("s"), name.key)
    assert check_key(stored).startswith(pending_prefix(ShardId("s")))
    assert pending_key(ShardId("s"), stored) == name.key


def test_names_are_listed_by_writer_then_by_time():
    names = [PendingName(w, t, at(t + 1), 0, DIGEST) for w in ("a", "b") for t in (0, 9, 10, 100, 2**63, 2**64 - 2)]
    assert [name.key for name in names] == sorted(name.key for name in names)


@pytest.mark.parametrize(
    "key",
    [
        "", "-pending", "-pending/", SOUND[1:], SOUND.upper(), f"{SOUND} ", f"{SOUND}\n", f" {SOUND}", f"{SOUND}.tmp",
        SOUND.replace("edge-7", ""), SOUND.replace("edge-7", "."), SOUND.replace("edge-7", "-x"),
        SOUND.replace("edge-7", "a/b"), SOUND.replace("edge-7", "ä"), SOUND.replace("edge-7", "x" * 101),
        SOUND.replace("-3-", "-03-"), SOUND.replace("-3-", "--"), SOUND.replace("-3-", "--3-"),
        SOUND.replace("-3-", f"-{10**20}-"), SOUND.replace(f"{5:020d}", "5"), SOUND.replace(f"{5:020d}", "0" * 21),
        SOUND.replace(f"{5:020d}", f"{9:020d}"), SOUND.replace(f"{5:020d}", f"{10:020d}"),
        SOUND.replace(f"{5:020d}", f"{2**64:020d}"), SOUND.replace(f"{9:020d}", f"{2**64:020d}"),
        SOUND.replace(f"{9:020d}", "TOP"), SOUND.replace(f"{5:020d}", "top"), SOUND.replace("5", "\u0665", 1),
        SOUND.replace(DIGEST, DIGEST[:-1]), SOUND.replace(DIGEST, DIGEST.replace("a", "A")),
        SOUND.replace(DIGEST, DIGEST[:-1] + "g"), SOUND.replace(".parquet", ""), SOUND.replace("-pending", "pending"),
    ],
)  # fmt: skip
def test_whatever_else_lies_there_is_no_name(key):
    assert parse_pending_key(key) is None
