"""What came of a transition; and how to find out what came of something that was sent without a certain answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.plan.upkeep import rollup_is_duty
from persist_lib.core.state import Outcome, State
from persist_lib.errors import (
    Damage,
    HistoryRegressed,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    PersistError,
    Refused,
)
from persist_lib.ids import SeqNo
from persist_lib.location.commands import ROLL_UP
from persist_lib.runtime.ambient import Backoff, Deadline

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

    def calls_for(self, every: int) -> tuple[str, ...]:
        """The upkeep that the writer of this append has to do now. A rollup is due each `every` transitions."""
        # SUBTLE: where nothing was read back, the states are old ones, by which it would be everybody's duty.
        is_own = self.is_read_back and rollup_is_duty(self.seqno, self.before, self.after, every)
        return tuple(dict.fromkeys((*self.due, ROLL_UP))) if is_own else self.due


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
