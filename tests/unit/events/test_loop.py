"""The event loop: what is released, when, in which order, and what each submitter gets when it stops."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import NotReleased
from persist_lib.events.api import Program
from persist_lib.events.loop import Loop
from persist_lib.events.recovery import replay
from persist_lib.events.repair import set_released
from tests.gated import wait_for
from tests.unit.events.programs import LONG_S, Counter, Gate, raising
from tests.unit.events.stored import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def counter() -> Counter:
    return Counter()


def told(future: Future[Any]) -> BaseException:
    error = future.exception(LONG_S)
    assert error is not None
    return error


def test_an_effect_waits_until_its_event_is_durable(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program) as loop:
        store.hold()
        first, second = loop.submit(b"a"), loop.submit(b"b")
        wait_for(lambda: counter.computed == [1, 2])
        time.sleep(0.05)
        assert counter.released == []
        assert not first.done()
        store.let(1)
        assert first.result(LONG_S).event_id == 1
        time.sleep(0.05)
        assert counter.released == ["1:a"]
        assert not second.done()
        store.let()
    assert counter.released == ["1:a", "2:b"]
    assert store.events == [b"a", b"b"]


def test_an_effect_waits_until_its_event_is_computed_and_events_are_persisted_meanwhile(
    store: MemoryStore, counter: Counter
) -> None:
    gate = Gate()
    counter.on_step = gate
    with Loop(store, counter.program) as loop:
        futures = [loop.submit(b"a") for _ in range(10)]
        wait_for(lambda: len(store.events) == 10)
        assert counter.released == []
        gate.open()
        assert [future.result(LONG_S).event_id for future in futures] == [*range(1, 11)]


def test_what_is_durable_late_keeps_the_effects_of_later_events_in_order() -> None:
    """The store acknowledges in order, and two stores as one may not: the loop does not rely on it."""
    store, counter = MemoryStore(), Counter()
    with Loop(store, counter.program) as loop:
        store.hold()
        futures = [loop.submit(word) for word in (b"a", b"b", b"c")]
        wait_for(lambda: len(store.held or []) == 3)
        assert store.held is not None
        store.held.reverse()
        store.let(2)
        time.sleep(0.05)
        assert counter.released == []
        store.let()
        for future in futures:
            future.result(LONG_S)
    assert counter.released == ["1:a", "2:b", "3:c"]


def test_a_slow_release_keeps_nothing_from_being_durable(store: MemoryStore, counter: Counter) -> None:
    gate = Gate()
    counter.on_release = gate
    with Loop(store, counter.program) as loop:
        for _ in range(50):
            loop.submit(b"a")
        wait_for(lambda: len(store.events) == 50)
        assert counter.released == []
        gate.open()
    assert len(counter.released) == 50


@pytest.mark.parametrize("bounds", [{"most_events": 3}, {"most_bytes": 3 * (1000 + 256)}])
def test_as_many_events_or_bytes_as_are_allowed_are_under_way(
    store: MemoryStore, counter: Counter, bounds: dict[str, int]
) -> None:
    gate, event = Gate(), b"x" * 1000
    counter.on_release = gate
    with Loop(store, counter.program, **bounds) as loop:  # type: ignore[arg-type]
        for _ in range(3):
            loop.submit(event)
        with pytest.raises(persist.BufferFull, match="not accepted"):
            loop.submit(event, block=False)
        with pytest.raises(persist.TimedOut, match="not accepted"):
            loop.submit(event, timeout=0.05)
        assert loop.accepted == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(loop.submit(event).event_id))
        thread.start()
        time.sleep(0.05)
        assert later == []
        gate.open()
        thread.join(LONG_S)
        assert later == [4]


def test_an_event_that_is_larger_than_the_bound_is_accepted_alone(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program, most_bytes=10) as loop:
        assert [loop.submit(b"x" * 100).result(LONG_S).event_id for _ in range(2)] == [1, 2]


def test_whoever_waits_for_room_gets_it_in_turn(store: MemoryStore, counter: Counter) -> None:
    gate = Gate()
    counter.on_release = gate
    with Loop(store, counter.program, most_events=1) as loop:
        loop.submit(b"0")
        threads = []
        for n in range(1, 6):
            threads.append(threading.Thread(target=loop.submit, args=(str(n).encode(),)))
            threads[-1].start()
            wait_for(lambda n=n: len(loop._flight._line) == n)  # type: ignore[misc]
        gate.open()
        for thread in threads:
            thread.join(LONG_S)
    assert store.events == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_a_computation_that_fails_stops_the_loop_with_nothing_of_it_or_after_it_released(store: MemoryStore) -> None:
    counter = Counter()
    failure = ValueError("no such account")
    counter.on_step = raising(failure, 3)
    loop = Loop(store, counter.program)
    store.hold()
    futures = [loop.submit(b"a") for _ in range(5)]
    wait_for(lambda: loop._flight.failing is not None)
    with pytest.raises(persist.NotSent, match="no such account"):
        loop.submit(b"a")
    store.let()
    assert [future.result(LONG_S).event_id for future in futures[:2]] == [1, 2]
    third = told(futures[2])
    assert isinstance(third, NotReleased)
    assert third.__cause__ is failure
    assert third.event_id == 3
    written = len(store.events)
    for future in futures[3:]:
        assert isinstance(told(future), NotReleased if future.event_id <= written else persist.NotSent)
    assert counter.released == ["1:a", "2:a"]
    with pytest.raises(NotReleased, match="event 3 is in the log"):
        loop.stop()
    loop.stop()
    assert loop.failure is not None


def test_nothing_is_written_any_more_behind_a_failure(
    store: MemoryStore, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event whose future says that it was not written must not come into the log after that."""
    stepping, writing = Gate(), Gate()

    def fail(_: object) -> None:
        stepping()
        raise ValueError("no")

    counter.on_step = fail
    loop = Loop(store, counter.program)
    write = loop._writer.write

    def slow(id_: int, payload: bytes) -> Future[None]:
        if id_ == 2:
            writing()
        return write(id_, payload)

    monkeypatch.setattr(loop._writer, "write", slow)
    futures = [loop.submit(word) for word in (b"a", b"b", b"c")]
    assert writing.has_come.wait(LONG_S)
    stepping.open()
    wait_for(lambda: loop._flight.failing is not None)
    writing.open()
    assert [type(told(future)) for future in futures] == [NotReleased, NotReleased, persist.NotSent]
    with pytest.raises(NotReleased):
        loop.stop()
    assert store.events == [b"a", b"b"]


