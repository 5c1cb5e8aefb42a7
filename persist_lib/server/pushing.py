"""Who follows which shards, and the new rows on their way to them.

Rows come in from the threads that commit or read them, which never wait: `saw` notes them, and the server's event loop
hands them to those that follow the shard. Whatever a client does not read is bounded by its `Backlog`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence

from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.server.backlog import Backlog

FOLLOWED_MOST = 10_000
"""The most shards that one client follows."""
ROWS_MOST = 256
BYTES_MOST = 1 << 20
"""The most rows of a shard, and bytes of them, that wait for the loop. Beyond it only the newest seqno is told."""


class Subscriber:
    """A client that follows shards: which, and what it was not told yet. For the event loop only."""

    def __init__(self) -> None:
        self.shards: set[str] = set()
        self.backlog = Backlog()
        self.ended: list[str] = []
        self.news = asyncio.Event()

    def tell(self, shard: str, rows: Sequence[Row], newest: SeqNo) -> None:
        """Let news wait until they are sent."""
        self.backlog.put(shard, rows, newest)
        self.news.set()

    def end(self, shard: str) -> None:
        """Tell no more of a shard, and that it is so."""
        self.shards.discard(shard)
        self.backlog.drop(shard)
        self.ended.append(shard)
        self.news.set()


class _Trail:
    """A shard that is followed: the newest seqno that is known, and rows that were not handed out yet."""

    def __init__(self) -> None:
        self.newest = SeqNo(0)
        self.rows: list[Row] = []
        self.subscribers: dict[Subscriber, None] = {}


class Pushing:
    """`saw`, `knows`, `behind` and `clients` may be called from any thread, everything else in the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trails: dict[str, _Trail] = {}
        self._touched: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscribers: dict[Subscriber, None] = {}
        self.is_stopping = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out by this event loop from now on."""
        self._loop = loop

    def saw(self, shard: str, rows: Sequence[Row]) -> None:
        """Note rows of a shard that are in its log, in their order. Those that were seen before change nothing."""
        if not rows or shard not in self._trails:
            return
        with self._lock:
            if (trail := self._trails.get(shard)) is None or rows[-1].seqno <= trail.newest:
                return
            trail.rows += [row for row in rows if row.seqno > trail.newest]
            if len(trail.rows) > ROWS_MOST or sum(len(row.data) for row in trail.rows) > BYTES_MOST:
                trail.rows = []
            trail.newest = rows[-1].seqno
            self._touch(shard)

    def knows(self, shard: str, newest: SeqNo) -> None:
        """Note the newest seqno of a shard, whose rows nobody read."""
        with self._lock:
            if (trail := self._trails.get(shard)) is not None and newest > trail.newest:
                trail.newest = newest
                self._touch(shard)

    def behind(self, heads: Mapping[str, SeqNo]) -> dict[str, SeqNo]:
        """The shards that are followed and have newer rows than were seen, and up to where these were."""
        with self._lock:
            return {
                shard: trail.newest for shard, newest in heads.items()
                if (trail := self._trails.get(shard)) is not None and trail.newest < newest
            }  # fmt: skip

    def followed(self) -> list[str]:
        """The shards that are followed."""
        with self._lock:
            return list(self._trails)

    def is_followed(self) -> bool:
        """Whether anybody follows anything."""
        return bool(self._trails)

    def join(self, subscriber: Subscriber) -> None:
        """Know a client."""
        self._subscribers[subscriber] = None

    def follow(self, subscriber: Subscriber, shards: Iterable[str]) -> None:
        """Tell a client of these shards from now on; of those that are too many, that it is told nothing."""
        for shard in shards:
            if len(subscriber.shards) >= FOLLOWED_MOST and shard not in subscriber.shards:
                subscriber.end(shard)
                continue
            with self._lock:
                trail = self._trails.setdefault(shard, _Trail())
                trail.subscribers[subscriber] = None
                newest = trail.newest
            subscriber.shards.add(shard)
            subscriber.tell(shard, (), newest)

    def unfollow(self, subscriber: Subscriber, shards: Iterable[str]) -> None:
        """Tell a client of these shards no more."""
        for shard in list(shards):
            subscriber.shards.discard(shard)
            subscriber.backlog.drop(shard)
            with self._lock:
                if (trail := self._trails.get(shard)) is not None:
                    trail.subscribers.pop(subscriber, None)
                    if not trail.subscribers:
                        del self._trails[shard]

    def leave(self, subscriber: Subscriber) -> None:
        """Forget a client."""
        self.unfollow(subscriber, subscriber.shards)
        self._subscribers.pop(subscriber, None)

    def clients(self) -> int:
        """How many clients follow shards."""
        return len(self._subscribers)

    def stop(self) -> None:
        """Tell nothing more: each client goes to another server."""
        self.is_stopping = True
        for subscriber in self._subscribers:
            subscriber.news.set()

    def _touch(self, shard: str) -> None:
        is_first = not self._touched
        self._touched[shard] = None
        if is_first and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
            found = [(shard, trail) for shard in touched if (trail := self._trails.get(shard)) is not None]
            news = [(shard, trail.rows, trail.newest, list(trail.subscribers)) for shard, trail in found]
            for _, trail in found:
                trail.rows = []
        for shard, rows, newest, subscribers in news:
            for subscriber in subscribers:
                subscriber.tell(shard, rows, newest)
