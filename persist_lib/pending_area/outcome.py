"""What a pass over a pending area did, or would do: values for callers, the command and Dagster."""

from __future__ import annotations

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.pending_area.listing import Others


class Disagreement(msgspec.Struct, frozen=True):
    """Batches that hold other updates for the same time. `time` is the earliest one, `writers` who says what.

    Each side is one content, with the key of one of its batches, and the names of its writers (the first ones). A side
    without writers is the shard: then the batch of the other side came late, and what the shard has stays as it is.
    """

    time: int
    keys: tuple[str, ...]
    writers: tuple[tuple[str, ...], ...]

    @property
    def is_late(self) -> bool:
        """Whether it is about a time that the shard has already."""
        return () in self.writers


class Absorbed(msgspec.Struct, frozen=True):
    """What became of the batches of a pending area.

    `batches` were absorbed with `updates`, of these `adopted` without being rewritten. `discarded` are others that
    nobody needs: those of other writers for the same times, and late ones. `left` are still pending, beyond `upper`.
    """

    shard: str
    lower: Antichain = MINIMUM
    upper: Antichain = MINIMUM
    batches: int = 0
    adopted: int = 0
    updates: int = 0
    size: int = 0
    discarded: int = 0
    deleted: int = 0
    """Batches deleted beneath a tombstone."""
    left: int = 0
    transitions: int = 0
    gap: int | None = None
    """A time from which on nothing continues, though batches beyond it are there; None if there is no such time."""
    ahead: int = 0
    """Batches that end too far ahead of the store's clock, and are not absorbed before that has come closer."""
    disagreements: tuple[Disagreement, ...] = ()
    damaged: dict[str, str] = {}
    """Batches that are not what their names say, and why."""
    endless: Others = Others()
    foreign: Others = Others()
    waits: str = ""
    """Why it stopped before everything that could be absorbed was."""
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""

    @property
    def is_blocked(self) -> bool:
        """Whether somebody has to choose, as writers disagree about a time that the shard does not have."""
        return any(not one.is_late for one in self.disagreements)