def test_a_start_stops_at_the_event_that_cannot_be_computed_until_the_program_is_mended(store: MemoryStore) -> None:
    broken, mended = Counter(), Counter()
    broken.on_step = raising(KeyError("x"), 2)
    loop = Loop(store, broken.program)
    futures = [loop.submit(b"a"), loop.submit(b"b")]
    assert isinstance(told(futures[1]), NotReleased)
    with pytest.raises(NotReleased):
        loop.stop()
    for _ in range(2):
        with pytest.raises(NotReleased, match="event 2 is in the log and cannot be computed"):
            Loop(store, broken.program)
    with Loop(store, mended.program):
        assert mended.released == ["2:b"]
    assert broken.released == ["1:a"]


@pytest.mark.parametrize(
    ("failure", "second"),
    [
        (persist.DiskFull("full", path="/x", free=0), persist.DiskFull),
        (persist.Indeterminate("lost"), persist.Indeterminate),
        (OSError("odd"), persist.Indeterminate),
    ],
)
def test_a_write_that_fails_stops_the_loop_with_nothing_of_it_or_after_it_released(
    store: MemoryStore, counter: Counter, failure: Exception, second: type[Exception]
) -> None:
    store.fail = lambda id_: failure if id_ == 2 else None
    loop = Loop(store, counter.program)
    store.hold()
    futures = [loop.submit(b"a") for _ in range(3)]
    wait_for(lambda: len(store.held or []) == 3)
    store.let()
    assert futures[0].result(LONG_S).event_id == 1
    assert isinstance(told(futures[1]), second)
    assert isinstance(told(futures[2]), persist.NotSent)
    assert counter.released == ["1:a"]
    with pytest.raises(second):
        loop.stop()
    assert store.events == [b"a"]


