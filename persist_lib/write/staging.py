"""Staged writes, the half of the commit: one batch of what all tasks wrote, appended by one compare-and-append.

An append takes the time from the newest state, anew in each attempt of the commit, so that it never loses to another
writer. With a `producer` it is committed once, however often it is repeated, by whichever process: the shard remembers
the last sequence number of each producer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from threading import RLock

from persist_lib.arguments import parse_seconds
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, State, Version
from persist_lib.errors import InvalidUsage, LeaseExpired
from persist_lib.frontier import MAX_TIME, Antichain
from persist_lib.ids import WriterId, format_writer_id, parse_producer
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases, Registering
from persist_lib.times import TimeLike, Times
from persist_lib.write.appending import parse_bounds, whole
from persist_lib.write.layout import assembled, counted_at
from persist_lib.write.pending import Appended
from persist_lib.write.registration import Lent, Registration, lease_ended
from persist_lib.write.share import Place, Share, commit_shares
from persist_lib.write.staged import LEASE_S, Lease, Stage, Staged, Ticket, parse_staged
from persist_lib.write.times import next_time

LONGEST_LEASE_S = 400 * 86_400.0


class Staging(ABC):
    """The calls of a write handle that stage writes of many processes, and append them together."""

    machine: Machine
    schema: Schema
    _schema_id: int
    _lock: RLock
    _leases: Leases
    _registration: Registration

    def stage(
        self, *, lease_s: float = LEASE_S, lower: object | None = None, new_upper: object | None = None
    ) -> Stage:
        """Register one writer id under which any number of processes may write parts. Close the stage at the end.

        The id lives for `lease_s` seconds after the last heartbeat, which tasks that write send. With bounds the rows
        have a `_time` of their own in `[lower, new_upper)`, and are appended as by `compare_and_append`; without them
        the commit chooses the time.
        """
        machine = self.machine
        if (lower is None) != (new_upper is None):
            raise InvalidUsage("a stage has both lower and new_upper, or neither: then the commit chooses the time")
        bounds = None
        if lower is not None:
            bounds = parse_bounds(lower, new_upper, Times(self.schema.times, machine.runtime.clock_ms))
        lease_ms = round(parse_seconds(lease_s, "lease_s") * 1000)
        if not 100 <= lease_ms <= LONGEST_LEASE_S * 1000:
            raise InvalidUsage(f"lease_s must be from 0.1 to {LONGEST_LEASE_S:.0f} seconds, got {lease_s}")
        self._fetch_writable()
        fresh = format_writer_id(machine.runtime.entropy())
        with Registering(self._leases, machine, fresh):
            machine.commit(lambda _state, now: c.RegisterWriter(fresh, "ingest", now + lease_ms))
        return self._staged_under(fresh, lease_ms, bounds)

    def resume_stage(self, ticket: Ticket) -> Stage:
        """The stage of a ticket that another process opened, to write more or to close it."""
        if not isinstance(ticket, Ticket) or ticket.shard != self.machine.shard:
            raise InvalidUsage(f"shard {self.machine.shard}: a stage is resumed with a ticket of the same shard")
        return self._staged_under(ticket.writer, ticket.lease_ms, ticket.bounds)

    def append_staged(
        self,
        staged: Iterable[Staged],
        *,
        at: TimeLike | None = None,
        producer: tuple[str, int] | None = None,
        timeout: float | None = None,
    ) -> Appended:
        """Append what tasks wrote, all of it by one compare-and-append, at the next time.

        The time is the shard's upper; where times are a clock, now if that is later; or `at`, which must be upper or
        later. It is chosen anew when another writer was first, so this never raises UpperMismatch without `at`. For a
        stage with bounds it is the `compare_and_append` of these. Nothing staged is no append, unless there are bounds.

        With a `producer`, a name and a sequence number, the append is committed once, as in `compare_and_append`:
        AlreadyProduced says that there was nothing left to do. After Indeterminate, repeat the call with the producer.

        Raises ConstraintViolated, DiffOverflow, and LeaseExpired when the stage's lease has ended: nothing was written
        then, and nothing staged can be appended any more.
        """
        machine = self.machine
        found = parse_staged(staged, machine.shard)
        bounds = found[0].bounds if found else None
        when = None if at is None else Times(self.schema.times, machine.runtime.clock_ms).parse(at, "at")
        if when is not None and (bounds is not None or when >= MAX_TIME):
            raise InvalidUsage("`at` is a time before the last one, and only for a stage without bounds of its own")
        producer = parse_producer(producer)
        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            with Spending() as spent:
                version = within(deadline, self._fetch_writable)
                check_new(machine, version, producer)
                if not found or (bounds is None and not any(one.parts for one in found)):
                    return Appended(version.seqno, version.state.upper, 0, b"", 0, spent.cost)
                place: Place = whole if bounds is not None else partial(self._placed, when)
                return self._commit_staged(found, place, producer, deadline, spent)
        finally:
            if held:
                self._lock.release()

    def _commit_staged(
        self, staged: list[Staged], place: Place, producer: tuple[str, int] | None, deadline: Deadline, spent: Spending
    ) -> Appended:
        machine, one = self.machine, staged[0]
        lent = Lent(machine, self._leases, one.writer)
        builder = self._staged_builder(one, deadline)
        state = machine.state
        built = within(
            deadline, partial(assembled, staged, builder, self.schema, state.schemas, inline_room(machine, state))
        )
        return send(machine, lent, builder, built, place, producer, deadline, spent)

    def _staged_builder(self, one: Staged, deadline: Deadline) -> Builder:
        machine = self.machine
        return Builder(
            machine.shard, Lease(machine, one.writer, one.lease_ms), self.schema, self._schema_id, machine.blob,
            machine.config, machine.runtime, deadline,
        )  # fmt: skip

    def _placed(self, when: int | None, built: Built, state: State) -> Batch:
        """The batch at the time chosen by this state."""
        machine, upper = self.machine, state.upper
        if when is not None and not upper.is_before(when):
            raise machine.refused(r.WrongUpper(Antichain(when), upper))
        time = next_time(self.schema, machine.shard, upper, machine.runtime) if when is None else when
        return counted_at(built.batch, upper, time)

    def _staged_under(self, writer: WriterId, lease_ms: int, bounds: tuple[Antichain, Antichain] | None) -> Stage:
        machine = self.machine
        url, consensus_url = self._leases.urls or ("memory:", "memory:")
        ticket = Ticket(
            url, consensus_url, machine.shard, self.schema, self._schema_id, writer, lease_ms, bounds, machine.config
        )
        return Stage(machine, self._leases, ticket)

    @abstractmethod
    def _begin(self, timeout: float | None, held: list[Lock]) -> Deadline: ...

    @abstractmethod
    def _fetch_writable(self) -> Version: ...


def send(
    machine: Machine, lent: Lent, builder: Builder, built: Built, place: Place, producer: tuple[str, int] | None,
    deadline: Deadline, spent: Spending,
) -> Appended:  # fmt: skip
    """Commit a batch under the stage's id."""
    token = machine.runtime.token()
    try:
        share = Share(machine, lent, lent.lent, builder, built, place, c.CompareAndAppend, token, producer)
        return commit_shares((share,), deadline, token, spent)[0]
    except LeaseExpired as error:
        raise lease_ended(machine, lent.lent) from error


def inline_room(machine: Machine, state: State) -> int:
    """How large an inline batch may be now."""
    room = INLINE_TOTAL_BYTES - state.inline_size
    return min(machine.config.inline_bytes, max(room, INLINE_TOTAL_BYTES // 2))


def check_new(machine: Machine, version: Version, producer: tuple[str, int] | None) -> None:
    """Raise AlreadyProduced for an append that was made before, without the work of it."""
    if producer is None or (last := version.state.producers.get(producer[0])) is None or last.sequence < producer[1]:
        return
    raise machine.refused(r.AlreadyProduced(*producer, last))
