"""The machines of one client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakMethod

from persist_lib.errors import InvalidUsage
from persist_lib.ids import ShardId, parse_shard_id
from persist_lib.shard.commit import Machine


class Machines:
    """One machine for each shard, shared by all handles; it is called with the shard's name.

    Collections have machines of their own: a member takes nothing by its own name, also not of a handle that the same
    program opened by that before. `make` makes one for a shard and whose member it is, and does not keep the client.
    SUBTLE: this takes no lock, as a fork could happen while another thread holds it. When two threads make one at once,
    both get the first one.
    """

    def __init__(self, make: WeakMethod[Callable[[ShardId, str], Machine]], url: str) -> None:
        self._make, self._url = make, url
        self._lone: dict[ShardId, Machine] = {}
        self._members: dict[ShardId, Machine] = {}
        self._closed = ""

    def __call__(self, name: str) -> Machine:
        self.check_open()
        shard = parse_shard_id(name)
        return self._lone.get(shard) or self._made(self._lone, shard, "")

    def get(self, shard: ShardId) -> Machine | None:
        """That of a shard, if there is one by now."""
        return self._lone.get(shard)

    def of_layer(self, name: str) -> Machine:
        """That of a shard for a collection, which knows whose member it is."""
        return self._members.get(ShardId(name)) or self(name)

    def know_members(self, names: Iterable[str], member: str) -> None:
        """Know that these shards may be members, and whose."""
        for shard in map(ShardId, names):
            if shard not in self._members:
                self._made(self._members, shard, member)

    def close(self) -> None:
        """Let all of them refuse every call, and make no other."""
        self._closed = f"this client of {self._url} was closed; open a new one with persist.open"
        for machine in [*self._lone.values(), *self._members.values()]:
            machine.close(self._closed)

    def check_open(self) -> None:
        """Raise InvalidUsage after `close`."""
        if self._closed:
            raise InvalidUsage(self._closed, url=self._url)

    def _made(self, machines: dict[ShardId, Machine], shard: ShardId, member: str) -> Machine:
        if (make := self._make()) is None:
            raise AssertionError("a machine is made for a client that is there")
        found = machines.setdefault(shard, make(shard, member))
        self.check_open()  # a `close` that comes after this check finds the machine
        return found
