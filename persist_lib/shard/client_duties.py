"""Which client of a shard has to roll up or flush, where a server chooses the times of appends.

Such clients read no rows back, so none of them sees by itself that it is its turn. The server asks one of them. It is
the one that knows the newest version: it has least to read, and as it has then read it, it is the next one too. If each
had its turn, each would read all rows of all of them.

While one of them makes room in the state, appends wait for it (`Room`). Otherwise all would be refused, and each client
would upload its append as an object: hundreds at once, of a kilobyte each, beside which the flush that makes room takes
ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.groups import Answer
from persist_lib.core.plan.compaction import is_filled
from persist_lib.core.plan.upkeep import rollup_is_duty
from persist_lib.core.state import State, Version
from persist_lib.ids import SeqNo
from persist_lib.location.commands import FLUSH, ROLL_UP
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.shard.requests import APPENDS, Request

ROOM_S = 1.0
"""How long an append waits for room, and for at most half of its own time. Then its client uploads it."""
LOOK_S = 0.25
"""How often it is looked whether those that wait have waited for long enough."""
Wake = Callable[[float], object]
"""Lets the shard have a turn after so many seconds."""


class Room:
    """Those of one shard. For one thread at a time: the one that has the shard's turn. Without `wake` none waits."""

    def __init__(self, runtime: Runtime, wake: Wake | None) -> None:
        self._runtime, self._wake = runtime, wake
        self._waiting: list[Request] = []
        self._size = 0
        self._look: Deadline | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def takes(self, request: Request, answer: Answer) -> bool:
        if self._wake is None or not wants_room(answer, request):
            return False
        if request.patience is None:
            request.patience = self._runtime.deadline(min(ROOM_S, request.deadline.remaining_s() / 2))
        if request.patience.has_passed():
            return False
        self._waiting.append(request)
        self._size = answer.held  # where it was refused: a flush of the same row may have made room since
        self._look_again(self._wake)
        return True

    def leaving(self, size: int) -> list[Request]:
        """Those that wait no longer: all of them if there is more room now, else those that waited for long enough."""
        if self._wake is None or not self._waiting:
            return []
        is_roomier = size < self._size
        found, kept = list[Request](), list[Request]()
        for one in self._waiting:
            is_impatient = one.patience is not None and one.patience.has_passed()
            (found if is_roomier or one.is_over or is_impatient else kept).append(one)
        self._waiting = kept
        if kept:
            self._look_again(self._wake)
        return found

    def clear(self) -> list[Request]:
        found, self._waiting = self._waiting, []
        return found

    def _look_again(self, wake: Wake) -> None:
        if self._look is None or self._look.has_passed():
            self._look = self._runtime.deadline(LOOK_S)
            wake(LOOK_S)


def wants_room(answer: Answer, request: Request) -> TypeGuard[r.InlineFull]:
    """Whether an append at the next time is refused only because the state is full."""
    return isinstance(answer, r.InlineFull) and isinstance(request.command, c.AppendNow)


PATIENCE = 4
"""How many rows upkeep waits for an append of the client that did it last."""
FLUSH_S = 1.0
"""How long after a client was asked to flush another one is asked, if there is no more room then."""
Placed = tuple[int, Request]
"""A request and its place in the lot."""


class Told(NamedTuple):
    """The place of a request in its lot, and what its client has to do."""

    place: int = -1
    due: tuple[str, ...] = ()


NO_CLIENT = Told()


class Upkeep:
    """What is due in one shard. For one thread at a time: the one that has the shard's turn."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._told = SeqNo(0)
        self._since: dict[str, SeqNo] = {}
        self._flushing: Deadline | None = None
        self._size = 0

    def tell(
        self, lot: Sequence[Request], answers: Sequence[Answer], before: State | None, after: Version, every: int
    ) -> Told:
        """The request whose client has duties, and which.

        `before` is the state before the row that led to `after`, None where there is no row. A rollup is due each
        `every` rows.
        """
        placed = list(zip(range(len(lot)), lot, answers, strict=False))
        appends = [one for one in placed if isinstance(one[2], StateDiff) and isinstance(one[1].command, APPENDS)]
        made = [(place, one) for place, one, _ in appends if before]
        if before and made and _rolls_up(made[0][1], before, after, every):
            self._since.setdefault(ROLL_UP, after.seqno)
        self._look(after)
        if told := [one for one in made if isinstance(one[1].command, c.AppendNow)]:
            return self._best(told, after)
        # Where all are refused for want of room, there is no row by which anybody could be told.
        full = [place for place, one, answer in placed if wants_room(answer, one)]
        return self._say(full[0], (FLUSH,), after) if full and FLUSH in self._since else NO_CLIENT

    def _look(self, after: Version) -> None:
        """See whether a flush is due, and no client is at it."""
        if after.state.inline_size < self._size:
            self._flushing = None
        self._size = after.state.inline_size
        is_at_it = self._flushing is not None and not self._flushing.has_passed()
        if is_filled(after.state) and not is_at_it:
            self._since.setdefault(FLUSH, after.seqno)
        else:
            self._since.pop(FLUSH, None)

    def _best(self, told: Sequence[Placed], after: Version) -> Told:
        if not self._since:
            return NO_CLIENT
        place, best = max(told, key=lambda one: one[1].known)
        if best.known < self._told and after.seqno < min(self._since.values()) + PATIENCE:
            return NO_CLIENT
        return self._say(place, tuple(self._since), after)

    def _say(self, place: int, due: tuple[str, ...], after: Version) -> Told:
        self._told = after.seqno
        for duty in due:
            del self._since[duty]
        if FLUSH in due:
            self._flushing = self._runtime.deadline(FLUSH_S)
        return Told(place, due)


def _rolls_up(first: Request, before: State, after: Version, every: int) -> bool:
    # Who appends at a time of its own reads the row back. If its append is the first, it rolls up unasked.
    is_placed = isinstance(first.command, c.AppendNow)
    return is_placed and rollup_is_duty(after.seqno, before, after.state, every)
