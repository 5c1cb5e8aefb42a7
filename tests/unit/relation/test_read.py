"""The read handle: the same contents for everyone at every later moment, or a typed error; nothing in between."""

from __future__ import annotations

import gc
import pickle
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import (
    DiffOverflow,
    InvalidUsage,
    LeaseExpired,
    Missing,
    NotFound,
    SinceViolation,
    TimedOut,
)
from persist_lib.relation.held import kept_of
from persist_lib.testing import Model, check_world, contents_of
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, WIDER, World, row, updates


def large(client: persist.Client, rows: int = 60_000, shard: str = "s") -> pa.Table:
    """One batch of many small parts, in key order."""
    words = pa.array(random.Random(1).choices([f"word{i:020d}" for i in range(50_000)], k=rows))
    table = pa.table(
        {"id": range(rows), "word": words, "_time": pa.array([0] * rows, pa.uint64()), "_diff": [1] * rows}
    )
    with client.open_writer(shard, SCHEMA) as write:
        write.compare_and_append(table, 0, 1)
    return table


@pytest.mark.slow
@pytest.mark.parametrize("config", [persist.Config(), TINY])
def test_every_time_is_read_as_it_was_before_and_after_maintenance_in_every_way(
    world: World, config: persist.Config
) -> None:
    client = world.client(config)
    model = filled(client)
    with client.open_reader("s") as read:
        for _ in range(2):
            for as_of in range(40):
                with read.snapshot(as_of, diff=True) as snapshot:
                    assert contents_of(snapshot.to_arrow()) == model.contents(as_of)
                    assert contents_of(pa.concat_tables(snapshot.batches())) == model.contents(as_of)
                    assert contents_of(pa.Table.from_pylist(snapshot.to_pylist(), snapshot.schema)) == model.contents(
                        as_of
                    )
            snapshot = read.snapshot(20, diff=True)
            assert contents_of(snapshot.to_polars().to_arrow()) == model.contents(20)
            frame = snapshot.to_pandas(types_mapper=pd_types)
            assert contents_of(pa.Table.from_pandas(frame, snapshot.schema)) == model.contents(20)
            assert snapshot.to_arrow().schema == SCHEMA.contents
            client.maintain("s")
            check_world(client, "s")


def pd_types(kind: pa.DataType) -> Any:
    import pandas as pd  # noqa: PLC0415

    return {pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype()}.get(kind)


def test_a_snapshot_that_is_held_reads_the_same_however_the_shard_moves_on(world: World) -> None:
    client = world.client(TINY)
    model = filled(client)
    read = client.open_reader("s")
    snapshot = read.snapshot(10, diff=True)
    iterator = read.snapshot(12, diff=True).batches()
    first = next(iterator)
    read.downgrade_since(39)
    with pytest.raises(SinceViolation) as told:
        read.snapshot(38, diff=True)
    assert (told.value.as_of, told.value.since) == (38, persist.at(39))
    for _ in range(3):
        client.maintain("s")
        client.heartbeat()
    assert contents_of(snapshot.to_arrow()) == model.contents(10)
    assert contents_of(pa.concat_tables([first, *iterator])) == model.contents(12)
    with pytest.raises(SinceViolation):
        client.open_reader("s").snapshot(10, diff=True)
    garbage = client.census("s").garbage
    assert garbage
    snapshot.release()
    del iterator
    gc.collect()
    world.clock.advance(1)
    client.heartbeat()
    for _ in range(3):
        client.maintain("s")
        client.heartbeat()
    assert client.census("s").garbage == 0, "what was held is collected after its release"
    assert contents_of(read.snapshot(39, diff=True).to_arrow()) == model.contents(39)


