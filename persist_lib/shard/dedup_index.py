"""Which commands the rows of a log hold, by their tokens: so that none is committed twice when it is repeated.

A client whose server does not answer sends its command to another one. The first may only be paused, and still hold it.
So a server that applies a command looks for its token in the rows that came since it was first sent.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Literal

from persist_lib.core import commands as c
from persist_lib.format.log import LogRow, decode_row
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Consensus, Row
from persist_lib.shard.log import SCAN_ROWS, row_name
from persist_lib.shard.requests import APPENDS, Request

ROWS_KEPT = 4096
"""How many rows' tokens are in memory, of each shard: some 100 bytes a command."""
NO_MATTER = (*APPENDS, c.Heartbeat, c.Expire, c.Upgrade, c.Create)
"""Commands that may be applied twice. An append moves upper, so that it never applies again; one at the next time is
known by its token, or refused (`core.outcomes`). The others do nothing the second time."""

RECENT_ROWS = 64
RECENT_BYTES = 256 * 1024
"""How many rows, and how many bytes of them, are in memory of each shard, for clients that follow the log."""

Found = SeqNo | Literal["not there", "unknown"]
Key = tuple[bytes, str]


class Seen:
    """The tokens of the rows after `begins` up to `ends`, and the newest rows. For one thread at a time."""

    def __init__(self, shard: ShardId, consensus: Consensus) -> None:
        self._shard, self._consensus = shard, consensus
        self._forget(SeqNo(-1))

    def _forget(self, newest: SeqNo) -> None:
        self.begins = self.ends = newest
        self._found: dict[Key, SeqNo] = {}
        self._keys: deque[tuple[SeqNo, list[Key]]] = deque()
        self._recent: deque[Row] = deque()
        self._recent_bytes = 0

    def follow(self, newest: SeqNo) -> None:
        """Know the rows up to `newest`, which is in the log. Begins there when it knew none before."""
        if self.begins < 0:
            self._forget(newest)
        while self.ends < newest:
            rows = self._scan(SeqNo(self.ends + 1))
            if not rows or rows[0].seqno != self.ends + 1:  # truncated in the meantime
                self._forget(newest)
                return
            for row in rows:
                self.add(row, _keys(row, self._shard))

    def committed(self, row: LogRow, data: bytes) -> None:
        """Know a row that was just committed, if it is the next one."""
        if row.seqno == self.ends + 1:
            self.add(Row(row.seqno, data), _keys_of(row))

    def add(self, row: Row, keys: list[Key]) -> None:
        self.ends = row.seqno
        self._keys.append((row.seqno, keys))
        self._found |= dict.fromkeys(keys, row.seqno)
        if len(self._keys) > ROWS_KEPT:
            self.begins, oldest = self._keys.popleft()
            for key in oldest:
                if self._found.get(key) == self.begins:
                    del self._found[key]
        self._recent.append(row)
        self._recent_bytes += len(row.data)
        while len(self._recent) > RECENT_ROWS or self._recent_bytes > RECENT_BYTES:
            self._recent_bytes -= len(self._recent.popleft().data)

    def rows(self, after: SeqNo, last: SeqNo) -> tuple[Row, ...]:
        """The rows after one up to another one, if all of them are in memory; else none."""
        first = self._recent[0].seqno if self._recent else SeqNo(0)
        if not first <= after + 1 <= last <= self.ends:
            return ()
        return tuple(islice(self._recent, after + 1 - first, last + 1 - first))

    def find(self, request: Request) -> Found:
        """The row that committed this command since it was made, up to the newest row that is known.

        "unknown" if the rows that could hold it are truncated; and if they are many and old, and it is said not to be
        repeated: its sender can make it again, and others would wait for this.

        SUBTLE: only its sender says that it is not repeated. A message that comes late may be older than its own
        repetition, which another server has got. So nothing but the rows since its sender's version tells.
        """
        if isinstance(request.command, NO_MATTER):
            return "not there"
        if not request.is_repeated and request.known + SCAN_ROWS < self.begins:
            return "unknown"
        return self.look_up(request, request.known)

    def look_up(self, request: Request, since: SeqNo) -> Found:
        """The same of any command, after the version `since`."""
        key = (request.token, c.stored_name(request.command))
        if key in self._found:
            return self._found[key]
        at = SeqNo(since + 1)
        while at <= self.begins:
            rows = self._scan(at)
            if not rows or rows[0].seqno != at:
                return "unknown"
            for row in rows:
                if key in _keys(row, self._shard):
                    return row.seqno
            at = SeqNo(rows[-1].seqno + 1)
        return "not there"

    def _scan(self, start: SeqNo) -> list[Row]:
        return self._consensus.scan(self._shard, start, SCAN_ROWS)


def _keys(row: Row, shard: ShardId) -> list[Key]:
    return _keys_of(decode_row(row.data, row_name(shard, row.seqno)))


def _keys_of(row: LogRow) -> list[Key]:
    return [(step.token, step.command) for step in row.steps if step.diff is not None]
