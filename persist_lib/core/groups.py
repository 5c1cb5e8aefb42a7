"""Several commands at once: each applied to the state that the one before it left, to be committed as one row.

Within a group every command counts as at the seqno of the row: a hold, a batch or garbage of that seqno says the same
as if the command had been alone, as nobody ever reads a state between two commands of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import GROUPS
from persist_lib.core.state import State
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change
from persist_lib.errors import InvariantViolated
from persist_lib.ids import SeqNo

CHANGES_MOST = 256
"""The most commands of a group that change something. A state remembers four times as many appends."""
BYTES_MOST = 512 * 1024
"""About the most bytes of a group: a further command goes into the next row. A command by itself may be larger."""
COMMAND_BYTES = 500
PART_BYTES = 200
"""About what a command and each of its parts or keys take, besides their inline bytes."""


Answer = StateDiff | r.Refusal | InvariantViolated
"""What came of a command: what it changes, why it does not apply, or that it may never be committed."""


class Applied(NamedTuple):
    """What came of the commands that went in, in their order, and the state after them."""

    answers: tuple[Answer, ...]
    state: State

    @property
    def diffs(self) -> tuple[StateDiff, ...]:
        """What they changed."""
        return tuple(answer for answer in self.answers if isinstance(answer, StateDiff))


def apply_together(state: State, seqno: SeqNo, commands: Sequence[c.Command]) -> Applied:
    """Apply as many of the first commands as may be one row at `seqno`, each to what the one before it left.

    At least one of them, if there is one. A command that would break what must always hold is answered with that, and
    changes nothing.
    """
    answers: list[Answer] = []
    changed = size = 0
    for command in commands:
        size += size_of(command)
        if (answers and is_alone(command)) or (changed and (changed >= changes_most(state) or size > BYTES_MOST)):
            break
        answer, state = _apply(state, seqno, command)
        answers.append(answer)
        changed += isinstance(answer, StateDiff)
        if is_alone(command):
            break
    return Applied(tuple(answers), state)


def _apply(state: State, seqno: SeqNo, command: c.Command) -> tuple[Answer, State]:
    try:
        answer = change(state, seqno, command)
        if not isinstance(answer, StateDiff):
            return answer, state
        after = apply_diff(state, answer)
        check_change(state, answer, after, seqno)
    except InvariantViolated as error:
        return error, state
    return answer, after


def size_of(command: c.Command) -> int:
    """About how many bytes of a row the command takes."""
    match command:
        case (
            c.CompareAndAppend(_, _, batch)
            | c.AppendNow(_, _, batch)
            | c.Append(_, _, batch)
            | c.ApplyCompaction(_, _, batch)
        ):
            staged = len(getattr(command, "staged", None) or ())
            return COMMAND_BYTES + batch.inline_size + PART_BYTES * (len(batch.parts) + staged)
        case c.Absorb(_, _, batch, absorbed):
            return COMMAND_BYTES + batch.inline_size + PART_BYTES * (len(batch.parts) + len(absorbed))
        case c.ForgetGarbage(keys) | c.DiscardPending(keys) | c.ForgetRetired(keys) | c.Heartbeat(keys):
            return COMMAND_BYTES + PART_BYTES * len(keys)
        case _:
            return COMMAND_BYTES


def is_alone(command: c.Command) -> bool:
    """Whether the command is never one of several: it decides in which format the row is written, or may be too new.

    One that is for a certain seqno is alone as well: what is before it in a row has moved the shard.

    A group also has what was refused, so that a command that came after groups is no part of one: programs that
    know groups and not the command could not read the row.
    """
    is_claim = isinstance(command, c.RegisterWriter) and command.at is not msgspec.UNSET
    return is_claim or isinstance(
        command, (c.Create, c.Upgrade, c.Adopt, c.Inherit, c.KeepContents, c.PinKeys, c.Unpin)
    )


def changes_most(state: State) -> int:
    """How many commands of one row may change this state: one, unless its format has groups."""
    return CHANGES_MOST if state.format >= GROUPS else 1
