"""A world to test the library in: a location whose clock, faults, rivals and requests a test decides."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import persist_lib as persist
from persist_lib.format.log import StoredState, encode_state
from persist_lib.location import Location, open_location
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import Fate, FaultyBlob, FaultyConsensus, ManualClock, Outcome, Rival
from persist_lib.testing.faults import Plan, RecordingBlob, RecordingConsensus
from persist_lib.testing.model import Update, updates_from

T = TypeVar("T")
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
WIDER = persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "more": "int64"})
SMALL = persist.Config(part_bytes=64 * 1024, inline_bytes=0)
"""No inline batches."""


def around_both(location: Location, around: Callable[[Operation, Callable[[], Any]], Any]) -> Location:
    """The location, with that around every operation of both of its stores."""

    class Blobs(AroundBlob):
        def around(self, operation: Operation, call: Callable[[], T]) -> T:
            return cast("T", around(operation, call))

    class Rows(AroundConsensus):
        def around(self, operation: Operation, call: Callable[[], T]) -> T:
            return cast("T", around(operation, call))

    return replace(location, blob=Blobs(location.blob), consensus=Rows(location.consensus))


class Clocked(AroundConsensus):
    """A server's Consensus, by the clock of the test."""

    def __init__(self, inner: Consensus, clock: ManualClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return call()

    def now(self) -> int:
        return self._clock() // 1_000_000


class World:
    """One location and any number of clients. Rivals act, then requests are recorded, then faults strike."""

    def __init__(self, url: str = "memory:", seed: int = 0, consensus: str | None = None) -> None:
        self.clock = ManualClock()
        self.inner = open_location(url, consensus, create=True, clock=self.clock)
        self.requests: list[Operation] = []
        self.rival = Rival(self.inner.consensus)
        self.clients: list[persist.Client] = []
        self.seed = seed

    def client(
        self,
        config: persist.Config | None = None,
        *,
        plan: Plan | None = None,
        rival: Rival | None = None,
        read_only: bool = False,
    ) -> persist.Client:
        location = self.reach(read_only=read_only)
        consensus = location.consensus
        if plan is not None:
            consensus = self.faulty(consensus, plan)
        consensus = RecordingConsensus(consensus, self.requests)
        if rival is not None:
            rival.inner = consensus
            consensus = rival
        blob = FaultyBlob(location.blob, plan, self.clock.sleep) if plan is not None else location.blob
        location = replace(location, blob=RecordingBlob(blob, self.requests), consensus=consensus)
        self.seed += 1
        client = persist.open(location, config=config, runtime=self.runtime(self.seed))
        self.clients.append(client)
        return client

    def reach(self, *, read_only: bool = False) -> Location:
        """The location as another process opens it, by the clock of the test."""
        location = open_location(self.inner.url, self.inner.consensus_url, clock=self.clock, read_only=read_only)
        if self.inner.consensus_url.startswith(("memory:", "file:")):
            return location
        return replace(location, consensus=Clocked(location.consensus, self.clock))

    def runtime(self, seed: int) -> Runtime:
        """What a client has for a clock, sleep and randomness."""
        return self.clock.runtime(seed)

    def faulty(self, consensus: Consensus, plan: Plan) -> Consensus:
        """A Consensus that fails as planned."""
        return FaultyConsensus(consensus, plan, self.clock.sleep)

    def count(self, *kinds: str) -> int:
        return sum(1 for request in self.requests if not kinds or request.kind in kinds)

    def bytes(self, shard: str) -> tuple[bytes, ...]:
        """Everything there is of a shard: its state as bytes, the rows, the keys in Blob."""
        keys = sorted(f"{entry.key} {entry.size}".encode() for entry in self.inner.blob.list(f"{shard}/"))
        rows = [row.data for row in self.inner.consensus.scan(shard, 0, 100_000)]  # type: ignore[arg-type]
        return (*rows, b"blobs", *keys)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.inner.close()


class Storm:
    """While it blows, operations of these kinds (None: all) have this outcome; the first one may have another.

    Keys that start with `but` are left out."""

    def __init__(self, outcome: Outcome, *kinds: str, first: Outcome | None = None, but: str = "\0") -> None:
        self._outcome, self._kinds, self._first, self._but = outcome, kinds, first, but
        self.blows = False

    def decide(self, operation: Operation) -> Fate:
        if not self.blows or operation.key.startswith(self._but) or (self._kinds and operation.kind not in self._kinds):
            return Fate()
        outcome, self._first = self._first or self._outcome, None
        return Fate(outcome, 0.01)


class Killed(BaseException):
    """The process is gone."""


class DiesAt:
    """A plan under which nothing happens from the n-th request on, counted while it is armed."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0
        self.is_armed = False

    def decide(self, operation: Operation) -> Fate:
        if self.is_armed:
            self.seen += 1
            if self.seen >= self.number:
                raise Killed
        return Fate()


def state_bytes(client: persist.Client, shard: str) -> bytes:
    version = client.inspect(shard)
    return encode_state(StoredState(version.seqno, version.digest, version.state))


def row(id_: int, word: str | None = "w", time: int = 0, diff: int = 1) -> dict[str, Any]:
    return {"id": id_, "word": word, "_time": time, "_diff": diff}


def updates(rows: Iterable[dict[str, Any]], schema: persist.Schema = SCHEMA) -> list[Update]:
    return updates_from(schema.names, rows)


__all__ = ["SCHEMA", "SMALL", "WIDER", "DiesAt", "Killed", "Storm", "World", "row", "state_bytes", "updates"]


def functions_of(call: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """How often a call goes through each function of the library, by file: in this thread; exact, as time is not."""
    folder, found = f"{Path(str(persist.__file__)).parent}/", Counter[tuple[str, str]]()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            found[code.co_filename, code.co_qualname] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
