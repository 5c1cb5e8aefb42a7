"""How processes that contend for one shard take turns without talking to each other.

A lost race costs as much as one that is won. The process that won the last race wins the next one at the least cost, as
it knows the newest version. So a turn is several versions in a row. The log says which process had a turn and when: the
process that has waited longest is next, and every other one waits for as long as those before it take.

All of this only decides when a process tries. Which process wins is decided by compare-and-set alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from persist_lib.core.state import Version
from persist_lib.ids import SeqNo
from persist_lib.runtime.ambient import Deadline

if TYPE_CHECKING:
    from persist_lib.shard.machine import Shard

RECENT = 512
"""A writer contends if it appended within this many versions."""
ROUND = 128
"""All contenders should have a turn within this many versions. What one may win in a row is its share of that."""
SELDOM = 1024
"""Versions in a row after which even processes that have not appended of late are let go first: they may be trying."""
ROUND_S = 0.1
"""All contenders should also have a turn within this time: where versions take long, a turn has fewer of them."""
SHORTEST = 6
"""The least versions of a turn, however many processes contend. Changing turns takes about as long as two versions."""
SHORTEST_ROUND = 24
"""The least versions of a round, however long they take: few contenders have longer turns than many."""
LONGEST_PAUSE_S = 0.25
"""The longest pause, before jitter."""
JITTER = 0.25
"""The random share of a pause. It separates processes that lost at the same moment; more would make turns overlap."""
FIRST_PAUSE_S = 0.002
"""The first pause of a process that contends with others than writers. Each further pause is twice as long."""
LEAST_S = 0.0005
"""The least time that an attempt is taken to need. Without it, pauses could take no time, and deadlines never pass."""
STRETCH = 2
"""A process that let others go first, and saw none come, continues for this many times the length of its turn."""


class Pace:
    """What one process knows of the race for the next version of a shard. Guarded by the machine's turn."""

    __slots__ = ("_attempt_s", "_behind", "_in_a_row", "_lost", "_own", "_turn")

    def __init__(self) -> None:
        self._own: deque[SeqNo] = deque(maxlen=RECENT)
        self._in_a_row = 0
        self._turn = SHORTEST
        self._lost = 0
        self._behind: int | None = 0
        """While it waits: how many others were before it at the last look. None: it has just let all of them go."""
        self._attempt_s = 0.0

    def won(self, seqno: SeqNo, took_s: float) -> None:
        """This process has committed the newest version, by an attempt that took `took_s` seconds."""
        self._own.append(seqno)
        self._in_a_row += 1
        self._lost = 0
        self._learn(took_s, 1 / 4)

    def overtaken(self) -> None:
        """Another process has committed the newest version."""
        self._in_a_row, self._turn = 0, SHORTEST

    def lost(self, version: Version, took_s: float) -> float:
        """An attempt to follow `version` was too late. Returns how long (s) to let others go first.

        The first lost race may be an accident, as the known version may be old. After that it is certain that others
        contend. The process that has waited longest tries again soon, as the process whose turn it is will end it soon.
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
        """How long (s) to let others go first before an attempt: 0 unless it has had its turn and there are others."""
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
        """After a pause, given the newest version: how much longer (s) to wait. 0 when it is its turn, or none came.

        A process never waits twice for the same others, as some of those before it may be gone.
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
        """Whether upkeep that `version` calls for is left to another process: to the one that committed it."""
        return version.seqno not in self._own and bool(self._others(version))

    def is_alone(self, version: Version) -> bool:
        """Whether this process made `version`, and there is no live writer of another one in it."""
        return version.seqno in self._own and not self._has_company(version)

    def _learn(self, took_s: float, weight: float) -> None:
        known, took_s = self._attempt_s, max(took_s, LEAST_S)
        self._attempt_s = known + weight * (took_s - known) if known else took_s

    def _others(self, version: Version) -> list[SeqNo]:
        """The seqno of the last append of each writer of another process, if it appended of late."""
        newest = {writer.outcomes[-1].seqno for writer in version.state.writers.values() if writer.outcomes}
        return [seqno for seqno in newest.difference(self._own) if seqno > version.seqno - RECENT]

    def _has_company(self, version: Version) -> bool:
        """Whether there are live writers of other processes, even if none of them appended of late."""
        return any(not w.outcomes or w.outcomes[-1].seqno not in self._own for w in version.state.writers.values())

    def _before(self, others: Sequence[SeqNo]) -> int:
        """How many of the others have waited for longer than this process."""
        own = self._own[-1] if self._own else 0
        return sum(seqno < own for seqno in others)

    def _versions(self, others: Sequence[SeqNo]) -> int:
        contenders = max(1, len(others)) + 1
        in_time = ROUND_S / (contenders * self._attempt_s) if self._attempt_s else ROUND
        shortest = max(SHORTEST, SHORTEST_ROUND // contenders)
        return max(shortest, int(min(ROUND / contenders, in_time)))

    def _turn_s(self, others: Sequence[SeqNo]) -> float:
        return self._versions(others) * self._attempt_s

    def _gap_s(self, others: Sequence[SeqNo]) -> float:
        """How long a process that ends its turn lets others begin, and how often the next one looks whether it can."""
        return max(self._turn_s(others) / 4, 5 * self._attempt_s)


def give_way(machines: Sequence[Shard], deadline: Deadline) -> bool:
    """Let others go first where a machine has had its turn. Returns whether it paused; then all were read afresh."""
    pause_s = _longest(machines, Pace.gives_way)
    return pause_s > 0.0 and _let_others_go_first(machines, deadline, pause_s)


def wait_after_loss(machines: Sequence[Shard], deadline: Deadline, took_s: float) -> None:
    """After an attempt to change all of these was too late: let others go first, then read all of them afresh."""
    pause_s = _longest(machines, lambda pace, version: pace.lost(version, took_s))
    if not _let_others_go_first(machines, deadline, pause_s):
        for machine in machines:
            machine.try_fetch()


def _let_others_go_first(machines: Sequence[Shard], deadline: Deadline, pause_s: float) -> bool:
    is_fresh = False
    while pause_s > 0.0 and not deadline.has_passed():
        deadline.pause(min(LONGEST_PAUSE_S, pause_s), JITTER)
        for machine in machines:
            machine.try_fetch()
        is_fresh = True
        pause_s = _longest(machines, Pace.still_waits)
    return is_fresh


def _longest(machines: Sequence[Shard], pause_s: Callable[[Pace, Version], float]) -> float:
    longest_s = 0.0
    for machine in machines:  # a loop, as every append runs this, and a generator costs more
        if (known := machine.known) is not None and (own_s := pause_s(machine.pace, known)) > longest_s:
            longest_s = own_s
    return longest_s
