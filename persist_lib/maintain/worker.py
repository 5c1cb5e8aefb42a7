"""A maintenance worker: a writer id that compacts and rolls up, registered only once there is work."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from persist_lib.core.plan.upkeep import has_ended
from persist_lib.core.state import State
from persist_lib.errors import Busy, PersistError
from persist_lib.ids import ShardId, WriterId
from persist_lib.relation.registration import Registration
from persist_lib.runtime.resource import Resource
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.leases import Leases

log = logging.getLogger("persist.maintenance")
Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is: updates that are merged, objects, batches or shards."""


class Uploader(Protocol):
    """An object that has the id of a live writer. Parts are uploaded under that id."""

    @property
    def id(self) -> WriterId: ...


class Worker(Resource):
    """One shard's worker for the length of a `with` block. The first use of `id` registers it, the end retires it.

    With `alone`, `id` raises Busy while another maintenance writer of this shard is live. That saves work done twice;
    correctness does not rest on it, as every result is decided by a compare-and-set. A worker that did not ask to be
    alone is not kept out, but keeps out those that do.
    """

    def __init__(self, machine: Machine, leases: Leases, *, alone: bool = False) -> None:
        self.machine = machine
        self.alone = alone
        self._registration = Registration(machine, leases, "maintenance")

    @property
    def id(self) -> WriterId:
        """A live maintenance writer's id. Raises Busy if the worker is to be alone and is not."""
        if self.alone and not self._registration.has_id and self._others(self.machine.state):
            self._refuse(self._others(self.machine.fetch().state))  # without the two transitions that it would cost
        deadline = self.machine.runtime.deadline(self.machine.config.timeout_s)
        return self._registration.register(deadline, self._check_alone)

    def _check_alone(self, registered: Committed) -> None:
        """Retire the fresh id and raise Busy if another worker was live when this one registered.

        The commit tells. Two workers that register at once do so in one order, so exactly the second one sees
        the other. A look before the registration could be made by both at once, and by neither afterwards.
        """
        if self.alone and (others := self._others(registered.before)):
            try:
                self._registration.retire()
            except PersistError as error:
                self._registration.forget()  # its lease ends by itself
                log.warning("shard %s: could not retire the worker's id: %s", self.machine.shard, error)
            self._refuse(others)

    def close(self) -> None:
        self._registration.close()

    def _others(self, state: State) -> dict[WriterId, int]:
        """The maintenance writers whose lease has not ended, and until when it lasts."""
        now = self.machine.consensus.now()
        return {
            id_: writer.lease_until
            for id_, writer in state.writers.items()
            if writer.purpose == "maintenance" and not has_ended(writer.lease_until, now)
        }

    def _refuse(self, others: Mapping[WriterId, int]) -> None:
        if others:
            worker = max(others, key=lambda id_: others[id_])
            raise _busy(self.machine.shard, worker, others[worker], self.machine.consensus.now())


def _busy(shard: ShardId, worker: WriterId, lease_until: int, now: int) -> Busy:
    until = f"{dt.datetime.fromtimestamp(lease_until / 1000, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Busy(
        f"shard {shard}: the worker {worker} is at maintenance work here, and this call is to be alone at it. Nothing "
        f"was changed. Try again when that worker is done. If it is dead, its lease ends at {until}, which is in "
        f"{max(1, round((lease_until - now) / 1000))} s",
        shard=shard, worker=worker, lease_until=lease_until,
    )  # fmt: skip
