"""A quiet clock: times that the store's clock has passed are completed by an append of nothing, when they are read."""

from __future__ import annotations

from collections.abc import Callable

from persist_lib.core.holds import layer_of
from persist_lib.core.state import State
from persist_lib.errors import NotAllowed, UpperMismatch
from persist_lib.frontier import at
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.times import PER_SECOND
from persist_lib.write.handle import WriteHandle
from persist_lib.write.times import FAR_MS, check_clock, format_token, is_chosen

LEAST_S = 5.0
"""The least time for the append, also for a caller who does not wait."""


def time_passed(machine: Machine, state: State, time: int) -> int | None:
    """The time of the store's clock, if `time` is at or beyond upper and may be completed: up to which all then is.

    None for a time to come, and unless times are a clock, and the library has chosen the time of each append that the
    state remembers: where callers bring times, moving upper to now would lock them out of theirs.
    """
    tokens = [outcome.token for outcome in state.outcomes if outcome.token]
    if state.times is None or state.upper.is_top() or not tokens or not all(map(is_chosen, tokens)):
        return None
    now, own = machine.consensus.now(), machine.runtime.clock_ms()
    if time > (last := now * PER_SECOND[state.times] // 1_000):
        return None
    check_clock(f"shard {machine.shard}", now, own, FAR_MS, "the store's clock", "this machine's clock")
    return last


def complete(
    machine: Machine, open_writer: Callable[[Schema], WriteHandle], state: State, time: int, deadline: Deadline
) -> bool:
    """Complete a time that is at or beyond upper, and all others up to the store's clock. Whether to look again.

    Does nothing where `time_passed` is None, where this client may not write, and to the shard of a layer, which moves
    with its others.
    """
    if layer_of(state) or (last := time_passed(machine, state, time)) is None:
        return False
    token = format_token(machine.runtime, state.upper, at(last + 1))
    try:
        with open_writer(state.schemas[-1]) as write:
            write.compare_and_append(
                [], state.upper, at(last + 1), timeout=max(LEAST_S, deadline.remaining_s()), token=token
            )
    except UpperMismatch:  # another writer was first
        return True
    except NotAllowed:
        return False
    return True
