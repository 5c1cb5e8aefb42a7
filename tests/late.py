"""A first attempt of which its caller hears nothing, and which comes through at a step of the second one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from persist_lib.core.state import Version
from persist_lib.errors import Indeterminate
from persist_lib.location.wrap.around import Operation
from persist_lib.shard.commit import Machine
from persist_lib.testing import Rival
from persist_lib.testing.rival import RACED
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
