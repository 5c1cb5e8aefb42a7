"""What decides an unknown outcome, and what does not: the same for rows, commands, statements and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from persist_lib.core import commands as c
from persist_lib.core.diff import StateDiff
from persist_lib.core.state import State
from persist_lib.errors import (
    Corrupt,
    Determinate,
    HistoryRegressed,
    Indeterminate,
    LeaseExpired,
    NotAuthenticated,
    TimedOut,
    UpperMismatch,
)
from persist_lib.format.log import LogRow
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.commands import Answered, MakesHeart, Proposed
from persist_lib.relation.appends import copied
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.shard.commit import until_answered
from persist_lib.shard.committer import until_decided, until_in_log

LOST, AWAY, DAMAGED = Indeterminate("the answer was lost"), Determinate("the store is away"), Corrupt("it is damaged")
LATER = Indeterminate("lost again")
CHANGED = NotAuthenticated("the password was changed")
RETIRED, CLOSED = LeaseExpired("retired", id="w1"), LeaseExpired("closed", id="")
MOVED = UpperMismatch("it moved")
FORGOTTEN = Indeterminate("it is not known any more")
FORGOTTEN.__cause__ = MOVED


def ticking(seconds: float = 9.0) -> Deadline:
    """Each look at the clock takes a second."""
    ticks = count()
    return Runtime(monotonic=lambda: float(next(ticks)), sleep=lambda _: None, background=False).deadline(seconds)


def answers(outcomes: Sequence[object]) -> Callable[[], Any]:
    left: Iterator[object] = iter(outcomes)

    def answer() -> Any:
        if isinstance(outcome := next(left), Exception):
            raise copied(outcome)
        return outcome

    return answer


class Row:
    """A row that is sent with such answers; what is in its place then is what the test says."""

    def __init__(self, outcomes: Sequence[object] = (), *, is_there: bool | None = None) -> None:
        self._answer, self._is_there = answers(outcomes), is_there
        self.machine, self.consensus, self.change = self, self, ()
        self.shard, self.state = ShardId("s"), State()
        self.row = LogRow(SeqNo(1), b"t", "SetRetention", 0, b"", None, StateDiff())

    def compare_and_set(self, *_: object) -> Any:
        return self._answer()

    def compare_and_set_many(self, _: object) -> Any:
        return self._answer()

    def is_in_log(self) -> bool | None:
        return self._is_there

    def is_remembered(self) -> bool | None:
        return None


def plain(outcomes: Sequence[object], deadline: Deadline) -> object:
    answer = answers(outcomes)
    return until_decided(lambda _: answer(), deadline)


def of_rows(outcomes: Sequence[object], deadline: Deadline) -> object:
    rows: Any = [Row(outcomes)]
    return until_in_log(rows, deadline)


class Taker:
    """A server that answers so."""

    def __init__(self, outcomes: Sequence[object]) -> None:
        self._answer = answers(outcomes)
        self.said: list[bool] = []

    def commit_commands(self, *_: object, is_repeated: bool, heart: MakesHeart) -> Any:
        self.said.append(is_repeated)
        return self._answer()


def of_commands(outcomes: Sequence[object], deadline: Deadline) -> object:
    return until_answered(Taker(outcomes), [Proposed("s", c.Finish(), SeqNo(0))], b"t", deadline)


CARRIERS = pytest.mark.parametrize("decided", [plain, of_rows, of_commands])
Decided = Callable[[Sequence[object], Deadline], object]


@CARRIERS
def test_after_an_answer_was_lost_only_an_answer_decides(decided: Decided) -> None:
    assert decided([LOST, AWAY, LATER, AWAY, True], ticking(99)) is True


@CARRIERS
@pytest.mark.parametrize("error", [AWAY, DAMAGED, CHANGED, CLOSED, MOVED])
def test_an_error_of_the_first_attempt_is_told_as_it_is(decided: Decided, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        decided([error, True], ticking())


@CARRIERS
@pytest.mark.parametrize("error", [DAMAGED, CHANGED, CLOSED])
def test_where_no_further_attempt_helps_what_was_lost_stays_unknown(decided: Decided, error: Exception) -> None:
    with pytest.raises(Indeterminate) as told:
        decided([LOST, error, True], ticking())
    assert isinstance(told.value.__cause__, type(error))


@CARRIERS
def test_a_refusal_is_told_and_what_was_forgotten_and_another_history_too(decided: Decided) -> None:
    with pytest.raises(HistoryRegressed):
        decided([LOST, HistoryRegressed("an older copy"), True], ticking())
    with pytest.raises(UpperMismatch):
        decided([LOST, MOVED, True], ticking())
    with pytest.raises(Indeterminate, match="not known any more"):
        decided([LOST, FORGOTTEN, True], ticking())


@CARRIERS
def test_at_the_deadline_the_first_unknown_outcome_is_told(decided: Decided) -> None:
    with pytest.raises(Indeterminate, match="the answer was lost"):
        decided([LOST, *[AWAY, LATER] * 9], ticking())


@CARRIERS
def test_under_an_id_that_was_retired_nothing_was_written(decided: Decided) -> None:
    assert decided([LOST, RETIRED, True], ticking()) is True
    with pytest.raises(Determinate):
        decided([LOST, RETIRED, AWAY], ticking())
    with pytest.raises(TimedOut, match=r"its writer.s lease ended; this call changed nothing"):
        decided([RETIRED] * 20, ticking())


@pytest.mark.parametrize("is_there", [True, False])
def test_rows_that_are_refused_after_an_unknown_outcome_are_looked_for(is_there: bool) -> None:
    rows: list[Any] = [Row([LOST, False]), Row(is_there=is_there)]
    assert until_in_log(rows, ticking()) is is_there
    rows = [Row([LOST, False])]
    with pytest.raises(Indeterminate, match="truncated"):
        until_in_log(rows, ticking())


def test_commands_say_that_they_were_sent_before() -> None:
    taker = Taker([LOST, AWAY, [Answered(SeqNo(1))]])
    until_answered(taker, [Proposed("s", c.Finish(), SeqNo(0))], b"t", ticking(99))
    assert taker.said == [False, True, True]


def test_who_goes_on_beyond_the_deadline_pauses_longer_and_longer() -> None:
    pauses: list[float] = []
    runtime = Runtime(monotonic=lambda: 1000.0, sleep=pauses.append, background=False)
    left = count()
    with pytest.raises(Indeterminate):
        until_decided(lambda _: answers([LOST])(), runtime.deadline(0), lambda _: next(left) < 12)
    assert len(pauses) == 12
    assert pauses[0] < 0.02
    assert 0.5 <= pauses[-1] <= 1.5
