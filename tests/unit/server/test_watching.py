"""How a server learns of rows of others: told by the store, or by looking at heads; only while anybody follows."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from persist_lib.errors import Determinate
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.log_watch import Announcing, Watching
from persist_lib.server.row_push import Pushing, Subscriber
from tests.unit.server.following import eventually


class Store(AroundConsensus):
    """A store of one row more than was told, for each shard that a test names; `tells` of them, or None."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.newest: dict[str, SeqNo] = {}
        self.tells: dict[str, SeqNo] | None = None
        self.asked: Counter[str] = Counter()
        self.fails = False
        self.came = threading.Event()

    def around(self, operation: Operation, call: Any) -> Any:
        raise AssertionError(operation)

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        self.asked["heads"] += 1
        assert keys is not None
        self.asked["shards"] += len(keys)
        if self.fails:
            raise Determinate("the store is gone")
        return {key: self.newest[key] for key in keys if key in self.newest}

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        self.asked["scan"] += 1
        return [Row(SeqNo(n), b"") for n in range(from_seqno, self.newest[key] + 1)][:limit]

    def heard(self, longest_s: float) -> Mapping[str, SeqNo] | None:
        if self.tells is None:
            return None
        self.asked["heard"] += 1
        if self.asked["heard"] == 1:  # from now on
            return {}
        self.came.wait(longest_s)
        self.came.clear()
        told, self.tells = self.tells, {}
        return told


class Site:
    """A store, and one client that follows `s` and has seen row 5."""

    def __init__(self, poll_s: float) -> None:
        self.store, self.hub, self.one = Store(), Pushing(), Subscriber()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.hub.start(self.loop)
        self.watching = Watching(Announcing(self.store, self.hub), self.hub, Runtime(), poll_s)
        self.watching.start()

    def follow(self) -> None:
        self.store.newest["s"] = SeqNo(5)
        self.loop.call_soon_threadsafe(self.hub.follow, self.one, ["s"])
        eventually(self.hub.is_followed)
        self.hub.knows("s", SeqNo(5))

    def told(self) -> int:
        return max([int(one.newest) for one in self.one.backlog.take()], default=0)

    def close(self) -> None:
        self.watching.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def test_heads_are_looked_at_only_while_anybody_follows() -> None:
    site = Site(poll_s=0.001)
    try:
        site.watching._wake.put(None)
        eventually(site.watching._wake.empty)
        assert not site.store.asked
        site.follow()
        eventually(lambda: site.store.asked["heads"] > 1)
        assert site.store.asked["scan"] == 0, "nothing new"
        site.store.newest = {"s": SeqNo(7), "t": SeqNo(9)}
        eventually(lambda: site.told() == 7)
        assert site.store.asked["scan"] == 1, "of what is followed"
        site.store.fails = True
        before = site.store.asked["heads"]
        eventually(lambda: site.store.asked["heads"] > before)
        assert site.watching._thread.is_alive(), "a store that fails ends nothing"
    finally:
        site.close()


def test_where_the_store_tells_of_rows_nothing_is_polled() -> None:
    site = Site(poll_s=1000)
    try:
        site.store.tells = {}
        site.watching._wake.put(None)
        site.follow()
        site.watching._wake.put(None)
        eventually(lambda: site.store.asked["heads"] == 1)  # what came before it told
        for n in range(6, 9):
            site.store.newest["s"] = SeqNo(n)
            site.store.tells = {"s": SeqNo(n), "t": SeqNo(1)}
            site.store.came.set()
            eventually(lambda n=n: site.told() == n)  # type: ignore[misc]
        assert (site.store.asked["heads"], site.store.asked["scan"]) == (1, 3)
    finally:
        site.store.came.set()
        site.close()
