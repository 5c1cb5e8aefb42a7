"""What a client was told of one shard that it follows: the newest rows, and from when on it is told."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from persist_lib.format.pushed import News
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.runtime.threads import Bell

CHECK_S = 4.5
"""How long nothing may come before a scan is due again: less than waiting calls wait (`read.waiting`)."""
ROWS_MOST = 256
BYTES_MOST = 1 << 20
"""How many rows of a shard, and bytes of them, are kept for those that follow it. Beyond it they scan the log."""


class Kept:
    """How many bytes of rows are kept, of all shards of a client."""

    def __init__(self) -> None:
        self.bytes = 0


class Followed:
    """One shard. Guarded by the lock that it is made with.

    `epoch` counts from when on it was told anew. What was committed before that is not told: `is_sure` once a scan that
    began later has reached the end of the log. `newest` is the newest seqno that is known of.
    """

    def __init__(self, shard: str, lock: threading.Lock, now: float, kept: Kept) -> None:
        self.shard = shard
        self._kept = kept
        self.bell = Bell(lock)
        self.epoch = 0
        self.is_live = self.is_sure = False
        self.newest = SeqNo(0)
        self.used = self.checked = now
        self.refused_until = 0.0
        self._rows: deque[Row] = deque()
        self._size = 0

    def begin(self) -> None:
        """It is told from now on."""
        self.epoch += 1
        self.is_live, self.is_sure = True, False

    def lose(self) -> None:
        """It is not told any more. Whoever waits looks again."""
        self.epoch += 1
        self.is_live = self.is_sure = False
        self.clear()

    def scanned(self, epoch: int, began: float, newest: SeqNo) -> None:
        """Note that a scan from that epoch, which began then, has come to the end of the log."""
        self.newest = max(self.newest, newest)
        if self.is_live and epoch == self.epoch:
            self.is_sure, self.checked = True, max(began, self.checked)

    def add(self, news: News, now: float) -> None:
        """Take what was told. Rows that do not follow the last one, as some were left out, take its place."""
        for seqno, data in news.rows:
            if self._rows and seqno <= self._rows[-1].seqno:
                continue
            if self._rows and seqno != self._rows[-1].seqno + 1:
                self.clear()
            self._rows.append(Row(seqno, data))
            self._count(len(data))
            self.newest = max(self.newest, seqno)
        self.newest = max(self.newest, news.newest)
        if news.rows or news.newest:
            self.checked = now
        if self._size > BYTES_MOST or len(self._rows) > ROWS_MOST:
            self.clear()

    def after(self, seqno: SeqNo, now: float) -> Sequence[Row] | None:
        """The rows after one, up to the newest; None if they are not here, or a scan is due. Rows before go."""
        if not (self.is_live and self.is_sure) or now - self.checked >= CHECK_S:
            return None
        while self._rows and self._rows[0].seqno <= seqno:
            self._count(-len(self._rows.popleft().data))
        if seqno >= self.newest:
            return ()
        if self._rows and self._rows[0].seqno == seqno + 1 and self._rows[-1].seqno == self.newest:
            return tuple(self._rows)
        return None

    def clear(self) -> None:
        """Keep no rows: whoever needs them scans the log."""
        self._rows.clear()
        self._count(-self._size)

    def _count(self, size: int) -> None:
        self._size += size
        self._kept.bytes += size