def test_an_event_that_the_store_does_not_take_at_once_is_told_as_the_store_says(
    store: MemoryStore, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(store, counter.program)

    def refuse(*_: object, **__: object) -> None:
        raise persist.NotSent("the writer has failed before", earlier="x")

    monkeypatch.setattr(loop._writer, "write", refuse)
    assert isinstance(told(loop.submit(b"a")), persist.NotSent)
    with pytest.raises(persist.NotSent):
        loop.stop()
    assert counter.computed == []


def test_an_effect_that_cannot_be_released_stops_the_loop_and_comes_again_with_the_same_key(store: MemoryStore) -> None:
    keys: list[str] = []

    def release(effect: Any) -> None:
        keys.append(effect.key)
        if effect.event_id == 2 and effect.number == 1 and len(keys) < 6:
            raise ConnectionError("refused")

    program: Program[int] = Program(lambda state, event: (state + 1, ["x", "y"]), int, release)
    loop = Loop(store, program)
    store.hold()
    futures = [loop.submit(b"a"), loop.submit(b"b"), loop.submit(b"c")]
    wait_for(lambda: len(store.held or []) == 3)
    store.let()
    assert futures[0].result(LONG_S).event_id == 1
    second, third = told(futures[1]), told(futures[2])
    assert isinstance(second, NotReleased)
    assert (second.event_id, second.number) == (2, 1)
    assert isinstance(second.__cause__, ConnectionError)
    assert isinstance(third, NotReleased)
    with pytest.raises(NotReleased, match="could not be released"):
        loop.stop()
    assert [key.rpartition(".")[0] for key in keys] == ["1.0", "1.1", "2.0", "2.1"]
    before = list(keys)
    keys += [""]
    with Loop(store, program):
        pass
    assert keys[5:7] == before[2:4], "the effects of the event that was not wholly released come again, alike"
    assert [key.rpartition(".")[0] for key in keys[5:]] == ["2.0", "2.1", "3.0", "3.1"]


def test_a_start_releases_again_what_is_behind_the_mark_and_nothing_up_to_it(store: MemoryStore) -> None:
    counter, again = Counter(), Counter()
    with Loop(store, counter.program) as loop:
        for word in (b"a", b"b", b"c"):
            loop.submit(word)
    store.marks["released"] = b'{"through":1}'
    store.snapshots.clear()
    with Loop(store, again.program):
        assert again.released == ["2:b", "3:c"], "before any new event is taken"
    assert again.computed == [1, 2, 3]
    assert store.marks["released"] == b'{"through":3}'


def test_the_mark_is_written_after_the_effect(store: MemoryStore, counter: Counter) -> None:
    seen: list[tuple[str, bytes | None]] = []
    counter.on_release = lambda effect: seen.append((effect.value, store.marks.get("released")))
    with Loop(store, counter.program, mark_every_s=0) as loop:
        for word in (b"a", b"b"):
            loop.submit(word).result(LONG_S)
            wait_for(lambda: "mark released" in store.written)
    assert seen == [("1:a", None), ("2:b", b'{"through":1}')]


def test_a_start_that_cannot_release_an_effect_says_so_and_the_next_one_goes_on_there(store: MemoryStore) -> None:
    counter, again = Counter(snapshots=False), Counter(snapshots=False)
    with Loop(store, counter.program) as loop:
        for word in (b"a", b"b", b"c"):
            loop.submit(word)
    store.marks.clear()
    again.on_release = raising(ConnectionError("refused"), 2)
    with pytest.raises(NotReleased, match="effect number 0 could not be released"):
        Loop(store, again.program)
    assert store.marks["released"] == b'{"through":1}'
    again.on_release = lambda _: None
    with Loop(store, again.program):
        pass
    assert again.released == ["1:a", "2:b", "3:c"]


def test_a_mark_that_does_not_decode_is_damage(store: MemoryStore, counter: Counter) -> None:
    Loop(store, counter.program).stop()
    store.marks["released"] = b"nonsense"
    with pytest.raises(persist.Corrupt, match="the mark 'released'"):
        Loop(store, counter.program)


def test_an_operator_s_mark_ends_a_loop_and_is_what_the_next_one_goes_by(store: MemoryStore, counter: Counter) -> None:
    loop = Loop(store, counter.program)
    counter.on_release = raising(ConnectionError("gone for good"), 2)
    futures = [loop.submit(word) for word in (b"a", b"b")]
    told(futures[1])
    with pytest.raises(NotReleased):
        loop.stop()
    with pytest.raises(NotReleased):
        Loop(store, counter.program)
    with pytest.raises(persist.InvalidUsage, match="no event 3"):
        set_released(store, 3)
    assert set_released(store, 2) == 1
    with Loop(store, counter.program) as loop:
        assert set_released(store, 2) == 2
        assert isinstance(told(loop.submit(b"c")), persist.Fenced)
        with pytest.raises(persist.Fenced):
            loop.stop()
    assert counter.released == ["1:a"]


def test_the_state_is_replayed_as_of_an_event_without_releasing_anything(store: MemoryStore) -> None:
    counter = Counter(snapshot_every=1)
    with Loop(store, counter.program, mark_every_s=0) as loop:
        for _ in range(4):
            loop.submit(b"a").result(LONG_S)
    again = Counter()
    assert replay(store, again.program) == ([1, 2, 3, 4], 4)
    assert replay(store, again.program, through=0) == ([], 0)
    assert replay(store, again.program, through=2) == ([1, 2], 2)
    assert replay(store, again.program, snapshots=False) == ([1, 2, 3, 4], 4)
    assert again.computed[-4:] == [1, 2, 3, 4]
    assert again.released == []
    with pytest.raises(persist.InvalidUsage, match="no event 5"):
        replay(store, again.program, through=5)
    with pytest.raises(persist.NotFound):
        replay(MemoryStore(), again.program)


def test_a_start_does_not_take_a_snapshot_beyond_the_mark(store: MemoryStore) -> None:
    """The events between the mark and the snapshot must be computed, as their effects may not have been released."""
    counter, again = Counter(), Counter()
    with Loop(store, counter.program) as loop:
        for word in (b"a", b"b", b"c"):
            loop.submit(word)
    assert list(store.snapshots) == [3]
    store.snapshots[1] = b"1\x001"
    store.marks["released"] = b'{"through":2}'
    with Loop(store, again.program):
        assert again.computed == [2, 3]
        assert again.released == ["3:c"]


def test_a_mark_beyond_the_log_is_refused_as_the_log_has_lost_events(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program) as loop:
        loop.submit(b"a")
        loop.submit(b"b")
    del store.events[1:]
    with pytest.raises(persist.HistoryRegressed, match="ends at event 1, and effects were released up to event 2"):
        Loop(store, counter.program)
    assert store.events == [b"a"]
    assert len(counter.released) == 2


def test_snapshots_are_of_durable_events_only_and_are_taken_before_the_next_step_changes_the_state() -> None:
    store, counter = MemoryStore(), Counter(snapshot_every=2)
    with Loop(store, counter.program, mark_every_s=0) as loop:
        store.hold()
        futures = [loop.submit(b"a") for _ in range(5)]
        wait_for(lambda: counter.computed == [1, 2, 3, 4, 5])
        assert not [one for one in store.written if one.startswith("snapshot")]
        store.let()
        for future in futures:
            future.result(LONG_S)
        wait_for(lambda: 2 in store.snapshots)
        assert store.snapshots[2] == b"1\x001,2"
        at = store.written.index
        assert at("event 2") < at("snapshot 2")
    assert store.snapshots[5] == b"1\x001,2,3,4,5", "and one when it stops"
    again = Counter()
    with Loop(store, again.program) as loop:
        assert again.computed == []
        loop.submit(b"a").result(LONG_S)
    assert store.snapshots[6] == b"1\x001,2,3,4,5,6"


def test_a_step_that_changes_the_state_and_raises_leaves_no_trace_of_it(store: MemoryStore) -> None:
    counter, again = Counter(snapshot_every=1), Counter()
    counter.on_step = raising(ValueError("late"), 3)
    loop = Loop(store, counter.program, mark_every_s=0)
    futures = [loop.submit(b"a") for _ in range(3)]
    told(futures[2])
    with pytest.raises(NotReleased):
        loop.stop()
    assert max(store.snapshots) <= 2
    with Loop(store, again.program) as loop:
        assert loop._state == [1, 2, 3]


def test_snapshots_of_another_version_are_passed_over(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program) as loop:
        loop.submit(b"a")
    newer = Counter(version="2")
    with Loop(store, newer.program):
        assert newer.computed == [1]
    assert newer.released == []


def test_an_encode_that_raises_costs_only_the_snapshot(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    def encode(_: int) -> bytes:
        raise TypeError("not like that")

    program: Program[int] = Program(lambda state, _: (state + 1, []), int, print, encode, int, snapshot_every=1)
    with Loop(store, program) as loop:
        loop.submit(b"a").result(LONG_S)
    assert not store.snapshots
    assert "no snapshot of the state after event 1" in caplog.text


def test_a_mark_that_cannot_be_stored_stops_the_loop_and_is_told(store: MemoryStore, counter: Counter) -> None:
    loop = Loop(store, counter.program)
    store.fail_marks = persist.DiskFull("full", path="/x", free=0)
    assert loop.submit(b"a").result(LONG_S).event_id == 1

    def is_refused() -> bool:
        try:
            loop.submit(b"b")
        except persist.NotSent:
            return True
        return False

    wait_for(is_refused)
    with pytest.raises((persist.DiskFull, persist.NotSent)):
        loop.stop()


def test_a_graceful_stop_finishes_what_was_accepted_and_takes_no_more(store: MemoryStore, counter: Counter) -> None:
    gate = Gate()
    counter.on_release = gate
    loop = Loop(store, counter.program)
    futures = [loop.submit(b"a") for _ in range(3)]
    with pytest.raises(persist.TimedOut, match="effects of 3 accepted events"):
        loop.stop(timeout=0.05)
    with pytest.raises(persist.InvalidUsage, match="stopped"):
        loop.submit(b"b")
    gate.open()
    loop.stop()
    assert all(future.done() for future in futures)
    assert store.marks["released"] == b'{"through":3}'
    loop.stop()
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("persist-loop")])


