"""What waits for a client, what a client keeps, and what others commit: without a network.

How a server learns of rows of others: told by the store, or by looking at heads; only while anybody follows.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate
from persist_lib.format.wire import News
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Row
from persist_lib.location.rpc import subscriptions as pushed
from persist_lib.location.rpc.subscriptions import Followed, Kept
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.row_push import ROWS_MOST, Announcing, Backlog, Pushing, Subscriber, Watching
from persist_lib.shard.commit import Machine
from tests.unit.server.following import eventually
from tests.worlds import SCHEMA, World, row


def rows(*seqnos: int, size: int = 10) -> list[Row]:
    return [Row(SeqNo(seqno), bytes(size)) for seqno in seqnos]


def news(*seqnos: int, newest: int = 0, size: int = 10) -> News:
    return News("s", tuple((one.seqno, one.data) for one in rows(*seqnos, size=size)), SeqNo(newest))


def one_followed() -> Followed:
    one = Followed("s", threading.Lock(), 0.0, Kept())
    one.begin()
    one.scanned(1, 0.0, SeqNo(3))
    return one


def seqnos(found: Any) -> list[int] | None:
    return None if found is None else [one.seqno for one in found]


def test_a_backlog_keeps_rows_up_to_its_bounds_and_then_the_newest_seqnos() -> None:
    backlog = Backlog(bytes_most=1000, rows_most=5)
    backlog.put("s", rows(1, 2), SeqNo(2))
    backlog.put("t", rows(7), SeqNo(7))
    assert [(one.shard, len(one.rows), one.newest) for one in backlog.take()] == [("s", 2, 2), ("t", 1, 7)]
    assert not backlog
    for n in range(1, 100):
        backlog.put("s", rows(n, size=300), SeqNo(n))
        assert backlog.bytes <= 1000
    backlog.put("t", (), SeqNo(9))
    backlog.put("t", (), SeqNo(8))
    told = {one.shard: one for one in backlog.take()}
    assert (told["s"].newest, told["t"].newest) == (99, 9)
    assert len(told["s"].rows) < 4
    for n in range(20):
        backlog.put("s", rows(n, size=0), SeqNo(n))
    assert sum(len(one.rows) for one in backlog.take()) <= 5


def test_what_a_client_no_longer_follows_does_not_wait_for_it() -> None:
    backlog = Backlog()
    backlog.put("s", rows(1, 2), SeqNo(2))
    backlog.drop("s")
    backlog.drop("s")
    assert (len(backlog), backlog.bytes, backlog.take()) == (0, 0, [])


def test_rows_are_given_without_a_gap_or_not_at_all() -> None:
    one = one_followed()
    one.add(news(4, 5, newest=5), 0.0)
    assert seqnos(one.after(SeqNo(3), 0.0)) == [4, 5]
    assert seqnos(one.after(SeqNo(4), 0.0)) == [5]
    assert seqnos(one.after(SeqNo(5), 0.0)) == []
    one.add(news(8, newest=8), 0.0)
    assert one.after(SeqNo(5), 0.0) is None, "6 and 7 were left out"
    assert seqnos(one.after(SeqNo(7), 0.0)) == [8]
    one.add(news(newest=10), 0.0)
    assert one.after(SeqNo(8), 0.0) is None, "the rows were left out"
    one.add(news(11, newest=11), 0.0)
    assert one.after(SeqNo(8), 0.0) is None
    assert seqnos(one.after(SeqNo(10), 0.0)) == [11]
    one.add(news(11, newest=11), 0.0)
    assert seqnos(one.after(SeqNo(10), 0.0)) == [11], "told twice"
    one.add(news(14, newest=14), 0.0)
    assert one.after(SeqNo(10), 0.0) is None, "11 is there, and 12 and 13 are not"


def test_what_came_before_a_shard_was_told_is_looked_for() -> None:
    one = Followed("s", threading.Lock(), 0.0, Kept())
    assert one.after(SeqNo(3), 0.0) is None
    one.scanned(0, 0.0, SeqNo(3))
    one.begin()
    assert one.after(SeqNo(3), 0.0) is None, "that scan began before"
    one.scanned(one.epoch, 0.0, SeqNo(4))
    assert one.after(SeqNo(3), 0.0) is None, "row 4 was told to nobody"
    assert seqnos(one.after(SeqNo(4), 0.0)) == []
    began = one.epoch
    one.lose()
    one.begin()
    one.scanned(began, 0.0, SeqNo(4))
    assert one.after(SeqNo(4), 0.0) is None, "it was lost in between"


def test_a_scan_is_due_when_nothing_came_for_a_while() -> None:
    one = one_followed()
    assert one.after(SeqNo(3), pushed.CHECK_S - 0.1) is not None
    assert one.after(SeqNo(3), pushed.CHECK_S) is None
    one.scanned(one.epoch, 4.0, SeqNo(3))
    assert one.after(SeqNo(3), pushed.CHECK_S) is not None
    one.add(news(4, newest=4), 8.0)
    assert one.after(SeqNo(3), 8.0 + pushed.CHECK_S - 0.1) is not None, "what comes tells that it works"


def test_what_a_client_keeps_is_bounded() -> None:
    kept = Kept()
    one = Followed("s", threading.Lock(), 0.0, kept)
    one.begin()
    one.scanned(1, 0.0, SeqNo(0))
    for n in range(1, 103):
        one.add(news(n, newest=n, size=100_000), 0.0)
        assert kept.bytes <= pushed.KEPT_BYTES_MOST
    assert one.after(SeqNo(0), 0.0) is None
    assert seqnos(one.after(SeqNo(101), 0.0)) == [102]
    one.lose()
    assert kept.bytes == 0


class Given(AroundConsensus):
    """A Consensus that is sent the rows that a test gives."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.given: list[Row] | None = None
        self.scans = 0

    def around(self, operation: Operation, call: Any) -> Any:
        self.scans += operation.kind == "scan"
        return call()

    def pushed(self, key: str, after: SeqNo) -> list[Row] | None:
        return self.given


