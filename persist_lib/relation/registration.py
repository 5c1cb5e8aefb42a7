"""The writer id of a handle or a worker: registered when it is first needed, kept alive, and retired at the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.producers import last_of
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, State, Version
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, LeaseExpired, SchemaMismatch, TimedOut
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, ShardId, WriterId, format_writer_id
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Built
from persist_lib.shard.commit import Build, Committed, Machine
from persist_lib.shard.leases import Leases, Registering, was_closed
from persist_lib.times import Times


def undoubted(shard: str, error: Indeterminate, what: str = "") -> Determinate:
    """The error for an append that was never sent, because a step before it failed. Only that step is in doubt."""
    return Determinate(
        f"{what or f'shard {shard}'}: this call appended nothing, as a step before the append failed: {error.message}. "
        "Try again",
        shard=shard,
    )


def timed_out(shard: ShardId, deadline: Deadline, why: str) -> TimedOut:
    """The error for an append whose deadline passed before anything of it was sent."""
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as {why}. "
        "This call appended nothing; try again, or with a longer timeout",
        shard=shard, timeout_s=deadline.timeout_s,
    )  # fmt: skip


def outrun(machine: Machine, schema: Schema, deadline: Deadline, races: int, what_else: str = "") -> TimedOut:
    """The error for a call that other writers were faster than until its deadline passed."""
    shard, upper = machine.shard, machine.state.upper
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as other writers were first {races} times; upper is "
        f"{schema.show(upper)} now. This call wrote nothing. Try again, with a longer timeout{what_else}",
        shard=shard, timeout_s=deadline.timeout_s, upper=upper,
    )  # fmt: skip


def check_newest(machine: Machine, schema: Schema, state: State) -> None:
    """Raise SchemaMismatch unless `schema` is the shard's newest: an older one cannot retract all of a row."""
    newest = state.schemas[-1]
    if newest != schema:
        raise SchemaMismatch(
            f"shard {machine.shard} has the schema {newest} by now, and this writer has {schema}, which cannot say all "
            "of the rows that are to be replaced. Nothing was written; open a writer with the newest schema",
            shard=machine.shard, actual=newest, expected=schema,
        )  # fmt: skip


