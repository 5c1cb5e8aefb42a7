"""The scrub: read parts again, verify their digests, and recompute what the state says of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.state import Batch
from persist_lib.errors import Damage
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.task import recompute
from persist_lib.shard.commit import Machine

Progress = Callable[[int, int], None]


class Scrubbed(msgspec.Struct, frozen=True):
    """What a scrub read, and every damage it found: batch id and what is wrong."""

    batches: int
    updates: int
    size: int
    damaged: tuple[tuple[tuple[int, int], str], ...]
    newest: int
    cost: Cost = Cost()
    """What it asked of the location."""


@charged
def scrub(machine: Machine, *, after: int = 0, progress: Progress | None = None) -> Scrubbed:
    """Re-read the batches that were appended or compacted after seqno `after`; `newest` is what to pass the next time.

    Changes nothing. Every batch is read, also when an earlier one is damaged.
    """
    version = machine.fetch()
    state = version.state
    batches = [batch for batch in state.trace if batch.born > after and batch.count]
    damaged = []
    for done, batch in enumerate(batches, 1):
        if problem := _problem(machine, batch):
            damaged.append((batch.id, problem))
        if progress is not None:
            progress(done, len(batches))
    return Scrubbed(
        len(batches), sum(b.count for b in batches), sum(b.size for b in batches), tuple(damaged), version.seqno
    )


def _problem(machine: Machine, batch: Batch) -> str | None:
    try:
        found = recompute(machine, batch)
    except Damage as damage:
        # Replaced and collected while we read is no damage.
        gone = all(b.id != batch.id or b.born != batch.born for b in machine.fetch().state.trace)
        return None if gone else damage.message
    for name, actual in found.items():
        if actual != getattr(batch, name):
            return f"{name} is {actual}, the state says {getattr(batch, name)}"
    return None
