"""The shards that a client follows, told by shard servers: who waits wakes at once, and rows come without a request.

A shard is followed at the server that its calls go to, so that this server makes most of its commits. If that one is
gone, the next one is taken, until it is back. What is told is a hint: a lost one costs time, as those that follow a
shard scan its log now and then. There is one stream and one thread for each server, whatever the number of shards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from persist_lib.format.wire import News, Pushed
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.rpc.push_stream import PushStream
from persist_lib.location.rpc.servers import Servers
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Bell, aside

CHECK_S = 4.5
"""How long nothing may come before a scan is due again: less than waiting calls wait (`read.waiting`)."""
KEPT_ROWS_MOST = 256
KEPT_BYTES_MOST = 1 << 20
"""How many rows of a shard, and bytes of them, are kept for those that follow it. Beyond it they scan the log."""


class Kept:
    """How many bytes of rows are kept, of all shards of a client."""

    def __init__(self) -> None:
        self.bytes = 0


class Followed:
    """One shard. Guarded by the lock that it is made with.

    `epoch` counts from when on it is told. What was committed before that is not told: `is_sure` once a scan that
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
        self.epoch += 1
        self.is_live, self.is_sure = True, False

    def lose(self) -> None:
        """No news of it come any more. Waiting calls look again."""
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
        if self._size > KEPT_BYTES_MOST or len(self._rows) > KEPT_ROWS_MOST:
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
        """Keep no rows: readers that need them scan the log."""
        self._rows.clear()
        self._count(-self._size)

    def _count(self, size: int) -> None:
        self._size += size
        self._kept.bytes += size


UNUSED_S = 60.0
"""How long a shard is followed without a waiting call."""
REFUSED_S = 30.0
"""After how long a shard is asked for again that the server does not tell of."""
BYTES_MOST = 64 << 20
"""How many bytes of rows are kept, of all shards."""
SLICE_S = 1.0


class Subscriptions:
    """What `WakesWaiters` and `PushesRows` ask for. Safe to use from several threads, and after a fork."""

    def __init__(self, servers: Servers, runtime: Runtime) -> None:
        self._servers, self._runtime = servers, runtime
        self._inherited: list[object] = []
        self._is_closed = False
        self._begin()
        enrol(self, Stage.STORES)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._followed: dict[str, Followed] = {}
        self._kept = Kept()
        self._lines = {
            server.address: PushStream(server, self._lock, self._runtime, self._take, self._lose, self._is_wanted)
            for server in self._servers.order("")
        }
        self._at: dict[str, PushStream] = {}
        self._swept = self._runtime.monotonic()

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        """Wait up to `longest_s` seconds for a row above `seqno` to be told. False at once if none could be now.

        True as well when something else has to be looked at: the shard is told from now on, or no longer.
        """
        deadline = self._runtime.deadline(longest_s)
        if (found := self._find(key)) is None:
            return False
        one, epoch, line = found
        if not one.is_sure:
            return True
        while not deadline.has_passed():
            if one.bell.wait(lambda: one.newest > seqno or one.epoch != epoch, deadline.remaining_s(), SLICE_S):
                break
            line.check()
        return True

    def pushed(self, key: str, after: SeqNo) -> Sequence[Row] | None:
        """The rows after one; None if they were not told, or a scan is due."""
        with self._lock:
            if (one := self._followed.get(key)) is None:
                return None
            one.used = now = self._runtime.monotonic()
            return one.after(after, now)

    def scanning(self, key: str) -> tuple[int, float]:
        """What `scanned` has to know of a scan that begins now."""
        with self._lock:
            one = self._followed.get(key)
            return (-1 if one is None else one.epoch), self._runtime.monotonic()

    def scanned(self, key: str, began: tuple[int, float], newest: SeqNo) -> None:
        """Note that a scan has come to the end of a shard's log, and what its newest row was (0: none was read)."""
        with self._lock:
            if (one := self._followed.get(key)) is not None:
                one.scanned(*began, newest)

    def close(self) -> None:
        """End the streams and their threads. Waiting calls continue. Idempotent."""
        self._is_closed = True
        with self._lock:
            followed = list(self._followed.values())
            for one in followed:
                one.lose()
        for one in followed:
            one.bell.ring()
        for line in self._lines.values():
            line.close()

    def after_fork_in_child(self) -> None:
        """Begin again. The parent's streams stay referenced: collecting them might end them for the parent."""
        self._inherited += [self._lines, self._at, self._followed]
        self._begin()

    def _find(self, key: str) -> tuple[Followed, int, PushStream] | None:
        """A shard that is told now, its epoch, and where it is told; None if it is not. See to it that it will be."""
        with self._lock:
            if self._is_closed:
                return None
            now = self._runtime.monotonic()
            if (one := self._followed.get(key)) is None:
                one = self._followed[key] = Followed(key, self._lock, now, self._kept)
            one.used = now
            line = self._place(one, now)
            if one.is_live and line is not None:
                return one, one.epoch, line
            is_missing = line is not None and line.thread is None
        if line is not None and is_missing:
            aside(line.ensure_thread)  # an interrupt could leave the start of a thread half done
        elif line is not None:
            line.check()  # nothing was told yet: the server may be paused since before the stream began
        return None

    def _place(self, one: Followed, now: float) -> PushStream | None:
        """The line where a shard is followed: that of the first server which is there. Moves it there if need be."""
        if now < one.refused_until:
            return None
        servers = [server for server in self._servers.order(one.shard) if not server.is_shunned]
        there = [line for line in (self._lines[server.address] for server in servers) if not line.is_gone]
        best = there[0] if there else None
        current = self._at.get(one.shard)
        if best is not None and best is not current:
            if current is not None:
                current.end(one.shard)
                one.lose()
            best.begin(one.shard)  # first, so that after an interrupt it is done again
            self._at[one.shard] = best
        return best

    def _take(self, line: PushStream, told: Pushed) -> None:
        now, changed = self._runtime.monotonic(), []
        with self._lock:
            for news in told.news:
                one = self._followed.get(news.shard)
                if one is None or self._at.get(news.shard) is not line:
                    continue
                if not one.is_live:
                    one.begin()
                one.add(news, now)
                changed.append(one)
            for shard in told.ended:
                if (one := self._followed.get(shard)) is not None and self._at.get(shard) is line:
                    self._leave(one)
                    one.refused_until = now + REFUSED_S
                    changed.append(one)
            if self._kept.bytes > BYTES_MOST:
                for one in self._followed.values():
                    one.clear()
            if now - self._swept > 1:
                self._sweep(now)
        for one in changed:
            one.bell.ring()

    def _leave(self, one: Followed) -> None:
        if (line := self._at.pop(one.shard, None)) is not None:
            line.end(one.shard)
        one.lose()

    def _sweep(self, now: float) -> None:
        self._swept = now
        for one in [one for one in self._followed.values() if now - one.used > UNUSED_S]:
            self._leave(one)
            del self._followed[one.shard]

    def _lose(self, line: PushStream) -> None:
        """Note that a line tells nothing any more, and wake all that wait for it."""
        with self._lock:
            lost = [one for one in self._followed.values() if self._at.get(one.shard) is line]
            for one in lost:
                self._leave(one)
        for one in lost:
            one.bell.ring()

    def _is_wanted(self) -> bool:
        return bool(self._followed)
