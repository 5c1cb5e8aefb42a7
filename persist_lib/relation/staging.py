"""Staged writes, the half of the commit: one batch of what all tasks wrote, appended by one compare-and-append.

An append takes the time from the newest state, again in each attempt of the commit, so that it never loses to another
writer. With a `producer` it is committed once, however often it is repeated, by whichever process: the shard remembers
the last sequence number of each producer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from persist_lib.arguments import LONGEST_S, parse_seconds
from persist_lib.core import commands as c
from persist_lib.core.state import Outcome
from persist_lib.errors import InvalidUsage, LeaseExpired, PersistError, Refused, UpperMismatch
from persist_lib.format.paths import blob_key
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import SeqNo, WriterId, format_writer_id
from persist_lib.kernel.keyset import Counts
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended, Changed
from persist_lib.relation.commit import commit_shares
from persist_lib.relation.differences import Overwriting, Upserting
from persist_lib.relation.lone import Batched, LoneWriter
from persist_lib.relation.ordered_writer import Brought, Done
from persist_lib.relation.registration import (
    Lent,
    Registration,
    check_produced,
    lease_ended,
    next_time,
    parse_bounds,
    staged_token,
)
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
from persist_lib.relation.staged_commit import Commit, Prepared, Rule, discard
from persist_lib.relation.verbs import NOTHING, Basis, Counted, Turn, Verbs
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.leases import Registering
from persist_lib.times import TimeLike

Answered = TypeVar("Answered", bound=Any)
"""The kind of the answers of tasks."""
PASS_S = 3600.0
"""How long a call may take that reads contents, unless the caller passes a timeout: seconds."""
LONGEST_LEASE_S = 400 * 86_400.0


class StagedChange(NamedTuple):
    """What is to become of staged rows: appended as they are, or as a rule says; and when, if the caller says that."""

    kind: type[Rule] | None
    everything: bool
    when: int | None
    bounds: tuple[Antichain, Antichain] | None
    upper: Antichain | None = None
    """Where upper has to be, as the rows were made of the contents up to there. None: anywhere."""

    def time_of(self, upper: Antichain) -> int | None:
        """The time of the rows, in an append up to `upper`. None: they have times of their own."""
        return None if self.bounds is not None else (upper.time or 1) - 1


class StagedCall(NamedTuple, Generic[Answered]):
    """A commit of staged rows: what was given, what was written again since, and what is closed at its end."""

    staged: Sequence[Answered]
    written: list[Sequence[Answered]]
    change: StagedChange
    producer: tuple[str, int] | None
    deadline: Deadline
    spent: Spending
    opened: ExitStack


class StagedVerbs(Verbs[Brought, Basis, Done, Counted], Generic[Brought, Basis, Done, Counted, Answered]):
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
        return self._plain(self._commit_all(found, StagedChange(None, False, when, bounds), producer, seconds))

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
        self, staged: Iterable[Answered], *, upper: object = None, producer: tuple[str, int] | None = None,
        timeout: float | None = None,
    ) -> Counted:  # fmt: skip
        """Make the contents what tasks wrote, at the next time. The difference is what is written: history stays.

        What is the same already is not written again; nothing at all is if all of it is. Nothing staged empties the
        contents, and needs no stage. Reads all contents in one pass of bounded memory, and again when another writer
        was first. `producer`, `timeout` and errors are those of `upsert_staged`. The counts by key are 0.

        Rows that were made of the contents themselves are given with the `upper` that these had: raises UpperMismatch,
        and nothing is written, where another writer was first since.
        """
        known = None if upper is None else self._times().frontier(upper, "upper")
        return self._by_rule(staged, StagedChange(Overwriting, True, None, None, known), producer, timeout)

    def _by_rule(
        self, staged: object, change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Counted:
        self._check_verb("append_staged")
        found = self._parse_staged(staged)
        if any(one.bounds is not None for one in found):
            raise InvalidUsage("the rows of a stage with bounds have times of their own, and are appended as they are")
        return self._commit_all(found, change, producer, PASS_S if timeout is None else timeout)

    def _commit_all(
        self, staged: list[Answered], change: StagedChange, producer: tuple[str, int] | None, timeout: float | None
    ) -> Counted:
        known = self._parse_producer(producer)

        def commit(deadline: Deadline) -> Counted:
            with Spending() as spent, ExitStack() as opened:
                return self._carry_out(StagedCall(staged, [staged], change, known, deadline, spent, opened))

        return self._in_turn(timeout, commit)

    def _carry_out(self, call: StagedCall[Answered]) -> Counted:
        """Append what is staged, again while others are first; or say where an earlier call appended it."""
        staged, change, deadline, races = call.staged, call.change, call.deadline, 0
        while True:
            turn = self._next_turn(deadline)
            if call.producer is not None:
                check_produced(self._producing(), call.producer)
            seqno = turn.places[0][1].seqno
            # Times of their own are an append without rows, too, and everything to become nothing is a change.
            if not (change.everything or change.bounds) and all(one.is_empty for one in staged):
                return self._answer(turn.lower, 0, b"", call.spent, seqno=seqno)
            if (done := self._appended_before(staged, turn)) is not None:
                time = change.time_of(done.upper)
                return self._answer(done.upper, 0, done.token, call.spent, time, seqno=done.seqno)
            try:
                if (answer := self._try_staged(call, turn)) is not None:
                    return answer
            except (InvalidUsage, Refused):  # perhaps an earlier call came through just now
                if self._appended_before(staged, turn) is None:
                    raise
                continue
            races += 1
            if deadline.has_passed():
                raise self._outrun(deadline, races)

    def _try_staged(self, call: StagedCall[Answered], turn: Turn[Basis]) -> Counted | None:
        """Append what is staged, if upper is still where it was found; None if another writer was first."""
        change, ids = call.change, [one.id for one in call.staged]
        token = token_of(ids) if ids else self._runtime.token()
        token = staged_token(token, chosen=change.bounds is None and change.when is None)
        prepared, bounds = dict[str, Prepared](), self._staged_bounds(change, turn)
        try:
            if (parts := self._parts_for(call, turn, bounds)) is None:
                return None
            self._prepare(prepared, call, parts, bounds)
            counts = Counts(*(sum(of) for of in zip(*(one.counts for one in prepared.values()), strict=True)))
            if change.kind is not None and all(one.is_empty() for one in prepared.values()):
                self._drop(parts)
                return self._answer(bounds[0], 0, b"", call.spent, None, counts, turn.places[0][1].seqno)
            if (done := self._commit_prepared(call, turn, prepared, bounds, token)) is None:
                return None
        except UpperMismatch as error:
            if change.bounds is None and change.when is None:
                return None
            if (lost := self._lost(bounds[0], error)) is error:
                raise
            raise lost from error
        except LeaseExpired as error:
            name = str(error.fields.get("shard"))
            if name in prepared and prepared[name].is_lent():
                raise lease_ended(self._place(name).machine, str(error.fields.get("id"))) from error
            raise
        if change.kind is not None:
            self._drop(parts)
        count, time = sum(one.built.batch.count for one in prepared.values()), change.time_of(bounds[1])
        return self._answer(bounds[1], count, token, call.spent, time, counts, *done)

    def _prepare(
        self, into: dict[str, Prepared], call: StagedCall[Answered], parts: Mapping[str, Sequence[Staged]],
        bounds: tuple[Antichain, Antichain],
    ) -> None:  # fmt: skip
        """Make a batch for each shard. One after the other, as each may take the memory of a pass."""
        kind, everything, time = call.change.kind, call.change.everything, call.change.time_of(bounds[1])
        try:
            for shard, given in parts.items():
                place = self._place(shard)
                into[shard] = prepare(
                    place, given, kind, bounds, time, call.deadline, call.spent, everything=everything
                )
        except Exception:
            discard(into)
            raise

    def _staged_bounds(self, change: StagedChange, turn: Turn[Basis]) -> tuple[Antichain, Antichain]:
        if change.bounds is not None:
            return change.bounds
        lower, time = turn.lower, change.when
        if change.upper is not None and lower != change.upper:
            raise self._gap(change.upper, lower)
        if lower.is_top() or (time is not None and not lower.is_before(time)):
            raise self._gap(lower if time is None else at(time), lower)
        if time is None:
            time = next_time(self.schema, self._what, lower, self._runtime, self._now)
        return lower, at(time + 1)

    def _drop(self, parts: Mapping[str, Sequence[Staged]]) -> None:
        """Delete parts of which only the difference was appended. What cannot be deleted is the audit's."""
        for shard, given in parts.items():
            keys = [blob_key(one.shard, part.key) for one in given for part in one.parts if part.inline is None]
            machine = self._place(shard).machine
            if keys:
                with suppress(PersistError):
                    within(machine.runtime.deadline(10.0), partial(machine.blob.delete_many, keys))

    @abstractmethod
    def _parse_staged(self, staged: object) -> list[Answered]:
        """A list of what tasks wrote, each of them once. Raises InvalidUsage."""

    @abstractmethod
    def _place(self, shard: str) -> Staging:
        """The writer of one of the shards."""

    @abstractmethod
    def _appended_before(self, staged: Sequence[Answered], turn: Turn[Basis]) -> Outcome | None:
        """The outcome of the append of all of these answers, if it was made. Raises InvalidUsage for some of them."""

    @abstractmethod
    def _parts_for(
        self, call: StagedCall[Answered], turn: Turn[Basis], bounds: tuple[Antichain, Antichain]
    ) -> Mapping[str, Sequence[Staged]] | None:  # fmt: skip
        """What to append to each shard of the turn. None: these bounds are beyond it, so that another turn is next."""

    @abstractmethod
    def _commit_prepared(
        self, call: StagedCall[Answered], turn: Turn[Basis], prepared: Mapping[str, Prepared],
        bounds: tuple[Antichain, Antichain], token: bytes,
    ) -> tuple[SeqNo, int] | None:  # fmt: skip
        """Append it to all shards or to none: at which seqno, and after how many attempts. None as in `_parts_for`."""

    def _lost(self, _expected: Antichain, error: UpperMismatch) -> UpperMismatch:
        """The error where the caller chose the time, and another writer was first."""
        return error


