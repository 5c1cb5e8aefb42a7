"""How a call waits for a new version of a shard: the store notifies it if it can, and otherwise the call polls."""

from __future__ import annotations

from persist_lib.ids import SeqNo
from persist_lib.location.api import WakesWaiters
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Machine

LONGEST_WAIT_S = 5.0
"""The longest wait for one notification. Notifications can be lost, so a waiter also looks once in this time."""
GROWTH = 1.2


class Patience:
    """The pauses of one waiting call: `first_s` at first, growing to `longest_s` when nothing comes."""

    def __init__(self, machine: Machine, deadline: Deadline, first_s: float, longest_s: float) -> None:
        self._machine = machine
        self._deadline = deadline
        self._pause_s = first_s
        self._longest_s = longest_s
        self._told_at: SeqNo | None = None

    def pause(self, seqno: SeqNo) -> None:
        """Wait until there may be a version beyond `seqno`, the one that the caller has seen.

        SUBTLE: after a notification that brought nothing new, one pause is an ordinary one. So no caller reads more
        often with notifications than without them, whatever the store sends.
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
