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


def is_minted(state: State) -> bool:
    """Whether times are a clock, and the library has chosen the time of each append that the state remembers.

    Where callers bring times, moving upper to now would lock them out of theirs. A layer's shard moves with its others.
    """
    tokens = [outcome.token for outcome in state.outcomes if outcome.token]
    return state.times is not None and not layer_of(state) and bool(tokens) and all(map(is_chosen, tokens))


def complete(
    machine: Machine, open_writer: Callable[[Schema], WriteHandle], state: State, time: int, deadline: Deadline
) -> bool:
    """Complete a time that is at or beyond upper, and all others up to the store's clock. Whether to look again.

    Does nothing for a time to come, where callers bring times, and where this client may not write.
    """
    if state.times is None or state.upper.is_top() or not is_minted(state):
        return False
    now = machine.consensus.now()
    last = now * PER_SECOND[state.times] // 1_000
    if time > last:
        return False
    own = machine.runtime.clock_ms()
    check_clock(f"shard {machine.shard}", now, own, FAR_MS, "the store's clock", "this machine's clock")
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
