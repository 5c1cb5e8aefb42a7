"""Staged writes of a collection, the half of the tasks: parts for all shards of a rendition, each row in its key's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persist_lib.arguments import not_pickled
from persist_lib.catalog.parallel import at_once
from persist_lib.catalog.partition_rows import Spreading, Write
from persist_lib.catalog.records import RenditionRecord
from persist_lib.core.cost import Cost
from persist_lib.frontier import Antichain
from persist_lib.relation.stage import Stage, Staged, Ticket
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.leases import Leased


class CollectionStaged(msgspec.Struct, frozen=True, array_like=True):
    """What one task wrote for the shards of a rendition. It is small: encode it with `msgspec.msgpack`, or pickle."""

    id: bytes
    collection: str
    rendition: int
    staged: tuple[Staged, ...]
    bounds: tuple[Antichain, Antichain] | None
    rows: int = 0
    cost: Cost = Cost()

    @property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(one.size for one in self.staged)

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows."""
        return not self.staged


class CollectionTicket(msgspec.Struct, frozen=True):
    """What a process needs to write parts for a collection's stage. It pickles."""

    collection: str
    rendition: RenditionRecord
    tickets: tuple[Ticket, ...]
    """One a shard."""

    @property
    def lease_ms(self) -> int:
        """For how long its ids live without a task that extends them."""
        return self.tickets[0].lease_ms

    def write(self, updates: object) -> CollectionStaged:
        """Write updates as parts, each for the shard of its key, as a shard's ticket does."""
        return _write(self, [ticket.write for ticket in self.tickets], updates)


class CollectionStage(Leased):
    """One writer id in each shard of a rendition. `close` retires them: what is not appended then never can be."""

    def __init__(self, runtime: Runtime, collection: str, rendition: RenditionRecord, stages: Sequence[Stage]) -> None:
        self._runtime, self._collection, self._rendition, self._stages = runtime, collection, rendition, stages

    @property
    def ticket(self) -> CollectionTicket:
        """What other processes need to write. Raises InvalidUsage for a location that lives in this process only."""
        return CollectionTicket(self._collection, self._rendition, tuple(stage.ticket for stage in self._stages))

    def write(self, updates: object) -> CollectionStaged:
        """Do in this process what `ticket.write` does in another."""
        tickets = tuple(stage.local for stage in self._stages)
        ticket = CollectionTicket(self._collection, self._rendition, tickets)
        return _write(ticket, [stage.write for stage in self._stages], updates)

    def close(self) -> None:
        """Retire the ids. Idempotent."""
        at_once(self._runtime, Stage.close, self._stages)

    __reduce__ = not_pickled("A stage", "Pass its ticket")


def _write(ticket: CollectionTicket, writes: Sequence[Write], updates: object) -> CollectionStaged:
    first, runtime, rows = ticket.tickets[0], Runtime(), 0
    spreading = Spreading(ticket.rendition, writes)
    for table in first.checked(updates, first.machine().consensus.now):
        rows += table.num_rows
        spreading.add(table)
    staged = tuple(one for share in spreading.finish() for one in share)
    cost = sum((one.cost for one in staged), Cost())
    return CollectionStaged(
        runtime.token(), ticket.collection, ticket.rendition.number, staged, first.bounds, rows, cost
    )


def by_shard(staged: Sequence[CollectionStaged], names: Sequence[str]) -> dict[str, list[Staged]]:
    """The parts for each of these shards."""
    found: dict[str, list[Staged]] = {name: [] for name in names}
    for one in staged:
        for part in one.staged:
            found[part.shard].append(part)
    return found
