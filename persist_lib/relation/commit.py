"""A share is what one handle brings to an append. This commits the shares of one handle or of several together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.formats import as_stored_in
from persist_lib.core.outcomes import outcome_since
from persist_lib.core.plan.compaction import plan_flush, policy_of
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, Outcome, State
from persist_lib.errors import Indeterminate, LeaseExpired, PersistError
from persist_lib.ids import SeqNo, WriterId
from persist_lib.location.commands import FLUSH, ROLL_UP
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain.compaction import carry_out
from persist_lib.maintain.merge_tasks import local_engine
from persist_lib.maintain.worker import write_rollup
from persist_lib.relation.appends import Appended
from persist_lib.relation.registration import Registration, undoubted
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Committed, Done, Machine, Undone, Wanted, try_commit_all

log = logging.getLogger("persist.write")
UPKEEP_S = 5.0
"""How long a rollup or a flush that is due may delay the return of an append that is committed."""

Kind = type[c.CompareAndAppend | c.AppendNow | c.Append]
Place = Callable[[Built, State], Batch]
"""The batch to register, given what was built and the newest state."""
LEAST = 8
"""A flush frees at least the room for inline batches divided by this: less would soon be full again."""


class Appending(NamedTuple):
    """How a batch is appended: where it is placed, by which command, under which token and producer.

    `since`: of an append at the next time that is repeated, a version that does not have it. `staged` are the answers
    of tasks in it.
    """

    place: Place
    kind: Kind
    token: bytes
    producer: tuple[str, int] | None = None
    since: SeqNo | None = None
    staged: c.Staged = ()


class Share:
    """The batch that one handle appends to its shard: built, uploaded, and to be committed under `writer`.

    Used with the handle's lock held.
    """

    __slots__ = (
        "_builder", "_built", "_is_asked", "_kind", "_place", "_placed", "_producer", "_registration", "_since",
        "_staged", "_token", "_writer",
        "machine",
    )  # fmt: skip

    def __init__(
        self, machine: Machine, registration: Registration, writer: WriterId, builder: Builder, built: Built,
        how: Appending,
    ) -> None:  # fmt: skip
        self.machine = machine
        self._registration = registration
        self._writer = writer
        self._builder = builder
        self._built = built
        self._place, self._kind, self._token, self._producer, self._since, staged = how
        self._staged = staged or msgspec.UNSET
        self._placed = built.batch
        self._is_asked = False

    def build(self, state: State, now: int) -> c.Command:
        """The command, for the newest state and the store's clock (ms)."""
        self._placed, self._is_asked = as_stored_in(state.format, self._place(self._built, state)), True
        lease_until = now + self.machine.config.lease_ms
        if self._kind is c.Append:
            return c.Append(self._writer, self._token, self._placed, lease_until)
        if self._kind is c.CompareAndAppend:
            return c.CompareAndAppend(
                self._writer, self._token, self._placed, lease_until, self._producer, now, self._staged
            )
        # SUBTLE: a fresh token is nowhere but in what this call sent, and each of that is decided before this is called
        # again. A token of an earlier call may be committed at any moment.
        since = self.machine.seen if self._since is None else self._since
        return c.AppendNow(
            self._writer, self._token, self._placed, lease_until, since, self._producer, now, self._staged
        )

    def refused(self, refusal: r.Refusal) -> PersistError:
        """The exception for a refusal. If it says that this writer is not live, the next call registers a new one."""
        error = self.machine.refused(refusal)
        if isinstance(error, LeaseExpired):
            self._registration.forget()
        return error

    def make_room(self, due: tuple[str, ...]) -> None:
        """After InlineFull, before the next attempt: make room in the state, or upload the batch as an object.

        `due`: what a server says that this writer has to do. Its clients are many, and others make no room.
        """
        try:
            if FLUSH in due:
                self.machine.fetch()
            if (self._kind is c.AppendNow and FLUSH not in due) or not self._flush():
                self._built = self._builder.externalised(self._built)
        except Indeterminate as error:
            raise undoubted(self.machine.shard, error) from error
        except LeaseExpired:
            self._registration.forget()
            raise

    def give_up(self) -> None:
        """Delete what was uploaded, if it is certain that nothing refers to it.

        SUBTLE: once a command was made of it, the log may refer to it, now or later. Then it is never deleted here.
        """
        if not self._is_asked:
            self._builder.discard()

    def housekeep(self, done: Done, deadline: Deadline) -> None:
        """Roll up or flush if that is this writer's duty. The append is committed, so a failure is only logged."""
        if not isinstance(done, Committed):
            return
        if not (due := done.calls_for(self.machine.config.rollup_every)):
            return
        try:
            upkeep = self.machine.runtime.deadline(min(UPKEEP_S, deadline.remaining_s()))
            if ROLL_UP in due:
                within(upkeep, lambda: write_rollup(self.machine, self._registration.id))
            if FLUSH in due:
                within(upkeep, self._flush)
        except PersistError as error:
            log.warning("shard %s: upkeep after an append failed: %s", self.machine.shard, error)

    def appended(self, done: Done, cost: Cost) -> Appended:
        """The acknowledgement of what was committed, now or by an earlier call with the same token."""
        if isinstance(done, Committed):
            if self._kind is c.AppendNow:
                outcome = done.outcome or outcome_since(done.after, self._token, done.seqno - 1)
                return self._at(outcome, done.attempts, cost)
            # Not `done.after.upper`: others of the same row may have gone on from there.
            return Appended(done.seqno, self._placed.upper, self._placed.count, self._token, done.attempts, cost)
        if done.outcome is not None:
            return self._at(done.outcome, 0, cost)
        version = self.machine.version
        if self._kind is c.Append:  # the shard had all of it already
            return Appended(version.seqno, version.state.upper, 0, self._token, 0, cost)
        # Another shard of the same append remembers that it was committed, and it was committed to all or to none.
        return Appended(version.seqno, self._placed.upper, self._placed.count, self._token, 0, cost)

    def _at(self, outcome: Outcome | None, attempts: int, cost: Cost) -> Appended:
        if outcome is None:
            raise Indeterminate(
                f"shard {self.machine.shard}: the append with token {self._token.hex()} is committed, but which upper "
                "it left is not known any more, as many others came since. Do not append it again",
                shard=self.machine.shard, token=self._token,
            )  # fmt: skip
        return Appended(outcome.seqno, outcome.upper, self._placed.count, self._token, attempts, cost)

    def _flush(self) -> bool:
        """Merge the newest inline batches into a part, so that the state has room again."""
        request = plan_flush(self.machine.state, policy_of(self.machine.config))
        if request is None or sum(batch.inline_size for batch in request.inputs) < INLINE_TOTAL_BYTES // LEAST:
            return False
        return carry_out(self.machine, self._registration, request, local_engine(self.machine)).seqno is not None


