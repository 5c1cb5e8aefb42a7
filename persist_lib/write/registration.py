"""The writer id of a handle: registered when it is first needed, kept alive, given up at the end."""

from __future__ import annotations

import weakref

from persist_lib.core import commands as c
from persist_lib.errors import LeaseExpired
from persist_lib.ids import WriterId, format_writer_id
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases, Registering, was_closed
from persist_lib.write.appending import timed_out


class Registration:
    """At most one writer id at a time, of one handle, whose lock guards it.

    Its lease is kept up from the moment at which it is registered until it is forgotten or closed. When the handle is
    dropped without being closed, then the id is abandoned, and retired by the thread that keeps leases up.
    """

    def __init__(self, machine: Machine, leases: Leases) -> None:
        self._machine = machine
        self._leases = leases
        self._id: WriterId | None = None
        self._dropped: weakref.finalize[..., Registration] | None = None
        self.is_closed = False

    @property
    def id(self) -> WriterId:
        """The id; registers one within the timeout of the settings. Raises LeaseExpired once it is closed."""
        return self.register(self._machine.runtime.deadline(self._machine.config.timeout_s))

    def register(self, deadline: Deadline) -> WriterId:
        """The id; registers one where there is none. Raises LeaseExpired once it is closed, and TimedOut."""
        if self.is_closed:
            raise self.closed_already()
        if self._id is None:
            if deadline.has_passed():  # without time for an answer it would only be in doubt
                raise timed_out(self._machine.shard, deadline, "what comes before its registration took that long")
            fresh = format_writer_id(self._machine.runtime.entropy())
            lease_ms = self._machine.config.lease_ms
            build = lambda _state, now: c.RegisterWriter(fresh, "ingest", now + lease_ms)  # noqa: E731
            self._leases.prepare()
            with Registering(self._leases, self._machine, fresh):
                self._machine.commit(build, deadline.remaining_s())
                self._leases.keep(self._machine, fresh)
                self._dropped = weakref.finalize(self, self._leases.abandon, self._machine, fresh)
                self._dropped.atexit = False
                self._id = fresh
        return self._id

    def closed_already(self) -> LeaseExpired:
        """The error for calls on a handle that was closed."""
        return was_closed(self._machine, "writer")

    def forget(self) -> None:
        """Stop using the id, as it is not live any more; the next call that needs one registers anew."""
        forgotten, self._id = self._id, None
        if self._dropped is not None:
            self._dropped.detach()
        if forgotten is not None:
            self._leases.drop(self._machine, forgotten)

    def close(self) -> None:
        """Retire the id, and register none any more. Idempotent."""
        self.is_closed = True
        if self._id is not None:
            self._leases.retire(self._machine, self._id)
            self.forget()  # last: after an interrupt, the next call retires it
