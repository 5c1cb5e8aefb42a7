"""What came of a transition; and of rows that were sent without a certain answer, read from the logs, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome, State
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.format.log import LogRow
from persist_lib.ids import SeqNo, ShardId
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.refusals import named
from persist_lib.times import show_frontier


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


DOUBT_PAUSE_S = 0.01


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


Waiting = Callable[[Indeterminate, PersistError], None]
"""Called between two attempts, with the first unknown outcome and the last error. Raises to give up."""


def until_decided(send: Callable[[], bool], sent: Sequence[Sent], deadline: Deadline) -> bool:
    """Whether the rows that `send` appends together, by one compare-and-set, are in their logs now.

    Resolves an indeterminate answer until `deadline`, or raises Indeterminate.
    """
    doubts: list[PersistError] = []

    def wait(doubt: Indeterminate, last: PersistError) -> None:
        doubts.append(doubt)
        if isinstance(last, InvalidUsage):  # for example, the password was changed: no further attempt helps
            raise in_doubt(sent, last) from last
        if deadline.has_passed():
            raise in_doubt(sent, doubt) from doubt
        deadline.pause(DOUBT_PAUSE_S)

    if (won := settle(send, sent, wait)) is None:
        raise in_doubt(sent, doubts[0]) from doubts[0]
    return won


def settle(send: Callable[[], bool], sent: Sequence[Sent], wait: Waiting) -> bool | None:
    """Whether the rows that `send` appends together are in their logs now; None when that cannot be known any more.

    SUBTLE: after an indeterminate answer the rows may still arrive later, so "not there" decides nothing. The same
    bytes are sent again until some row is there: ours, or that of another process, which keeps ours out for ever.
    Raises Determinate or InvalidUsage only if the first attempt did, and then nothing was done.
    """
    doubt: Indeterminate | None = None
    while True:
        try:
            won = send()
            return won if won or doubt is None else _is_done(sent)
        except Indeterminate as error:
            doubt = doubt or error
            last: PersistError = error
        except (Determinate, InvalidUsage) as error:
            if doubt is None:
                raise
            last = error
        wait(doubt, last)


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
