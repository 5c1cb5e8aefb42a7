"""How much history the retention policy of a shard gives up: a pure plan from one state."""

from __future__ import annotations

from persist_lib.core.state import RETENTION, State
from persist_lib.frontier import Antichain, at


def plan_retention(state: State) -> Antichain | None:
    """Where the retention hold should stand; None when it stands there, or the shard has no policy."""
    if state.retention is None or state.is_finished() or state.upper.time is None:
        return None
    hold = state.holds.get(RETENTION)
    target = at(max(0, state.upper.time - 1 - state.retention)).join(state.since)
    return target if hold is None or hold.since < target else None
