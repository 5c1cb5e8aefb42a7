"""The argument of every duty: one shard, and how to do the duty there."""

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
"""Called with the number of items that are done and the total number."""


@dataclass(frozen=True, slots=True)
class Call:
    """One shard, and how to do a duty there. A duty ignores the fields that it does not need.

    `worker` registers when a duty first asks for its id. With `dry_run` the duty changes nothing and returns what it
    would do.
    """

    worker: Worker
    leases: Leases
    policy: Policy | None = None
    engine: Engine | None = None
    adder: Adder | None = None
    dry_run: bool = False
    force: bool = False
    after: int = 0
    new_only: bool = False
    progress: Progress | None = None

    @property
    def machine(self) -> Machine:
        """The shard."""
        return self.worker.machine