def test_a_failure_in_the_block_is_what_the_block_raises(store: MemoryStore) -> None:
    counter = Counter()
    counter.on_release = raising(OSError("gone"), 1)
    with pytest.raises(NotReleased, match="gone"), Loop(store, counter.program) as loop:
        loop.submit(b"a").result(LONG_S)
    with pytest.raises(ZeroDivisionError), Loop(MemoryStore(), counter.program):
        _ = 1 / 0


def test_release_may_submit_events_also_when_there_is_no_room(store: MemoryStore) -> None:
    loops: list[Loop[int]] = []

    def release(effect: Any) -> None:
        if effect.value == b"ask":
            loops[0].submit(b"answer")

    program: Program[int] = Program(lambda state, event: (state, [event.payload]), int, release)
    with Loop(store, program, most_events=1) as loop:
        loops.append(loop)
        for _ in range(5):
            loop.submit(b"ask").result(LONG_S)
        wait_for(lambda: store.events.count(b"answer") == 5)


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_loop_that_gets_no_threads_leaves_none(
    store: MemoryStore, counter: Counter, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    started = list[object]()
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("persist-loop"):
            if len(started) == threads:
                raise RuntimeError("can't start new thread")
            started.append(self)
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError):
            Loop(store, counter.program)
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("persist-loop")])
    with Loop(store, counter.program) as loop:
        assert loop.submit(b"a").result(LONG_S).event_id == 1


