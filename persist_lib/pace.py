"""How processes that contend for one shard take turns without talking to each other.

A race that is lost costs as much as one that is won. So who lost lets the others go first, for as long as an attempt of
each of them takes: then about one is trying at a time. Who has won several times in a row, which spares everybody work
as it knows the newest version, lets them go first too: it would only win again.
"""

from __future__ import annotations

from collections import deque

from persist_lib.core.state import Version
from persist_lib.ids import SeqNo

IN_A_ROW = 8
"""Versions of one process, one after the other, after which it lets others go first."""
RECENT = 128
"""Versions: who appended within so many is contending. Enough for sixteen processes that had a turn each."""


class Pace:
    """What one process knows of the race for the next version of a shard. Guarded by the machine's turn."""

    __slots__ = ("_in_a_row", "_own", "_took_s")

    def __init__(self) -> None:
        self._own: deque[SeqNo] = deque(maxlen=RECENT)
        self._in_a_row = 0
        self._took_s = 0.0

    def won(self, seqno: SeqNo) -> None:
        """The newest version is this process's."""
        self._own.append(seqno)
        self._in_a_row += 1

    def overtaken(self) -> None:
        """The newest version is another process's."""
        self._in_a_row = 0

    def lost(self, version: Version, took_s: float) -> float:
        """An attempt to follow `version` was too late; answers how long (s) to let others go first.

        SUBTLE: no longer for who has lost more often. Then who has won would try more often, and win again.
        """
        self._in_a_row, self._took_s = 0, took_s
        return took_s * self._others(version)

    def has_had_its_turn(self) -> bool:
        """Whether it is time to let others go first, if there are any."""
        return self._in_a_row >= IN_A_ROW

    def gives_way(self, version: Version) -> float:
        """How long (s) to do that. 0 when there are none."""
        self._in_a_row = 0
        return self._took_s * self._others(version)

    def is_others_duty(self, version: Version) -> bool:
        """Whether what `version` calls for is left to another process: to that whose version it is."""
        return version.seqno not in self._own and self._others(version) > 0

    def _others(self, version: Version) -> int:
        """How many writers of other processes have appended of late."""
        newest = {writer.outcomes[-1].seqno for writer in version.state.writers.values() if writer.outcomes}
        return len({seqno for seqno in newest if seqno > version.seqno - RECENT}.difference(self._own))
