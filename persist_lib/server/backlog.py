"""What one client was not told yet of the shards that it follows: bounded, whether it reads or not."""

from __future__ import annotations

from collections.abc import Sequence

from persist_lib.format.push_messages import News
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row

BYTES_MOST = 128 << 10
ROWS_MOST = 1024
"""How many rows, and bytes of them, wait for one client. Beyond that it is told the newest seqnos only."""
OVERHEAD = 64


class Backlog:
    """News by shard. Rows are left out rather than kept beyond the bounds; the newest seqno never is."""

    def __init__(self, bytes_most: int = BYTES_MOST, rows_most: int = ROWS_MOST) -> None:
        self._bytes_most, self._rows_most = bytes_most, rows_most
        self._rows: dict[str, list[Row]] = {}
        self._newest: dict[str, SeqNo] = {}
        self._bytes = self._count = 0

    def __len__(self) -> int:
        """Of how many shards there is news."""
        return len(self._newest)

    @property
    def bytes(self) -> int:
        """How many bytes of rows wait."""
        return self._bytes

    def put(self, shard: str, rows: Sequence[Row], newest: SeqNo) -> None:
        """Add news of a shard. `rows` are those after the ones that were put before; without them it lags."""
        self._newest[shard] = max(newest, self._newest.get(shard, SeqNo(0)))
        if rows:
            self._rows.setdefault(shard, []).extend(rows)
            self._bytes += sum(len(row.data) + OVERHEAD for row in rows)
            self._count += len(rows)
            if self._bytes > self._bytes_most or self._count > self._rows_most:
                self._forget_rows()

    def drop(self, shard: str) -> None:
        """Tell no news of a shard."""
        if self._newest.pop(shard, None) is not None:
            gone = self._rows.pop(shard, [])
            self._bytes -= sum(len(row.data) + OVERHEAD for row in gone)
            self._count -= len(gone)

    def take(self) -> list[News]:
        """All news, which do not wait any more."""
        news = [
            News(shard, tuple((row.seqno, row.data) for row in self._rows.get(shard, ())), newest)
            for shard, newest in self._newest.items()
        ]
        self._newest = {}
        self._forget_rows()
        return news

    def _forget_rows(self) -> None:
        self._rows = {}
        self._bytes = self._count = 0
