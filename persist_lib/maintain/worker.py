"""A maintenance worker: a writer id that compacts and rolls up, registered only once there is work."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from persist_lib.ids import WriterId
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.write.registration import Registration


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
        self._registration = Registration(machine, leases, "maintenance")

    @property
    def id(self) -> WriterId:
        """A live maintenance writer's id."""
        return self._registration.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._registration.close()
        except Exception:
            if error is None:
                raise  # otherwise the first error matters more; the lease ends by itself
