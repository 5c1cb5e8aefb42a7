"""Whether a command that may still be on its way can change a shard some day, or never will.

A server that is paused may hold a command for as long as it likes, and apply it to the newest state when it goes on. So
a client that asked another server may be told "not committed" only of a command that no later state accepts. What
decides that are ids, which are never reused, frontiers, which never move back, and seqnos.
"""

from __future__ import annotations

from persist_lib.core import commands as c
from persist_lib.core.identities import next_of
from persist_lib.core.members import refuses_stranger
from persist_lib.core.outcomes import outcome_since, remembers_since
from persist_lib.core.state import State


def is_out_for_ever(state: State, command: c.Command) -> bool:
    """Whether neither this state nor any later one is changed by `command`. False where that is not certain.

    The state must be one in which whoever acts in the command was registered, as clients register first. A command that
    was committed may be out as well: look for its token first.
    """
    is_strange = refuses_stranger(state, command) is not None
    return bool(state.schemas) and (is_strange or _is_passed(state, command) or _is_gone(state, command))


def _is_passed(state: State, command: c.Command) -> bool:
    """Whether a frontier or a number, which never moves back, is beyond what the command needs."""
    match command:
        case c.Create():
            return True
        case c.CompareAndAppend(_, _, batch) | c.Absorb(_, _, batch):
            return batch.lower < state.upper
        case c.AppendNow(_, token, since=since):
            # No frontier passes it: it goes wherever upper is. But no state commits it twice, or if it is not certain.
            is_there = outcome_since(state, token, since) is not None
            return is_there or not remembers_since(state, since) or state.upper.is_top()
        case c.Append(_, _, batch):
            return batch.upper <= state.upper
        case c.AddRollup(_, seqno):
            return seqno <= state.newest_rollup
        case c.EvolveSchema(expected):
            return expected < len(state.schemas) - 1
        case c.Reserve(column, first):
            return first < next_of(state, column)
        case c.Upgrade(format_):
            return format_ <= state.format
        case c.Adopt():
            return state.member != (command.former or "") or state.is_finished()
        case c.Inherit():
            return command.lower < state.upper
        case _:
            return state.is_finished() and not isinstance(command, (c.ForgetGarbage, c.ForgetRetired))


def _is_gone(state: State, command: c.Command) -> bool:
    """Whether whoever acts in the command is retired.

    SUBTLE: a retired id is forgotten some day, and could then be registered once more by a registration that comes a
    second time. So no registration may be applied twice: whoever applies commands looks for their tokens first.
    """
    match command:
        case (
            c.CompareAndAppend(id_) | c.AppendNow(id_) | c.Append(id_) | c.Absorb(id_) | c.ApplyCompaction(id_)
            | c.KeepContents(id_)
        ):  # fmt: skip
            return id_ not in state.writers
        case c.AddRollup(id_):
            return id_ not in state.writers and not state.is_finished()
        case c.DowngradeSince(id_) | c.CloneReader(_, id_):
            return id_ not in state.readers
        case c.Heartbeat(ids):
            return not any(id_ in state.writers or id_ in state.readers for id_ in ids)
        case c.Retire(id_):
            return id_ not in state.writers and id_ not in state.readers
        case _:
            return False
