"""The one committer: how transitions of one shard, or of several together, come into their logs.

Prepare the rows from the newest states known, and append them by one compare-and-set. After a lost race, try again
from the newest states. Refusals, and that nothing has to be done, count only of states that were read afresh. An
unknown outcome is resolved from the logs, never guessed. All of the rows are committed, or none; one shard is the case
of one.

Whose transitions they are is a `Work`: those of one call of this process (`commit`), or commands of many clients that a
server, or a client without one, carries out (`group_commit`, `multi_shard_commit`). What came of anything that was sent
without a certain answer is found out by `until_decided`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from persist_lib.errors import (
    Damage,
    HistoryRegressed,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    PersistError,
    Refused,
)
from persist_lib.runtime.ambient import Backoff, Deadline
from persist_lib.shard.contention import give_way, wait_after_loss
from persist_lib.shard.machine import Prepared, Shard, moment
from persist_lib.shard.refusals import named
from persist_lib.times import show_frontier

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

    `send` gets the first unknown outcome, None before that. It is called again while this `goes_on`, by default
    until `deadline`, after longer and longer pauses. In the end, and where no further attempt can tell, this raises
    what is `told` of that; by default the first unknown outcome itself.
    SUBTLE: what was sent without an answer may still arrive later. So after an unknown outcome, an error that says
    "this attempt did nothing" says nothing of those before. Only an answer or a refusal decides.
    """
    doubt: Indeterminate | None = None
    backoff: Backoff | None = None
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
                    shard = error.fields.get("shard", "")
                    raise deadline.gave_up(f"shard {shard}", "as its writer's lease ended", shard=shard) from error
                doubt = None
                continue
            if doubt is None or isinstance(error, HistoryRegressed):  # on another history there is nothing to decide
                raise
            if isinstance(error, NO_ATTEMPT_HELPS):
                raise told(error, doubt) from error
            if isinstance(error, Refused):
                raise
        if deadline.has_passed() if goes_on is None else not goes_on(doubt):
            unknown = told(doubt, doubt)
            raise unknown from (doubt.__cause__ if unknown is doubt else doubt)
        backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        pause_s = backoff.take()
        (deadline.runtime.deadline(2 * pause_s) if deadline.has_passed() else deadline).pause(pause_s)


T = TypeVar("T")


class Work(ABC):
    """What is committed together. Its machines are of one location, each of another shard, and their turns are held."""

    machines: Sequence[Shard]

    @property
    @abstractmethod
    def deadline(self) -> Deadline:
        """Until when it lets others go first."""

    def is_wanted(self) -> bool:
        """Whether anybody still waits for it. If not, nothing more of it is tried."""
        return True

    @abstractmethod
    def prepare(self) -> Sequence[Prepared]:
        """The rows after the newest versions known; none where nothing can be, or need be, committed."""

    @abstractmethod
    def is_answered(self, *, is_fresh: bool) -> bool:
        """Answer what needs no row, if that can be told; `is_fresh`: of versions that were read since it came."""

    @abstractmethod
    def send(self, prepared: Sequence[Prepared]) -> bool | None:
        """Append the rows, and return whether they are there; None if it cannot be known, which was told then."""

    @abstractmethod
    def committed(self, prepared: Sequence[Prepared], attempts: int, took_s: float) -> None:
        """Answer what the rows hold, which are committed, and adopted by their machines."""

    @abstractmethod
    def lost(self, prepared: Sequence[Prepared], attempts: int) -> None:
        """Hear that others were first. Raises to give up."""

    def ask(self, call: Callable[[], T]) -> T:
        """Run operations on the location."""
        return call()


def carry_out(work: Work) -> None:
    """Commit the rows of a work, or find out what there is to tell instead."""
    machines, monotonic = work.machines, work.machines[0].runtime.monotonic
    is_fresh, attempts = work.ask(lambda: give_way(machines, work.deadline)), 0
    while work.is_wanted():
        started, begun = monotonic(), moment()
        if prepared := work.prepare():
            attempts += 1
            won = work.send(prepared)
            took_s = monotonic() - started
            if won:
                for one in prepared:
                    one.machine.adopt(one, took_s, begun)
                work.committed(prepared, attempts, took_s)
            if won is not False:
                return
            work.lost(prepared, attempts)
            work.ask(partial(wait_after_loss, machines, work.deadline, took_s))
        elif work.is_answered(is_fresh=is_fresh):
            return
        else:  # a version may be stale: read once more before telling a refusal, or that nothing has to be done
            work.ask(partial(fetch_all, machines))
        is_fresh = True


def fetch_all(machines: Sequence[Shard]) -> None:
    """Know the newest versions there are."""
    for machine in machines:
        machine.try_fetch()


def until_in_log(
    prepared: Sequence[Prepared],
    deadline: Deadline,
    goes_on: GoesOn | None = None,
    ask: Callable[[Callable[[], bool]], bool] = lambda call: call(),
) -> bool:
    """Append the rows by one compare-and-set, and return whether they are in their logs now.

    While the answer is unknown the same bytes are sent again, until some row is there: ours, or that of another
    process, which keeps ours out for ever. Raises Indeterminate where it stays unknown, or cannot be known any more.
    """

    def send(doubt: Indeterminate | None) -> bool | None:
        won = ask(partial(_compare_and_set, prepared))
        return won if won or doubt is None else _is_done(prepared)

    if (won := until_decided(send, deadline, goes_on, lambda cause, _: in_doubt(prepared, cause))) is None:
        raise in_doubt(prepared, Indeterminate("the rows that would tell are truncated"))
    return won


def _compare_and_set(prepared: Sequence[Prepared]) -> bool:
    first = prepared[0]
    if len(prepared) == 1:
        return first.machine.consensus.compare_and_set(first.machine.shard, *first.change)
    return first.machine.consensus.compare_and_set_many({one.shard: one.change for one in prepared})


def _is_done(sent: Sequence[Prepared]) -> bool | None:
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


def in_doubt(sent: Sequence[Prepared], cause: PersistError) -> Indeterminate:
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
