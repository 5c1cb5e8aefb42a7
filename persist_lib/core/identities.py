"""Columns that count up: the state says the next number of each, and a writer takes a range of them by one transition.

The next number only rises, and a range begins there. So no number is in two ranges, whichever writers take them, and
whatever is repeated or lost on its way. A writer that ends leaves a gap.
"""

from __future__ import annotations

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import IDENTITIES
from persist_lib.core.state import State
from persist_lib.ids import SeqNo
from persist_lib.schema.widening import NUMBER

FIRST = 1
END = 1 << 63
"""Behind the last number: it is an int64."""


def next_of(state: State, column: str) -> int:
    """The next number of a column, by its id."""
    return state.identities.get(column, FIRST)


def counting(state: State) -> list[str]:
    """The ids of the columns that count up now."""
    return [column.id for column in state.schemas[-1].columns if column.fill == NUMBER] if state.schemas else []


def reserve(state: State, command: c.Reserve) -> StateDiff | r.Refusal:
    """What taking a range changes."""
    if state.format < IDENTITIES:
        return r.NeedsFormat("numbers that count up", IDENTITIES, state.format)
    if command.column not in counting(state):
        return r.Unknown((command.column,))
    first = next_of(state, command.column)
    if command.first != first:
        return r.Overtaken(SeqNo(command.first), SeqNo(first))
    # True is an int, and would be read again as a bool.
    if type(command.count) is not int or not 1 <= command.count <= END - first:
        return r.InvalidBounds(f"{command.count} numbers from {first} on, of those below {END}")
    return StateDiff(identities=((command.column, state.identities.get(command.column), first + command.count),))


def problems(state: State) -> list[str]:
    """What is wrong with the numbers that a state says are next, one sentence each."""
    found = [] if state.format >= IDENTITIES or not state.identities else [f"columns count up in format {state.format}"]
    known = {column.id for schema in state.schemas for column in schema.columns if column.fill == NUMBER}
    for column, number in state.identities.items():
        if column not in known or type(number) is not int or not FIRST < number <= END:
            found.append(f"the next number of {column!r} is {number!r:.100}")
    return found
