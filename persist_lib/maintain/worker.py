"""A maintenance worker: a writer id that compacts and rolls up, registered only once there is work."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from persist_lib.core.commands import RegisterWriter
from persist_lib.ids import WriterId, format_writer_id
from persist_lib.leases import Leases
from persist_lib.machine import Machine


class Uploader(Protocol):
    """Whoever has the id of a live writer, below which parts can be uploaded."""

    @property
    def id(self) -> WriterId:
        """The writer's id."""
        ...


class Worker:
    """One shard's worker for the length of a `with` block. `id` registers it on first use, the end retires it."""

    def __init__(self, machine: Machine, leases: Leases) -> None:
        self.machine = machine
        self._leases = leases
        self._id: WriterId | None = None

    @property
    def id(self) -> WriterId:
        """A live maintenance writer's id."""
        if self._id is None:
            fresh = format_writer_id(self.machine.runtime.entropy())
            lease_ms = self.machine.config.lease_ms
            self._leases.prepare()
            self.machine.commit(lambda _state, now: RegisterWriter(fresh, "maintenance", now + lease_ms))
            self._leases.keep(self.machine, fresh)
            self._id = fresh
        return self._id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._id is None:
            return
        retired, self._id = self._id, None
        try:
            self._leases.retire(self.machine, retired)
        except Exception:
            if error is None:
                raise  # otherwise what went wrong first matters more; the lease ends by itself
