"""A server's funnels over a location in memory: requests made by hand, and compare-and-sets that do as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from persist_lib.config import Config
from persist_lib.core import commands as c
from persist_lib.core.state import Batch
from persist_lib.errors import Indeterminate
from persist_lib.format.log import LogRow, decode_row
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import SeqNo, ShardId, WriterId, format_writer_id
from persist_lib.location.api import Change, Consensus, Newest
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.commit import Machine
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.requests import Request
from tests.worlds import SCHEMA, World

T = TypeVar("T")
SHARD = ShardId("s")
W1, W2 = format_writer_id(1), format_writer_id(2)
CONFIG = Config(timeout_s=5, lease_ms=60_000)
LEASE_MS = 60_000


class Lost(Exception):
    """Raised by a hook: the compare-and-set does not happen, and its answer is lost."""


class Told(AroundConsensus):
    """A Consensus that notes what is appended, and calls `before` and `after` around each compare-and-set."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self.sent: list[bytes] = []
        self.asked: list[str] = []
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.many: Callable[[], object] = lambda: None
        self.after_many: Callable[[], object] = lambda: None

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        self.asked.append(operation.kind)
        return call()

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        self.sent.append(data)
        return self._fated(lambda: super(Told, self).compare_and_set(key, expected, data), self.before, self.after)

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        if not changes:
            return super().compare_and_set_many(changes)
        self.sent += [data for _, data in changes.values()]
        return self._fated(lambda: super(Told, self).compare_and_set_many(changes), self.many, self.after_many)

    def _fated(self, call: Callable[[], bool], before: Callable[[], object], after: Callable[[], object]) -> bool:
        try:
            before()
        except Lost:
            raise Indeterminate("planned: it did not happen, and nobody knows") from None
        won = call()
        try:
            after()
        except Lost:
            raise Indeterminate("planned: it happened, and nobody knows") from None
        return won


class Served:
    """A shard `s` (and others) with two writers, in a format, and the funnel of a server for it."""

    def __init__(self, world: World, format_: int = 4) -> None:
        self.world = world
        self.client = world.client(Config(format=format_))
        self.direct = self.client.machine(SHARD)
        self.create(SHARD, format_)
        self.consensus = Told(world.client().consensus)
        self.funnel = self.server()

    def create(self, shard: str, format_: int = 4) -> None:
        self.direct_commit(c.Create(SCHEMA, format_), shard)
        for writer in (W1, W2):
            self.direct_commit(c.RegisterWriter(writer, "ingest", 2**50), shard)

    def server(self, shard: str = SHARD, consensus: Consensus | None = None) -> Funnel:
        """Another server."""
        machine = Machine(ShardId(shard), self.client.blob, consensus or self.consensus, CONFIG, self.runtime())
        return Funnel(machine)

    def runtime(self) -> Runtime:
        return self.world.clock.runtime()

    def direct_commit(self, command: c.Command, shard: str = SHARD) -> SeqNo:
        """What another client does to the shard by itself."""
        return self.client.machine(shard).commit(lambda _state, _now: command).seqno

    def request(self, command: c.Command, token: bytes = b"", **options: Any) -> Request:
        token = token or f"{len(self.consensus.asked)}-{id(command)}".encode()
        shard, seconds = ShardId(options.pop("shard", SHARD)), options.pop("seconds", 60.0)
        told: dict[str, Any] = {"client": "a", "known": SeqNo(0), **options}
        return Request(shard, command, token, deadline=self.runtime().deadline(seconds), **told)

    def put(self, command: c.Command, token: bytes = b"", funnel: Funnel | None = None, **options: Any) -> Request:
        request = self.request(command, token, **options)
        (funnel or self.funnel).put(request)
        return request

    def until_a_rollup_is_due(self) -> int:
        """Commit heartbeats until the next row calls for a rollup. Returns that row's seqno."""
        machine = self.funnel.machine
        machine.fetch()
        while machine.ground().seqno < machine.config.rollup_every - 1:
            self.put(c.Heartbeat((W1,), 2**51 + machine.ground().seqno))
            self.funnel.turn()
        return machine.config.rollup_every

    def rows(self, shard: str = SHARD) -> list[LogRow]:
        found = self.world.inner.consensus.scan(shard, SeqNo(0), 10_000)
        return [decode_row(row.data, "row") for row in found]


def append(lower: int, upper: int, writer: WriterId = W1, token: bytes = b"t") -> c.CompareAndAppend:
    """An append of no updates."""
    return c.CompareAndAppend(writer, token, Batch(0, 1, at(lower), at(upper), MINIMUM, 0, 0, 0), LEASE_MS)


def hold(name: str, opaque: Any, expected: bytes | None = None) -> c.SetHold:
    return c.SetHold(name, MINIMUM, expected, opaque)


def answer(request: Request) -> Any:
    """The answer, an `Answered`, which is there; without the rows that go along."""
    return request.answer.result(0)._replace(rows=())


def error(request: Request) -> Any:
    return request.answer.exception(0)
