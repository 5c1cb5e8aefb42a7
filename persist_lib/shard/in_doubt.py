"""What came of a transition; and of rows that were sent without a certain answer, read from the logs, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome, State
from persist_lib.errors import (
    Damage,
    HistoryRegressed,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    PersistError,
    Refused,
    TimedOut,
)
from persist_lib.format.log import LogRow
from persist_lib.ids import SeqNo, ShardId
from persist_lib.runtime.ambient import Backoff, Deadline
from persist_lib.shard.refusals import named
from persist_lib.times import show_frontier

T = TypeVar("T")


class Committed(NamedTuple):
    """An acknowledged transition: its seqno and token in the log, the states before and after it, and the attempts.

    In a row of several commands, `before` is the state that the ones before it left, and `after` that of the whole row.
    With an `outcome` of an append, both may be one and the same, an older state, as nothing was read back.
    `due`: what a server says that its sender has to do. `after` is the newest state then.
    """

    seqno: SeqNo
    token: bytes
    before: State
    after: State
    attempts: int
    outcome: Outcome | None = None
    due: tuple[str, ...] = ()

    @property
    def is_read_back(self) -> bool:
        """Whether its states are those before and after it."""
        return self.before is not self.after


Build = Callable[[State, int], c.Command]
"""Makes a command from the newest state and the store's clock (ms). Called again after every lost race."""

Done = Committed | r.AlreadyDone
"""A success: a transition, or nothing to change."""


class Undone(NamedTuple):
    """Nothing was changed. Maps the place of each refused transition to its refusal. Never empty.

    `due`: what a server says that the sender of the first one has to do before it tries again.
    """

    refusals: dict[int, r.Refusal]
    due: tuple[str, ...] = ()


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
"""The first and the longest pause between two attempts to find out what became of something."""

NO_ATTEMPT_HELPS = (Damage, InvalidUsage, LeaseExpired)
"""Errors that end all attempts: the password was changed, say, or this process has closed its writer."""

GoesOn = Callable[[Indeterminate], bool]
"""Whether to try again; it gets the first unknown outcome."""
Told = Callable[[PersistError, Indeterminate], Indeterminate]
"""Makes the error of what stays unknown, of what ended the attempts and of the first unknown outcome."""


def until_decided(
    send: Callable[[Indeterminate | None], T],
    deadline: Deadline,
    goes_on: GoesOn | None = None,
    told: Told = lambda _, doubt: doubt,
) -> T:
    """What `send` answers: called again, with the very same, until it is certain what became of it.

    `send` gets the first unknown outcome, None while there is none. It is called again while this `goes_on`, by default
    until `deadline`, after longer and longer pauses. In the end, and where no further attempt can tell, this raises
    what is `told` of that; by default the first unknown outcome itself.
    SUBTLE: what was sent without an answer may still arrive later. So after an unknown outcome, an error that says
    "this attempt did nothing" says nothing of those before. Only an answer or a refusal decides.
    """
    doubt: Indeterminate | None = None
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        try:
            return send(doubt)
        except Indeterminate as error:
            if isinstance(error.__cause__, Refused):  # what could tell has forgotten it
                raise
            doubt = doubt or error
        except PersistError as error:
            if isinstance(error, LeaseExpired) and error.fields.get("id"):
                # Certainly not committed, as the id was retired before. The next attempt registers another one.
                if deadline.has_passed():
                    raise _out_of_leases(error, deadline) from error
                doubt = None
                continue
            if doubt is None or isinstance(error, HistoryRegressed):  # on another history there is nothing to decide
                raise
            if isinstance(error, NO_ATTEMPT_HELPS):
                raise told(error, doubt) from error
            if isinstance(error, Refused):
                raise
        if deadline.has_passed() if goes_on is None else not goes_on(doubt):
            raise told(doubt, doubt) from doubt.__cause__
        pause_s = backoff.take()
        (deadline.runtime.deadline(2 * pause_s) if deadline.has_passed() else deadline).pause(pause_s)


def _out_of_leases(error: LeaseExpired, deadline: Deadline) -> TimedOut:
    shard = error.fields.get("shard", "")
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as the lease of its writer ended. Nothing was "
        "written; try again, or with a longer timeout",
        shard=shard, timeout_s=deadline.timeout_s,
    )  # fmt: skip


class Sent(Protocol):
    """A row that one shard's log was asked to append."""

    @property
    def shard(self) -> ShardId:
        """The shard's name."""

    @property
    def row(self) -> LogRow:
        """The row."""

    @property
    def state(self) -> State:
        """The state after it."""

    def is_in_log(self) -> bool | None:
        """Whether the row is in its place; False when another row is, for ever; None when there is no row there."""

    def is_remembered(self) -> bool | None:
        """Whether the newest state remembers that the row was committed; None when it cannot tell."""


def until_in_log(
    append: Callable[[], bool], sent: Sequence[Sent], deadline: Deadline, goes_on: GoesOn | None = None
) -> bool:
    """Whether the rows that `append` appends together are in their logs now.

    While the answer is unknown the same bytes are sent again, until some row is there: ours, or that of another
    process, which keeps ours out for ever. Raises Indeterminate where it stays unknown, or cannot be known any more.
    """

    def send(doubt: Indeterminate | None) -> bool | None:
        won = append()
        return won if won or doubt is None else _is_done(sent)

    if (won := until_decided(send, deadline, goes_on, lambda cause, _: in_doubt(sent, cause))) is None:
        raise in_doubt(sent, Indeterminate("the rows that would tell are truncated"))
    return won


def _is_done(sent: Sequence[Sent]) -> bool | None:
    """What became of rows that were sent with an unknown outcome, and refused when sent again; None when unknown.

    SUBTLE: refused means that in at least one shard our place is taken. A shard where it is free decides nothing. Where
    our own row has taken it, all of our rows are in, as they are committed together. Where a row of another process has
    taken it, ours can never come to that place, and so to none, however late a copy of the request arrives. It does not
    matter which shard it is, nor that they are read one after the other, as a row stays in its place. Only truncation
    can hide it; then the state's memory of its last appends tells.
    """
    for one in sent:
        if (is_ours := one.is_in_log()) is not None:
            return is_ours
    for one in sent:
        if (is_ours := one.is_remembered()) is not None:
            return is_ours
    return None


def in_doubt(sent: Sequence[Sent], cause: PersistError) -> Indeterminate:
    """The error for rows of which it is not known whether they were committed."""
    row = sent[0].row.steps[0]
    trace = row.diff.trace if row.diff is not None and row.command == "CompareAndAppend" else None
    appended = trace.added[-1] if trace is not None else None
    show = partial(show_frontier, unit=sent[0].state.times)
    what = f"append of [{show(appended.lower)}, {show(appended.upper)})" if appended else f"change ({row.command})"
    return Indeterminate(
        f"{named([one.shard for one in sent])}: it is not known whether the {what} with token {row.token.hex()} "
        f"was committed ({cause}). "
        "Repeat the call with the same token and it answers what happened; delete nothing that it refers to",
        shard=sent[0].shard, token=row.token,
    )  # fmt: skip