def inline_room(machine: Machine, state: State) -> int:
    """How many bytes an inline batch may have now."""
    room = INLINE_TOTAL_BYTES - state.inline_size
    return min(machine.config.inline_bytes, max(room, INLINE_TOTAL_BYTES // 2))


def check_produced(machine: Machine, producer: tuple[str, int] | None) -> None:
    """Raise AlreadyProduced before anything is uploaded, if the shard has this append of the producer already.

    The version that this process knows says so without a request; where it does, it is read again.
    """
    if (
        producer is not None
        and last_of(machine.state, *producer)
        and (last := last_of(machine.fetch().state, *producer))
    ):
        raise machine.refused(r.AlreadyProduced(*producer, last))


def parse_bounds(lower: object, upper: object, times: Times) -> tuple[Antichain, Antichain]:
    """The bounds of an append as frontiers. Raises InvalidUsage when they are not frontiers, or not in order."""
    low, up = times.frontier(lower, "expected_upper"), times.frontier(upper, "new_upper")
    if not low < up:
        raise InvalidUsage(
            f"an append covers times from its lower to below its upper, so {times.show(low)} must be before "
            f"{times.show(up)}",
            lower=low,
            upper=up,
        )
    return low, up


def whole(built: Built, _state: State) -> Batch:
    """The batch as it was built: it is registered unchanged."""
    return built.batch


class Registration:
    """At most one writer id at a time, for one handle or worker, which guards it.

    `purpose` and `owner` are for people to read, `layer` is the one that this id appends for. A `judge` raises for a
    version after which it must not be registered: the registration is the transition after one that it let pass.
    Its lease is kept up from its registration until it is forgotten or
    closed. When the handle is dropped without `close`, the id is abandoned, and the thread that keeps leases
    up retires it.
    """

    def __init__(
        self, machine: Machine, leases: Leases, purpose: Literal["ingest", "maintenance"], owner: str = "",
        layer: str = "",
        judge: Callable[[Version], object] | None = None,
    ) -> None:  # fmt: skip
        self._machine = machine
        self.owner, self.layer, self._judge = owner, layer, judge
        self._leases = leases
        self._purpose = purpose
        self._id: WriterId | None = None
        self._dropped: weakref.finalize[..., Registration] | None = None
        self.is_closed = False

    @property
    def has_id(self) -> bool:
        """Whether an id is registered, as far as this process knows."""
        return self._id is not None

    @property
    def id(self) -> WriterId:
        """The id. Registers one, within the timeout of the settings, if there is none. Raises as `register` does."""
        return self.register(self._machine.runtime.deadline(self._machine.config.timeout_s))

    def register(self, deadline: Deadline, note: Callable[[Committed], object] | None = None) -> WriterId:
        """The id. Registers one if there is none, and then calls `note` with what was committed.

        Raises LeaseExpired after `close`, TimedOut after the deadline.
        """
        if self.is_closed:
            raise self.closed_already()
        if self._id is None:
            if deadline.has_passed():  # without time left for an answer, the registration would only be in doubt
                raise timed_out(self._machine.shard, deadline, "the steps before its registration took that long")
            fresh = format_writer_id(self._machine.runtime.entropy())
            lease_ms, said = self._machine.config.lease_ms, (self.owner, self.layer)

            def build(_state: State, now: int) -> c.RegisterWriter:
                made = c.RegisterWriter(fresh, self._purpose, now + lease_ms, *said)
                if self._judge is None:
                    return made
                self._judge(version := self._machine.version)  # it is `_state`'s, as the committing thread has the turn
                return replace(made, at=SeqNo(version.seqno + 1))

            self._leases.prepare()
            with Registering(self._leases, self._machine, fresh):
                committed = self._commit(build, deadline)
                self._leases.keep(self._machine, fresh)
                self._dropped = weakref.finalize(self, self._leases.abandon, self._machine, fresh)
                self._dropped.atexit = False
                self._id = fresh
            if note is not None:
                note(committed)
        return self._id

    def _commit(self, build: Build, deadline: Deadline) -> Committed:
        """Commit the registration that `build` makes, or raise its refusal."""
        return self._machine.commit(build, deadline.remaining_s())

    def closed_already(self) -> LeaseExpired:
        """The error for a call on a closed handle."""
        return was_closed(self._machine, "writer")

    def forget(self) -> None:
        """Stop using the id, as it is not live any more. The next call that needs an id registers a new one."""
        forgotten, self._id = self._id, None
        if self._dropped is not None:
            self._dropped.detach()
        if forgotten is not None:
            self._leases.drop(self._machine, forgotten)

    def close(self) -> None:
        """Retire the id, and never register another one. Idempotent."""
        self.is_closed = True
        self.retire()

    def retire(self) -> None:
        """Retire the id, if there is one. The next call that needs an id registers a new one."""
        if self._id is not None:
            self._leases.retire(self._machine, self._id)
            self.forget()  # last: after an interrupt, the next call retires the id


class Lent(Registration):
    """A writer id that another process registered, for as long as it is live. No other id ever takes its place."""

    def __init__(self, machine: Machine, leases: Leases, writer: WriterId) -> None:
        super().__init__(machine, leases, "ingest")
        self._id = self.lent = writer

    def register(self, _deadline: Deadline, _note: Callable[[Committed], object] | None = None) -> WriterId:
        """The id. Raises LeaseExpired when it was found not to be live any more."""
        if self._id is None:
            raise lease_ended(self._machine, self.lent)
        return self._id


def lease_ended(machine: Machine, writer: str) -> LeaseExpired:
    """The error where the id under which tasks wrote parts has ended, so that they can never be appended."""
    return LeaseExpired(
        f"shard {machine.shard}: the lease of the stage {writer} has ended, so what was written under it may be "
        "deleted at any time, and can never be appended. Nothing was appended. Write again, with a longer lease "
        "(lease_s) if the tasks have to wait for long before they write",
        id=writer, shard=machine.shard,
    )  # fmt: skip