class Staging(LoneWriter, StagedVerbs[Batched, None, Appended, Changed, Staged]):
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

    def _check_ticket(self, ticket: object) -> None:
        if not isinstance(ticket, Ticket) or ticket.shard != self.machine.shard:
            raise InvalidUsage(f"shard {self.machine.shard}: a stage is resumed with a ticket of the same shard")

    def _place(self, shard: str) -> Staging:
        if shard != self.machine.shard:
            raise AssertionError(f"{shard} is not written by this handle")
        return self

    def _appended_before(self, staged: Sequence[Staged], _turn: Turn[None]) -> Outcome | None:
        return appended_before(self.machine, staged, token_of(one.id for one in staged)) if staged else None

    def _try_staged(self, call: StagedCall[Staged], turn: Turn[None]) -> Changed | None:
        """What needs no look at the contents takes its time from the state of each attempt, and never loses."""
        if call.change.kind is not None or self.schema.constraints:
            return super()._try_staged(call, turn)
        commit = self._commit_of(call.staged, call.producer, call.deadline, call.spent)
        done = commit.append(call.staged, call.change.when)
        time = call.change.time_of(done.upper)
        return self._answer(done.upper, done.count, done.token, call.spent, time, NOTHING, done.seqno, done.attempts)

    def _parts_for(
        self, call: StagedCall[Staged], _turn: Turn[None], _bounds: tuple[Antichain, Antichain]
    ) -> Mapping[str, Sequence[Staged]]:  # fmt: skip
        return {self.machine.shard: call.staged}

    def _commit_prepared(
        self, call: StagedCall[Staged], _turn: Turn[None], prepared: Mapping[str, Prepared],
        _bounds: tuple[Antichain, Antichain], token: bytes,
    ) -> tuple[SeqNo, int]:  # fmt: skip
        one = prepared[self.machine.shard]
        share = self._before(partial(one.share, self.machine, token, call.deadline, call.producer))
        done = commit_shares((share,), call.deadline, token, call.spent)[0]
        return done.seqno, done.attempts

    def _commit_of(
        self, staged: Sequence[Staged], producer: tuple[str, int] | None, deadline: Deadline, spent: Spending
    ) -> Commit:
        """A commit under the id of the stage; under the handle's own if nothing is staged."""
        machine = self.machine
        registration: Registration = self._registration
        uploader: Callable[[], WriterId] = partial(registration.register, deadline)
        if staged:
            registration = Lent(machine, self._leases, staged[0].writer)
            uploader = Lease(machine, staged[0].writer, staged[0].lease_ms)
        return Commit(self, registration, uploader, producer, deadline, spent, staged)

    def _staged_under(self, writer: WriterId, lease_ms: int, bounds: tuple[Antichain, Antichain] | None) -> Stage:
        machine = self.machine
        url, consensus_url = self._leases.urls or ("memory:", "memory:")
        ticket = Ticket(
            url, consensus_url, machine.shard, self.schema, self._schema_id, writer, lease_ms, bounds, machine.config
        )
        return Stage(machine, self._leases, ticket)