def test_a_time_that_is_not_complete_is_waited_for_and_then_timed_out(world: World) -> None:
    client = world.client()
    filled(client, 3)
    read = client.open_reader("s")
    before = world.bytes("s")
    start = world.clock.monotonic()
    with pytest.raises(TimedOut) as told:
        read.snapshot(3, timeout=2, diff=True)
    assert told.value.timeout_s == 2
    assert 2 <= world.clock.monotonic() - start < 3
    with pytest.raises(TimedOut, match=r"shard s: upper has to pass 3, and upper is \[3\]\. "):
        read.snapshot(3, timeout=0, diff=True)
    assert world.clock.monotonic() - start < 3, "no time is no time, not the default"
    with pytest.raises(TimedOut):
        read.wait_for_upper(4, timeout=0.5)
    assert world.bytes("s") == before
    assert read.wait_for_upper(3) == persist.at(3)


def test_an_expired_reader_gets_lease_expired_and_never_data(world: World) -> None:
    client = world.client(TINY.model_copy(update={"lease_ms": 1000}))
    filled(client)
    read = client.open_reader("s")
    snapshot, iterator = read.snapshot(10, diff=True), read.snapshot(11, diff=True).batches()
    keeper = world.client(TINY).open_reader("s")
    keeper.downgrade_since(39)
    other = world.client(TINY)
    world.clock.advance(5)
    for _ in range(4):
        other.maintain("s")
        kept_of(keeper).move_hold()
    assert not [key for key in other.inspect("s").state.readers if key == read.id]
    with pytest.raises(LeaseExpired):
        read.snapshot(39, diff=True)
    with pytest.raises(LeaseExpired):
        snapshot.to_arrow()
    with pytest.raises(LeaseExpired):
        list(iterator)
    with pytest.raises(LeaseExpired):
        read.downgrade_since(39)
    read.close()
    check_world(other, "s")


@pytest.mark.parametrize("compacted", [False, True])
def test_columns_are_left_out_and_keys_pruned_part_by_part(world: World, compacted: bool) -> None:
    client = world.client(TINY)
    table = large(client)
    if compacted:
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(-1, "x", 1)], 1, 2)
        client.maintain("s")
    read = client.open_reader("s")
    parts = [part for batch in client.inspect("s").state.trace for part in batch.parts]
    assert len(parts) > 10
    world.requests.clear()
    got = read.snapshot(0, columns=["word"], key_from=(30_000,), key_to=(30_010,), diff=True).to_arrow()
    assert got.schema.names == ["word", "_diff"]
    assert got.column("word").to_pylist() == sorted(table.column("word").slice(30_000, 10).to_pylist())
    assert 1 <= world.count("get", "get_range") <= 2
    world.requests.clear()
    assert read.snapshot(0, key=(59_999,), diff=True).to_arrow().column("id").to_pylist() == [59_999]
    assert world.count("get", "get_range") <= 1
    world.requests.clear()
    assert read.snapshot(0, key=(60_000,), diff=True).to_arrow().num_rows == 0
    assert read.snapshot(0, key_from=(10,), key_to=(10,), diff=True).to_arrow().num_rows == 0
    assert read.snapshot(0, key_from=(20,), key_to=(10,), diff=True).to_arrow().num_rows == 0
    assert read.snapshot(0, key=(), diff=True).to_arrow().num_rows == 60_000
    assert read.snapshot(0, columns=[], diff=True).to_arrow().schema.names == ["_diff"]


KEYS = persist.Schema(key={"a": "string", "b": "int64"}, value={"v": "int64"})


