"""Streams, driven as Spark drives them but without a JVM: killed at any step, they deliver each update once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import persist_lib as persist
from persist_lib.errors import HoldConflict, InvalidUsage, SinceViolation
from tests.torture.roles import open_ahead
from tests.unit.spark.worlds import SCHEMA, TINY, Stream, World, added, rows

RETENTION = "retention"
"""The hold of the shard's retention policy."""
AFTER_LEASES_S = 100_000.0


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[persist.Client]:
    monkeypatch.setenv("PERSIST_CONFIG", json.dumps(TINY))
    with persist.open(f"file:{tmp_path}", config=persist.Config(**TINY)) as opened:
        yield opened


class Sink:
    """What a stream delivered, by batch: a batch that is repeated must be the same."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}

    def __call__(self, number: int, table: Any) -> None:
        found = sorted(rows(table, "a", "b", "v", "_time", "_diff"), key=repr)
        assert self.batches.setdefault(number, found) == found, f"batch {number} is another when it is repeated"

    def updates(self) -> Any:
        return added((((a, b, v), t), d) for found in self.batches.values() for a, b, v, t, d in found)

    def contents(self) -> Any:
        return added((data, diff) for (data, _), diff in self.updates().items())


def stream(client: persist.Client, sink: Any, **options: str) -> Stream:
    return Stream(client, sink, changes="true", **options)


def drain(query: Stream) -> int:
    done = 0
    while query.step():
        done += 1
        assert done < 500, "it does not end"
    return done


def test_latest_starts_after_what_is_there(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(2)
    world.append(rng, 50, times=5)
    query = stream(client, sink, **{"from": "latest"})
    query.start()
    assert drain(query) == 1, "one without rows, which anchors the stream"
    world.append(rng, 50, times=5)
    drain(query)
    assert sink.updates() == world.changes(4, 9)


@pytest.mark.parametrize(
    "limits", [{"max_updates": "7"}, {"max_bytes": "1"}, {"max_times": "2"}, {"max_times": "3", "max_updates": "40"}]
)
def test_limits_cut_batches_at_times(client: persist.Client, limits: dict[str, str]) -> None:
    world, sink, rng = World(client), Sink(), random.Random(3)
    for _ in range(6):
        world.append(rng, 10, times=4)
    client.compact("orders")
    for _ in range(3):
        world.append(rng, 10, times=4)
    query = stream(client, sink, **{"from": "0"}, **limits)
    query.start()
    assert drain(query) > 5
    assert sink.updates() == world.changes(0, 35)
    if "max_times" in limits:
        most = max(len({t for *_, t, _ in found}) for found in sink.batches.values())
        assert most <= int(limits["max_times"])


def test_limits_are_kept_at_each_restart(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(3)
    for _ in range(5):
        world.append(rng, 10)
    query = stream(client, sink, max_times="1", **{"from": "0"})
    for number in range(1, 5):
        query.start()
        assert query.step()
        assert sink.updates() == world.changes(0, number)


def test_a_batch_without_limit_has_the_rest_of_the_contents_and_all_that_follows(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(12)
    for _ in range(4):
        world.append(rng, 40)
    query = stream(client, sink, max_bytes="1")
    query.start()
    assert query.step()
    for _ in range(4):
        world.append(rng, 40)
    assert query.plan(ReadAllAvailable())
    query.run()
    query.finish()
    assert not query.step()
    assert sink.updates() == added([*(((d, 3), n) for d, n in world.contents(3).items()), *world.changes(3, 7).items()])


def test_a_time_that_is_more_than_a_batch_is_cut_by_key_and_read_to_its_end(client: persist.Client) -> None:
    """By batches as small, and by one without a limit, which continues within the time and has what follows."""
    rng = random.Random(13)
    texts = [rng.randbytes(10).hex() for _ in range(20_000)]
    wide = pa.table({"a": range(20_000), "b": texts, "v": range(20_000)})
    with client.open_writer("orders", SCHEMA) as writer:
        for time in range(3):
            writer.compare_and_append(wide if time == 1 else wide.slice(0, 5), time, time + 1)
    for limit in (None, ReadAllAvailable()):
        sink = Sink()
        query = stream(client, sink, max_updates="4000", **{"from": "0"})
        query.start()
        assert query.step()
        first = len(sink.batches[0])
        assert 0 < first < 20_000, "a part of the time"
        query.start()  # it was killed there
        assert query.plan(limit)
        query.run()
        query.finish()
        drain(query)
        assert len(sink.batches) == 2 if limit is not None else len(sink.batches) > 3
        assert max(len(found) for found in sink.batches.values()) < (20_000 if limit is None else 30_000)
        expected = {((a, texts[a], a), 1) for a in range(20_000)} | {((a, texts[a], a), 2) for a in range(5)}
        assert sink.updates() == dict.fromkeys(expected, 1)
        assert sum(map(len, sink.batches.values())) == len(expected), "each of them once"


def test_available_now_reads_what_is_complete_and_no_more(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(4)
    for _ in range(5):
        world.append(rng, 10)
    query = stream(client, sink, max_times="1", **{"from": "0"})
    query.start("available now")
    for _ in range(3):
        world.append(rng, 10)
    assert drain(query) == 4
    assert sink.updates() == world.changes(0, 4)
    query.start("available now")
    drain(query)
    assert sink.updates() == world.changes(0, 7)


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_step_it_delivers_each_update_once(client: persist.Client, seed: int) -> None:
    rng = random.Random(seed)
    world, sink = World(client), Sink()
    client.open_writer("orders", SCHEMA).close()
    client.set_hold("orders", "history", 0) if rng.random() < 0.3 else client.set_retention("orders", rng.randrange(3))
    options: dict[str, str] = rng.choice([{}, {"max_updates": "5"}, {"max_bytes": "2000"}, {"max_times": "1"}])
    options |= rng.choice([{}, {"hold": "mine"}, {"from": "0"}])
    if "from" in options:
        world.append(rng, 10)
    query = stream(client, sink, **options)
    query.start()
    for _ in range(60):
        match rng.randrange(9):
            case 0 | 1:
                world.append(rng, rng.randrange(20), times=rng.randrange(1, 4))
            case 2:
                query.start(rng.choice(["processing", "available now"]))  # killed before
            case 3 if query.plan():
                query.start()
            case 4 if query.plan():
                query.run()
                query.start()
            case 5:
                client.maintain("orders")
            case 6:
                client.compact("orders")
            case _:
                query.step()
    query.start()
    drain(query)
    assert sink.contents() == (world.contents(world.upper - 1) if "from" not in options else contents_after(world))
    assert len(client.inspect("orders").state.holds) <= 3


def contents_after(world: World) -> Any:
    return added((data, diff) for (data, _), diff in world.changes(0, world.upper - 1).items())


def test_a_stopped_stream_keeps_its_history_and_a_released_one_lets_go(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(5)
    client.open_writer("orders", SCHEMA).close()
    client.set_retention("orders", 1)
    world.append(rng, 20)
    query = stream(client, sink, hold="etl")
    query.start()
    drain(query)
    for _ in range(8):
        world.append(rng, 20)
        client.maintain("orders")
    state = client.inspect("orders").state
    assert state.holds["etl"].opaque == b"Spark stream, starting"
    assert state.since == persist.at(0), "collection waits for the stream"
    query.start()
    drain(query)
    assert sink.updates() == added([*(((d, 0), n) for d, n in world.contents(0).items()), *world.changes(0, 8).items()])
    query.start()
    client.maintain("orders")
    assert client.inspect("orders").state.since > persist.at(5), "it moved on with the stream"

    client.release_hold("orders", "etl")
    for _ in range(8):
        world.append(rng, 20)
        client.maintain("orders")
    with pytest.raises(SinceViolation, match="Start it with another checkpointLocation"):
        query.start()


def test_a_query_that_dies_before_its_first_batch_leaves_a_lease_and_no_hold(client: persist.Client) -> None:
    """A hold without a given name is made when the offset that names it is in the checkpoint; until then a lease is."""
    world, sink, rng = World(client), Sink(), random.Random(10)
    client.open_writer("orders", SCHEMA).close()
    client.set_retention("orders", 0)
    world.append(rng, 20)
    query = stream(client, sink)
    query.start()
    assert query.plan()
    query.planned.clear()  # Spark died before it had noted the offset
    for _ in range(3):
        world.append(rng, 20)
        client.maintain("orders")
    state = client.inspect("orders").state
    assert set(state.holds) == {RETENTION}
    assert state.since == persist.at(0), "the lease keeps what the first batch needs"
    with open_ahead(client.url, rng, AFTER_LEASES_S) as later:
        later.expire("orders")
        world.append(rng, 20)
        later.maintain("orders")
        assert later.inspect("orders").state.since == persist.at(4), "it ends by itself"
    query.start()
    assert query.plan()
    query.run()
    (hold,) = set(client.inspect("orders").state.holds) - {RETENTION}
    assert hold == json.loads(query.planned[0])["hold"]
    with open_ahead(client.url, rng, AFTER_LEASES_S) as later:
        later.expire("orders")
        world.append(rng, 20)
        later.maintain("orders")
        assert later.inspect("orders").state.since == persist.at(4), "what was begun is kept without any lease"
    query.start()
    drain(query)
    assert sink.contents() == world.contents(5)
    assert set(client.inspect("orders").state.holds) == {hold, RETENTION}


def test_a_first_batch_that_was_planned_is_read_at_a_restart_or_refused_in_words(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(11)
    client.open_writer("orders", SCHEMA).close()
    client.set_retention("orders", 0)
    world.append(rng, 20)
    query, other = stream(client, sink), stream(client, Sink())
    for one in (query, other):
        one.start()
        assert one.plan()
        one.start()  # Spark died when it had noted the offset, and before it planned the batch
    world.append(rng, 20)
    client.maintain("orders")
    drain(query)
    assert sink.contents() == world.contents(1)
    query.start()
    with open_ahead(client.url, rng, AFTER_LEASES_S) as later:
        later.expire("orders")
        world.append(rng, 20)
        later.maintain("orders")
    with pytest.raises(SinceViolation, match="Start it with another checkpointLocation"):
        other.run()


def test_a_stream_that_stopped_within_the_contents_keeps_them_as_they_were(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(14)
    client.open_writer("orders", SCHEMA).close()
    client.set_retention("orders", 0)
    for _ in range(4):
        world.append(rng, 40)
    client.maintain("orders")
    query = stream(client, sink, max_bytes="1", hold="etl")
    query.start()
    assert query.step()
    query.start()  # which also says that the first batch is done
    for _ in range(4):
        world.append(rng, 40)
        with open_ahead(client.url, rng, AFTER_LEASES_S) as later:
            later.expire("orders")
            later.maintain("orders")
            later.compact("orders")
    assert client.inspect("orders").state.since == persist.at(3)
    query.start()
    drain(query)
    assert sink.updates() == added([*(((d, 3), n) for d, n in world.contents(3).items()), *world.changes(3, 7).items()])


def test_a_hold_that_is_released_is_taken_again_if_nothing_is_lost(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(6)
    world.append(rng, 20)
    query = stream(client, sink, hold="etl")
    query.start()
    drain(query)
    client.release_hold("orders", "etl")
    world.append(rng, 20)
    with pytest.raises(HoldConflict, match="while the query ran"):
        query.step()
    query.start()
    drain(query)
    assert "etl" in client.inspect("orders").state.holds
    assert sink.contents() == world.contents(1)


def test_a_stream_never_ends_the_history_of_others(client: persist.Client) -> None:
    world, rng = World(client), random.Random(7)
    for _ in range(5):
        world.append(rng, 10)
    query = stream(client, Sink())
    query.start()
    drain(query)
    world.append(rng, 10)
    drain(query)
    query.start()
    assert client.inspect("orders").state.since == persist.at(0)


def test_two_streams_do_not_share_a_hold(client: persist.Client) -> None:
    world, rng = World(client), random.Random(8)
    world.append(rng, 10)
    first = stream(client, Sink(), hold="etl")
    first.start()
    first.step()
    world.append(rng, 10)
    first.step()
    first.start()
    second = stream(client, Sink(), hold="etl")
    second.start()
    with pytest.raises(HoldConflict, match="has a hold etl already"):
        second.step()


def test_a_closed_shard_ends_the_stream_and_its_hold(client: persist.Client) -> None:
    world, sink, rng = World(client), Sink(), random.Random(9)
    world.append(rng, 10)
    with client.open_writer("orders", SCHEMA) as writer:
        writer.compare_and_append([], 1, [])
    query = stream(client, sink)
    query.start()
    drain(query)
    assert sink.contents() == world.contents(0)
    query.start()
    assert not client.inspect("orders").state.holds


def test_an_empty_shard_has_no_batch_until_there_is_a_time(client: persist.Client) -> None:
    client.open_writer("orders", SCHEMA).close()
    world, sink = World(client), Sink()
    query = stream(client, sink)
    query.start("available now")
    assert drain(query) == 1
    assert sink.batches == {0: []}
    query.start()
    world.append(random.Random(1), 10)
    drain(query)
    assert sink.contents() == world.contents(0)


def test_rows_are_what_is_added_and_an_update_is_an_error_in_words(client: persist.Client) -> None:
    client.open_writer("orders", SCHEMA).close()
    with client.open_writer("orders", SCHEMA) as writer:
        writer.compare_and_append([{"a": 1, "b": "x", "v": 1, "_diff": 2}], 0, 1)
        found: list[Any] = []
        query = Stream(client, lambda _, table: found.extend(rows(table, "a", "b", "v")))
        query.start()
        query.step()
        assert found == [(1, "x", 1)] * 2
        writer.compare_and_append([{"a": 1, "b": "x", "v": 1, "_diff": -1}], 1, 2)
        with pytest.raises(InvalidUsage, match='option changes \\("true"\\)'):
            query.step()


def test_a_checkpoint_of_something_else_is_refused(client: persist.Client) -> None:
    world = World(client)
    world.append(random.Random(1), 3)
    query = stream(client, Sink())
    for wrong in ({"version": 1, "shard": "others", "hold": "h", "at": 1}, {"partition": 3}, {"version": 2}):
        query.planned, query.done = [json.dumps(wrong)], 0
        query.start()
        with pytest.raises(persist.PersistError):
            query.run()
