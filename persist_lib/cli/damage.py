"""What scrubs remember of damage, as `persist show` and `persist census` tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from persist_lib.cli import units
from persist_lib.errors import PersistError
from persist_lib.ids import ShardId

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.maintain.scrub_memory import Remembered


def look(client: Client, shards: Sequence[str]) -> dict[str, Remembered]:
    """Return what scrubs remember of these shards, by one listing; a failure is in it, and stops nothing else."""
    from persist_lib.maintain.scrub_memory import Remembered, known_damage

    if not shards:
        return {}
    try:
        return dict(known_damage(client.blob, [ShardId(shard) for shard in shards]).items())
    except PersistError as error:
        return dict.fromkeys(shards, Remembered(unreadable=error.message))


def lines(shard: str, memory: Remembered | None) -> list[str]:
    """A line that says what is known, and one for each damaged batch. The first one is never empty."""
    if memory is None:
        return ["not known: no scrub has looked yet"]
    marks = sorted(memory.damaged.values(), key=lambda mark: mark.id)
    told = [f"batch {mark.lo}..{mark.hi}: {mark.says} (known since {units.moment(mark.since)})" for mark in marks]
    if memory.unreadable:
        again = f"`persist scrub {shard}` reads everything again"
        return [f"not known: what scrubs remember cannot be read ({memory.unreadable}); {again}", *told]
    return [units.of(len(marks), "batch") if marks else "none that a scrub found", *told]


def value(memory: Remembered | None) -> dict[str, Any]:
    """The same for machines. `damaged` is None where it is not known."""
    if memory is None or (memory.unreadable and not memory.damaged):
        return {"damaged": None, "damaged_batches": []}
    marks = sorted(memory.damaged.values(), key=lambda mark: mark.id)
    batches = [{"id": list(mark.id), "says": mark.says, "since": mark.since} for mark in marks]
    return {"damaged": len(marks), "damaged_batches": batches}