@pytest.mark.parametrize("config", [persist.Config(), TINY])
def test_keys_are_filtered_exactly_also_nulls_prefixes_and_signs(world: World, config: persist.Config) -> None:
    client = world.client(config)
    write, read = client.open_shard("s", KEYS)
    names = [None, "", "a", "a\0", "aa", "b", "ÿ", "\U0010ffff"]
    rows = [{"a": a, "b": b, "v": 0, "_time": 0} for a in names for b in (None, -(2**63), -1, 0, 2**63 - 1)]
    write.compare_and_append(rows[::2], 0, 1)
    write.compare_and_append([r | {"_time": 1} for r in rows[1::2]], 1, 2)
    everything = Counter((r["a"], r["b"], 0) for r in rows)
    for r in rows:
        assert contents_of(read.snapshot(1, key=(r["a"], r["b"]), diff=True).to_arrow()) == {(r["a"], r["b"], 0): 1}
        below = contents_of(read.snapshot(1, key_to=(r["a"], r["b"]), diff=True).to_arrow())
        above = contents_of(read.snapshot(1, key_from=(r["a"], r["b"]), diff=True).to_arrow())
        assert below + above == everything
        assert not below.keys() & above.keys()
    for a in names:
        assert contents_of(read.snapshot(1, key=(a,), diff=True).to_arrow()) == {k: 1 for k in everything if k[0] == a}
    assert [r["a"] for r in read.snapshot(1, diff=True).to_pylist()][::5] == sorted(
        names, key=lambda a: (a is not None, (a or "").encode())
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("filled_by", [filled, large])
def test_splits_are_a_disjoint_union_of_the_snapshot(world: World, n: int, filled_by: Any) -> None:
    client = world.client(TINY)
    filled_by(client)
    read = client.open_reader("s")
    ranges: list[dict[str, Any]] = [{}, {"key_from": (5,), "key_to": (20_000,)}, {"key": (7,)}]
    for keys in ranges:
        snapshot = read.snapshot(0, **keys, diff=True)
        splits = snapshot.splits(n)
        assert 1 <= len(splits) <= n
        tables = [split.to_arrow(world.inner.blob) for split in splits]
        whole: Counter[Any] = Counter()
        for table in tables:
            found = contents_of(table)
            assert not found.keys() & whole.keys()
            whole.update(found)
        assert whole == contents_of(snapshot.to_arrow())
    if filled_by is large and n == 7:
        sizes = [
            table.num_rows for table in (s.to_arrow(world.inner.blob) for s in read.snapshot(0, diff=True).splits(n))
        ]
        assert len(sizes) == 7
        assert max(sizes) < 2 * min(sizes), "about equal"


READ = """
import pickle, sys
from persist_lib.testing import contents_of
split = pickle.load(open(sys.argv[1], "rb"))
pickle.dump((contents_of(split.to_arrow()), split.to_arrow().schema.names), sys.stdout.buffer)
"""


@pytest.mark.slow
def test_a_split_is_read_in_another_process_that_is_given_nothing_else(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data", config=TINY) as client:
        large(client, 8_000)
        with client.open_reader("s") as read, read.snapshot(0, columns=["id"], diff=True) as snapshot:
            union: Counter[Any] = Counter()
            for i, split in enumerate(snapshot.splits(2)):
                path = tmp_path / f"split{i}"
                path.write_bytes(pickle.dumps(split))
                done = subprocess.run(
                    [sys.executable, "-c", READ, str(path)], capture_output=True, check=True, cwd=Path.cwd()
                )
                found, names = pickle.loads(done.stdout)
                assert names == ["id", "_diff"]
                union.update(found)
            assert union == contents_of(snapshot.to_arrow())


@pytest.mark.slow
def test_batches_of_a_shard_of_many_parts_take_the_memory_of_a_few(world: World) -> None:
    client = world.client(TINY)
    large(client, 200_000)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(i, "z", 1) for i in range(0, 200_000, 1000)], 1, 2)
    read = client.open_reader("s")
    whole = sum(part.size for batch in client.inspect("s").state.trace for part in batch.parts)
    gc.collect()
    for as_of in (0, 1):
        most = rows = 0
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        for table in read.snapshot(as_of, diff=True).batches():
            rows += table.num_rows
            most = max(most, pa.total_allocated_bytes() - before + tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert rows == 200_000 + (200 if as_of else 0)
        assert most < 3 * 1024 * 1024, f"of {whole} compressed bytes"


def test_a_read_only_client_writes_nothing_anywhere(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url, config=TINY) as client:
        model = filled(client)
        client.maintain("s")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(tmp_path.rglob("*"))}
    with persist.open(url, read_only=True) as client:
        read = client.open_reader("s", SCHEMA)
        assert contents_of(read.snapshot(17, diff=True).to_arrow()) == model.contents(17)
        listen = read.listen(0, until=40)
        assert sum(event.table.num_rows for event in listen if isinstance(event, persist.Updates)) > 0
        client.census("s")
        client.maintain("s", dry_run=True)
        for act in (
            lambda: client.open_writer("s", SCHEMA),
            lambda: client.open_writer("new", SCHEMA),
            lambda: client.maintain("s"),
            lambda: client.roll_up("s", force=True),
            lambda: client.set_hold("s", "h", 0),
            lambda: client.set_retention("s", 1),
            lambda: client.finish("s"),
            lambda: client.evolve_schema("s", WIDER),
            lambda: read.downgrade_since(3),
        ):
            with pytest.raises(InvalidUsage):
                act()
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(tmp_path.rglob("*"))} == before


