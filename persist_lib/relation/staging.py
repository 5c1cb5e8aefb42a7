"""Staged writes, the half of the commit: one batch of what all tasks wrote, appended by one compare-and-append.

An append takes the time from the newest state, again in each attempt of the commit, so that it never loses to another
writer. With a `producer` it is committed once, however often it is repeated, by whichever process: the shard remembers
the last sequence number of each producer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from persist_lib.arguments import LONGEST_S, parse_seconds
from persist_lib.core import commands as c
from persist_lib.errors import InvalidUsage, Refused
from persist_lib.frontier import MAX_TIME, Antichain
from persist_lib.ids import WriterId, format_writer_id
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended, Changed
from persist_lib.relation.commit import commit_shares
from persist_lib.relation.differences import Overwriting, Upserting
from persist_lib.relation.lone import Batched, LoneWriter
from persist_lib.relation.ordered_writer import Brought, Done, OrderedWriter
from persist_lib.relation.registration import Lent, Registration, check_produced, parse_bounds
from persist_lib.relation.stage import (
    LEASE_S,
    Lease,
    Stage,
    Staged,
    Ticket,
    appended_before,
    can_append,
    parse_staged,
    token_of,
)
from persist_lib.relation.staged_commit import Commit, Prepared, Rule
from persist_lib.relation.verbs import Counted
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.leases import Registering
from persist_lib.times import TimeLike

Answered = TypeVar("Answered", bound=Any)
S = TypeVar("S", bound=Appended)
PASS_S = 3600.0
"""How long a call may take that reads contents, unless the caller passes a timeout: seconds."""
LONGEST_LEASE_S = 400 * 86_400.0


class StagedChange(NamedTuple):
    """What is to become of staged rows: appended as they are, or as a rule says; and when, if the caller says that."""

    kind: type[Rule] | None
    everything: bool
    when: int | None
    bounds: tuple[Antichain, Antichain] | None


class StagedVerbs(OrderedWriter[Brought, Done], Generic[Brought, Answered, Done, Counted]):
    """The calls that append together what many processes wrote, whatever places hold the rows."""

    def append_staged(
        self,
        staged: Iterable[Answered],
        *,
        at: TimeLike | None = None,
        producer: tuple[str, int] | None = None,
        timeout: float | None = None,
    ) -> Done:
        """Append what tasks wrote, all of it by one compare-and-append, at the next time.

        The time is the shard's upper; where times are a clock, now if that is later; or `at`, which must be upper or
        later. It is chosen again when another writer was first, so this never raises UpperMismatch without `at`. For a
        stage with bounds it is the `compare_and_append` of these. Nothing staged is no append, unless there are bounds.

        With a `producer`, a name and a sequence number, the append is committed once, as in `compare_and_append`:
        AlreadyProduced says that there was nothing left to do.

        Each answer is appended once, with a producer or without, in however many calls it is passed. A call whose
        answers were all appended before says where that was, with a count of 0; so after Indeterminate, repeat it. If
        only some of them were, it raises InvalidUsage and appends nothing. The shard remembers each answer until its
        stage is closed, and after that the last 1,024 appends, by all of their answers together.

        Constraints of the schema are checked against the newest contents of the keys, in bounded memory. Raises
        ConstraintViolated, DiffOverflow, and LeaseExpired when the stage's lease has ended: nothing was written then,
        and nothing staged can be appended any more. `timeout` is in seconds; with constraints it is an hour.
        """
        self._check_verb("append_staged")
        found = self._parse_staged(staged)
        bounds = found[0].bounds if found else None
        when = None if at is None else self._times().parse(at, "at")
        if when is not None and (bounds is not None or when >= MAX_TIME):
            raise InvalidUsage("`at` is a time before the last one, and only for a stage without bounds of its own")
        seconds = PASS_S if timeout is None and self.schema.constraints else timeout
        return self._append_staged(
            found, StagedChange(None, False, when, bounds), self._parse_producer(producer), seconds
        )

    def upsert_staged(
        self, staged: Iterable[Answered], *, producer: tuple[str, int] | None = None, timeout: float | None = None
    ) -> Counted:
        """Make each row that tasks wrote the one row of its key, at the next time, as `upsert` does.

        Rows that are to delete their key have the `_diff` `DELETE`; all others are there once. Different rows for one
        key are refused, and so is a key that is both to be written and deleted: InvalidUsage names some. What is staged
        is merged with the newest contents of these keys in one pass of bounded memory, and again when another writer
        was first. `producer` and errors are those of `append_staged`. `timeout` is in seconds, None: an hour.
        """
        return self._by_rule(staged, StagedChange(Upserting, False, None, None), producer, timeout)

    def overwrite_staged(
        self, staged: Iterable[Answered], *, producer: tuple[str, int] | None = None, timeout: float | None = None
    ) -> Counted:
        """Make the contents what tasks wrote, at the next time. The difference is what is written: history stays.

        What is the same already is not written again; nothing at all is if all of it is. Nothing staged empties the
        contents, and needs no stage. Reads all contents in one pass of bounded memory, and again when another writer
        was first. `producer`, `timeout` and errors are those of `upsert_staged`. The counts by key are 0.
        """
        return self._by_rule(staged, StagedChange(Overwriting, True, None, None), producer, timeout)

    def _by_rule(
        self, staged: object, change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Counted:
        self._check_verb("append_staged")
        found = self._parse_staged(staged)
        if any(one.bounds is not None for one in found):
            raise InvalidUsage("the rows of a stage with bounds have times of their own, and are appended as they are")
        seconds = PASS_S if timeout is None else timeout
        return self._change_staged(found, change, self._parse_producer(producer), seconds)

    @abstractmethod
    def _parse_staged(self, staged: object) -> list[Answered]:
        """A list of what tasks wrote, each of them once. Raises InvalidUsage."""

    @abstractmethod
    def _append_staged(
        self, staged: list[Answered], change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Done: ...

    @abstractmethod
    def _change_staged(
        self, staged: list[Answered], change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Counted: ...


class Staging(LoneWriter, StagedVerbs[Batched, Staged, Appended, Changed]):
    """The calls of a write handle that stage writes of many processes, and append them together."""

    def stage(self, *, lease_s: float = LEASE_S, lower: object | None = None, new_upper: object | None = None) -> Stage:
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
            bounds = parse_bounds(lower, new_upper, self._times())
        lease_ms = round(parse_seconds(lease_s, "lease_s") * 1000)
        if not 100 <= lease_ms <= LONGEST_LEASE_S * 1000:
            raise InvalidUsage(f"lease_s must be from 0.1 to {LONGEST_LEASE_S:.0f} seconds, got {lease_s}")
        self._fetch_writable()
        fresh, said = format_writer_id(machine.runtime.entropy()), (self._registration.owner, self._registration.layer)
        with Registering(self._leases, machine, fresh):
            machine.commit(lambda _state, now: c.RegisterWriter(fresh, "ingest", now + lease_ms, *said))
        return self._staged_under(fresh, lease_ms, bounds)

    def resume_stage(self, ticket: Ticket) -> Stage:
        """The stage of a ticket that another process opened, to write more or to close it."""
        self._check_ticket(ticket)
        return self._staged_under(ticket.writer, ticket.lease_ms, ticket.bounds)

    def can_append(self, ticket: Ticket) -> bool:
        """Whether what is written with a ticket could be appended now: read from the location.

        False too for a stage that remembers `STAGED_MOST` answers: it is time for another one.
        """
        self._check_ticket(ticket)
        return can_append(self.machine.fetch().state, ticket)

    def _parse_staged(self, staged: object) -> list[Staged]:
        shard = self.machine.shard

        def other(one: Staged) -> str | None:
            return None if one.shard == shard else f"shard {one.shard}"

        return parse_staged(staged, Staged, f"shard {shard}", {"shard": shard}, other)

    def _append_staged(
        self, staged: list[Staged], change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Appended:
        def append(deadline: Deadline) -> Appended:
            with Spending() as spent:
                version = within(deadline, self._fetch_writable)
                check_produced(self.machine, producer)
                if not staged or (change.bounds is None and not any(one.parts for one in staged)):
                    return Appended(version.seqno, version.state.upper, 0, b"", 0, spent.cost)
                commit = self._commit_of(staged, producer, deadline, spent)
                return self._once(staged, spent, lambda: commit.append(staged, change.when))

        return self._in_turn(timeout, append)

    def _check_ticket(self, ticket: object) -> None:
        if not isinstance(ticket, Ticket) or ticket.shard != self.machine.shard:
            raise InvalidUsage(f"shard {self.machine.shard}: a stage is resumed with a ticket of the same shard")

    def _change_staged(
        self, staged: list[Staged], change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Changed:
        if (kind := change.kind) is None:
            raise AssertionError("a change of staged rows has a rule")

        def commit_changes(deadline: Deadline) -> Changed:
            with Spending() as spent:
                version = within(deadline, self._fetch_writable)
                check_produced(self.machine, producer)
                if not change.everything and not any(one.parts for one in staged):
                    return Changed(version.seqno, version.state.upper, 0, b"", 0, spent.cost)
                commit, rule = self._commit_of(staged, producer, deadline, spent), kind(self.machine, self.schema)
                done = self._once(staged, spent, lambda: commit.change(staged, rule, everything=change.everything))
                if isinstance(done, Changed):
                    return done
                time = (done.upper.time or 1) - 1
                return Changed(done.seqno, done.upper, 0, done.token, 0, done.cost, time)

        return self._in_turn(timeout, commit_changes)

    def _once(self, staged: Sequence[Staged], spent: Spending, commit: Callable[[], S]) -> S | Appended:
        """Commit these answers, or say where an earlier call has appended all of them."""
        token = token_of(one.id for one in staged)

        def before() -> Appended | None:
            found = appended_before(self.machine, staged, token) if staged else None
            return None if found is None else Appended(found.seqno, found.upper, 0, token, 0, spent.cost)

        if (done := before()) is not None:
            return done
        try:
            return commit()
        except (InvalidUsage, Refused):  # perhaps an earlier call came through just now
            if (done := before()) is not None:
                return done
            raise

    def prepare(
        self, staged: Sequence[Staged], kind: type[Rule] | None, bounds: tuple[Antichain, Antichain],
        time: int | None, deadline: Deadline, spent: Spending, *, everything: bool,
    ) -> Prepared:  # fmt: skip
        """What is staged as a batch to be appended together with those of other shards (see `Commit.prepare`)."""
        found = self._parse_staged(staged)
        rule = None if kind is None else kind(self.machine, self.schema)
        commit = self._commit_of(found, None, deadline, spent)
        return commit.prepare(found, rule, bounds, time, everything=everything)

    def staged_rows(self, staged: Sequence[Staged]) -> Iterator[pa.Table]:
        """Read what tasks wrote: tables of `schema.updates`, in order, each data once a time, in bounded memory."""
        commit = self._commit_of(list(staged), None, self.machine.runtime.deadline(LONGEST_S), Spending())
        return commit.rows(staged)

    def append_prepared(self, prepared: Prepared, deadline: Deadline, token: bytes) -> Appended:
        """Append what was prepared, by itself."""

        def append(deadline: Deadline) -> Appended:
            with Spending() as spent:
                share = prepared.share(self.machine, token, deadline)
                return commit_shares((share,), deadline, token, spent)[0]

        return self._in_turn(deadline.remaining_s(), append)

    def drop_staged(self, staged: Sequence[Staged]) -> None:
        """Delete parts of which only the difference was appended: nothing will ever refer to them."""
        deadline = self.machine.runtime.deadline(self.machine.config.timeout_s)
        self._commit_of(list(staged), None, deadline, Spending()).drop(staged)

    def _commit_of(
        self, staged: list[Staged], producer: tuple[str, int] | None, deadline: Deadline, spent: Spending
    ) -> Commit:
        """A commit under the id of the stage; under the handle's own if nothing is staged."""
        machine = self.machine
        registration: Registration = self._registration
        uploader: Callable[[], WriterId] = partial(registration.register, deadline)
        if staged:
            registration = Lent(machine, self._leases, staged[0].writer)
            uploader = Lease(machine, staged[0].writer, staged[0].lease_ms)
        return Commit(
            machine,
            self._leases,
            self.schema,
            self._schema_id,
            registration,
            uploader,
            producer,
            deadline,
            spent,
            staged,
        )

    def _staged_under(self, writer: WriterId, lease_ms: int, bounds: tuple[Antichain, Antichain] | None) -> Stage:
        machine = self.machine
        url, consensus_url = self._leases.urls or ("memory:", "memory:")
        ticket = Ticket(
            url, consensus_url, machine.shard, self.schema, self._schema_id, writer, lease_ms, bounds, machine.config
        )
        return Stage(machine, self._leases, ticket)
