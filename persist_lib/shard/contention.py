"""How processes that contend for one shard take turns without talking to each other.

A race that is lost costs as much as one that is won, and who won the last one wins the next one at the least cost, as
it knows the newest version. So a turn is several versions in a row. The log says who had a turn and when: whoever has
waited longest is next, and everybody else waits for as long as those before it take.

All of this decides when somebody tries, and nothing else. Who wins is decided by compare-and-set alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from persist_lib.core.state import Version
from persist_lib.ids import SeqNo
from persist_lib.runtime.ambient import Deadline

RECENT = 512
"""Versions: who appended within so many is contending."""
ROUND = 128
"""Versions in which all contenders should have a turn: what one of them may win in a row is its share of that."""
SELDOM = 1024
"""Versions in a row after which even those who did not append of late are let go first: they may be trying since."""
ROUND_S = 0.1
"""In how much time they should: where versions take long, turns have fewer of them."""
SHORTEST = 6
"""Versions of a turn at least, however many contend. Taking turns takes about as long as two versions."""
SHORTEST_ROUND = 24
"""Versions of a round at least, however long they take: few contenders have longer turns than many."""
LONGEST_PAUSE_S = 0.25
"""No pause is longer, before it is jittered."""
JITTER = 0.25
"""Of a pause. It parts those who lost at the same moment; more of it would make turns overlap."""
FIRST_PAUSE_S = 0.002
"""The first pause of who contends with others than writers. Each further one is twice as long."""
LEAST_S = 0.0005
"""Of an attempt. Where they take no time at all, pauses still do: or nobody's deadline would ever come."""
STRETCH = 2
"""How many times its turn's length somebody goes on when nobody came while it let others go first."""


