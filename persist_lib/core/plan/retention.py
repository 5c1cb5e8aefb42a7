"""How much history a shard keeps, and where its retention hold should stand: pure, from one state."""

from __future__ import annotations

from persist_lib.core.holds import is_of_layer, layer_of
from persist_lib.core.state import RETENTION, State
from persist_lib.frontier import Antichain, at
from persist_lib.times import Times


def retention_of(state: State, by_rule: int | str | None) -> int | None:
    """How far behind upper history is kept: as the shard says, else as rules do; None: all of it is kept.

    Rules say nothing of what belongs to a layer, and no lengths of time where times are plain integers.
    """
    if state.retention is not None or by_rule is None:
        return state.retention
    if layer_of(state) or any(name != RETENTION and is_of_layer(name) for name in state.holds):
        return None
    is_integer = state.times is None
    return None if is_integer and isinstance(by_rule, str) else Times(state.times, int).distance(by_rule, "retention")


def plan_retention(state: State, by_rule: int | str | None = None) -> Antichain | None:
    """Where the retention hold should stand; None when it stands there, or neither the shard nor a rule says so."""
    if state.member or state.is_finished() or state.upper.time is None:
        return None
    if (kept := retention_of(state, by_rule)) is None:
        return None
    hold = state.holds.get(RETENTION)
    target = at(max(0, state.upper.time - 1 - kept)).join(state.since)
    return target if hold is None or hold.since < target else None
