"""Appends that wait for room in the state of their shard, as one of their clients is making some.

Otherwise all of them would be refused, and each client would upload its append as an object: hundreds at once, of a
kilobyte each, beside which the flush that makes room takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.groups import Answer
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.shard.requests import Request

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
        """Whether a request waits, instead of being answered so."""
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
            (found if is_roomier or one.is_over or _is_impatient(one) else kept).append(one)
        self._waiting = kept
        if kept:
            self._look_again(self._wake)
        return found

    def clear(self) -> list[Request]:
        """All of them, which wait no longer."""
        found, self._waiting = self._waiting, []
        return found

    def _look_again(self, wake: Wake) -> None:
        if self._look is None or self._look.has_passed():
            self._look = self._runtime.deadline(LOOK_S)
            wake(LOOK_S)


def wants_room(answer: Answer, request: Request) -> TypeGuard[r.InlineFull]:
    """Whether an append at the next time is refused only because the state is full."""
    return isinstance(answer, r.InlineFull) and isinstance(request.command, c.AppendNow)


def _is_impatient(request: Request) -> bool:
    return request.patience is not None and request.patience.has_passed()
