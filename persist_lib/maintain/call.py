"""What a duty is called with: one shard, and how the duty is to be done there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from persist_lib.core.plan.compaction import Policy
from persist_lib.maintain.worker import Worker
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases

if TYPE_CHECKING:
    from persist_lib.maintain.compaction import Engine
    from persist_lib.maintain.scrub import Adder

Progress = Callable[[int, int], None]
"""Told how many of how many are done."""


@dataclass(frozen=True, slots=True)
class Call:
    """One shard, and how a duty is to be done there. What a duty has no use for, it ignores.

    `worker` registers when a duty first asks for its id. `dry_run` changes nothing, and answers what would be done.
    """

    worker: Worker
    leases: Leases
    policy: Policy | None = None
    engine: Engine | None = None
    adder: Adder | None = None
    dry_run: bool = False
    force: bool = False
    after: int = 0
    progress: Progress | None = None

    @property
    def machine(self) -> Machine:
        """The shard."""
        return self.worker.machine
