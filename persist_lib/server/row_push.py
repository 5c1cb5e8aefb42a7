"""Who follows which shards, and the new rows on their way to them.

Rows come in from the threads that commit or read them, which never wait: `saw` notes them, and the server's event loop
hands them to those that follow the shard. Whatever a client does not read is bounded by its `Backlog`.

Of rows that others commit, past this server, it hears from the store, or else looks at the heads now and then. One
request answers the heads of all shards, whatever the number of clients and of shards that they follow. The rows of a
shard are then read once for all that follow it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from persist_lib.errors import InvalidUsage, NewerFormat, NotAuthenticated, PersistError
from persist_lib.format.wire import News, decode_follow, encode_pushed
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Consensus, Newest, Row
from persist_lib.location.contract import next_seqno
from persist_lib.location.wrap.around import AroundConsensus
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.access import Caller

log = logging.getLogger("persist.server")

BACKLOG_BYTES = 128 << 10
BACKLOG_ROWS = 1024
"""How many rows, and bytes of them, wait for one client. Beyond that it gets the newest seqnos only."""
OVERHEAD = 64


class Backlog:
    """News by shard. Rows are left out rather than kept beyond the bounds; the newest seqno never is."""

    def __init__(self, bytes_most: int = BACKLOG_BYTES, rows_most: int = BACKLOG_ROWS) -> None:
        self._bytes_most, self._rows_most = bytes_most, rows_most
        self._rows: dict[str, list[Row]] = {}
        self._newest: dict[str, SeqNo] = {}
        self.bytes = self._count = 0

    def __len__(self) -> int:
        return len(self._newest)

    def put(self, shard: str, rows: Sequence[Row], newest: SeqNo) -> None:
        """Add news of a shard. `rows` are those after the ones that were put before; without them it lags."""
        self._newest[shard] = max(newest, self._newest.get(shard, SeqNo(0)))
        if rows:
            self._rows.setdefault(shard, []).extend(rows)
            self.bytes += sum(len(row.data) + OVERHEAD for row in rows)
            self._count += len(rows)
            if self.bytes > self._bytes_most or self._count > self._rows_most:
                self._forget_rows()

    def drop(self, shard: str) -> None:
        if self._newest.pop(shard, None) is not None:
            gone = self._rows.pop(shard, [])
            self.bytes -= sum(len(row.data) + OVERHEAD for row in gone)
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
        self.bytes = self._count = 0


FOLLOWED_MOST = 10_000
"""The most shards that one client follows."""
ROWS_MOST = 256
BYTES_MOST = 1 << 20
"""The most rows of a shard, and bytes of them, that wait for the loop. Beyond it only the newest seqno is kept."""


class Subscriber:
    """A client that follows shards: which, and what it was not told yet. For the event loop only."""

    def __init__(self) -> None:
        self.shards: set[str] = set()
        self.backlog = Backlog()
        self.ended: list[str] = []
        self.news = asyncio.Event()

    def tell(self, shard: str, rows: Sequence[Row], newest: SeqNo) -> None:
        self.backlog.put(shard, rows, newest)
        self.news.set()

    def end(self, shard: str) -> None:
        """Tell no more of a shard, and say that it ended."""
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
        """Note the newest seqno of a shard, whose rows were not read."""
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
        with self._lock:
            return list(self._trails)

    def is_followed(self) -> bool:
        return bool(self._trails)

    def join(self, subscriber: Subscriber) -> None:
        self._subscribers[subscriber] = None

    def follow(self, subscriber: Subscriber, shards: Iterable[str]) -> None:
        """Tell a client of these shards from now on; of those that are too many, that they are not followed."""
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
        for shard in list(shards):
            subscriber.shards.discard(shard)
            subscriber.backlog.drop(shard)
            with self._lock:
                if (trail := self._trails.get(shard)) is not None:
                    trail.subscribers.pop(subscriber, None)
                    if not trail.subscribers:
                        del self._trails[shard]

    def leave(self, subscriber: Subscriber) -> None:
        self.unfollow(subscriber, subscriber.shards)
        self._subscribers.pop(subscriber, None)

    def clients(self) -> int:
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


BEAT_S = 1.0
"""After so long without news, a client gets an empty message, which shows that the server is there."""
SLOWEST_S = 60.0
"""A client that takes no message for so long gets nothing more: it has to follow again."""


class Following:
    """Serves `follow`. `caller` tells who makes a call, by what is known now, and raises NotAuthenticated.

    `known` sees to it that its rights are those of now.
    """

    def __init__(
        self, pushing: Pushing, caller: Callable[[Any], Caller], known: Callable[[Caller], Awaitable[None]]
    ) -> None:
        self._pushing, self._caller, self._known = pushing, caller, known

    async def serve(self, _said: Any, context: Any) -> None:
        try:
            self._caller(context)  # before anything of a stranger is read
        except NotAuthenticated as stranger:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, stranger.message)
        subscriber = Subscriber()
        self._pushing.join(subscriber)
        listening = asyncio.ensure_future(self._listen(subscriber, context))
        try:
            while not (self._pushing.is_stopping or listening.done()):
                await self._tell(subscriber, context)
            if listening.done() and (error := listening.exception()) is not None:
                raise error
        except NotAuthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        except (InvalidUsage, NewerFormat) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the client takes no messages")
        finally:
            listening.cancel()
            self._pushing.leave(subscriber)

    async def _listen(self, subscriber: Subscriber, context: Any) -> None:
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                said = decode_follow(data)
                self._pushing.unfollow(subscriber, said.ended)
                self._pushing.follow(subscriber, said.begun)
        finally:
            subscriber.news.set()

    async def _tell(self, subscriber: Subscriber, context: Any) -> None:
        """Send the next message: what is new, or after a while that nothing is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(subscriber.news.wait(), BEAT_S)
        subscriber.news.clear()
        # By the rights of this moment, which may be others than when the shard was asked for.
        caller = self._caller(context)
        with suppress(PersistError):  # where the store does not answer, by what it said last
            await self._known(caller)
        news = []
        for one in subscriber.backlog.take():
            if caller.rights_on(one.shard):
                news.append(one)
            else:
                self._pushing.unfollow(subscriber, (one.shard,))
                subscriber.ended.append(one.shard)
        ended, subscriber.ended = tuple(subscriber.ended), []
        await asyncio.wait_for(context.write(encode_pushed(tuple(news), ended)), SLOWEST_S)


