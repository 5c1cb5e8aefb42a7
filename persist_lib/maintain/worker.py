"""A maintenance worker: a writer id that compacts and rolls up, registered only once there is work."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Protocol, Self

from persist_lib.core.commands import RegisterWriter
from persist_lib.ids import WriterId, format_writer_id
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases, Registering


class Uploader(Protocol):
    """An object that has the id of a live writer. Parts are uploaded under that id."""

    @property
    def id(self) -> WriterId:
        """The writer's id."""
        ...


class Worker:
    """One shard's worker for the length of a `with` block. The first use of `id` registers it, the end retires it."""

    def __init__(self, machine: Machine, leases: Leases) -> None:
        self.machine = machine
        self._leases = leases
        self._id: WriterId | None = None
        self._dropped: weakref.finalize[..., Worker]

    @property
    def id(self) -> WriterId:
        """A live maintenance writer's id."""
        if self._id is None:
            fresh = format_writer_id(self.machine.runtime.entropy())
            lease_ms = self.machine.config.lease_ms
            self._leases.prepare()
            with Registering(self._leases, self.machine, fresh):
                self.machine.commit(lambda _state, now: RegisterWriter(fresh, "maintenance", now + lease_ms))
                self._leases.keep(self.machine, fresh)
                # The id is given up even if an interrupt keeps `__exit__` from running.
                self._dropped = weakref.finalize(self, self._leases.abandon, self.machine, fresh)
                self._dropped.atexit = False
                self._id = fresh
        return self._id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._id is None:
            return
        try:
            self._leases.retire(self.machine, self._id)
            self._dropped.detach()
        except Exception:
            if error is None:
                raise  # otherwise the first error matters more; the lease ends by itself
        self._id = None
