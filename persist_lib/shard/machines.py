"""The machines of one client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakMethod

from persist_lib.errors import InvalidUsage
from persist_lib.ids import ShardId, epoch_of, parse_shard_id
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
        self._members: dict[ShardId, list[str]] = {}
        """As whose members each is known, in epochs of the collection."""
        self._by_member: dict[str, dict[ShardId, Machine]] = {}
        self._closed = ""

    def __call__(self, name: str) -> Machine:
        self.check_open()
        shard = parse_shard_id(name)
        return self._lone.get(shard) or self._made(self._lone, shard, "")

    def get(self, shard: ShardId) -> Machine | None:
        """That of a shard, if there is one by now."""
        return self._lone.get(shard)

    def of_layer(self, name: str, most: int | None = None) -> Machine:
        """That of a shard for a collection, which knows whose member it is: in the newest epoch, or up to `most`."""
        shard = ShardId(name)
        members = [one for one in self._members.get(shard, ()) if most is None or epoch_of(one) <= most]
        if not members:
            return self(name)
        newest = max(members, key=epoch_of)
        made = self._by_member.setdefault(newest, {})
        return made.get(shard) or self._made(made, shard, newest)

    def know_members(self, names: Iterable[str], member: str) -> None:
        """Know that these shards may be members, and whose."""
        for shard in map(ShardId, names):
            members = self._members.setdefault(shard, [])  # it only grows, as this takes no lock either
            if member not in members:
                members.append(member)

    def close(self) -> None:
        """Let all of them refuse every call, and make no other."""
        self._closed = f"this client of {self._url} was closed; open a new one with persist.open"
        for machines in [self._lone, *self._by_member.values()]:
            for machine in list(machines.values()):
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
