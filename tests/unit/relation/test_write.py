"""The write handle: what it promises, what it refuses, and that a refusal leaves everything as it was."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import (
    Determinate,
    InvalidName,
    InvalidUsage,
    LeaseExpired,
    SchemaMismatch,
    UpperMismatch,
)
from persist_lib.testing import Model, Outcome, Rival, Script, check_world, contents_of
from tests.worlds import SCHEMA, SMALL, WIDER, Storm, World, row, updates


def contents(client: persist.Client, as_of: int, shard: str = "s") -> Any:
    with client.open_reader(shard) as read:
        return contents_of(read.snapshot(as_of, diff=True).to_arrow())


def test_an_append_of_one_time_needs_no_time_and_no_diff(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([{"id": 1, "word": "x"}], 0, 1)
    write.compare_and_append(pd.DataFrame({"id": np.array([1, 2]), "word": ["x", None]}), 1, 2)
    assert contents(client, 1) == {(1, "x"): 2, (2, None): 1}


WRONG = {
    "missing column": ([{"word": "w", "_time": 0}], SchemaMismatch),
    "time at upper": ([row(1, time=8)], InvalidUsage),
    "not updates": (7, InvalidUsage),
    "a good row, then a bad one": ([row(1, time=5), row(1, time=9)], InvalidUsage),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("verb", ["compare_and_append", "append"])
@pytest.mark.parametrize("config", [persist.Config(), SMALL])
def test_wrong_updates_are_refused_and_everything_is_as_it_was(
    world: World, what: str, verb: str, config: persist.Config
) -> None:
    client = world.client(config)
    client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 5)
    before = world.bytes("s")
    write = client.open_writer("s", SCHEMA)
    data, error = WRONG[what]
    with pytest.raises(error):
        getattr(write, verb)(data, 5, 8)
    assert world.bytes("s") == before, "not even the writer registers for what is refused at the border"
    write.compare_and_append([row(1, time=5)], 5, 8)
    check_world(client, "s")


@pytest.mark.parametrize(
    ("lower", "upper"), [(5, 5), (6, 5), ([], []), ([], 5), (5, -1), (5, 2**64), ("5", 6), (5, 6.0)]
)
def test_impossible_bounds_are_refused_without_input_or_output(world: World, lower: Any, upper: Any) -> None:
    write = world.client().open_writer("s", SCHEMA)
    world.requests.clear()
    for verb in (write.compare_and_append, write.append):
        with pytest.raises(InvalidUsage):
            verb([], lower, upper)
    assert not world.requests


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "x" * 101, "-x", 7, None, "é"])
def test_a_bad_shard_name_is_refused_and_makes_nothing(world: World, name: Any) -> None:
    client = world.client()
    with pytest.raises(InvalidName):
        client.open_writer(name, SCHEMA)
    assert client.shards() == []
    assert not world.requests[:-1]


def test_another_upper_is_refused_with_both_and_nothing_is_linked(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 5)
    before = client.inspect("s")
    with pytest.raises(UpperMismatch) as told:
        write.compare_and_append([row(1, time=7)], 7, 8)
    assert (told.value.expected, told.value.actual) == (persist.at(7), persist.at(5))
    assert client.inspect("s") == before
    with pytest.raises(UpperMismatch):
        write.append([row(1, time=7)], 7, 8)
    assert client.inspect("s") == before
    check_world(client, "s")


def test_another_schema_is_refused_and_nothing_changes(world: World) -> None:
    client = world.client()
    client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 5)
    before = world.bytes("s")
    with pytest.raises(SchemaMismatch):
        client.open_writer("s", WIDER)
    with pytest.raises(SchemaMismatch):
        client.open_shard("s", WIDER)
    with pytest.raises(SchemaMismatch):
        client.open_reader("s", WIDER)
    assert world.bytes("s") == before


def test_an_empty_append_moves_upper_and_empty_ones_fuse(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    for time in range(10):
        assert write.compare_and_append([], time, time + 1).count == 0
    assert len(client.inspect("s").state.trace) == 1
    assert write.fetch_upper() == persist.at(10)


def test_updates_that_cancel_are_an_empty_append(world: World) -> None:
    for config in (persist.Config(), SMALL):
        client = world.client(config)
        write = client.open_writer(f"s{config.inline_bytes}", SCHEMA)
        assert write.compare_and_append([row(1), row(1, diff=-1)], 0, 1).count == 0
        check_world(client, write.shard)


def test_advancing_upper_is_a_no_op_where_it_is_already(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    assert write.advance_upper(0).upper == persist.at(0)
    assert write.advance_upper(5).upper == persist.at(5)
    before = world.bytes("s")
    for time in (0, 3, 5):
        assert write.advance_upper(time).upper == persist.at(5)
    assert world.bytes("s") == before
    other = world.client().open_writer("s", SCHEMA)
    other.advance_upper(9)
    assert write.advance_upper(7).upper == persist.at(9), "another writer was ahead"


def test_a_finished_shard_takes_no_more_and_stays_readable(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 5)
    assert write.finish().upper == persist.TOP
    assert write.finish().upper == persist.TOP, "again is a no-op"
    with pytest.raises(UpperMismatch):
        write.compare_and_append([row(1, time=5)], 5, 6)
    with client.open_reader("s") as read:
        assert contents_of(read.snapshot(diff=True).to_arrow()) == {(1, "w"): 1}
        assert contents_of(read.snapshot(2**64 - 1, diff=True).to_arrow()) == {(1, "w"): 1}


def test_finishing_at_an_expected_upper_is_refused_at_another(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 5)
    with pytest.raises(UpperMismatch):
        write.finish(4)
    assert write.finish(5).upper == persist.TOP


def test_several_writers_of_identical_data_add_each_update_once(world: World) -> None:
    for config in (persist.Config(), SMALL):
        shard = f"s{config.inline_bytes}"
        writers = [world.client(config).open_writer(shard, SCHEMA) for _ in range(3)]
        every = [
            row(id_, f"w{id_ % 3}", time, 1 if id_ % 4 else -1) for time in range(30) for id_ in range(time, time + 4)
        ]
        cuts = [[0, 10, 20, 30], [0, 7, 15, 30], [0, 29, 30]]
        ranges = sorted(((low, up, i) for i, cut in enumerate(cuts) for low, up in pairwise(cut)))
        appended = 0
        for low, up, i in ranges:
            upper = writers[i].fetch_upper().time or 0
            done = writers[i].append([u for u in every if low <= u["_time"] < up], low, up)
            expected = sum(1 for u in every if max(low, upper) <= u["_time"] < up)
            assert done.count == expected, "it says what it added, not what it was given"
            appended += done.count
        assert appended == len(every)
        model = Model()
        model.append(updates(every), persist.at(0), persist.at(30))
        client = world.client(config)
        for as_of in (0, 6, 7, 10, 14, 29):
            assert contents(client, as_of, shard) == model.contents(as_of)
        check_world(client, shard)
        client.maintain(shard)
        assert contents(client, 29, shard) == model.contents(29)
        check_world(client, shard)


def test_an_overlap_that_does_not_fit_inline_any_more_is_trimmed_as_an_object(world: World) -> None:
    client = world.client(persist.Config(inline_bytes=256 * 1024))
    write = client.open_writer("s", SCHEMA)
    big = "x" * 200_000
    # Full, and of inline batches that no flush takes, as every second one is an object.
    small = world.client(persist.Config(inline_bytes=0)).open_writer("s", SCHEMA)
    time = 0
    for _ in range(5):
        write.compare_and_append([row(time, big, time)], time, time + 1)
        small.compare_and_append([row(time, "o", time + 1)], time + 1, time + 2)
        time += 2
    assert client.inspect("s").state.inline_size > 900_000
    other = world.client(persist.Config(inline_bytes=256 * 1024)).open_writer("s", SCHEMA)
    every = [row(7, big, time - 1), row(8, big[:150_000], time)]
    assert other.append(every, time - 1, time + 1, timeout=5).count == 1
    check_world(client, "s")
    assert (8, big[:150_000]) in contents(client, time)


def test_inline_batches_are_flushed_into_a_part_when_the_state_is_full(world: World) -> None:
    client = world.client(persist.Config(inline_bytes=256 * 1024))
    write = client.open_writer("s", SCHEMA)
    model = Model()
    for time in range(14):
        rows = [row(time, f"{time}" * 60_000, time)]
        write.compare_and_append(rows, time, time + 1)
        model.append(updates(rows), persist.at(time), persist.at(time + 1))
        assert client.inspect("s").state.inline_size <= 1024 * 1024
    assert any(part.inline is None for batch in client.inspect("s").state.trace for part in batch.parts)
    check_world(client, "s")
    assert contents(client, 13) == model.contents(13)


def test_a_writer_rolls_up_when_nobody_else_does(world: World) -> None:
    client = world.client(persist.Config(rollup_every=4))
    write = client.open_writer("s", SCHEMA)
    for time in range(40):
        write.compare_and_append([row(time, "x", time)], time, time + 1)
    version = client.inspect("s")
    assert version.seqno - version.state.newest_rollup <= 2 * 4 + 1
    check_world(client, "s")
    world.requests.clear()
    assert world.client().inspect("s").seqno == version.seqno
    assert world.count() <= 3, "head, rollup, scan"


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.LOST_UNKNOWN])
def test_an_append_that_is_committed_is_acknowledged_even_if_the_rollup_after_it_fails(
    world: World, outcome: Outcome
) -> None:
    plan = Script({("set", n): outcome for n in range(1, 1000)})
    client = world.client(persist.Config(rollup_every=2, timeout_s=0.5), plan=plan)
    write = client.open_writer("s", SCHEMA)
    for time in range(12):
        assert write.compare_and_append([row(time, "x", time)], time, time + 1).upper == persist.at(time + 1)
    check_world(world.client(), "s")


@pytest.mark.slow
def test_a_million_rows_through_an_iterator_take_the_memory_of_a_few_parts(world: World) -> None:
    client = world.client(persist.Config(part_bytes=256 * 1024, inline_bytes=0))
    write = client.open_writer("s", SCHEMA)
    kept: list[int] = []

    def tables() -> Iterator[pa.Table]:
        generator = np.random.default_rng(0)
        for start in range(0, 400_000, 4000):
            ids = np.arange(start, start + 4000)
            words = pa.array(generator.integers(0, 2**62, 4000)).cast(pa.string())
            kept.append(held())
            yield pa.table(
                {"id": ids, "word": words, "_time": pa.repeat(pa.scalar(0, pa.uint64()), 4000),
                 "_diff": pa.repeat(pa.scalar(1, pa.int64()), 4000)}
            )  # fmt: skip

    def held() -> int:
        return pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0] - stored()

    def stored() -> int:
        return sum(entry.size for entry in world.inner.blob.list("s/"))

    tracemalloc.start()
    try:
        assert write.compare_and_append(tables(), 0, 1).count == 400_000
        first = kept[:5]
        assert max(kept) - min(first) < 12 * 256 * 1024, "does not grow with the input"
        kept.clear()
        write.append(tables(), 0, 1)
        assert max(kept) - kept[0] < 24 * 256 * 1024, "also where an overlap may have to be trimmed"
    finally:
        tracemalloc.stop()
    assert len(client.inspect("s").state.trace[0].parts) > 20


def test_an_expired_writer_is_told_once_and_registers_anew(world: World) -> None:
    client = world.client(persist.Config(lease_ms=1000))
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    first = write.id
    world.clock.advance(2)
    assert world.client().expire("s").overdue[0].id == first
    before = client.inspect("s")
    with pytest.raises(LeaseExpired) as told:
        write.compare_and_append([row(1, time=1)], 1, 2)
    assert told.value.id == first
    assert client.inspect("s") == before
    write.compare_and_append([row(1, time=1)], 1, 2)
    assert write.id != first
    assert contents(client, 1) == {(1, "w"): 2}
    check_world(client, "s")


def test_a_writer_whose_lease_has_ended_but_was_not_retired_still_writes(world: World) -> None:
    client = world.client(persist.Config(lease_ms=1000))
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    world.clock.advance(60)
    write.compare_and_append([row(1, time=1)], 1, 2)
    assert not world.client().expire("s").overdue, "the append extended the lease"


def test_appends_of_several_threads_through_one_handle_are_ordered_and_none_is_lost(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    failures: list[Exception] = []

    def work(id_: int) -> None:
        done = 0
        while done < 20:
            upper = write.upper.time or 0
            try:
                write.compare_and_append([row(id_, "t", upper)], upper, upper + 1)
                done += 1
            except UpperMismatch:
                continue
            except Exception as error:  # noqa: BLE001
                failures.append(error)
                return

    threads = [threading.Thread(target=work, args=(id_,)) for id_ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert contents(client, 79) == {(id_, "t"): 20 for id_ in range(4)}
    check_world(client, "s")


def test_a_client_that_closes_retires_what_it_registered(world: World) -> None:
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    listen = read.listen(0)
    assert len(client.inspect("s").state.readers) == 2
    client.close()
    state = world.client().inspect("s").state
    assert not state.writers
    assert not state.readers, "listeners too"
    del listen


def test_a_handle_that_was_dropped_does_not_live_on(world: World) -> None:
    client = world.client(persist.Config(lease_ms=10_000))
    client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1)
    client.open_reader("s").listen(0)
    assert len(client.inspect("s").state.readers) == 2
    gc.collect()  # a listener and its iterator refer to each other
    for _ in range(10):
        world.clock.advance(3)
        client.heartbeat()
        client.expire("s")
    state = client.inspect("s").state
    assert not state.writers
    assert not state.readers


def test_a_writer_keeps_writing_while_the_schema_evolves(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    client.evolve_schema("s", WIDER)
    wide = client.open_writer("s", WIDER)
    wide.compare_and_append([row(1, time=1) | {"more": 5}], 1, 2)
    write.compare_and_append([row(1, time=2)], 2, 3)
    assert contents(client, 2) == {(1, "w", None): 2, (1, "w", 5): 1}
    check_world(client, "s")
    client.maintain("s")
    assert contents(client, 2) == {(1, "w", None): 2, (1, "w", 5): 1}
    check_world(client, "s")


def test_appends_go_on_while_rollups_cannot_be_written(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "set")
    client = world.client(persist.Config(rollup_every=10), plan=storm)
    write = client.open_writer("s", SCHEMA)
    storm.blows = True
    start = world.clock.monotonic()
    for time in range(60):
        write.compare_and_append([row(time, "x", time)], time, time + 1)
    assert world.clock.monotonic() - start < 40, "a rollup is tried now and then, and not for long"
    storm.blows = False
    for time in range(60, 75):
        write.compare_and_append([row(time, "x", time)], time, time + 1)
    assert client.inspect("s").state.newest_rollup > 50


def test_a_writer_that_expires_while_it_flushes_is_told_once(world: World) -> None:
    rival = Rival(world.inner.consensus)
    config = persist.Config(inline_bytes=256 * 1024, lease_ms=1000)
    client = world.client(config, rival=rival)
    write = client.open_writer("s", SCHEMA)
    for time in range(5):
        write.compare_and_append([row(time, "x" * 200_000, time)], time, time + 1)
    other = world.client(config)

    def expire() -> None:
        world.clock.advance(10)
        assert other.expire("s").overdue

    rival.before_next(expire)
    with pytest.raises(LeaseExpired):
        write.compare_and_append([row(5, "x" * 200_000, 5)], 5, 6)
    assert not rival.waiting
    write.compare_and_append([row(5, "x" * 200_000, 5)], 5, 6)
    check_world(client, "s")


@pytest.mark.parametrize("kind", ["set", "scan", "compare_and_set"])
def test_only_an_append_that_was_sent_has_an_unknown_outcome(world: World, kind: str) -> None:
    """What comes before (a look at the log, an upload, the registration) leaves no doubt: nothing was appended."""
    storm = Storm(Outcome.LOST_UNKNOWN, kind)
    config = SMALL.model_copy(update={"timeout_s": 0.2})
    client = world.client(config, plan=storm)
    write = client.open_writer("s", SCHEMA)
    storm.blows = True
    if kind == "scan":
        with pytest.raises(Determinate):
            write.fetch_upper()
        world.client().open_writer("s", SCHEMA).advance_upper(3)  # so that it has to look again
    with pytest.raises(Determinate):
        write.compare_and_append([row(1)], 0, 1)
    storm.blows = False
    write.append([row(1, time=3)], 3, 4) if kind == "scan" else write.compare_and_append([row(1)], 0, 1)
    check_world(client, "s")
