"""Appends that are held back by bytes and age: how many commits they become, and what sends them earlier."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import persist_lib as persist
from persist_lib.errors import (
    InvalidUsage,
)
from persist_lib.testing import check_world
from tests.gated import LONG_S, Threaded
from tests.worlds import SCHEMA, SMALL, World, row


@pytest.mark.slow
@pytest.mark.parametrize(("config", "puts"), [(persist.Config(), 0), (SMALL, 1)])
def test_ten_thousand_appends_are_as_many_commits_as_their_age_says(
    world: World, config: persist.Config, puts: int
) -> None:
    """100 s of an update each 10 ms, held for a second: 100 commits, with an object each or none."""
    client = world.client(config.model_copy(update={"rollup_every": 1000}))
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=10**9, age_s=1.0))
    assert write.id
    world.requests.clear()
    futures = []
    for n in range(10_000):
        futures.append(write.append_async([row(n, time=n)], n, n + 1))
        world.clock.advance(0.01)
    write.flush()
    assert world.count("compare_and_set") == 100
    assert world.count("set") == 100 * puts
    assert world.count() == 100 * (1 + puts)
    counts = [future.result(0).count for future in futures]
    assert sum(counts) == 10_000
    assert len({future.result().seqno for future in futures}) == 100
    check_world(client, "s")


def test_bytes_decide_where_they_come_first(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=100_000, age_s=1000))
    assert write.id
    world.requests.clear()
    for n in range(100):
        write.append_async([row(n, "x" * 9_000, n)], n, n + 1)
    assert world.count("compare_and_set") == 8, "twelve of about 9 kB each"
    write.close()
    assert write.fetch_upper() == persist.at(100)
    check_world(client, "s")


def test_without_batching_nothing_is_held_back(make: Callable[..., Threaded]) -> None:
    t = make()
    t.write.append_async([row(0)], 0, 1).result(LONG_S)


def test_what_is_held_back_is_sent_by_itself_when_it_is_old(make: Callable[..., Threaded]) -> None:
    t = make(batching=persist.Batching(bytes=10**6, age_s=0.4))
    started = time.monotonic()
    futures = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(10)]
    assert {future.result(LONG_S).seqno for future in futures} == {futures[0].result().seqno}
    assert 0.35 < time.monotonic() - started < 5
    assert t.gate.passed == 1


def test_nothing_is_held_for_longer_than_half_of_its_timeout(make: Callable[..., Threaded]) -> None:
    t = make(batching=persist.Batching(bytes=10**6, age_s=1000))
    started = time.monotonic()
    t.write.append_async([row(0)], 0, 1, timeout=1).result(LONG_S)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("urgent", ["flush", "compare_and_append", "full"])
def test_nobody_waits_for_what_is_held_back(make: Callable[..., Threaded], urgent: str) -> None:
    t = make(persist.Config(buffer_bytes=64 * 1024), batching=persist.Batching(bytes=10**9, age_s=1000))
    started = time.monotonic()
    held = t.write.append_async([row(0, "x" * 50_000)], 0, 1)
    if urgent == "flush":
        t.write.flush()
    elif urgent == "compare_and_append":
        t.write.compare_and_append([row(1, time=1)], 1, 2)
    else:
        t.write.append_async([row(1, "x" * 50_000, 1)], 1, 2)
    held.result(LONG_S)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("size", "age_s"), [(0, 1), (-1, 1), (1, -1), (1, float("nan")), (1, float("inf"))])
def test_batching_by_nothing_is_refused(size: int, age_s: float) -> None:
    with pytest.raises(InvalidUsage):
        persist.Batching(bytes=size, age_s=age_s)
