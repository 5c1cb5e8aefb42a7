"""Appends at the next time: where they are placed, and how a state knows that it has one of them already.

Such a batch has no place of its own: it is put at upper, wherever that is. So no frontier ever passes it, and it could
be put there twice. Its token keeps that off: the state remembers its last appends, and the command says by `since` from
which version on they have to be searched. A state that does not remember all of them refuses.
"""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import REMEMBERS_OUTCOMES
from persist_lib.core.outcomes import outcome_since
from persist_lib.core.state import Batch, State
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.times import END_S, PER_SECOND, Unit


def time_after(upper: Antichain, unit: Unit | None, now: int) -> int | None:
    """The time at which a batch is put that is to be at the next one: of a clock now, but never before upper.

    `now` is ms. Without a clock it is upper. None where the shard is closed for writing, and at the end of all times.
    """
    least = upper.time
    if least is None:
        return None
    if unit is None:
        return least if least < MAX_TIME else None
    found = max(least, now * PER_SECOND[unit] // 1_000)
    return found if found < END_S * PER_SECOND[unit] else None


def counted_at(batch: Batch, lower: Antichain, time: int) -> Batch:
    """The same updates, all at one time, in a batch from `lower` on. All of its parts must be of one time."""
    parts = tuple(
        [part if part.time_lower == part.time_upper == time else part.counted_at(time) for part in batch.parts]
    )
    return msgspec.structs.replace(batch, lower=lower, upper=at(time + 1), parts=parts)


def remembers_since(state: State, since: int) -> bool:
    """Whether the state remembers all appends that were committed after the version `since`."""
    return state.format >= REMEMBERS_OUTCOMES and bool(state.outcomes) and state.outcomes[0].seqno <= since


def not_new(state: State, seqno: SeqNo, command: c.AppendNow) -> r.Refusal | None:
    """Why an append at the next time is refused before anything else is looked at; None if it was not committed yet."""
    if command.since >= seqno:
        return r.InvalidBounds(f"it is said to be made from v{command.since}, which is not before v{seqno}")
    if (outcome := outcome_since(state, command.token, command.since)) is not None:
        return r.AlreadyDone(outcome)
    if state.format < REMEMBERS_OUTCOMES:
        return r.NeedsFormat("an append at the next time", REMEMBERS_OUTCOMES, state.format)
    return None if remembers_since(state, command.since) else r.Forgotten(command.since, state.outcomes[0].seqno)


def placed(state: State, command: c.AppendNow) -> c.CompareAndAppend | r.Refusal:
    """The append that it comes to in this state."""
    batch, upper = command.batch, state.upper
    if upper.is_top():
        return r.WrongUpper(upper, upper)
    if (time := time_after(upper, state.times, command.now)) is None:
        return r.InvalidBounds(f"upper is {upper}, where times end")
    if any(part.time_lower != part.time_upper for part in batch.parts):
        return r.InvalidBounds("it is to be put at one time, and has parts of several")
    return c.CompareAndAppend(
        command.writer, command.token, counted_at(batch, upper, time), command.lease_until, command.producer,
        command.now, command.staged,
    )  # fmt: skip
