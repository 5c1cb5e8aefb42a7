"""Appends that are accepted now and written later: in order, once or not at all, together where that is the same."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import (
    BufferFull,
    Determinate,
    DiffOverflow,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    NotSent,
    TimedOut,
    UpperMismatch,
)
from persist_lib.location import open_location
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import Outcome, Rival, Script, check_world, contents_of
from tests.worlds import SCHEMA, SMALL, Storm, World, row

T = TypeVar("T")
LONG_S = 20.0
"""Longer than anything here takes."""


class Gate(AroundConsensus):
    """A Consensus whose compare-and-sets wait while it is shut. `waiting` is set when one does."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.open, self.waiting = threading.Event(), threading.Event()
        self.open.set()
        self.passed = 0
        self.outcome: Exception | None = None

    def shut(self) -> None:
        self.open.clear()
        self.waiting.clear()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind == "compare_and_set":
            if not self.open.is_set():
                self.waiting.set()
                assert self.open.wait(LONG_S)
            self.passed += 1
            if self.outcome is not None:
                raise self.outcome
        return call()


class Threaded:
    """A client with threads on a location of its own, whose compare-and-sets pass a gate."""

    def __init__(self, url: str, config: persist.Config, **options: Any) -> None:
        self.location = open_location(url, create=True)
        self.gate = Gate(self.location.consensus)
        self.client = persist.open(replace(self.location, consensus=self.gate), config=config)
        self.other = persist.open(replace(open_location(self.location.url)), runtime=Runtime(background=False))
        self.write = self.client.open_writer("s", SCHEMA, **options)
        assert self.write.id
        self.gate.passed = 0

    def outstanding(self, time: int = 0) -> Any:
        """One append on its way that does not arrive until the gate is opened."""
        self.gate.shut()
        future = self.write.append_async([row(time, time=time)], time, time + 1)
        assert self.gate.waiting.wait(LONG_S)
        return future

    def contents(self, as_of: int) -> Any:
        with self.other.open_reader("s") as read:
            return contents_of(read.snapshot(as_of).to_arrow())

    def close(self) -> None:
        self.gate.open.set()
        self.gate.outcome = None
        self.client.close()
        self.other.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Threaded]]:
    made: list[Threaded] = []

    def begin(config: persist.Config | None = None, **options: Any) -> Threaded:
        made.append(Threaded("memory:", config or persist.Config(), **options))
        return made[-1]

    yield begin
    for threaded in made:
        try:
            threaded.close()
        except (NotSent, UpperMismatch, Determinate, LeaseExpired):
            continue


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_what_is_accepted_while_an_append_is_outstanding_is_one_commit(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    rest = [t.write.append_async([row(n, time=n), row(n, "v", n)], n, n + 1) for n in range(1, 51)]
    assert not any(future.done() for future in (first, *rest))
    t.gate.open.set()
    done = [future.result(LONG_S) for future in rest]
    assert t.gate.passed == 2
    assert first.result().seqno + 1 == done[0].seqno == done[-1].seqno
    assert {(d.upper, d.count, d.token) for d in done} == {(persist.at(51), 2, done[0].token)}
    assert len(t.contents(50)) == 101
    check_world(t.other, "s")


def test_each_future_counts_its_own_updates(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    batches = [
        ([row(9, time=1), row(9, time=1), row(1, time=2), row(1, time=2, diff=-1)], 1, 4),
        ([], 4, 5),
        ([row(n, time=5) for n in range(7)], 5, 6),
        ([row(9, time=9)], 6, persist.TOP),
    ]
    futures = [t.write.append_async(*batch) for batch in batches]
    t.gate.open.set()
    assert [future.result(LONG_S).count for future in futures] == [1, 0, 7, 1]
    assert t.gate.passed == 2
    check_world(t.other, "s")


def test_empty_appends_share_a_commit_too(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    futures = [t.write.append_async([], n, n + 1) for n in range(1, 9)]
    t.gate.open.set()
    assert [future.result(LONG_S).count for future in futures] == [0] * 8
    assert t.gate.passed == 2


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


def test_a_lost_race_fails_all_that_were_sent_together_and_all_behind_and_writes_none(
    make: Callable[..., Threaded],
) -> None:
    """The rival moves upper to exactly where the later ones begin: they must not slip in behind somebody else's."""
    t = make()
    first = t.outstanding()
    rest = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    t.other.open_writer("s", SCHEMA).compare_and_append([row(-1)], 0, 1)
    t.gate.open.set()
    with pytest.raises(UpperMismatch):
        first.result(LONG_S)
    for future in rest:
        with pytest.raises(NotSent) as told:
            future.result(LONG_S)
        assert isinstance(told.value.earlier, UpperMismatch)
        assert isinstance(told.value.__cause__, UpperMismatch)
    assert t.contents(0) == {(-1, "w"): 1}
    # Everybody knows now.
    t.write.append_async([row(1, time=1)], 1, 2).result(LONG_S)
    check_world(t.other, "s")


def test_together_they_fail_with_one_reason_and_an_error_each(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    rest = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    rival = t.other.open_writer("s", SCHEMA)
    first.add_done_callback(lambda _: rival.compare_and_append([row(-1, time=1)], 1, 3))
    t.gate.open.set()
    errors = [future.exception(LONG_S) for future in rest]
    assert all(isinstance(error, UpperMismatch) and error.actual == persist.at(3) for error in errors)
    assert len({id(error) for error in errors}) == 3
    assert t.contents(2) == {(0, "w"): 1, (-1, "w"): 1}


def lose(t: Threaded) -> Any:
    """An append that lost a race to a rival who went exactly as far; nobody has looked at it."""
    first = t.outstanding()
    t.other.open_writer("s", SCHEMA).compare_and_append([row(-1)], 0, 1)
    t.gate.open.set()
    wait_for(first.done)
    return first


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


CALLS: dict[str, Callable[[persist.WriteHandle], Any]] = {
    "append_async": lambda write: write.append_async([row(1, time=1)], 1, 2).result(LONG_S),
    "compare_and_append": lambda write: write.compare_and_append([row(1, time=1)], 1, 2),
    "append": lambda write: write.append([row(1, time=1)], 1, 2),
    "advance_upper": lambda write: write.advance_upper(2),
    "finish": lambda write: write.finish(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_that_nobody_knows_of_fails_the_next_call_once(make: Callable[..., Threaded], call: str) -> None:
    t = make()
    lose(t)
    with pytest.raises(NotSent, match="upper is"):
        CALLS[call](t.write)
    assert t.other.inspect("s").state.upper == persist.at(1)
    CALLS[call](t.write)
    assert t.other.inspect("s").state.upper > persist.at(1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("look", ["result", "exception"])
def test_a_failure_that_somebody_looked_at_fails_nothing(make: Callable[..., Threaded], call: str, look: str) -> None:
    t = make()
    first = lose(t)
    with suppress(UpperMismatch):
        getattr(first, look)()
    CALLS[call](t.write)


def test_flush_and_close_raise_what_it_was(make: Callable[..., Threaded]) -> None:
    t = make()
    lose(t)
    with pytest.raises(UpperMismatch):
        t.write.flush()
    t.write.flush()
    t = make()
    lose(t)
    with pytest.raises(UpperMismatch):
        t.write.close()
    assert not t.other.inspect("s").state.writers.keys() & {"w"}
    t.write.close()


def test_the_end_of_a_block_does_not_hide_what_went_wrong_in_it(make: Callable[..., Threaded]) -> None:
    t = make()

    def fail() -> None:
        with t.write:
            lose(t)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    t = make()

    def fail_in_the_clients() -> None:
        with t.client:
            lose(t)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_clients()
    t = make()
    with pytest.raises(UpperMismatch), t.write:
        lose(t)
    t = make()
    with pytest.raises(UpperMismatch), t.client:
        lose(t)


def test_what_was_accepted_in_a_block_is_written_at_its_end_also_after_an_exception(
    make: Callable[..., Threaded],
) -> None:
    t = make()
    with t.write:
        for n in range(20):
            t.write.append_async([row(n, time=n)], n, n + 1)
    assert len(t.contents(19)) == 20
    t = make()

    def fail() -> None:
        with t.write:
            t.write.append_async([row(0)], 0, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(t.contents(0)) == 1
    with pytest.raises(LeaseExpired):
        t.write.append_async([row(1, time=1)], 1, 2)


def test_closing_fails_what_does_not_make_it_in_time(make: Callable[..., Threaded]) -> None:
    t = make(persist.Config(timeout_s=0.3))
    first = t.outstanding()
    second = t.write.append_async([row(1, time=1)], 1, 2)
    opening = threading.Timer(1.0, t.gate.open.set)
    opening.start()
    with pytest.raises(TimedOut, match="1 appends that it had accepted were not sent") as told:
        t.write.close()
    opening.join()
    assert "go on" not in told.value.message, "they do not"
    assert "Nothing of those was written" in told.value.message
    assert first.result(LONG_S).upper == persist.at(1), "it was on its way, and its lease was kept so long"
    with pytest.raises(NotSent, match="closed before its turn came"):
        second.result(LONG_S)
    assert len(t.contents(0)) == 1


def test_wrong_updates_are_refused_at_the_call_and_concern_nothing_else(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    most = 2**62
    for wrong, error in [
        (([row(1, time=7)], 1, 2), InvalidUsage),
        (([{"id": 1}], 1, 2), InvalidUsage),
        (([], 2, 1), InvalidUsage),
        (([row(1, time=1, diff=most)] * 3, 1, 2), DiffOverflow),
    ]:
        with pytest.raises(error):
            t.write.append_async(*wrong)
    second = t.write.append_async([row(1, time=1, diff=most), row(2, time=1, diff=most)] * 1, 1, 2)
    t.gate.open.set()
    assert first.result(LONG_S).count == 1
    assert second.result(LONG_S).count == 2


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
    assert 0.25 < time.monotonic() - started < 5
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
    with pytest.raises(TimedOut, match=r"They go on, .*\. This call did nothing else"):
        getattr(t.write, call)(*arguments, timeout=0.3)
    assert time.monotonic() - started < 5
    t.gate.open.set()
    assert first.result(LONG_S).upper == persist.at(1)
    t.write.compare_and_append([row(1, time=1)], 1, 2)


def test_one_whose_timeout_has_passed_when_its_turn_comes_is_not_sent(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    late = t.write.append_async([row(1, time=1)], 1, 2, timeout=0.05)
    behind = t.write.append_async([row(2, time=2)], 2, 3)
    time.sleep(0.1)
    t.gate.open.set()
    first.result(LONG_S)
    with pytest.raises(TimedOut):
        late.result(LONG_S)
    # It may have gone along with the one whose time had come, and fails likewise.
    with pytest.raises((NotSent, TimedOut)):
        behind.result(LONG_S)
    assert t.write.fetch_upper() == persist.at(1)


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("config", [persist.Config(timeout_s=1), SMALL.model_copy(update={"timeout_s": 1})])
def test_the_token_of_those_sent_together_decides_all_of_them(
    world: World, happens: bool, asynchronous: bool, config: persist.Config
) -> None:
    outcome = Outcome.HAPPENED_UNKNOWN if happens else Outcome.LOST_UNKNOWN
    storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan", first=outcome)
    client = world.client(config, plan=storm)
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=10**6, age_s=100))
    write.compare_and_append([row(0)], 0, 1)
    batches = [([row(n, time=n)] * (n != 2) + [row(-n, time=n)], n, n + 1) for n in range(1, 5)]
    futures = [write.append_async(*batch, timeout=1) for batch in batches]
    storm.blows = True
    with pytest.raises(Indeterminate):
        write.flush()
    storm.blows = False
    errors = [future.exception() for future in futures]
    tokens = [error.token for error in errors if isinstance(error, Indeterminate)]
    assert len(set(tokens)) == 1, "they have one token, and each its times"
    # The last one first, and one twice.
    for n in (3, 0, 3, 1, 2):
        if asynchronous:
            future = write.append_async(*batches[n], token=tokens[n])  # type: ignore[arg-type]
            write.flush()
            done = future.result()
        else:
            done = write.compare_and_append(*batches[n], token=tokens[n])  # type: ignore[arg-type]
        assert (done.count, done.upper) == (1 if n == 1 else 2, persist.at(5))
    read = world.client().open_reader("s")
    assert len(contents_of(read.snapshot(4).to_arrow())) == 8
    check_world(client, "s")


def test_what_did_not_happen_is_told_to_all_by_any_token(world: World) -> None:
    storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan")
    client = world.client(persist.Config(timeout_s=1), plan=storm)
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=10**6, age_s=100))
    write.compare_and_append([row(0)], 0, 1)
    batches = [([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    futures = [write.append_async(*batch) for batch in batches]
    storm.blows = True
    with pytest.raises(Indeterminate):
        write.flush()
    storm.blows = False
    world.client().open_writer("s", SCHEMA).compare_and_append([row(-1, time=1)], 1, 2)
    for n in (1, 0, 2):
        error = futures[n].exception()
        assert isinstance(error, Indeterminate)
        with pytest.raises(UpperMismatch):
            write.compare_and_append(*batches[n], token=error.token)  # type: ignore[arg-type]
    assert len(contents_of(world.client().open_reader("s").snapshot(1).to_arrow())) == 2


def test_a_cancelled_append_is_not_sent_and_neither_is_what_follows(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    futures = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 5)]
    assert futures[1].cancel()
    assert not first.cancel(), "it is on its way"
    t.gate.open.set()
    assert futures[0].result(LONG_S).upper == persist.at(2)
    for future in futures[2:]:
        with pytest.raises(NotSent, match="cancelled"):
            future.result(LONG_S)
    assert t.write.fetch_upper() == persist.at(2)
    t.write.append_async([], 2, 3).result(LONG_S)


def test_the_last_one_cancelled_fails_nothing(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    assert t.write.append_async([row(1, time=1)], 1, 2).cancel()
    t.gate.open.set()
    t.write.flush()
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


def test_an_expired_writer_fails_what_it_has_and_registers_anew(world: World) -> None:
    client = world.client(persist.Config(lease_ms=1000))
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=10**6, age_s=100))
    write.compare_and_append([row(0)], 0, 1)
    futures = [write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 3)]
    world.clock.advance(2)
    assert world.client().expire("s").overdue
    with pytest.raises(LeaseExpired):
        write.flush()
    assert all(isinstance(future.exception(), LeaseExpired) for future in futures)
    write.append_async([row(1, time=1)], 1, 2)
    write.flush()
    assert write.fetch_upper() == persist.at(2)


def test_without_background_an_append_is_done_when_the_call_returns(world: World) -> None:
    client = world.client()
    before = threading.active_count()
    write = client.open_writer("s", SCHEMA)
    for n in range(5):
        assert write.append_async([row(n, time=n)], n, n + 1).result(0).upper == persist.at(n + 1)
    with pytest.raises(UpperMismatch):
        write.append_async([], 9, 10).result(0)
    assert threading.active_count() == before


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


def test_four_threads_with_one_counter_lose_nothing_and_keep_the_order(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(buffer_bytes=64 * 1024)) as client:
        write = client.open_writer("s", SCHEMA)
        counter, lock, futures = iter(range(10**6)), threading.Lock(), []

        def work(id_: int) -> None:
            for _ in range(250):
                with lock:
                    n = next(counter)
                    futures.append(write.append_async([row(id_, f"{n}", n)], n, n + 1))

        threads = [threading.Thread(target=work, args=(id_,)) for id_ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        write.flush()
        done = [future.result(0) for future in futures]
        assert all(a.seqno <= b.seqno for a, b in pairwise(done))
        assert len({d.seqno for d in done}) < 1000, "they shared commits"
        with client.open_reader("s") as read:
            found = contents_of(read.snapshot(999).to_arrow())
        assert sorted(int(word) for _, word in found) == list(range(1000))
        check_world(client, "s")


def test_appends_that_wait_use_no_thread(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data") as client:
        write = client.open_writer("s", SCHEMA)
        assert write.id
        before = threading.active_count()
        write.compare_and_append([row(0)], 0, 1)
        write.append([row(1, time=1)], 1, 2)
        assert threading.active_count() == before


def test_a_forked_child_hangs_in_nothing_and_its_parent_goes_on(tmp_path: Path) -> None:
    location = open_location(f"file:{tmp_path}/data", create=True)
    gate = Gate(location.consensus)
    client = persist.open(replace(location, consensus=gate))
    write = client.open_writer("s", SCHEMA)
    assert write.id
    gate.shut()
    futures = [write.append_async([row(0)], 0, 1)]
    assert gate.waiting.wait(LONG_S)
    futures += [write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    told = tmp_path / "told"
    if (child := os.fork()) == 0:
        try:
            for future in futures:
                with pytest.raises(Indeterminate, match="forked"):
                    future.result(1)
            write.flush(timeout=1)
            told.write_text("well")
        finally:
            os._exit(0)
    wait_for_child(child)
    gate.open.set()
    assert [future.result(LONG_S).upper for future in futures][-1] == persist.at(4)
    if (child := os.fork()) == 0:
        try:
            done = write.append_async([row(4, time=4)], 4, 5).result(10)
            write.compare_and_append([row(5, time=5)], 5, 6)
            told.write_text(f"{told.read_text()} {done.upper}")
        finally:
            os._exit(0)
    wait_for_child(child)
    assert told.read_text() == "well [5]"
    assert write.fetch_upper() == persist.at(6)
    client.close()


def test_a_child_forked_in_the_middle_of_a_commit_can_append(tmp_path: Path) -> None:
    location = open_location(f"file:{tmp_path}/data", create=True)
    gate = Gate(location.consensus)
    client = persist.open(replace(location, consensus=gate))
    write = client.open_writer("s", SCHEMA)
    assert write.id
    gate.shut()
    outstanding = write.append_async([row(0)], 0, 1)
    assert gate.waiting.wait(LONG_S)
    told = tmp_path / "told"
    if (child := os.fork()) == 0:
        try:
            gate.open.set()
            done = write.append_async([row(1)], 0, 1).result(10)
            told.write_text(f"{write.compare_and_append([row(2, time=1)], 1, 2, timeout=10).upper} {done.upper}")
        finally:
            os._exit(0)
    wait_for_child(child)
    assert told.read_text() == "[2] [1]"
    gate.open.set()
    assert isinstance(outstanding.exception(LONG_S), UpperMismatch)
    client.close()


def wait_for_child(child: int) -> None:
    end = time.monotonic() + LONG_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)


SCRIPT = """
import sys
import persist_lib as persist
schema = persist.Schema(key={{"id": "int64"}}, value={{"word": "string"}})
config = persist.Config(inline_bytes={inline}, part_bytes=64 * 1024, timeout_s=3600)
client = persist.open("file:{path}", config=config)
write = client.open_writer("s", schema, batching={batching})
for n in range(50):
    write.append_async([{{"id": i, "word": "x" * 100, "_time": n}} for i in range(200)], n, n + 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["None", "persist.Batching(bytes=10**9, age_s=3600)"])
@pytest.mark.parametrize("inline", [0, 16 * 1024])
def test_a_program_that_just_ends_has_written_what_it_accepted(tmp_path: Path, batching: str, inline: int) -> None:
    """At once: what is held back waits for nothing more."""
    script = SCRIPT.format(path=tmp_path / "data", batching=batching, inline=inline)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    with persist.open(f"file:{tmp_path}/data") as client:
        assert client.inspect("s").state.upper == persist.at(50)
        check_world(client, "s")


def test_a_rival_that_wins_every_other_race_never_makes_an_append_go_missing(world: World) -> None:
    """Whoever appends at the upper that a failure tells loses nothing and doubles nothing."""
    rival = Rival(world.inner.consensus)
    write = world.client(rival=rival).open_writer("s", SCHEMA)
    assert write.id
    other = world.client().open_writer("s", SCHEMA)
    upper, mine = 0, 0
    for n in range(40):
        if n % 2:
            rival.before_next(lambda: other.advance_upper((other.fetch_upper().time or 0) + 1))
        try:
            upper = write.append_async([row(n, time=upper)], upper, upper + 1).result(0).upper.time or 0
            mine += 1
        except UpperMismatch as error:
            upper = error.actual.time  # type: ignore[attr-defined]
    assert mine == 20
    assert upper == 40
    found = contents_of(world.client().open_reader("s").snapshot(39).to_arrow())
    assert sorted(id_ for id_, _ in found) == list(range(0, 40, 2))


def test_a_failed_upload_fails_those_sent_together_and_leaves_nothing(world: World) -> None:
    plan = Script({("set", n): Outcome.REFUSED for n in range(1, 200)})
    client = world.client(SMALL.model_copy(update={"timeout_s": 0.2}), plan=plan)
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=10**6, age_s=100))
    futures = [write.append_async([row(n, time=n)], n, n + 1) for n in range(3)]
    with pytest.raises(Determinate):
        write.flush()
    assert all(type(future.exception()) is Determinate for future in futures)
    assert client.inspect("s").state.upper == persist.at(0)


def test_a_table_of_the_callers_is_taken_without_copying(make: Callable[..., Threaded]) -> None:
    t = make()
    t.outstanding()
    table = pa.Table.from_pylist([row(1, "x" * 1_000_000, 1)], schema=SCHEMA.updates)
    before = pa.total_allocated_bytes()
    t.write.append_async(table, 1, 2)
    assert pa.total_allocated_bytes() - before < 500_000