def test_a_read_only_reader_goes_on_where_blobs_vanish_between_batches(world: World) -> None:
    client = world.client(TINY)
    large(client, 100_000)
    with client.open_writer("s", SCHEMA) as write:
        for time in range(1, 6):
            write.compare_and_append([row(-time, "x", time), row(500 * time, "y", time)], time, time + 1)
    read = world.client(TINY, read_only=True).open_reader("s")
    expected = contents_of(read.snapshot(3, diff=True).to_arrow())
    listened = listen(read, 0)
    iterator, whole, splits = (
        read.snapshot(3, diff=True).batches(),
        read.snapshot(3, diff=True),
        read.snapshot(3, diff=True).splits(2),
    )
    some = [next(iterator)]
    live = read.listen(0, until=6)
    first = next(live)
    for _ in range(3):
        client.maintain("s")
    client.compact("s", policy=persist.Policy(weight=1e9))
    for _ in range(3):
        client.maintain("s")
    assert client.census("s").garbage == 0
    assert contents_of(pa.concat_tables([*some, *iterator])) == expected
    assert contents_of(whole.to_arrow()) == expected
    tables = [event.table for event in [first, *live] if isinstance(event, persist.Updates)]
    assert Counter(map(str, pa.concat_tables(tables).to_pylist())) == listened
    with pytest.raises(Missing):
        splits[0].to_arrow(world.inner.blob)


def listen(read: persist.ReadHandle, as_of: int) -> Counter[str]:
    tables = [event.table for event in read.listen(as_of, until=6) if isinstance(event, persist.Updates)]
    return Counter(map(str, pa.concat_tables(tables).to_pylist()))


def test_a_read_only_reader_is_told_when_history_was_given_up(world: World) -> None:
    client = world.client(TINY)
    filled(client)
    with client.open_reader("s") as held:
        read = world.client(TINY, read_only=True).open_reader("s")
        snapshot = read.snapshot(3, diff=True)
        held.downgrade_since(30)
    for _ in range(3):
        client.maintain("s")
    with pytest.raises(SinceViolation):
        snapshot.to_arrow()
    with pytest.raises(SinceViolation):
        read.snapshot(3, diff=True)
    assert read.since == persist.at(30)


def test_a_blob_that_was_lost_is_named_and_never_read_as_empty(world: World) -> None:
    client = world.client(TINY)
    filled(client, 3)
    lost = client.inspect("s").state.trace[-1].parts[0].key
    world.inner.blob.delete(f"s/{lost}")
    for reader in (client, world.client(TINY, read_only=True)):
        with pytest.raises(Missing) as told:
            reader.open_reader("s").snapshot(2, diff=True).to_arrow()
        assert lost in str(told.value.key)
        with pytest.raises(Missing):
            list(reader.open_reader("s").listen(0, until=3))
    with pytest.raises(Missing):
        client.maintain("s", policy=persist.Policy(weight=1e9))
    assert client.scrub("s").damaged


