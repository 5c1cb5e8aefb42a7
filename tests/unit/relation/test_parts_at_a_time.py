"""Parts that count at a time of their own are read at that time through every door, and compaction writes others."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec.structs import replace

import persist_lib as persist
from persist_lib.core import refusals as r
from persist_lib.core.state import Part
from persist_lib.format.digest import CHUNK
from persist_lib.ids import PartKey
from persist_lib.testing import check_world
from tests.at_a_time import commit_at, written

SCHEMA = persist.Schema(key={"id": "int64"}, value={"word": "string", "more": "binary"})


@pytest.fixture
def client():
    with persist.open("memory:", runtime=persist.Runtime(background=False)) as client:
        yield client


def rows(first: int, count: int, bytes_each: int = 0) -> pa.Table:
    """Rows with incompressible bytes, so that a part is as large as is asked for."""
    random = np.random.default_rng(first)
    more = [random.bytes(bytes_each) for _ in range(count)]
    ids = np.arange(first, first + count)
    return pa.table({"id": ids, "word": [f"w{i % 3}" for i in ids], "more": pa.array(more, pa.binary())})


def found(table: pa.Table) -> dict[int, int]:
    return dict(zip(table["id"].to_pylist(), table["_diff"].to_pylist(), strict=True))


@pytest.mark.parametrize(("count", "bytes_each", "inline"), [(20, 0, 0), (20, 0, 1 << 20), (300, 40_000, 0)])
@pytest.mark.parametrize("runs", [1, 3])
def test_every_door_reads_such_a_part_at_its_time(client, count, bytes_each, inline, runs):
    """Small, inline, and larger than what is fetched at once; alone in the shard, and beside others."""
    write, read = client.open_shard("s", SCHEMA)
    batch = written(write, rows(0, count, bytes_each), runs, inline_bytes=inline)
    assert all((part.inline is None) is (inline == 0) for part in batch.parts)
    assert runs > 1 or not bytes_each or batch.parts[0].size > CHUNK
    write.compare_and_append([], 0, 5)
    commit_at(write, batch, 5, 10, 7)
    check_world(client, "s")
    everything = dict.fromkeys(range(count), 1)
    assert found(read.snapshot(7, diff=True).to_arrow()) == everything
    assert found(read.snapshot(9, diff=True).to_arrow()) == everything
    assert read.snapshot(6, diff=True).to_arrow().num_rows == 0
    gone = {**rows(0, 1, bytes_each).to_pylist()[0], "_time": 10, "_diff": -1}
    write.compare_and_append([gone, {"id": 10**6, "word": None, "more": None, "_time": 10, "_diff": 1}], 10, 11)
    later = {**dict.fromkeys(range(1, count), 1), 10**6: 1}
    for as_of, expected in ((6, {}), (7, everything), (9, everything), (10, later)):
        snapshot = read.snapshot(as_of, diff=True)
        assert found(snapshot.to_arrow()) == expected
        assert found(pa.concat_tables([snapshot.to_arrow().slice(0, 0), *snapshot.batches()])) == expected
        assert found(read.snapshot(as_of, columns=["id"], diff=True).to_arrow()) == expected
        pieces = [split.to_arrow(client.blob) for split in snapshot.splits(3)]
        assert found(pa.concat_tables(pieces) if pieces else snapshot.to_arrow()) == expected
        where = read.snapshot(as_of, filter=pc.field("id") < 5, diff=True)
        assert found(where.to_arrow()) == {i: n for i, n in expected.items() if i < 5}
        assert found(read.snapshot(as_of, keys=[3, 4, 10**6], diff=True).to_arrow()) == {
            i: n for i, n in expected.items() if i in {3, 4, 10**6}
        }
    changes = read.changes(6, 9).to_arrow()
    assert set(changes["_time"].to_pylist()) == {7}
    assert changes.num_rows == count
    assert read.changes(7, 9).to_arrow().num_rows == 0
    heard = pa.concat_tables([e.table for e in read.listen(6).poll() if isinstance(e, persist.Updates)])
    assert sorted(set(heard["_time"].to_pylist())) == [7, 10]
    assert not client.scrub("s").damaged


def test_compaction_writes_ordinary_parts_with_the_same_contents_as_of_every_time(client):
    write, read = client.open_shard("s", SCHEMA)
    expected = {}
    for time in range(8):
        batch = written(write, rows(time * 3, 6), 2)
        commit_at(write, batch, time, time + 1, time)
    for time in range(8):
        expected[time] = found(read.snapshot(time, diff=True).to_arrow())
    assert len({tuple(sorted(contents.items())) for contents in expected.values()}) == 8
    client.compact("s", policy=persist.Policy(weight=1e9, advance=0.01))
    parts = [part for batch in client.inspect("s").state.trace for part in batch.parts]
    assert all(part.at is None for part in parts)
    assert len(parts) == 1
    assert {time: found(read.snapshot(time, diff=True).to_arrow()) for time in range(8)} == expected
    check_world(client, "s")


def test_an_upsert_looks_up_what_such_parts_hold(client):
    write, read = client.open_shard("s", SCHEMA)
    commit_at(write, written(write, rows(0, 20)), 0, 5, 3)
    done = write.upsert([{"id": 4, "word": "new", "more": None}, {"id": 5, "word": "w2", "more": b""}])
    assert (done.updated, done.unchanged) == (1, 1)
    assert read.snapshot(done.time, keys=[4], diff=True).to_arrow()["word"].to_pylist() == ["new"]


def test_a_part_that_holds_several_times_cannot_be_moved():
    part = Part(PartKey("w/1"), 5, 3, bytes(16), b"", b"", 0, 2, 0)
    with pytest.raises(ValueError, match="not one time"):
        part.counted_at(7)


def test_a_check_finds_a_part_that_counts_at_one_time_and_holds_several(client):
    write, _ = client.open_shard("s", SCHEMA)
    builder = write._builder(write._deadline(None))
    table = pa.table([*rows(0, 2).columns, pa.array([0, 1], pa.uint64()), pa.array([1, 1], pa.int64())],
                     schema=SCHEMA.updates)  # fmt: skip
    batch = builder.build(iter([table]), persist.at(0), persist.at(2), inline_bytes=0).batch
    forged = [said_to_hold_one(part) for part in batch.parts]
    commit_at(write, replace(batch, parts=tuple(forged)), 0, 2, 1)
    with pytest.raises(AssertionError, match="counts at one time, and holds several"):
        check_world(client, "s")


def said_to_hold_one(part: Part) -> Part:
    """The part, as if it held one time only."""
    return replace(part, time_upper=part.time_lower)


def test_a_shard_of_an_older_format_refuses_such_parts_and_says_what_to_do(client):
    with persist.open("memory:", config=persist.Config(format=2)) as old:
        write, _ = old.open_shard("s", SCHEMA)
        batch = written(write, rows(0, 3))
        with pytest.raises(persist.InvalidUsage, match=r"format 2.*persist shard upgrade") as caught:
            commit_at(write, batch, 0, 1, 0)
        assert isinstance(caught.value.refusal, r.NeedsFormat)
        assert caught.value.refusal.needed == 3
        old.upgrade("s")
        commit_at(write, batch, 0, 1, 0)
