"""How a call waits for a new version of a shard: the store notifies it if it can, and otherwise the call polls."""

from __future__ import annotations

from persist_lib.core.state import Version
from persist_lib.ids import SeqNo
from persist_lib.location.api import WakesWaiters
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Machine
from persist_lib.shard.pushed_rows import told

LONGEST_WAIT_S = 5.0
"""The longest wait for one notification. Notifications can be lost, so a waiter also looks once in this time."""
GROWTH = 1.2


class Patience:
    """The looks and pauses of one waiting call: `first_s` at first, growing to `longest_s` when nothing comes.

    `follows`: also the first look may be at what the store told, so that nothing is read if nothing came. `tells_all`:
    all that the call waits for is in the shard. Otherwise it looks as often as without notifications, at the latest.
    """

    def __init__(
        self, machine: Machine, deadline: Deadline, first_s: float, longest_s: float,
        *, follows: bool = False, tells_all: bool = True,
    ) -> None:  # fmt: skip
        self._machine = machine
        self._deadline = deadline
        self._pause_s = first_s
        self._longest_s = longest_s
        self._told_at: SeqNo | None = None
        self._is_following, self._tells_all = follows, tells_all
        self._is_read = False

    def look(self) -> Version:
        """The newest version: read from the log at first and at the end; in between what the store told, if it does."""
        version = told(self._machine) if self._is_following and not self._deadline.has_passed() else None
        self._is_following, self._is_read = True, version is None
        return self._machine.fetch() if version is None else version

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed, and the last look was at the log: then what was waited for is not there."""
        return self._is_read and self._deadline.has_passed()

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
        self._grow()

    def _grow(self) -> None:
        self._pause_s = min(self._longest_s, self._pause_s * GROWTH)

    def _was_told(self, seqno: SeqNo) -> bool:
        consensus, longest_s = self._machine.consensus, min(LONGEST_WAIT_S, self._deadline.remaining_s())
        if not self._tells_all:
            longest_s = min(self._pause_s, longest_s)
            self._grow()
        return isinstance(consensus, WakesWaiters) and consensus.wait(self._machine.shard, seqno, longest_s)
