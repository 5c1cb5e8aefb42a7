"""How much history a shard keeps, and where its retention hold should stand: pure, from one state."""

from __future__ import annotations

import re
from typing import NamedTuple

from persist_lib.arguments import parse_integer, shown
from persist_lib.core.holds import is_of_layer, layer_of
from persist_lib.core.state import OUTCOMES_KEPT, RETENTION, State
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.times import Times, Unit

LAST = re.compile(r"last (\d+)")
LAST_MOST = OUTCOMES_KEPT - 1
"""The most appends of which a state tells where they began: it remembers their ends."""


class Kept(NamedTuple):
    """How far behind upper history is kept, in times (None: all of it is, as it is not known), and that for people."""

    distance: int | None
    says: str


def parse_retention(value: object, what: str) -> int | str:
    """How much history a rule keeps: a number of times, or as text a length of time, or "last 10" appends.

    Raises InvalidUsage.
    """
    if not isinstance(value, str):
        return parse_integer(value, what, 0, MAX_TIME)
    if (last := last_of(value)) is not None:
        parse_integer(last, f"how many of the last appends {what} keeps", 1, LAST_MOST)
    else:
        Times("ms", int).distance(value, what)
    return value


def last_of(retention: object) -> int | None:
    """How many of the last appends a retention keeps; None where it is of another kind."""
    found = LAST.fullmatch(retention) if isinstance(retention, str) else None
    return int(found[1]) if found else None


def check_own(value: object, what: str) -> None:
    """Raise InvalidUsage if that is a retention of rules alone: a state keeps its own as a number of times."""
    if isinstance(value, str) and value.startswith("last "):
        raise InvalidUsage(f"{what} is no number of appends: say {shown(value)} by a rule (`persist config --rules`)")


def retention_of(state: State, by_rule: int | str | None) -> Kept | None:
    """How much history is kept: as the shard says, else as rules do; None: neither says so, and all of it is kept.

    Rules say nothing of what belongs to a layer, as the shards of a collection, and no lengths of time where times are
    plain integers.
    """
    times = Times(state.times, int)
    if state.retention is not None:
        return Kept(state.retention, times.show_distance(state.retention))
    if by_rule is None or layer_of(state) or any(name != RETENTION and is_of_layer(name) for name in state.holds):
        return None
    if (last := last_of(by_rule)) is not None:
        return _of_last(state, last, times)
    distance = distance_of(by_rule, state.times)
    return None if distance is None else Kept(distance, f"{times.show_distance(distance)} by a rule")


def distance_of(by_rule: int | str, times: Unit | None) -> int | None:
    """A rule's retention in times; None for the last appends, and for a length of time where times are integers."""
    if last_of(by_rule) is not None or (isinstance(by_rule, str) and times is None):
        return None
    return Times(times, int).distance(by_rule, "retention")


def _of_last(state: State, count: int, times: Times) -> Kept:
    """So much that each time since the `count` last appends began can be read.

    An append is what moved upper, also without updates. Each remembered one begins where the one before it ends.
    """
    known, named = max(0, len(state.outcomes) - 1), f"the last {count:,} appends by a rule"
    if state.upper.time is None or known < count:
        closed = "it is closed" if state.upper.time is None else f"{known:,} of them are remembered"
        return Kept(None, f"{named}, and {closed}, so all history stays")
    distance = max(0, state.upper.time - 1 - (state.outcomes[-count - 1].upper.time or 0))
    return Kept(distance, f"{times.show_distance(distance)} ({named})")


def plan_retention(state: State, by_rule: int | str | None = None) -> Antichain | None:
    """Where the retention hold should stand; None when it stands there, or neither the shard nor a rule says so."""
    if state.member or state.is_finished() or state.upper.time is None:
        return None
    kept = retention_of(state, by_rule)
    if kept is None or kept.distance is None:
        return None
    hold = state.holds.get(RETENTION)
    target = at(max(0, state.upper.time - 1 - kept.distance)).join(state.since)
    return target if hold is None or hold.since < target else None
