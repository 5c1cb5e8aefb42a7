"""A first attempt of which its caller hears nothing, and which comes through at a step of the second one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import persist_lib as persist
from persist_lib import streams
from persist_lib.core.state import Version
from persist_lib.errors import Indeterminate
from persist_lib.frontier import at
from persist_lib.location.wrap.around import Operation
from persist_lib.relation.writer import WriteHandle
from persist_lib.shard.commit import Machine
from persist_lib.testing import Rival
from persist_lib.testing.faults import RACED
from tests.served import Sharing
from tests.streaming import SCHEMA, update
from tests.worlds import World

fetch = Machine.fetch


class Lost(Rival):
    """While it is armed, the first write is kept back, and whatever else is asked stays without an answer."""

    def __init__(self, world: World) -> None:
        super().__init__(world.inner.consensus)
        self.armed, self.kept = False, list[Callable[[], object]]()

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if not self.armed or (operation.kind not in RACED and not self.kept):
            return call()
        self.kept = self.kept or [call]
        raise Indeterminate("no answer")


class AtStep(Rival):
    """Once it is set, it calls `act` just before its request number `step`, or after so many fetches of a shard."""

    def __init__(self, world: World) -> None:
        super().__init__(world.inner.consensus)
        self.step, self.after_fetches = -1, False
        self.act: Callable[[], object] = int
        self.machines: list[Machine] = []

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if not self.after_fetches:
            self.count()
        return call()

    def count(self) -> None:
        self.step -= 1
        if self.step == -1:
            self.act()

    def fetched(self, machine: Machine) -> Version:
        """A fetch, after which another thread may fetch a newer version before this one is looked at."""
        found = fetch(machine)
        if self.after_fetches and machine in self.machines:
            self.count()
        return found


class Line:
    """A stream as one program writes it, which takes the lock over each time that it starts."""

    STARTS = 3
    """The upper at the start. Call `n` writes at the time `STARTS + n - 1`, and seals that."""

    def __init__(self, client: persist.Client) -> None:
        self.client = client
        self.machines = [client.machine(name) for name in ("c", "c.unsealed")]

    def open(self) -> None:
        """Start. Once this returns, what was in doubt is decided."""
        self.runtime = streams.open(self.client, reentrance_id="same")
        self.write, self.read = self.runtime.create_or_load("c", SCHEMA)

    def handles(self) -> list[WriteHandle]:
        stream = self.runtime._shared.committer.streams["c"]  # type: ignore[union-attr]
        return [stream.write_sealed, stream.write_unsealed]

    def call(self, n: int, *, writes: bool, seals: bool) -> object:
        rows, upper = [update(n, self.STARTS + n - 1, "ours")], self.STARTS + n
        write, seal = streams.Write(self.write, rows), streams.Seal(self.write, upper)
        return self.runtime.multi_write([*[write] * writes, *[seal] * seals]).result()

    def is_done(self, n: int, *, writes: bool) -> bool:
        with self.read.contents() as found:
            return n in found.to_arrow().column("id").to_pylist() if writes else found.upper >= at(self.STARTS + n)


class Served(Sharing):
    """One shard server, whose store does not fail. Who waits does so by the clock of the test only."""

    def __init__(self) -> None:
        super().__init__()
        self.faults.stop()

    def _wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
