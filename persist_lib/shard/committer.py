"""The one committer: how transitions of one shard, or of several together, come into their logs.

Prepare the rows from the newest states known, and append them by one compare-and-set. After a lost race, try again
from the newest states. Refusals, and that nothing has to be done, count only of states that were read afresh. An
unknown outcome is resolved from the logs, never guessed. All of the rows are committed, or none; one shard is the case
of one.

Whose transitions they are is a `Work`: those of one call of this process (`commit`), or commands of many clients that a
server, or a client without one, carries out (`group_commit`, `multi_shard_commit`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from persist_lib.errors import Indeterminate, PersistError
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.contention import give_way, wait_after_loss
from persist_lib.shard.in_doubt import GoesOn, until_decided
from persist_lib.shard.machine import Prepared, Shard
from persist_lib.shard.refusals import named
from persist_lib.times import show_frontier

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
        started = monotonic()
        if prepared := work.prepare():
            attempts += 1
            won = work.send(prepared)
            took_s = monotonic() - started
            if won:
                for one in prepared:
                    one.machine.adopt(one, took_s)
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