class Pace:
    """What one process knows of the race for the next version of a shard. Guarded by the machine's turn."""

    __slots__ = ("_attempt_s", "_behind", "_in_a_row", "_lost", "_own", "_turn")

    def __init__(self) -> None:
        self._own: deque[SeqNo] = deque(maxlen=RECENT)
        self._in_a_row = 0
        self._turn = SHORTEST
        self._lost = 0
        self._behind: int | None = 0
        """While it waits: others that were before it when it looked last; None: it has just let all of them go."""
        self._attempt_s = 0.0

    def won(self, seqno: SeqNo, took_s: float) -> None:
        """The newest version is this process's, by an attempt that took so long (s)."""
        self._own.append(seqno)
        self._in_a_row += 1
        self._lost = 0
        self._learn(took_s, 1 / 4)

    def overtaken(self) -> None:
        """The newest version is another process's."""
        self._in_a_row, self._turn = 0, SHORTEST

    def lost(self, version: Version, took_s: float) -> float:
        """An attempt to follow `version` was too late; answers how long (s) to let others go first.

        The first race lost is taken for an accident, as what is known may be old. After that it is known that others
        are at it. Who has waited longest tries again soon, as whoever is having its turn is about to end it.
        """
        self.overtaken()
        self._learn(took_s, 0)
        self._lost += 1
        others = self._others(version)
        if not others:
            return 0.0 if self._lost == 1 else FIRST_PAUSE_S * 2.0 ** min(self._lost - 2, 10)
        self._behind = self._before(others) if self._lost > 1 else 0
        soon_s = min(self._gap_s(others) / 1.5 - 2 * self._attempt_s, self._attempt_s * 2.0 ** min(self._lost - 1, 10))
        return self._behind * self._turn_s(others) + soon_s

    def gives_way(self, version: Version) -> float:
        """How long (s) to let others go first before an attempt: 0 unless it has had its turn and there are any."""
        if self._in_a_row < self._turn:
            return 0.0
        others = self._others(version)
        length = self._versions(others) if others else SELDOM
        if self._in_a_row < length or not (others or self._has_company(version)):
            self._turn = length if self._in_a_row < length else self._in_a_row + length
            return 0.0
        self._behind, self._lost = None, 1
        return self._gap_s(others)

    def still_waits(self, version: Version) -> float:
        """After a pause, given the newest version: how much longer (s). 0 when it is its turn, or nobody came.

        Nobody waits twice for the same ones: some of those before it may be gone.
        """
        others, behind, self._behind = self._others(version), self._behind, 0
        if behind == 0:
            return 0.0
        if version.seqno in self._own:
            self._turn = self._in_a_row + (STRETCH * self._versions(others) if others else SELDOM)
            return 0.0
        before = self._before(others)
        if behind is not None and before >= behind:
            return 0.0
        self._behind = before
        return before * self._turn_s(others) + (self._turn_s(others) - self._gap_s(others) if behind is None else 0.0)

    def is_others_duty(self, version: Version) -> bool:
        """Whether what `version` calls for is left to another process: to that whose version it is."""
        return version.seqno not in self._own and bool(self._others(version))

    def _learn(self, took_s: float, weight: float) -> None:
        known, took_s = self._attempt_s, max(took_s, LEAST_S)
        self._attempt_s = known + weight * (took_s - known) if known else took_s

    def _others(self, version: Version) -> list[SeqNo]:
        """Where each writer of another process that appended of late did so last."""
        newest = {writer.outcomes[-1].seqno for writer in version.state.writers.values() if writer.outcomes}
        return [seqno for seqno in newest.difference(self._own) if seqno > version.seqno - RECENT]

    def _has_company(self, version: Version) -> bool:
        """Whether writers of other processes live, though none of them appended of late."""
        return any(not w.outcomes or w.outcomes[-1].seqno not in self._own for w in version.state.writers.values())

    def _before(self, others: Sequence[SeqNo]) -> int:
        """How many of them have waited for longer."""
        own = self._own[-1] if self._own else 0
        return sum(seqno < own for seqno in others)

    def _versions(self, others: Sequence[SeqNo]) -> int:
        """Of a turn."""
        contenders = max(1, len(others)) + 1
        in_time = ROUND_S / (contenders * self._attempt_s) if self._attempt_s else ROUND
        shortest = max(SHORTEST, SHORTEST_ROUND // contenders)
        return max(shortest, int(min(ROUND / contenders, in_time)))

    def _turn_s(self, others: Sequence[SeqNo]) -> float:
        return self._versions(others) * self._attempt_s

    def _gap_s(self, others: Sequence[SeqNo]) -> float:
        """How long somebody lets others begin, and how often the next one looks whether it can."""
        return max(self._turn_s(others) / 4, 5 * self._attempt_s)


class Paced(Protocol):
    """A machine, as far as taking turns is concerned."""

    pace: Pace

    @property
    def known(self) -> Version | None:
        """The newest version it knows."""

    def try_fetch(self) -> Version | None:
        """The newest version there is."""


def give_way(machines: Sequence[Paced], deadline: Deadline) -> bool:
    """Let others go first where a machine has had its turn; whether it paused, and read all of them afresh then."""
    pause_s = _longest(machines, Pace.gives_way)
    return pause_s > 0.0 and _let_others_go_first(machines, deadline, pause_s)


def wait_after_loss(machines: Sequence[Paced], deadline: Deadline, took_s: float) -> None:
    """Let others go first, as an attempt to change all of these was too late; then read all of them afresh."""
    pause_s = _longest(machines, lambda pace, version: pace.lost(version, took_s))
    if not _let_others_go_first(machines, deadline, pause_s):
        for machine in machines:
            machine.try_fetch()


def _let_others_go_first(machines: Sequence[Paced], deadline: Deadline, pause_s: float) -> bool:
    is_fresh = False
    while pause_s > 0.0 and not deadline.has_passed():
        deadline.pause(min(LONGEST_PAUSE_S, pause_s), JITTER)
        for machine in machines:
            machine.try_fetch()
        is_fresh = True
        pause_s = _longest(machines, Pace.still_waits)
    return is_fresh


def _longest(machines: Sequence[Paced], pause_s: Callable[[Pace, Version], float]) -> float:
    longest_s = 0.0
    for machine in machines:  # a loop, as each append comes here, and a generator costs more
        if (known := machine.known) is not None and (own_s := pause_s(machine.pace, known)) > longest_s:
            longest_s = own_s
    return longest_s
