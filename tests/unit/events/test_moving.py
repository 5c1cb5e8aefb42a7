"""Two stores: copying a log, moving it to where it continues, and what is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.events import check
from persist_lib.events.loop import Loop
from persist_lib.events.migrate import compare, copy, joined
from tests.gated import wait_for
from tests.unit.events.programs import LONG_S, Counter
from tests.unit.events.stored import MemoryStore


@pytest.fixture
def first() -> MemoryStore:
    """A log of five events, all released, with a snapshot."""
    store = MemoryStore("first")
    with Loop(store, Counter().program) as loop:
        for n in range(5):
            loop.submit(str(n).encode())
    return store


@pytest.fixture
def second() -> MemoryStore:
    return MemoryStore("second")


ACTS: dict[str, Callable[[MemoryStore, MemoryStore], object]] = {
    "copy": copy,
    "move": lambda one, other: Loop(other, Counter().program, source=one),
    "check": lambda one, _: check(one),
}


class Killed(BaseException):
    """The process dies: what would have been written after it is not."""


def killed_after(store: MemoryStore, writes: int) -> Callable[[], None]:
    """Lets a store take so many writes more. Returns what makes it whole again."""
    whole, left = MemoryStore.writer, [writes]

    class Dying:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            found = getattr(self._inner, name)
            if not name.startswith("write"):
                return found

            def dying(*args: object, **kwargs: object) -> object:
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return found(*args, **kwargs)

            return dying

        def __enter__(self) -> object:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def opened(owner: str = "") -> Any:
        return Dying(whole(store, owner=owner))

    store.writer = opened  # type: ignore[method-assign]

    def mend() -> None:
        del store.writer

    return mend


def test_a_log_is_copied_with_its_mark_and_its_newest_snapshot(first: MemoryStore, second: MemoryStore) -> None:
    before = dict(vars(first))
    dry = copy(first, second, dry_run=True)
    assert (dry.checked, dry.written, dry.last) == (0, 5, 5)
    assert not second.is_there
    done = copy(first, second)
    assert (done.checked, done.written, done.last) == (0, 5, 5)
    assert second.events == first.events
    assert second.marks["released"] == first.marks["released"]
    assert second.snapshots == {5: first.snapshots[5]}
    assert dict(vars(first)) == before, "the source is only read"
    again = copy(first, second)
    assert (again.checked, again.written) == (5, 0)
    assert compare(first, second).second == 5
    counter = Counter()
    with Loop(second, counter.program) as loop:
        assert loop._state == [1, 2, 3, 4, 5]
    assert counter.released == []


def test_a_copy_continues_with_what_is_new(first: MemoryStore, second: MemoryStore) -> None:
    copy(first, second)
    with Loop(first, Counter().program) as loop:
        loop.submit(b"more")
    done = copy(first, second)
    assert (done.checked, done.written) == (5, 1)
    assert second.events == first.events
    assert second.marks["released"] == b'{"through":6}'


def test_a_mark_beyond_what_was_copied_is_not_copied(first: MemoryStore, second: MemoryStore) -> None:
    """A program writes to the source at the same time: its mark is read after its events."""
    copy(first, second)
    copy(first, second, progress=lambda *_: first.marks.update(released=b'{"through":9}'))
    assert second.marks["released"] == b'{"through":5}'


@pytest.mark.parametrize("name", ACTS)
def test_a_log_that_ends_before_its_mark_is_no_source(first: MemoryStore, second: MemoryStore, name: str) -> None:
    first.marks["released"] = b'{"through":9}'
    with pytest.raises(
        persist.HistoryRegressed, match="first ends at event 5, and effects were released up to event 9"
    ):
        ACTS[name](first, second)
    assert second.written == []


@pytest.mark.parametrize("name", ["copy", "move"])
def test_another_log_is_refused_before_anything_is_written(first: MemoryStore, second: MemoryStore, name: str) -> None:
    with Loop(second, Counter().program) as loop:
        for word in (b"0", b"1", b"x"):
            loop.submit(word)
    before = [(list(one.written), dict(one.marks), one.epoch) for one in (first, second)]
    with pytest.raises(persist.Diverged, match=r"event 3 is not the same in first \(1 bytes, b'2'\) and in second"):
        ACTS[name](first, second)
    assert before == [(list(one.written), dict(one.marks), one.epoch) for one in (first, second)]


def test_a_copy_onto_a_log_that_is_ahead_is_refused(first: MemoryStore, second: MemoryStore) -> None:
    copy(first, second)
    with Loop(second, Counter().program) as loop:
        loop.submit(b"more")
    with pytest.raises(persist.Diverged, match="ends at event 6, beyond first"):
        copy(first, second)


@pytest.mark.parametrize("writes", range(12))
@pytest.mark.parametrize("act", ["copy", "move", "both"])
def test_whenever_it_dies_it_is_finished_by_the_next_and_nobody_takes_a_part_for_the_log(
    first: MemoryStore, second: MemoryStore, writes: int, act: str
) -> None:
    counter = Counter()

    def run() -> None:
        if act == "copy":
            copy(first, second)
        else:
            Loop(second, counter.program, source=first, both=act == "both").stop()

    events = list(first.events)
    mend = killed_after(second, writes)
    try:
        run()
    except Killed:
        assert second.events == events[: len(second.events)]
        if second.is_there and 0 < len(second.events) < 5:
            with pytest.raises(persist.Refused, match="continues in first"):
                Loop(second, counter.program)
    mend()
    mend = killed_after(second, writes)
    with suppress(Killed):
        run()
    mend()
    run()
    assert second.events == events
    assert second.marks["released"] == b'{"through":5}'
    assert counter.released == []
    with Loop(second, counter.program) as loop:
        assert loop.submit(b"more").result(LONG_S).event_id == 6
    if act == "move":
        with pytest.raises(persist.Refused, match="continues in second"):
            Loop(first, counter.program)
    else:
        Loop(first, counter.program).stop()


def test_a_moved_log_goes_on_only_where_it_went(first: MemoryStore, second: MemoryStore) -> None:
    counter = Counter()
    with Loop(second, counter.program, source=first) as loop:
        loop.submit(b"more").result(LONG_S)
    assert counter.released == ["6:more"]
    assert len(first.events) == 5
    with pytest.raises(persist.Refused, match="the log in first continues in second"):
        Loop(first, counter.program)
    with pytest.raises(persist.Refused, match="continues in second"):
        copy(first, MemoryStore("third"))
    with pytest.raises(persist.Refused, match="continues in second"):
        Loop(MemoryStore("third"), counter.program, source=first)
    with Loop(second, counter.program, source=first) as loop:
        assert loop.accepted == 6
    with Loop(first, counter.program, source=second) as loop:
        loop.submit(b"back").result(LONG_S)
    assert len(first.events) == 7
    with pytest.raises(persist.Refused, match="continues in first"):
        Loop(second, counter.program)
    assert counter.released == ["6:more", "7:back"]


def test_a_program_that_still_runs_on_the_source_is_fenced_by_a_move(first: MemoryStore, second: MemoryStore) -> None:
    running, counter = Counter(), Counter()
    loop = Loop(first, running.program)
    with Loop(second, counter.program, source=first):
        assert isinstance(loop.submit(b"late").exception(LONG_S), persist.Fenced)
    with pytest.raises(persist.Fenced):
        loop.stop()
    assert first.events == second.events


def test_both_stores_go_on_alike_and_an_event_waits_for_both(first: MemoryStore, second: MemoryStore) -> None:
    counter = Counter()
    with Loop(second, counter.program, source=first, both=True) as loop:
        first.hold()
        future = loop.submit(b"more")
        wait_for(lambda: len(second.events) == 6)
        assert counter.released == []
        first.let()
        assert future.result(LONG_S).event_id == 6
    assert first.events == second.events
    assert first.marks == second.marks
    assert first.snapshots[6] == second.snapshots[6]


@pytest.mark.parametrize("ahead", ["first", "second"])
def test_what_only_one_of_both_has_after_a_crash_is_brought_to_the_other(
    first: MemoryStore, second: MemoryStore, ahead: str
) -> None:
    counter = Counter()
    Loop(second, counter.program, source=first, both=True).stop()
    {"first": first, "second": second}[ahead].events.append(b"late")
    with Loop(second, counter.program, source=first, both=True) as loop:
        assert loop.accepted == 6
    assert first.events == second.events
    assert counter.released == ["6:late"]


FULL, LOST = persist.DiskFull("full", path="/x", free=0), persist.Indeterminate("lost")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (None, None, None), (FULL, FULL, persist.DiskFull), (FULL, None, persist.Indeterminate),
        (None, FULL, persist.Indeterminate), (FULL, LOST, persist.Indeterminate), (LOST, FULL, persist.Indeterminate),
        (None, OSError("odd"), persist.Indeterminate),
    ],
)  # fmt: skip
def test_two_answers_are_one_that_claims_no_more_than_is_certain(
    one: Exception | None, other: Exception | None, expected: type[Exception] | None
) -> None:
    both: tuple[Future[None], Future[None]] = (Future(), Future())
    answer = joined(*both)
    for future, error in zip(both, (one, other), strict=True):
        assert not answer.done()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    found = answer.exception(LONG_S)
    assert type(found) is expected if expected else found is None


def test_a_log_is_compared_byte_for_byte(first: MemoryStore, second: MemoryStore) -> None:
    copy(first, second)
    done: list[tuple[int, int]] = []
    assert compare(first, second, progress=lambda *counts: done.append(counts)).first == 5
    assert done == [(n, 5) for n in range(1, 6)]
    second.events[4] = b"5"
    with pytest.raises(persist.Diverged, match="event 5"):
        compare(first, second)
    with pytest.raises(persist.NotFound):
        compare(first, MemoryStore("third"))


@pytest.mark.parametrize("act", [ACTS["copy"], ACTS["move"]])
def test_a_log_is_not_copied_or_moved_onto_itself(first: MemoryStore, act: Callable[..., object]) -> None:
    epoch = first.epoch
    with pytest.raises(persist.InvalidUsage, match="are the same log"):
        act(first, first)
    assert first.epoch == epoch
    assert not first.marks.keys() - {"released"}


def test_a_source_that_is_not_there_is_not_taken_for_an_empty_log(first: MemoryStore, second: MemoryStore) -> None:
    with pytest.raises(persist.NotFound):
        copy(second, first)
    with pytest.raises(persist.NotFound):
        Loop(first, Counter().program, source=second)
    Loop(first, Counter().program).stop()


@pytest.mark.parametrize("act", ["copy", "move"])
def test_what_the_target_gets_until_it_is_claimed_is_compared_before_anything_is_written(
    first: MemoryStore, second: MemoryStore, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(first, second)
    for word in (b"5", b"6", b"7"):
        first.events.append(word)
    claim, written = second.writer, list(second.written)

    def late(*, owner: str = "") -> Any:
        second.events.append(b"another")  # of a program that runs on the target
        return claim(owner=owner)

    monkeypatch.setattr(second, "writer", late)

    with pytest.raises(persist.Diverged, match="event 6"):
        ACTS[act](first, second)
    assert second.written == written
    assert len(first.events) == 8


def test_a_log_that_was_moved_away_stays_so_when_it_gets_a_copy(first: MemoryStore, second: MemoryStore) -> None:
    with Loop(second, Counter().program, source=first) as loop:
        loop.submit(b"more").result(LONG_S)
    assert copy(second, first).written == 1
    with pytest.raises(persist.Refused, match="it was moved there"):
        Loop(first, Counter().program)
    Loop(second, Counter().program).stop()


def moved_when_claimed(store: MemoryStore, third: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program moves the log to a third store just before somebody claims it."""
    claim = store.writer

    def writer(*, owner: str = "") -> Any:
        monkeypatch.setattr(store, "writer", claim)
        Loop(third, Counter().program, source=store).stop()
        return store.writer(owner=owner)

    monkeypatch.setattr(store, "writer", writer)


def test_a_log_that_is_moved_until_it_is_claimed_does_not_go_on_here(
    first: MemoryStore, second: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_when_claimed(first, second, monkeypatch)
    with pytest.raises(persist.Refused, match="continues in second: it was moved there"):
        Loop(first, Counter().program)
    with Loop(second, Counter().program) as loop:
        assert loop.accepted == 5


def test_neither_does_it_go_on_where_somebody_else_was_about_to_move_it(
    first: MemoryStore, second: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_when_claimed(first, second, monkeypatch)
    third = MemoryStore("third")
    with pytest.raises(persist.Refused, match="continues in second: it was moved there"):
        Loop(third, Counter().program, source=first)
    with third.reader() as reader:
        assert reader.last == 0
    with Loop(second, Counter().program) as loop:
        assert loop.accepted == 5