def test_pushed_rows_are_checked_as_those_that_are_read(world: World) -> None:
    client = world.client()
    write = client.open_shard("s", SCHEMA)[0]
    consensus = Given(client.consensus)
    machine = Machine(ShardId("s"), client.blob, consensus, client.config, client.runtime)
    assert machine.told() is None, "it knows none yet"
    first = machine.fetch().seqno
    for n in range(3):
        write.compare_and_append([row(n, time=n)], n, n + 1)
    new = client.consensus.scan("s", SeqNo(first + 1), 100)
    client.open_shard("t", SCHEMA)[0].compare_and_append([row(0)], 0, 1)
    other = client.consensus.scan("t", SeqNo(0), 100)
    flipped = Row(new[0].seqno, new[0].data[:-1] + bytes([new[0].data[-1] ^ 1]))
    for wrong in (new[1:], [new[0], new[2]], [flipped], [Row(new[0].seqno, b"")], other[-1:],
                  [Row(new[0].seqno, other[-1].data)], None):  # fmt: skip
        consensus.given = wrong
        assert machine.told() is None
        assert machine.version.seqno == first
    consensus.scans, consensus.given = 0, new
    assert machine.follow().seqno == new[-1].seqno >= first + 3
    consensus.given = []
    assert machine.follow().state == client.inspect("s").state
    assert consensus.scans == 0
    consensus.given = None
    machine.follow()
    assert consensus.scans == 1
    machine.close("closed")
    with pytest.raises(persist.InvalidUsage):
        machine.follow()


def test_rows_are_handed_to_those_that_follow_their_shard_and_to_no_one_else() -> None:
    async def run() -> None:
        hub, one, two = Pushing(), Subscriber(), Subscriber()
        hub.start(asyncio.get_running_loop())
        hub.join(one)
        hub.join(two)
        hub.follow(one, ["s"])
        hub.follow(two, ["s", "t"])
        assert [found.shard for found in two.backlog.take()] == ["s", "t"], "each is answered"
        one.backlog.take()
        hub.saw("s", rows(4, 5))
        hub.saw("s", rows(4, 5, 6))
        hub.saw("u", rows(1))
        hub.knows("t", SeqNo(9))
        hub.knows("t", SeqNo(8))
        await asyncio.sleep(0)
        assert [(f.shard, [n for n, _ in f.rows], f.newest) for f in one.backlog.take()] == [("s", [4, 5, 6], 6)]
        assert {(f.shard, len(f.rows), f.newest) for f in two.backlog.take()} == {("s", 3, 6), ("t", 0, 9)}
        hub.saw("s", rows(*range(7, 7 + ROWS_MOST + 1)))
        await asyncio.sleep(0)
        assert [(len(f.rows), f.newest) for f in one.backlog.take()] == [(0, 7 + ROWS_MOST)], "too many at once"
        hub.unfollow(one, ["s"])
        hub.leave(two)
        hub.saw("s", rows(999))
        assert not hub.is_followed()

    asyncio.run(run())


@pytest.mark.parametrize("gap", [1, 3, ROWS_MOST + 1])
def test_rows_of_others_are_read_once_for_all_or_at_least_known_of(world: World, gap: int) -> None:
    client = world.client()
    write = client.open_shard("s", SCHEMA)[0]

    async def run() -> None:
        hub, one = Pushing(), Subscriber()
        hub.start(asyncio.get_running_loop())
        given = Given(client.consensus)
        watching = Watching(Announcing(given, hub), hub, Runtime())
        hub.follow(one, ["s"])
        one.backlog.take()
        await asyncio.to_thread(watching.look)
        await asyncio.sleep(0)
        head = client.consensus.heads()["s"]
        assert [(len(f.rows), f.newest) for f in one.backlog.take()] == [(0, head)], "of what was seen never"
        for n in range(gap):
            write.compare_and_append([row(n, time=n)], n, n + 1)
        given.scans = 0
        await asyncio.to_thread(watching.look)
        await asyncio.sleep(0)
        found = [([n for n, _ in f.rows], f.newest) for f in one.backlog.take()]
        newest = client.consensus.heads()["s"]
        assert found == [(list(range(head + 1, newest + 1)) if gap <= ROWS_MOST else [], newest)]
        assert given.scans == (gap <= ROWS_MOST)
        await asyncio.to_thread(watching.look)
        assert given.scans == (gap <= ROWS_MOST), "nothing new"
        watching.start()
        watching.close()

    asyncio.run(run())


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