def test_a_shard_that_is_not_there_is_not_found_and_not_made(client: persist.Client) -> None:
    for act in (
        lambda: client.open_reader("s"), lambda: client.maintain("s"), lambda: client.inspect("s"),
        lambda: client.set_hold("s", "h", 0), lambda: client.finish("s"), lambda: client.set_retention("s", 1),
    ):  # fmt: skip
        with pytest.raises(NotFound):
            act()
    assert client.shards() == []


@pytest.mark.parametrize("config", [persist.Config(), TINY])
def test_older_updates_read_as_null_and_an_older_reader_adds_up_what_it_cannot_tell_apart(
    world: World, config: persist.Config
) -> None:
    client = world.client(config)
    model = filled(client, 10)
    old = client.open_reader("s")
    client.evolve_schema("s", WIDER)
    wide, narrow = Model(), Model()
    wide.append([((*data, None), time, diff) for data, time, diff in model.updates], persist.at(0), persist.at(10))
    narrow.append(model.updates, persist.at(0), persist.at(10))
    rng = random.Random(5)
    with client.open_writer("s", WIDER) as write:
        for time in range(10, 30):
            rows = [
                row(rng.randrange(30), rng.choice(["a", None]), time) | {"more": rng.randrange(3)} for _ in range(40)
            ]
            write.compare_and_append(rows, time, time + 1)
            wide.append(updates(rows, WIDER), persist.at(time), persist.at(time + 1))
            narrow.append(updates(rows), persist.at(time), persist.at(time + 1))
    new = client.open_reader("s")
    for _ in range(2):
        for as_of in (5, 10, 17, 29):
            assert contents_of(new.snapshot(as_of, diff=True).to_arrow()) == wide.contents(as_of)
            assert contents_of(old.snapshot(as_of, diff=True).to_arrow()) == narrow.contents(as_of)
            assert contents_of(pa.concat_tables(old.snapshot(as_of, diff=True).batches())) == narrow.contents(as_of)
            parts = [
                contents_of(split.to_arrow(world.inner.blob)) for split in old.snapshot(as_of, diff=True).splits(3)
            ]
            assert sum(parts, Counter()) == Counter({k: v for k, v in narrow.contents(as_of).items() if v > 0})
        check_world(client, "s")
        for read in (old, new):
            read.downgrade_since(5)
            client.heartbeat()
        client.compact("s", policy=persist.Policy(weight=1e9))
    for read in (old, new):
        read.downgrade_since(29)
    client.compact("s", policy=persist.Policy(weight=1e9, advance=0.01))
    assert contents_of(old.snapshot(29, diff=True).to_arrow()) == narrow.contents(29), (
        "one run at one time, and not yet contents"
    )
    assert contents_of(new.snapshot(29, diff=True).to_arrow()) == wide.contents(29)
    check_world(client, "s")


@pytest.mark.parametrize("config", [persist.Config(), TINY])
def test_a_sum_beyond_64_bits_is_an_error_and_wedges_nobody(world: World, config: persist.Config) -> None:
    client = world.client(config)
    write, read = client.open_shard("s", SCHEMA)
    for time in range(3):
        write.compare_and_append([row(1, "poison", time, 2**62), row(2, "fine", time)], time, time + 1)
    for _ in range(2):
        assert contents_of(read.snapshot(2, key=(2,), diff=True).to_arrow()) == {(2, "fine"): 3}
        snapshot = read.snapshot(2, diff=True)
        for act in (snapshot.to_arrow, lambda snapshot=snapshot: list(snapshot.batches())):
            with pytest.raises(DiffOverflow):
                act()
        read.downgrade_since(2)
        client.maintain("s", policy=persist.Policy(weight=1e9, advance=0.01))
        check_world(client, "s")
    write.compare_and_append([row(1, "poison", 3, -(2**62))], 3, 4)
    write.compare_and_append([row(1, "poison", 4, -(2**62))], 4, 5)
    assert contents_of(read.snapshot(4, diff=True).to_arrow()) == {(2, "fine"): 3, (1, "poison"): 2**62}