def commit_shares(
    shares: Sequence[Share], deadline: Deadline, token: bytes, spent: Spending, beside: Sequence[Wanted] = ()
) -> list[Appended]:
    """Commit all shares, each of another shard, or raise why none was committed. All answers have the cost of `spent`.

    `beside` are transitions of other shards that are committed with them: all of it or nothing. After a failure,
    uploaded objects are deleted where it is certain that no log refers to them.
    """
    try:
        done = _commit(shares, deadline, token, beside)[: len(shares)]
    except Exception:
        for share in shares:
            share.give_up()
        raise
    for share, one in zip(shares, done, strict=True):
        share.housekeep(one, deadline)
    cost = spent.cost
    return [share.appended(one, cost) for share, one in zip(shares, done, strict=True)]


def _commit(shares: Sequence[Share], deadline: Deadline, token: bytes, beside: Sequence[Wanted]) -> Sequence[Done]:
    wanted = [Wanted(share.machine, share.build) for share in shares] + list(beside)
    while isinstance(done := try_commit_all(wanted, deadline, token), Undone):
        refused = [*(share.refused for share in shares), *(one.machine.refused for one in beside)]
        full = [at for at, refusal in done.refusals.items() if isinstance(refusal, r.InlineFull)]
        errors = [refused[at](refusal) for at, refusal in done.refusals.items() if at not in full]
        if errors:
            raise errors[0]
        for at in full:
            shares[at].make_room(done.due)
    return done
