"""What all that is followed or open has in common: delivery, waiting, failures, interrupts, pauses and closing.

And background work without threads: the same answers and errors as with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from persist_lib.errors import Determinate, Indeterminate, PersistError, TimedOut
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.runtime.ambient import Backoff, Deadline, Runtime
from persist_lib.runtime.follow import Follow
from persist_lib.runtime.threads import Resource
from persist_lib.testing import ManualClock
from tests.interrupts.points import Interrupter, only_on_cpython_3_11

END = 3


class Numbers(Follow[str]):
    """Steps of two updates and their progress, of which `there` are there and one comes with each pause."""

    def __init__(self, there: int, *, is_patient: bool = True, comes: bool = True) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock.runtime(), at(0), at(END), 5.0, "numbers", shard="n")
        self.there, self.is_patient, self.comes = there, is_patient, comes
        self.is_closed = False
        self.fails: Callable[[str], None] = lambda _event: None

    def _fetch(self) -> Iterator[None]:
        while (step := self.frontier.time or 0) < self.there:
            for letter in "ab":
                self.fails(f"{step}{letter}")
                self._due = f"{step}{letter}", True
                yield
            self.fails(f"progress {step}")
            upper = at(step + 1)
            self._due, self.frontier = (f"to {step + 1}", False), upper
            yield

    def _show(self, frontier: Antichain) -> str:
        return str(frontier)

    def _begin(self, deadline: Deadline) -> None:
        self.deadline = deadline

    def _pause(self) -> None:
        self.there += self.comes
        self.deadline.pause(1.0)

    def _keeps(self, failure: PersistError) -> bool:
        return not self.is_patient

    def close(self) -> None:
        self.is_closed = True


ALL = [event for step in range(END) for event in (f"{step}a", f"{step}b", f"to {step + 1}")]


def once(at_event: str, error: BaseException) -> Callable[[str], None]:
    struck: list[str] = []

    def fails(event: str) -> None:
        if event == at_event and not struck:
            struck.append(event)
            raise error

    return fails


def test_each_event_comes_once_waited_for_or_polled_and_the_end_closes() -> None:
    waited = Numbers(0)
    assert list(waited) == ALL
    assert waited.is_closed
    polled = Numbers(1)
    assert polled.poll() == ALL[:3]
    assert polled.poll() == []
    polled.there = 2
    assert next(polled) == "1a"
    assert polled.poll() == ALL[4:6]


def test_when_nothing_comes_it_looks_once_more_and_says_how_long_it_waited() -> None:
    numbers = Numbers(0, comes=False)
    with pytest.raises(TimedOut, match=r"nothing came after .* for 5 s") as caught:
        next(numbers)
    assert caught.value.fields["shard"] == "n"
    numbers.there = END
    assert list(numbers) == ALL


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_failed_step_begins_again_if_nothing_of_it_was_delivered_and_the_failure_is_not_kept(
    is_patient: bool,
) -> None:
    numbers = Numbers(END, is_patient=is_patient)
    numbers.fails = once("0a", Determinate("no answer"))
    with pytest.raises(Determinate, match="no answer"):
        next(numbers)
    if is_patient:
        assert list(numbers) == ALL
    else:
        with pytest.raises(Determinate, match="no answer"):
            next(numbers)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Determinate("no answer")])
def test_after_a_part_of_a_step_it_says_what_to_drop(error: BaseException) -> None:
    numbers = Numbers(END)
    numbers.fails = once("1b", error)
    assert list(itertools.islice(numbers, 4)) == ALL[:4]
    with pytest.raises(type(error)):
        next(numbers)
    for _ in range(2):
        with pytest.raises(Determinate, match="Drop what came after the progress to") as caught:
            next(numbers)
        assert caught.value.fields["frontier"] == at(1)


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_failed_poll_delivers_nothing_and_never_again_what_it_had_taken(is_patient: bool) -> None:
    numbers = Numbers(END, is_patient=is_patient)
    numbers.fails = once("1a", Determinate("no answer"))
    with pytest.raises(Determinate, match="no answer"):
        numbers.poll()
    assert numbers.frontier == at(0)
    with pytest.raises(Determinate, match="no answer"):
        numbers.poll()


@only_on_cpython_3_11
def test_an_interrupt_anywhere_loses_and_doubles_nothing() -> None:
    counted = Interrupter(None)
    with counted:
        list(Numbers(1))
    for place in range(counted.count):
        for poll in (False, True):
            numbers, got = Numbers(1), list[str]()
            try:
                with Interrupter(place):
                    if poll:
                        got += numbers.poll()
                    else:
                        for event in numbers:
                            got += (event,)
            except KeyboardInterrupt:
                pass
            try:
                got += numbers
            except Determinate as cut:
                assert "Drop what came after" in cut.message  # noqa: PT017
                continue
            assert got == ALL, place


def test_pauses_grow_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.take() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    backoff.reset()
    assert [backoff.pause_s, backoff.take()] == [0.5, 0.5]
    assert Backoff(5.0, 3.0).take() == 3.0


class Failing(Resource):
    def close(self) -> None:
        raise Indeterminate("not known whether it is closed")


def test_a_failure_to_close_hides_no_error_of_the_block() -> None:
    with pytest.raises(Indeterminate), Failing():
        pass
    with pytest.raises(KeyError) as caught, Failing():
        raise KeyError("it")
    assert "not known whether it is closed" in caught.value.__notes__[0]


def test_what_is_complete_at_first_is_over_at_once() -> None:
    numbers = Numbers(END)
    numbers.frontier = TOP
    assert list(numbers) == []


def fails(_: int) -> int:
    raise ValueError("it failed")


@pytest.mark.parametrize("background", [True, False])
def test_what_a_task_answers_or_raises_reaches_its_caller(background: bool) -> None:
    with Runtime(background=background).pool(2, "test") as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
        with pytest.raises(ValueError, match="it failed"):
            pool.submit(fails, 1).result()
        with pytest.raises(ValueError, match="it failed"):
            list(pool.map(fails, [1]))
