"""The shards that have a table's rows, and the pin of a publication in the state of each.

A lone shard is a table of one. A publication takes all pins over first, with one fencing value, and each later step
expects that: so two calls exclude one another, whichever shard they meet at.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import PART_SUMS, PINS
from persist_lib.core.pins import pin_name
from persist_lib.core.state import Pin, State
from persist_lib.errors import Fenced
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey
from persist_lib.maintain.compaction import move_up
from persist_lib.maintain.worker import Worker
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP = 10
"""How many snapshots are kept, unless it is said."""


class Shards(NamedTuple):
    """Where a table's rows are: `machines` have them at the time that is published, `former` may have earlier ones.

    `name` is the table's, and `folder` that of its publications (`paths.published_prefix`).
    """

    name: str
    folder: str
    machines: tuple[Machine, ...]
    former: tuple[Machine, ...] = ()

    @property
    def every(self) -> tuple[Machine, ...]:
        return self.machines + self.former

    def pin_of(self, machine: Machine, format_: str) -> str:
        """What the pin of this publication is called in a shard."""
        return pin_name(format_, self.folder, machine.shard)

    def pins(self, format_: str) -> list[Pin]:
        """The pins that there are, as far as the states are known."""
        found = (one.state.pins.get(self.pin_of(one, format_)) for one in self.every)
        return [pin for pin in found if pin is not None]

    @contextmanager
    def workers(self, leases: Leases) -> Iterator[list[Worker]]:
        """What rewrites each shard that has rows."""
        with ExitStack() as stack:
            yield [stack.enter_context(Worker(machine, leases)) for machine in self.machines]


def lone(machine: Machine) -> Shards:
    """A table that one shard is."""
    return Shards(machine.shard, machine.shard, (machine,))


class Terms(NamedTuple):
    """What is said of a publication for the next ones."""

    keep: int
    follows: bool


def terms_of(pins: Sequence[Pin], keep: int | None, follows: bool | None) -> Terms:
    """What was said, or was before; of several pins, the newest counts."""
    pin = max(pins, key=lambda one: -1 if one.as_of is None else one.as_of, default=None)
    return Terms(keep or (pin.keep if pin else 0) or KEEP, bool(pin and pin.follows) if follows is None else follows)


class Pins:
    """One call's hold of a publication's pins: in each shard that has rows, and in those that have a pin of it."""

    def __init__(self, shards: Shards, format_: str) -> None:
        self._shards, self._format = shards, format_
        self._token = b"%016x" % (shards.machines[0].runtime.entropy() % 2**64)
        self.before: dict[str, Pin] = {}
        """What each pin was that was taken over, by shard."""

    def take(self, *, make: bool = True) -> None:
        """Take over the pins that there are, and, with `make`, begin them in each shard that has rows."""
        for machine in self._shards.every:
            name = self._shards.pin_of(machine, self._format)
            makes = make and machine in self._shards.machines
            if not makes and name not in machine.fetch().state.pins:
                continue
            if makes:
                upgrade(machine)
            taken = list[Pin | None]()

            def take(state: State, _now: int, name: str = name, taken: list[Pin | None] = taken) -> c.PinKeys:
                old = state.pins.get(name)
                taken[:] = [old]
                found = old or Pin((), b"")
                return c.PinKeys(
                    name, found.keys, old.opaque if old else None, self._token, found.as_of, found.keep, found.follows
                )

            self._judge(machine, machine.try_commit(take))
            self.before[machine.shard] = taken[0] or Pin((), self._token)

    def add(self, machine: Machine, keys: set[PartKey]) -> bool:
        """Pin these as well. False where one was replaced before that."""
        name = self._shards.pin_of(machine, self._format)

        def add(state: State, _now: int) -> c.PinKeys:
            old = state.pins.get(name) or Pin((), b"")
            together = tuple(sorted({*old.keys, *keys}))
            return c.PinKeys(name, together, self._token, self._token, old.as_of, old.keep, old.follows)

        answer = machine.try_commit(add)
        if isinstance(answer, r.Unknown):
            return False
        self._judge(machine, answer)
        return True

    def settle(self, named: set[str], as_of: int, terms: Terms) -> None:
        """Leave pinned what a snapshot names, by its key in Blob. Earlier renditions keep no pin of nothing."""
        for machine in self._taken:
            name, pin = self._shards.pin_of(machine, self._format), self._pin(machine)
            keys = tuple(key for key in pin.keys if blob_key(machine.shard, key) in named)
            command: c.PinKeys | c.Unpin = c.PinKeys(name, keys, self._token, self._token, as_of, *terms)
            if machine in self._shards.former:
                command = c.PinKeys(name, keys, self._token, self._token, pin.as_of, terms.keep)
                command = command if keys else c.Unpin(name, self._token)
            self._commit(machine, command)

    def drop(self) -> None:
        """Unpin all of it."""
        for machine in self._taken:
            self._commit(machine, c.Unpin(self._shards.pin_of(machine, self._format), self._token))

    def keys(self) -> set[str]:
        """All that is pinned, by its key in Blob. Raises Fenced where another call has taken one over."""
        return {blob_key(one.shard, key) for one in self._taken for key in self._pin(one).keys}

    def are_as_of(self, as_of: int) -> bool:
        """Whether each shard that has rows was published as of this time by the last call that came to its end."""
        return all(self.before[one.shard].as_of == as_of for one in self._shards.machines)

    def fenced(self) -> Fenced:
        shards = self._shards
        return Fenced(
            f"table {shards.name}: another program publishes it as {self._format}, or withdrew it, and took over. This "
            "call moved nothing that readers see; look at what is published, and publish again",
            shard=shards.machines[0].shard, table=shards.name,
        )  # fmt: skip

    def _pin(self, machine: Machine) -> Pin:
        pin = machine.fetch().state.pins.get(self._shards.pin_of(machine, self._format))
        if pin is None or pin.opaque != self._token:
            raise self.fenced()
        return pin

    @property
    def _taken(self) -> list[Machine]:
        return [one for one in self._shards.every if one.shard in self.before]

    def _commit(self, machine: Machine, command: c.PinKeys | c.Unpin) -> None:
        self._judge(machine, machine.try_commit(lambda _state, _now: command))

    def _judge(self, machine: Machine, answer: object) -> None:
        if isinstance(answer, r.WrongOpaque):
            raise self.fenced()
        if not isinstance(answer, Committed | r.AlreadyDone):
            raise machine.refused(answer)  # type: ignore[arg-type]


def upgrade(machine: Machine) -> None:
    """Bring a shard to the format that has pins. Raises where settings keep it from that."""
    if (most := machine.config.format) is not None and most < PINS:
        raise machine.refused(r.NeedsFormat("publications", PINS, most))
    move_up(machine, min(most or PART_SUMS, PART_SUMS))
