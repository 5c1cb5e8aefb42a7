"""How a call waits for a shard to move: told by the store where it tells, looking by itself otherwise."""

from __future__ import annotations

from persist_lib.ids import SeqNo
from persist_lib.location.api import WakesWaiters
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Machine

LONGEST_WAIT_S = 5.0
"""For a notification. They can be lost, so this is how late news may be then, and how often an idle waiter looks."""
GROWTH = 1.2


class Patience:
    """The pauses of one waiting call: of `first_s` each, growing to `longest_s` when nothing comes."""

    def __init__(self, machine: Machine, deadline: Deadline, first_s: float, longest_s: float) -> None:
        self._machine = machine
        self._deadline = deadline
        self._pause_s = first_s
        self._longest_s = longest_s
        self._told_at: SeqNo | None = None

    def pause(self, seqno: SeqNo) -> None:
        """Until there may be something beyond `seqno`, the version that was looked at last.

        SUBTLE: after having been told, and there was nothing new, one pause is an ordinary one: whatever a store tells,
        no caller looks more often than without it.
        """
        told_at, self._told_at = self._told_at, None
        if told_at != seqno and self._was_told(seqno):
            self._told_at = seqno
            return
        self._deadline.pause(self._pause_s)
        self._pause_s = min(self._longest_s, self._pause_s * GROWTH)

    def _was_told(self, seqno: SeqNo) -> bool:
        consensus, longest_s = self._machine.consensus, min(LONGEST_WAIT_S, self._deadline.remaining_s())
        return isinstance(consensus, WakesWaiters) and consensus.wait(self._machine.shard, seqno, longest_s)