class Announcing(AroundConsensus):
    """The same Consensus. A row is announced when it is known to be in the log, never before."""

    def __init__(self, inner: Consensus, pushing: Pushing) -> None:
        super().__init__(inner)
        self._pushing = pushing

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        rows = self.inner.scan(key, from_seqno, limit)
        self._pushing.saw(key, rows)
        return rows

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        return self._announced(self.inner.compare_and_set(key, expected, data), {key: (expected, data)})

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        return self._announced(self.inner.compare_and_set_many(changes), changes)

    def _announced(self, won: bool, changes: Mapping[str, Change]) -> bool:
        for key, (expected, data) in changes.items() if won else ():
            self._pushing.saw(key, [Row(next_seqno(expected), data)])
        return won


POLL_S = 0.5
"""How often the heads are looked at, where the store does not tell of new rows."""
CHECK_S = 5.0
"""How often they are looked at where it does, as what it tells can get lost."""
SHARE = 20
"""The pause is at least so many times what a look takes: of a slow store, the heads are looked at less often."""
READERS = 4
PATIENCE_S = 10.0


class Watching:
    """A thread that looks for the rows of others while anybody follows a shard."""

    def __init__(self, consensus: Announcing, pushing: Pushing, runtime: Runtime, poll_s: float = POLL_S) -> None:
        self._consensus, self._pushing, self._runtime, self._poll_s = consensus, pushing, runtime, poll_s
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._is_over = False
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="persist-watch")
        self._thread = threading.Thread(target=self._run, name="persist-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._wake.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown()

    def look(self) -> None:
        """Look at the heads, and read the rows that this server has not seen."""
        followed = self._pushing.followed()
        self._read(within(self._runtime.deadline(PATIENCE_S), lambda: self._consensus.heads(followed)))

    def _run(self) -> None:
        next_look, was_told = self._runtime.monotonic(), False
        while not self._is_over:
            try:
                heard = self._consensus.heard(self._poll_s) if self._pushing.is_followed() else None
                if heard:
                    self._read(heard)
                # What was committed before the store began to tell was not told.
                is_news, was_told = heard is not None and not was_told, heard is not None
                started = self._runtime.monotonic()
                if self._pushing.is_followed() and (is_news or started >= next_look):
                    self.look()
                    took_s = self._runtime.monotonic() - started
                    next_look = started + max(CHECK_S if was_told else self._poll_s, SHARE * took_s)
            except PersistError as error:
                log.info("could not look for rows of others; those that follow get them late: %s", error)
                next_look = self._runtime.monotonic() + CHECK_S
            except Exception:
                log.exception("could not look for rows of others; those that follow get them late")
                next_look = self._runtime.monotonic() + CHECK_S
            if not was_told:
                with suppress(Empty):
                    self._wake.get(timeout=self._poll_s)

    def _read(self, heads: Mapping[str, SeqNo]) -> None:
        """Read what is new in these shards, several at a time. All of it before the next look: that bounds it."""
        behind = self._pushing.behind(heads)
        for _ in self._pool.map(lambda shard: self._read_one(shard, behind[shard], heads[shard]), behind):
            pass

    def _read_one(self, shard: str, seen: SeqNo, newest: SeqNo) -> None:
        if seen > 0 and newest - seen <= ROWS_MOST:
            # `Announcing` announces the rows where they are read.
            within(self._runtime.deadline(PATIENCE_S), lambda: self._consensus.scan(shard, SeqNo(seen + 1), ROWS_MOST))
        self._pushing.knows(shard, newest)
