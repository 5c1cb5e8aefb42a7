"""Appends that are accepted now and written later: in order, once or not at all, together where that is the same.

Appends that are held back by bytes and age: how many commits they become, and what sends them earlier.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import (
    BufferFull,
    Determinate,
    InvalidUsage,
    TimedOut,
    UpperMismatch,
)
from persist_lib.testing import check_world
from tests.gated import LONG_S, Threaded, wait_for
from tests.worlds import SCHEMA, SMALL, World, row


def test_one_with_a_token_shares_no_commit_and_answers_again(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    tokens = [None, b"1" * 16, b"2" * 16, None, None]
    futures = [t.write.append_async([row(n, time=n)], n, n + 1, token=tokens[n - 1]) for n in range(1, 6)]
    t.gate.open.set()
    seqnos = [future.result(LONG_S).seqno for future in futures]
    assert len(set(seqnos)) == 4
    assert seqnos[3] == seqnos[4]
    again = t.write.compare_and_append([row(2, time=2)], 2, 3, token=tokens[1])
    assert again.seqno == seqnos[1]
    assert t.write.append_async([row(2, time=2)], 2, 3, token=tokens[1]).result(LONG_S).seqno == seqnos[1]
    assert len(t.contents(5)) == 6


def test_what_does_not_continue_what_came_before_is_a_commit_of_its_own(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    right, gap = t.write.append_async([row(1, time=1)], 1, 2), t.write.append_async([row(5, time=5)], 5, 6)
    t.gate.open.set()
    assert right.result(LONG_S).upper == persist.at(2)
    with pytest.raises(UpperMismatch) as told:
        gap.result(LONG_S)
    assert (told.value.expected, told.value.actual) == (persist.at(5), persist.at(2))


def test_what_the_caller_changes_after_the_call_does_not_change_what_was_accepted(
    make: Callable[..., Threaded],
) -> None:
    t = make()
    t.outstanding()
    ids = np.arange(100)
    frame = pd.DataFrame({"id": ids, "word": ["w"] * 100}, copy=False)
    rows = [row(1000, time=2)]
    futures = [
        t.write.append_async(frame, 1, 2),
        t.write.append_async(rows, 2, 3),
        t.write.append_async((frame for _ in range(1)), 3, 4),
    ]
    ids[:] = -1
    frame.loc[:, "id"] = -2
    rows[0]["id"] = -3
    rows.clear()
    t.gate.open.set()
    assert [future.result(LONG_S).count for future in futures] == [100, 1, 100]
    assert min(id_ for id_, _ in t.contents(3)) == 0


def test_a_full_buffer_blocks_or_raises_as_told(make: Callable[..., Threaded]) -> None:
    t = make(persist.Config(buffer_bytes=64 * 1024))
    t.outstanding()
    big = "x" * 40_000
    second = t.write.append_async([row(1, big, 1)], 1, 2)
    with pytest.raises(BufferFull) as told:
        t.write.append_async([row(2, big, 2)], 2, 3, block=False)
    assert told.value.most == 64 * 1024
    assert isinstance(told.value, Determinate), "nothing was accepted, so it can be tried again"
    started = time.monotonic()
    with pytest.raises(TimedOut):
        t.write.append_async([row(2, big, 2)], 2, 3, timeout=0.3)
    assert 0.25 < time.monotonic() - started < 20
    accepted: list[Any] = []
    blocked = threading.Thread(target=lambda: accepted.append(t.write.append_async([row(2, big, 2)], 2, 3)))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    with pytest.raises(BufferFull):  # small enough, but somebody stands in line
        t.write.append_async([row(3, "w", 3)], 3, 4, block=False)
    t.gate.open.set()
    blocked.join(LONG_S)
    assert accepted[0].result(LONG_S).upper == persist.at(3)
    assert second.result().upper == persist.at(2)
    assert len(t.contents(2)) == 3


def test_one_append_beyond_the_whole_buffer_is_accepted_alone(make: Callable[..., Threaded]) -> None:
    t = make(persist.Config(buffer_bytes=64 * 1024))
    t.outstanding()
    t.write.append_async([row(1, "x" * 200_000, 1)], 1, 2, block=False)
    with pytest.raises(BufferFull):
        t.write.append_async([], 2, 3, block=False)
    t.gate.open.set()
    t.write.flush()
    assert len(t.contents(1)) == 2


def test_empty_appends_do_not_pile_up_for_ever(make: Callable[..., Threaded]) -> None:
    t = make(persist.Config(buffer_bytes=64 * 1024))
    t.outstanding()
    for n in range(1, 64):
        t.write.append_async([], n, n + 1, block=False)
    with pytest.raises(BufferFull):
        [t.write.append_async([], n, n + 1, block=False) for n in range(64, 66)]


def test_those_who_wait_for_room_are_served_in_order(make: Callable[..., Threaded]) -> None:
    t = make(persist.Config(buffer_bytes=64 * 1024))
    t.outstanding()
    big = "x" * 64_400
    t.write.append_async([row(1, big, 1)], 1, 2)
    threads = []
    for n in range(2, 8):
        updates = [row(n, big if n % 2 else "w", n)]
        threads.append(threading.Thread(target=t.write.append_async, args=(updates, n, n + 1)))
        threads[-1].start()
        wait_for(lambda n=n: len(t.write._outbox._line) == n - 1)  # type: ignore[misc, union-attr]
    t.gate.open.set()
    for thread in threads:
        thread.join(LONG_S)
    t.write.flush()
    assert t.write.fetch_upper() == persist.at(8)


def test_calls_that_wait_come_after_what_was_accepted_before(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    t.write.append_async([row(1, time=1)], 1, 2)
    done: list[Any] = []
    waiting = threading.Thread(target=lambda: done.append(t.write.compare_and_append([row(2, time=2)], 2, 3)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    t.gate.open.set()
    waiting.join(LONG_S)
    assert done[0].upper == persist.at(3)
    t.write.append_async([row(3, time=3)], 3, 4)
    assert t.write.append([row(4, time=4)], 4, 5).count == 1
    t.write.append_async([row(5, time=5)], 5, 6)
    t.write.advance_upper(7)
    t.write.append_async([row(7, time=7)], 7, 8)
    assert t.write.finish(8).upper == persist.TOP
    assert len(t.contents(9)) == 7


@pytest.mark.parametrize("call", ["compare_and_append", "flush"])
def test_waiting_for_what_was_accepted_before_ends_with_the_timeout(make: Callable[..., Threaded], call: str) -> None:
    t = make()
    first = t.outstanding()
    started = time.monotonic()
    arguments = ([row(1, time=1)], 1, 2) if call == "compare_and_append" else ()
    with pytest.raises(TimedOut, match=r"They continue, .*\. This call did nothing else"):
        getattr(t.write, call)(*arguments, timeout=0.3)
    assert time.monotonic() - started < 20
    t.gate.open.set()
    assert first.result(LONG_S).upper == persist.at(1)
    t.write.compare_and_append([row(1, time=1)], 1, 2)


def test_a_coroutine_awaits_its_appends(make: Callable[..., Threaded]) -> None:
    t = make()

    async def several() -> list[int]:
        futures = [t.write.append_async([row(n, time=n)], n, n + 1, block=False) for n in range(10)]
        return [(await asyncio.wrap_future(future)).count for future in futures]

    assert asyncio.run(several()) == [1] * 10
    assert len(t.contents(9)) == 10


CALLBACKS: dict[str, Callable[[persist.WriteHandle], Any]] = {
    "append_async": lambda write: write.append_async([row(2, "x" * 60_000, 2)], 2, 3),
    "compare_and_append": lambda write: write.compare_and_append([row(2, time=2)], 2, 3),
    "flush": lambda write: write.flush() or write.append_async([row(2, time=2)], 2, 3),  # type: ignore[func-returns-value]
    "close": lambda write: write.close(),
}


@pytest.mark.parametrize("call", CALLBACKS)
def test_what_a_future_calls_back_may_use_the_handle(make: Callable[..., Threaded], call: str) -> None:
    t = make(persist.Config(buffer_bytes=64 * 1024, timeout_s=5))
    first = t.outstanding()
    t.write.append_async([row(1, "x" * 60_000, 1)], 1, 2)
    called = threading.Event()
    failures: list[Exception] = []

    def back(_: Any) -> None:
        try:
            CALLBACKS[call](t.write)
        except Exception as error:  # noqa: BLE001
            failures.append(error)
        called.set()

    first.add_done_callback(back)
    t.gate.open.set()
    assert called.wait(LONG_S)
    assert not failures
    t.write.flush()
    assert t.write.fetch_upper() == persist.at(2 if call == "close" else 3)


def test_a_dropped_handle_writes_what_it_accepted_and_lives_no_longer(make: Callable[..., Threaded]) -> None:
    t = make(batching=persist.Batching(bytes=10**6, age_s=0.2))
    future = t.write.append_async([row(0)], 0, 1)
    gone = weakref.ref(t.write)
    del t.write
    assert future.result(LONG_S).upper == persist.at(1)
    end = time.monotonic() + LONG_S
    while gone() is not None:
        gc.collect()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_without_background_an_append_is_done_when_the_call_returns(world: World) -> None:
    client = world.client()
    before = threading.active_count()
    write = client.open_writer("s", SCHEMA)
    for n in range(5):
        assert write.append_async([row(n, time=n)], n, n + 1).result(0).upper == persist.at(n + 1)
    with pytest.raises(UpperMismatch):
        write.append_async([], 9, 10).result(0)
    assert threading.active_count() == before


def test_a_table_of_the_callers_is_taken_without_copying(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    table = pa.Table.from_pylist([row(1, "x" * 1_000_000, 1)], schema=SCHEMA.updates)
    before = pa.total_allocated_bytes()
    t.write.append_async(table, 1, 2)
    assert pa.total_allocated_bytes() - before < 500_000


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


def test_what_is_held_back_is_sent_by_itself_when_it_is_old(make: Callable[..., Threaded]) -> None:
    t = make(batching=persist.Batching(bytes=10**6, age_s=0.4))
    started = time.monotonic()
    futures = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(10)]
    assert {future.result(LONG_S).seqno for future in futures} == {futures[0].result().seqno}
    assert 0.35 < time.monotonic() - started < 20
    assert t.gate.passed == 1


def test_nothing_is_held_for_longer_than_half_of_its_timeout(make: Callable[..., Threaded]) -> None:
    t = make(batching=persist.Batching(bytes=10**6, age_s=1000))
    started = time.monotonic()
    t.write.append_async([row(0)], 0, 1, timeout=1).result(LONG_S)
    assert time.monotonic() - started < 20


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
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("size", "age_s"), [(0, 1), (-1, 1), (1, -1), (1, float("nan")), (1, float("inf"))])
def test_batching_by_nothing_is_refused(size: int, age_s: float) -> None:
    with pytest.raises(InvalidUsage):
        persist.Batching(bytes=size, age_s=age_s)
