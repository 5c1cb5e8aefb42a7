"""A world whose clients go through shard servers, which a test cuts off and replaces, also amid a commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import persist_lib as persist
from persist_lib.core.formats import CREATED
from persist_lib.ids import ShardId
from persist_lib.location import Location, open_location
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from persist_lib.testing import FaultyConsensus, Outcome, Rival
from persist_lib.testing.faults import RACED, Chances, Plan
from tests.faults.proxy import Proxy
from tests.worlds import Clocked, World

T = TypeVar("T")
PATIENT_S = 60.0
"""No call of a client ends before: the machine is busy, and nothing is known of a call that did."""
LONGEST_WAIT_S = 0.05
STORE_FAULTS = {Outcome.REFUSED: 0.03, Outcome.HAPPENED_UNKNOWN: 0.05, Outcome.LOST_UNKNOWN: 0.05}


class Struck(AroundConsensus):
    """A server's way to its store. `before` and `after` are called around its next compare-and-set, once."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], object] | None = None

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind not in RACED:
            return call()
        (before, self.before), (after, self.after) = (self.before, None), (self.after, None)
        if before is not None:
            before()
        answer = call()
        if after is not None:
            after()
        return answer


class Slot:
    """One of the servers that clients name. Behind the address, which stays, one server follows another."""

    def __init__(self, make: Callable[[], tuple[ShardServer, Struck]]) -> None:
        self._make = make
        self.proxy = Proxy(None)
        self.replace()

    def replace(self) -> None:
        """Cut all connections to the server. Another one is there, which knows nothing. The former continues by itself.

        It may be in the middle of a commit: then it is as a server that was paused, and does the rest later.
        """
        self.server, self.store = self._make()
        self.proxy.target = self.server.port
        self.proxy.cut()

    def lose(self) -> None:
        """Cut all connections. Nobody is there until `replace`."""
        self.proxy.target = None
        self.proxy.cut()


class ServedWorld(World):
    """A world with shard servers, whose own requests to the store fail now and then while `faults` are on.

    Clients do not notice: whatever becomes of such a request, the server finds it out.
    """

    servers = 1
    format = CREATED

    def __init__(self, url: str = "memory:", seed: int = 0, consensus: str | None = None) -> None:
        super().__init__(url, seed, consensus)
        self.faults = Chances(seed, STORE_FAULTS)
        self._started: list[tuple[ShardServer, persist.Client]] = []
        self.slots = [Slot(self._serve) for _ in range(self.servers)]
        self.address = "persist://" + ",".join(f"127.0.0.1:{slot.proxy.port}" for slot in self.slots)

    def _serve(self) -> tuple[ShardServer, Struck]:
        location = super().reach()
        struck = Struck(FaultyConsensus(location.consensus, self.faults))
        config = persist.Config(timeout_s=PATIENT_S)
        store = persist.open(replace(location, consensus=struck), config=config, runtime=Runtime(background=False))
        server = ShardServer(store, "127.0.0.1:0")
        server.start()
        self._started.append((server, store))
        return server, struck

    def reach(self, *, read_only: bool = False) -> Location:
        location = open_location(self.inner.url, self.address, clock=self.clock, read_only=read_only)
        return replace(location, consensus=Clocked(location.consensus, self.clock))

    def runtime(self, seed: int) -> Runtime:
        """SUBTLE: who waits lets time pass for real as well, as a connection that is made again takes some."""
        return replace(super().runtime(seed), sleep=self._wait)

    def _wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        time.sleep(min(seconds, LONGEST_WAIT_S))

    def faulty(self, consensus: Consensus, plan: Plan) -> Consensus:
        return FaultyConsensus(consensus, plan, self.clock.sleep)

    def client(
        self, config: persist.Config | None = None, *, plan: Plan | None = None, rival: Rival | None = None,
        read_only: bool = False,
    ) -> persist.Client:  # fmt: skip
        more = {"timeout_s": PATIENT_S, "format": self.format}
        config = (config or persist.Config()).model_copy(update=more)
        return super().client(config, plan=plan, rival=rival, read_only=read_only)

    def cut_at_next(self, which: int, *, is_before: bool) -> None:
        """Replace a server in the middle of its next commit: before its row is there, or after."""
        slot = self.slots[which % self.servers]
        setattr(slot.store, "before" if is_before else "after", slot.replace)

    def at_once(self, shard: str, *calls: Callable[[], T]) -> list[T]:
        """Make calls at the same time. All of their first commands wait together for a turn of the shard."""
        funnels = [slot.server._funnels.funnel(ShardId(shard)) for slot in self.slots]
        found: list[T | BaseException] = [AssertionError("it did not end")] * len(calls)

        def run(number: int) -> None:
            try:
                found[number] = calls[number]()
            except BaseException as error:  # noqa: BLE001 - raised below
                found[number] = error

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
        with ExitStack() as held:
            for funnel in funnels:
                held.enter_context(funnel.machine.turn)
            for number, thread in enumerate(threads, 1):
                thread.start()
                patience = Runtime().deadline(PATIENT_S)
                while sum(len(funnel.queue) for funnel in funnels) < number and thread.is_alive():
                    assert not patience.has_passed(), "a command does not come to a server"
                    patience.pause(0.001)
        for thread in threads:
            thread.join(PATIENT_S)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if not isinstance(one, BaseException)]

    def close(self) -> None:
        self.faults.stop()
        super().close()
        for slot in self.slots:
            slot.proxy.close()
        for server, store in self._started:
            server.stop(0)
            store.close()


class TwoServers(ServedWorld):
    """Two servers, and shards whose rows are shared."""

    servers = 2
    format = 4


class Sharing(ServedWorld):
    """One server, and shards whose rows are shared."""

    format = 4
