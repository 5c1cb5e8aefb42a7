"""Which commands the rows of a log hold, by their tokens: so that none is committed twice, whoever sends it again.

A client whose server does not answer sends its command to another one. The first may only be paused, and still hold it.
So whoever applies a command looks for its token in the rows that came since it was first sent.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from persist_lib.core import commands as c
from persist_lib.format.log import LogRow, decode_row
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Consensus
from persist_lib.server.requests import APPENDS, Request
from persist_lib.shard.log import SCAN_ROWS, row_name

ROWS_KEPT = 4096
"""How many rows' tokens are in memory, of each shard: some 100 bytes a command."""
NO_MATTER = (*APPENDS, c.Heartbeat, c.Expire, c.Upgrade, c.Create)
"""Commands that may be applied twice. An append moves upper, so that it never applies again. The others do nothing
the second time."""

Found = SeqNo | Literal["not there", "unknown"]


class Seen:
    """The tokens of the rows after `begins` up to `ends`. For one thread at a time."""

    def __init__(self, shard: ShardId, consensus: Consensus) -> None:
        self._shard, self._consensus = shard, consensus
        self.begins = self.ends = SeqNo(-1)
        self._found: dict[tuple[bytes, str], SeqNo] = {}
        self._rows: deque[LogRow] = deque()

    def follow(self, newest: SeqNo) -> None:
        """Know the rows up to `newest`, which is in the log. Begins there when it knew none before."""
        if self.begins < 0:
            self.begins = self.ends = newest
        while self.ends < newest:
            rows = self._scan(SeqNo(self.ends + 1))
            if not rows or rows[0].seqno != self.ends + 1:  # truncated in the meantime
                self.begins, self.ends, self._found, self._rows = newest, newest, {}, deque()
                return
            for row in rows:
                self.add(row)

    def add(self, row: LogRow) -> None:
        """Know one more row: the next one."""
        if row.seqno != self.ends + 1:
            return
        self.ends = row.seqno
        self._rows.append(row)
        self._found |= dict.fromkeys(_keys(row), row.seqno)
        if len(self._rows) > ROWS_KEPT:
            oldest = self._rows.popleft()
            self.begins = oldest.seqno
            for key in _keys(oldest):
                if self._found.get(key) == oldest.seqno:
                    del self._found[key]

    def find(self, request: Request, since: SeqNo) -> Found:
        """The row after `since` that committed this command, up to the newest row that is known.

        "unknown" if the rows that could hold it are truncated.
        """
        if isinstance(request.command, NO_MATTER):
            return "not there"
        key = (request.token, type(request.command).__name__)
        if key in self._found:
            return self._found[key]
        at = SeqNo(since + 1)
        while at <= self.begins:
            rows = self._scan(at)
            if not rows or rows[0].seqno != at:
                return "unknown"
            for row in rows:
                if key in _keys(row):
                    return row.seqno
            at = SeqNo(rows[-1].seqno + 1)
        return "not there"

    def _scan(self, start: SeqNo) -> list[LogRow]:
        rows = self._consensus.scan(self._shard, start, SCAN_ROWS)
        return [decode_row(row.data, row_name(self._shard, row.seqno)) for row in rows]


def _keys(row: LogRow) -> list[tuple[bytes, str]]:
    return [(step.token, step.command) for step in row.steps if step.diff is not None]