def prepare(
    write: Staging, staged: Sequence[Staged], kind: type[Rule] | None, bounds: tuple[Antichain, Antichain],
    time: int | None, deadline: Deadline, spent: Spending, *, everything: bool,
) -> Prepared:  # fmt: skip
    """What is staged as a batch to be appended together with those of other shards (see `Commit.prepare`)."""
    found = write._parse_staged(staged)
    rule = None if kind is None else kind(write.machine, write.schema)
    return write._commit_of(found, None, deadline, spent).prepare(found, rule, bounds, time, everything=everything)


def staged_rows(write: Staging, staged: Sequence[Staged]) -> Iterator[pa.Table]:
    """Read what tasks wrote: tables of `schema.updates`, in order, each data once a time, in bounded memory."""
    return write._commit_of(list(staged), None, write.machine.runtime.deadline(LONGEST_S), Spending()).rows(staged)


def append_prepared(write: Staging, prepared: Prepared, deadline: Deadline, token: bytes) -> Appended:
    """Append what was prepared, by itself."""

    def append(deadline: Deadline) -> Appended:
        with Spending() as spent:
            share = prepared.share(write.machine, token, deadline)
            return commit_shares((share,), deadline, token, spent)[0]

    return write._in_turn(deadline.remaining_s(), append)