def test_release_may_stop_the_loop_which_finishes_what_was_accepted(store: MemoryStore, counter: Counter) -> None:
    loop = Loop(store, counter.program)
    counter.on_release = lambda effect: loop.stop() if effect.event_id == 1 else None
    store.hold()
    futures = [loop.submit(b"a") for _ in range(3)]
    store.let()
    assert [future.result(LONG_S).event_id for future in futures] == [1, 2, 3]
    with pytest.raises(persist.InvalidUsage, match="stopped"):
        loop.submit(b"b")
    loop.stop()
    assert store.marks["released"] == b'{"through":3}'


def test_a_successor_fences_a_loop_which_releases_nothing_that_is_not_in_the_log(store: MemoryStore) -> None:
    first, second = Counter(), Counter()
    loop = Loop(store, first.program)
    loop.submit(b"a").result(LONG_S)
    with Loop(store, second.program) as newer:
        error = told(loop.submit(b"b"))
        assert isinstance(error, persist.Fenced)
        newer.submit(b"c").result(LONG_S)
    with pytest.raises(persist.Fenced):
        loop.stop()
    assert store.events == [b"a", b"c"]
    assert first.released == ["1:a"]
    assert second.released == ["2:c"]


def test_a_caller_may_change_its_buffer_as_soon_as_the_event_is_accepted(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program) as loop:
        store.hold()
        buffer = bytearray(b"abc")
        future = loop.submit(buffer)
        buffer[:] = b"xyz"
        store.let()
        future.result(LONG_S)
    assert store.events == [b"abc"]
    assert counter.released == ["1:abc"]


