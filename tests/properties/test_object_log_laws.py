"""The log in an object store: what a scan returns while others append, truncate, and write into places that were freed.

The store is a dictionary, so that others can act before each of a scan's requests, and so that those which it makes at
the same time come in any order. Real stores hold the same code in `unit/location/test_s3_cas.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from random import Random
from typing import Any, cast

from persist_lib.ids import SeqNo
from persist_lib.location.api import Entry, Found, Object, Row, Stored
from persist_lib.location.objects.consensus import ObjectsConsensus
from persist_lib.runtime.ambient import Runtime
from tests.logs import after

SCHEDULES = 1500
KEY = "s"


class Bucket:
    """Objects by name, each with a version. Equal bytes have equal versions, as the ETags of S3 are digests."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}

    def put(self, name: str, data: bytes, replaces: str | None = None, metadata: Any = None) -> Stored | None:
        there = self.objects.get(name)
        if (replaces is None) != (there is None) or (there is not None and self.version(there[0]) != replaces):
            return None
        self.objects[name] = data, dict(metadata or {})
        return Stored(self.version(data))

    @staticmethod
    def version(data: bytes) -> str:
        return data.decode()


class Requests:
    """An `ObjectStore` of a bucket, before each of whose requests `act` is called."""

    where = "a bucket"

    def __init__(self, bucket: Bucket, act: Callable[[], None] = lambda: None, page: int = 3) -> None:
        self.bucket, self.act, self.size = bucket, act, page

    def _request(self) -> dict[str, tuple[bytes, dict[str, str]]]:
        self.act()
        return self.bucket.objects

    def get(self, name: str, doing: str, start: int = 0, end: int | None = None) -> Object | None:
        found = self._request().get(name)
        return None if found is None else Object(found[0][start:end], self.bucket.version(found[0]))

    def find(self, name: str, doing: str) -> Found | None:
        found = self._request().get(name)
        return None if found is None else Found(len(found[0]), found[1])

    def put(self, name: str, data: bytes, doing: str, **how: Any) -> Stored | None:
        self._request()
        return self.bucket.put(name, bytes(data), **how)

    def entries(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> Iterator[Entry]:
        while True:
            objects = self._request()
            names = sorted(name for name in objects if name.startswith(prefix) and name > after)[: self.size]
            for name in names:
                yield Entry(name, len(objects[name][0]), self.bucket.version(objects[name][0]))
            if len(names) < self.size:
                return
            after = names[-1]

    def delete(self, names: list[str], page: int | None = None) -> dict[str, Exception]:
        for name in names:
            self._request().pop(name, None)
        return {}


class InAnyOrder(Executor):
    """Runs what was submitted in an order of its own, before the first result is taken."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.waiting: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Lazy()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised by `result`, as from a thread
                future.set_exception(error)

        future.before = self.run_all
        self.waiting.append(run)
        return future

    def run_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.rng.shuffle(waiting)
        for run in waiting:
            run()

    def shutdown(self, *_: Any, **__: Any) -> None:
        self.run_all()


class _Lazy(Future[Any]):
    before: Callable[[], None]

    def result(self, timeout: float | None = None) -> Any:
        self.before()
        return super().result(timeout)


class AnyOrder(Runtime):
    """A runtime whose threads are one thread that takes what there is to do in any order."""

    def pool(self, threads: int, name: str) -> Executor:
        return InAnyOrder(self.random)


class Others:
    """Another client that appends and truncates, and stale ones that write into freed places; and what is true."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.bucket, self.words = rng, Bucket(), itertools.count()
        self.log: dict[int, bytes] = {}
        self.floor, self.is_still = 1, False
        self.client = ObjectsConsensus(cast("Any", Requests(self.bucket)), runtime=Runtime(background=False))

    @property
    def newest(self) -> int:
        return max(self.log, default=0)

    def append(self, client: ObjectsConsensus | None = None) -> None:
        data = b"%d" % next(self.words)
        assert (client or self.client).compare_and_set(KEY, after(self.newest), data)
        self.log[self.newest + 1] = data

    def truncate(self) -> None:
        if self.newest:
            self.floor = max(self.floor, self.rng.randint(1, self.newest))
            self.client.truncate(KEY, SeqNo(self.floor))

    def stray(self) -> None:
        """A stale client's PUT: it finds a place free that truncation has freed, with the old bytes or others."""
        if self.floor > 1:
            at = self.rng.randrange(max(1, self.floor - 4), self.floor)
            data = self.rng.choice([self.log[at], b"stray %d" % next(self.words)])
            self.bucket.put(self.client._row(KEY, SeqNo(at)), data)

    def overtake(self) -> None:
        """All rows but a new one are truncated, and stale clients write into each place that was freed."""
        self.append()
        self.floor, freed = self.newest, range(self.floor, self.newest)
        self.client.truncate(KEY, SeqNo(self.floor))
        for at in freed:
            self.bucket.put(self.client._row(KEY, SeqNo(at)), b"stray %d" % next(self.words))

    def act(self) -> None:
        while not self.is_still and self.rng.random() < 0.25:
            self.rng.choice([self.append, self.append, self.truncate, self.stray, self.stray, self.overtake])()


def check(others: Others, client: ObjectsConsensus, rng: Random) -> None:
    """One scan, by what was so before and after it."""
    newest, floor = others.newest, others.floor
    start, limit = rng.randint(0, newest + 2), rng.choice([1, 2, 5, 1000])
    found = client.scan(KEY, SeqNo(start), limit)
    assert found == [Row(SeqNo(row.seqno), others.log[row.seqno]) for row in found], "a stray was read"
    first, start = (found[0].seqno if found else max(start, floor)), max(start, 1)
    assert first == start or max(start, floor) <= first <= others.floor, "it begins at the floor"
    assert [row.seqno for row in found] == [*range(first, first + len(found))], "there is a gap"
    assert len(found) <= limit
    assert len(found) == limit or first + len(found) > newest, "a row that was there before is missing"


def test_no_scan_returns_a_stray_or_misses_a_row(rng: Random) -> None:
    for _ in range(SCHEDULES):
        others = Others(rng)
        for _ in range(rng.randint(0, 12)):
            rng.choice([others.append, others.append, others.append, others.truncate, others.stray])()
        objects = Requests(others.bucket, others.act)
        client = ObjectsConsensus(cast("Any", objects), runtime=AnyOrder(random=rng))
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.6:
                head = client.head(KEY)
                assert head is None or others.log[head.seqno] == head.data
            if rng.random() < 0.2:
                others.is_still = True
                others.append(client)
                others.is_still = False
            check(others, client, rng)
