"""Appends to several shards at once: all of it or nothing, whatever happens in between."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import Append
from persist_lib.core.commands import Retire
from persist_lib.core.state import TOKENS_KEPT
from persist_lib.errors import (
    Determinate,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    Refused,
    ShardFinished,
    UpperMismatch,
)
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.testing import Chances, Outcome, Rival, check_world, contents_of
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA, SMALL, Storm, World, row

ON_EACH_STORE = pytest.mark.parametrize(
    "world", ["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    kind = getattr(request, "param", "memory")
    url = CONSENSUSES[kind].prepare(tmp_path)
    made = World(f"file:{tmp_path}/blobs", consensus=url) if kind == "postgresql" else World(url)
    yield made
    made.close()


def writers(client: persist.Client, *shards: str) -> list[persist.WriteHandle]:
    """Handles that are registered."""
    opened = [client.open_writer(shard, SCHEMA) for shard in shards]
    assert all(write.id for write in opened)
    return opened


def next_of(*opened: persist.WriteHandle, word: str = "w") -> list[Append]:
    """The next append of each, wherever its upper is as far as its client knows."""
    return [Append(write, [row(1, word, at)], at, at + 1) for write in opened for at in [write.upper.time or 0]]


def words(world: World, shard: str) -> list[str]:
    """All words, in the order of their times."""
    client = world.client(read_only=True)
    upper = client.inspect(shard).state.upper.time or 0
    if not upper:
        return []
    with client.open_reader(shard, SCHEMA) as read:
        return [word for (_, word) in sorted(contents_of(read.snapshot(upper - 1, diff=True).to_arrow()).elements())]


@ON_EACH_STORE
def test_all_are_appended_with_one_compare_and_set_and_answered_in_order(world: World) -> None:
    client = world.client()
    b, a, c = writers(client, "b", "a", "c")
    a.compare_and_append([row(0)], 0, 1)
    world.requests.clear()
    done = client.compare_and_append_many(
        [Append(b, [row(1), row(2)], 0, 5), Append(a, [], 1, 2), Append(c, [row(3, time=6)], 0, 7)]
    )
    assert [request.kind for request in world.requests] == ["compare_and_set_many"]
    assert [(one.upper.time, one.count, one.attempts) for one in done] == [(5, 2, 1), (2, 0, 1), (7, 1, 1)]
    assert [one.seqno for one in done] == [client.inspect(shard).seqno for shard in "bac"]
    assert len({one.token for one in done}) == 1
    assert {(one.cost.commits, one.cost.puts) for one in done} == {(1, 0)}, "what it cost all of them together"
    assert [write.upper.time for write in (a, b, c)] == [2, 5, 7]
    for shard in "abc":
        check_world(client, shard)
    a.compare_and_append([row(4, time=2)], 2, 3)
    assert len(words(world, "b")) == 2
    assert len(words(world, "a")) == 2


def test_one_is_as_good_as_many_and_none_is_nothing(world: World) -> None:
    client = world.client()
    (a,) = writers(client, "a")
    world.requests.clear()
    assert client.compare_and_append_many(next_of(a))[0].upper == persist.at(1)
    assert [request.kind for request in world.requests] == ["compare_and_set"], "as an append to one shard is"
    world.requests.clear()
    assert client.compare_and_append_many([]) == []
    assert client.compare_and_append_many(iter([])) == []
    assert world.requests == []


def test_a_repeated_call_reads_only_the_shards_that_are_not_known_to_remember_it(world: World) -> None:
    client = world.client()
    a, b = writers(client, "a", "b")
    appends, old = next_of(a, b), {shard: client.machine(shard).version for shard in "ab"}
    done = client.compare_and_append_many(appends, token=b"t")
    for stale in ("", "a", "b"):
        for shard in stale:
            client.machine(shard)._version = old[shard]
        world.requests.clear()
        again = client.compare_and_append_many(appends, token=b"t")
        assert [(one.seqno, one.upper, one.count) for one in again] == [(one.seqno, one.upper, 1) for one in done]
        assert [request.kind for request in world.requests] == ["scan"] * len(stale)


@pytest.mark.parametrize("config", [persist.Config(), SMALL])
def test_what_one_shard_refuses_is_refused_for_all_and_names_it(world: World, config: persist.Config) -> None:
    client = world.client(config)
    a, b = writers(client, "a", "b")
    writers(world.client(), "b")[0].compare_and_append([row(1)], 0, 3)
    before = world.inner.consensus.scan("a", 0, 99)  # type: ignore[arg-type]
    for appends in ([Append(a, [row(1)], 0, 1), Append(b, [row(1)], 0, 1)], next_of(b, a)):
        with pytest.raises(UpperMismatch, match="shard b") as told:
            client.compare_and_append_many(appends)
        assert (told.value.shard, told.value.expected, told.value.actual) == ("b", persist.at(0), persist.at(3))
        client.machine("b")._version = None
    assert world.inner.consensus.scan("a", 0, 99) == before  # type: ignore[arg-type]
    assert client.compare_and_append_many(next_of(a, b))
    client.finish("b")
    with pytest.raises(ShardFinished, match="shard b"):
        client.compare_and_append_many(next_of(a, b))
    assert client.inspect("a").state.upper == persist.at(1)
    check_world(client, "a")


def test_a_writer_that_was_retired_refuses_all_and_registers_anew_at_the_next_call(world: World) -> None:
    client = world.client()
    a, b = writers(client, "a", "b")
    retired = b.id
    client.machine("b").commit(lambda _state, _now: Retire(retired))
    with pytest.raises(LeaseExpired, match="shard b") as told:
        client.compare_and_append_many(next_of(a, b))
    assert told.value.id == retired
    assert client.inspect("a").state.upper == persist.at(0)
    assert [one.count for one in client.compare_and_append_many(next_of(a, b))] == [1, 1]
    assert b.id != retired


def test_wrong_calls_are_refused_before_anything_is_written(world: World) -> None:
    client, other = world.client(SMALL), world.client(SMALL)
    a, b = writers(client, "a", "b")
    (theirs,) = writers(other, "b")
    closed = client.open_writer("c", SCHEMA)
    closed.close()
    good = Append(a, [row(1)], 0, 1)
    world.requests.clear()
    wrong: list[tuple[list[Any], type[Exception], str]] = [
        ([good, Append(a, [row(1, time=1)], 1, 2)], InvalidUsage, "twice"),
        ([good, Append(theirs, [row(1)], 0, 1)], InvalidUsage, "another client"),
        ([good, (b, [row(1)], 0, 1)], InvalidUsage, "Append"),
    ]
    for appends, error, said in wrong:
        with pytest.raises(error, match=said):
            client.compare_and_append_many(appends)
    for write, lower, upper, said in [("b", 0, 1, "Append"), (b, 1, 1, "before"), (b, "x", 1, "expected_upper")]:
        with pytest.raises(InvalidUsage, match=said):
            Append(write, [row(1)], lower, upper)  # type: ignore[arg-type]
    assert world.requests == []
    for appends, error, said in [
        ([good, Append(b, [row(1, time=1)], 0, 1)], InvalidUsage, "time"),
        ([good, Append(b, [5], 0, 1)], InvalidUsage, "update"),
        ([good, Append(closed, [row(1)], 0, 1)], LeaseExpired, "closed"),
    ]:
        with pytest.raises(error, match=said):
            client.compare_and_append_many(appends)
    assert world.count("compare_and_set", "compare_and_set_many") == 0
    assert [*world.inner.blob.list("")] == [], "what was uploaded for the right one is gone again"
    with pytest.raises(InvalidUsage, match="read_only"):
        world.client(read_only=True).compare_and_append_many([good])
    assert len(client.compare_and_append_many([good])) == 1


def test_on_a_store_without_transactions_it_is_refused_before_anything_is_uploaded(tmp_path: Path) -> None:
    world = World(CONSENSUSES["s3"].prepare(tmp_path))
    client = world.client(SMALL)
    a, b = (client.open_writer(shard, SCHEMA) for shard in "ab")
    world.requests.clear()
    for appends in ([], [Append(a, [row(1)], 0, 1)], [Append(a, [row(1)], 0, 1), Append(b, [row(1)], 0, 1)]):
        with pytest.raises(InvalidUsage, match="PostgreSQL"):
            client.compare_and_append_many(appends)
    assert world.requests == []
    assert [*world.inner.blob.list("")] == []
    world.close()


@pytest.mark.parametrize("lost", ["a", "b", "ab"])
def test_a_race_lost_in_one_shard_is_tried_again_for_all(world: World, lost: str) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    a, b = writers(client, "a", "b")

    def act() -> None:
        for shard in lost:
            other.set_hold(shard, "h", 0)

    rival.before_next(act)
    done = client.compare_and_append_many(next_of(a, b))
    assert [one.attempts for one in done] == [2, 2]
    assert [one.upper for one in done] == [persist.at(1)] * 2
    for shard in "ab":
        check_world(client, shard)


@ON_EACH_STORE
def test_a_rival_that_moves_one_upper_leaves_nothing_of_ours_in_any_shard(world: World) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    a, b = writers(client, "a", "b")
    theirs = writers(other, "b", "c")
    rival.before_next(lambda: other.compare_and_append_many(next_of(*theirs, word="theirs")))
    with pytest.raises(UpperMismatch, match="shard b"):
        client.compare_and_append_many(next_of(a, b, word="ours"))
    assert (words(world, "a"), words(world, "b"), words(world, "c")) == ([], ["theirs"], ["theirs"])


@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
@pytest.mark.parametrize("config", [persist.Config(timeout_s=1), SMALL.model_copy(update={"timeout_s": 1})])
@pytest.mark.parametrize("meanwhile", ["nothing", "a was read", "a forgot", "a was retired", "both went on"])
def test_after_an_unknown_outcome_the_token_answers_for_all_what_happened(
    world: World, outcome: Outcome, config: persist.Config, meanwhile: str
) -> None:
    """Also when all but one of the writers no longer know."""
    storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set_many", "scan", first=outcome)
    client = world.client(config, plan=storm)
    a, b = writers(client, "a", "b")
    appends = next_of(a, b)
    storm.blows = True
    with pytest.raises(Indeterminate) as told:
        client.compare_and_append_many(appends)
    storm.blows = False
    token = told.value.token
    assert isinstance(token, bytes)
    happened = outcome is Outcome.HAPPENED_UNKNOWN
    if meanwhile == "a was read":
        client.machine("a").fetch()
    elif meanwhile == "a was retired":
        client.machine("a").commit(lambda _state, _now: Retire(a.id))
    else:
        for write in {"a forgot": [a], "both went on": [a, b], "nothing": []}[meanwhile]:
            for _ in range(TOKENS_KEPT + (meanwhile == "a forgot") if happened else 0):
                upper = write.fetch_upper().time or 0
                write.compare_and_append([row(2, "more", upper)], upper, upper + 1)
    if meanwhile == "a was retired" and not happened:
        with pytest.raises(LeaseExpired):
            client.compare_and_append_many(appends, token=token)
    for _ in range(2):
        done = client.compare_and_append_many(appends, token=token)
        assert [(one.count, one.token) for one in done] == [(1, token)] * 2
        assert [one.upper for one in done] == [persist.at(1)] * 2
        if meanwhile in {"nothing", "a was read"}:
            assert [one.seqno for one in done] == [client.inspect(shard).seqno for shard in "ab"]
    for shard in "ab":
        assert words(world, shard).count("w") == 1
        check_world(client, shard)


def test_a_state_full_of_inline_batches_makes_room_and_all_go_in(world: World) -> None:
    client = world.client(persist.Config(inline_bytes=256 * 1024))
    a, b = writers(client, "a", "b")
    for time in range(12):
        noise = random.Random(time).randbytes(90_000).hex()
        done = client.compare_and_append_many(
            [Append(a, [row(1, noise, time)], time, time + 1), Append(b, [row(1, "w", time)], time, time + 1)]
        )
        assert [one.upper.time for one in done] == [time + 1] * 2
        assert client.inspect("a").state.inline_size <= 1024 * 1024
    assert any(part.inline is None for batch in client.inspect("a").state.trace for part in batch.parts)
    for shard in "ab":
        check_world(client, shard)
        assert len(words(world, shard)) == 12


def test_room_in_a_full_state_is_made_by_whoever_filled_it_and_the_others_wait_a_moment(world: World) -> None:
    config = persist.Config(inline_bytes=256 * 1024)
    client, other = world.client(config), world.client(config)
    a, b = writers(client, "a", "b")
    (theirs,) = writers(other, "a")
    noise = random.Random(0).randbytes(90_000).hex()

    class Busy(AroundConsensus):
        scans_until_it_goes_on = 0

        def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
            if operation.kind == "scan" and self.scans_until_it_goes_on:
                self.scans_until_it_goes_on -= 1
                if self.scans_until_it_goes_on == 0:
                    go_on()
            return call()

    def go_on() -> None:
        upper = theirs.fetch_upper().time or 0
        theirs.compare_and_append([row(1, noise, upper)], upper, upper + 1)

    busy = Busy(client.location.consensus)
    client.consensus.inner = busy
    while other.inspect("a").state.inline_size < 900_000:
        go_on()
    a.fetch_upper()
    world.requests.clear()
    busy.scans_until_it_goes_on = 4  # after the fresh read of both, in the second look at whether there is room
    upper = a.upper.time or 0
    appends = [Append(a, [row(1, noise, upper)], upper, upper + 1), Append(b, [row(1)], 0, 1)]
    with pytest.raises(UpperMismatch):
        client.compare_and_append_many(appends)
    assert busy.scans_until_it_goes_on == 0
    assert sum(request.kind == "set" and "/rollup/" not in request.key for request in world.requests) == 1
    assert any(part.inline is None for batch in client.inspect("a").state.trace for part in batch.parts)
    check_world(client, "a")


def test_an_upload_that_fails_leaves_nothing_of_any(world: World) -> None:
    plan = Storm(Outcome.REFUSED, "set")
    client = world.client(SMALL.model_copy(update={"timeout_s": 1}), plan=plan)
    a, b = writers(client, "a", "b")

    def failing() -> Iterator[list[dict[str, Any]]]:
        plan.blows = True
        yield [row(1)]

    with pytest.raises(Determinate):
        client.compare_and_append_many([Append(a, [row(1)], 0, 1), Append(b, failing(), 0, 1)])
    assert [*world.inner.blob.list("")] == []
    plan.blows = False
    client.compare_and_append_many(next_of(a, b))


def test_threads_that_name_the_shards_in_other_orders_never_wait_for_each_other(tmp_path: Path) -> None:
    """All handles are of one client, so that they share machines and their locks."""
    client = persist.open(f"file:{tmp_path}/x")
    names = ["a", "b", "c"]
    handles = [{name: client.open_writer(name, SCHEMA) for name in names} for _ in range(3)]
    for each in handles:
        assert all(write.id for write in each.values())
    barrier, done = threading.Barrier(3), [0, 0, 0]

    def run(who: int) -> None:
        order, rng = names[who:] + names[:who], random.Random(who)
        barrier.wait()
        while done[who] < 25:
            chosen = order[: rng.choice([2, 3])]
            try:
                if rng.random() < 0.3:
                    write = handles[(who + 1) % 3][chosen[0]]
                    at = write.fetch_upper().time or 0
                    write.compare_and_append([row(who, "alone", at)], at, at + 1, timeout=20)
                else:
                    together = next_of(*(handles[who][name] for name in reversed(chosen)), word=f"{who}-{done[who]}")
                    client.compare_and_append_many(together, timeout=20)
                    done[who] += 1
            except UpperMismatch:
                continue

    threads = [threading.Thread(target=run, args=(who,), daemon=True) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [25] * 3, "they wait for each other"
    for name in names:
        check_world(client, name)
    client.close()  # not in a `with` block: it would wait too


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_each_call_is_done_in_all_shards_or_in_none(seed: int) -> None:
    """Two clients, three shards, random calls and faults."""
    rng, world = random.Random(seed), World(seed=seed * 100)
    plan = Chances(seed, {Outcome.HAPPENED_UNKNOWN: 0.1, Outcome.LOST_UNKNOWN: 0.1, Outcome.REFUSED: 0.1}, 0.01)
    plan.stop()
    config = persist.Config(timeout_s=rng.choice([0.01, 0.2, 5.0]), inline_bytes=rng.choice([0, 16 * 1024]))
    clients = [world.client(config, plan=plan) for _ in range(2)]
    handles = [dict(zip("abc", writers(client, *"abc"), strict=True)) for client in clients]
    plan.go_on()
    allowed: dict[str, tuple[set[str], ...]] = {}
    for number in range(25):
        who, shards, word = rng.randrange(2), rng.sample("abc", rng.choice([1, 2, 3])), f"n{number}"
        appends = next_of(*(handles[who][shard] for shard in shards), word=word)
        try:
            clients[who].compare_and_append_many(appends)
            allowed[word] = (set(shards),)
        except Indeterminate:
            allowed[word] = (set(), set(shards))
        except (Determinate, Refused):
            allowed[word] = (set(),)
    plan.stop()
    found = {shard: words(world, shard) for shard in "abc"}
    for word, sets in allowed.items():
        assert {shard for shard in "abc" if word in found[shard]} in sets
    for shard in "abc":
        assert len(found[shard]) == len(set(found[shard]))
        check_world(world.client(), shard)
    world.close()