def test_a_future_cannot_be_cancelled_as_its_event_is_on_its_way(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program) as loop:
        store.hold()
        future = loop.submit(b"a")
        assert not future.cancel()
        store.let()
        assert future.result(LONG_S).effects[0].value == "1:a"


def test_a_forked_child_has_no_loop_and_the_parent_goes_on(store: MemoryStore, counter: Counter) -> None:
    with Loop(store, counter.program) as loop:
        store.hold()
        future = loop.submit(b"a")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(persist.NotSent, match="parent"):
                    loop.submit(b"b")
                assert isinstance(future.exception(1), persist.Indeterminate)
                loop.stop()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        store.let()
        assert future.result(LONG_S).event_id == 1
    assert store.events == [b"a"]


@pytest.mark.parametrize("answer", [None, 5, [1, 2], (1, "effects"), (1, {"a": 1}), (1, iter([]))])
def test_a_step_that_returns_something_else_is_told_what_to_return(store: MemoryStore, answer: Any) -> None:
    program: Program[Any] = Program(lambda *_: answer, int, print)
    loop = Loop(store, program)
    error = told(loop.submit(b"a"))
    assert isinstance(error.__cause__, persist.InvalidUsage)
    with pytest.raises(NotReleased, match="step must return"):
        loop.stop()


@pytest.mark.parametrize("event", ["text", None, 5, [b"a"], object()])
def test_an_event_is_bytes(store: MemoryStore, counter: Counter, event: Any) -> None:
    with Loop(store, counter.program) as loop, pytest.raises(persist.InvalidUsage, match="event must be bytes"):
        loop.submit(event)
    assert store.events == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Program(None, int, print),  # type: ignore[arg-type]
        lambda: Program(print, 5, print),  # type: ignore[arg-type]
        lambda: Program(print, int, "x"),  # type: ignore[arg-type]
        lambda: Program(print, int, print, encode=bytes),  # type: ignore[arg-type]
        lambda: Program(print, int, print, snapshot_every=0),  # type: ignore[arg-type]
        lambda: Program(print, int, print, version=1),  # type: ignore[arg-type]
        lambda: Loop(MemoryStore(), print),  # type: ignore[arg-type]
        lambda: Loop(MemoryStore(), Counter().program, most_events=0),
        lambda: Loop(MemoryStore(), Counter().program, mark_every_s=-1),
        lambda: Loop(MemoryStore(), Counter().program, both=True),
        lambda: Loop(MemoryStore(), Counter().program, runtime=persist.Runtime(background=False)),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(make: Callable[[], object]) -> None:
    with pytest.raises(persist.InvalidUsage):
        make()
