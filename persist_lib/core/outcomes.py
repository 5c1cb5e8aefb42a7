"""What a state knows of an append by its token and its times: that it was committed, that it never will be, or neither.

An append is known by token, lower and upper together: a token that is used for several appends tells them apart. What
was sent together with others under one token is there when an outcome with that token covers its times.
"""

from __future__ import annotations

from bisect import bisect_left

from persist_lib.core.diff import OutcomesEdit
from persist_lib.core.formats import REMEMBERS_OUTCOMES
from persist_lib.core.state import OUTCOMES_KEPT, Outcome, State
from persist_lib.frontier import Antichain


def find_outcome(state: State, token: bytes, lower: Antichain, upper: Antichain) -> Outcome | None:
    """The outcome of the append of `[lower, upper)` with this token, if the state remembers it."""
    index = _place(state, upper)
    if 0 < index < len(state.outcomes):
        begins, outcome = state.outcomes[index - 1].upper, state.outcomes[index]
        return outcome if outcome.token == token and begins <= lower else None
    # Where these began is not known, unless something is known to begin in between.
    known = (*state.outcomes[:1], *(outcome for writer in state.writers.values() for outcome in writer.outcomes))
    found = (outcome for outcome in known if (outcome.token, outcome.upper) == (token, upper))
    return None if _is_cut(state, lower, upper) else next(found, None)


def is_excluded(state: State, lower: Antichain, upper: Antichain) -> bool:
    """Whether an append of `[lower, upper)` that `find_outcome` does not know was not committed, and never will be.

    It can only be committed where upper is its lower, and then leaves an upper at or beyond its own. So it is excluded
    where upper has come to rest between both, where a batch begins between both, and where the append that did reach
    its upper is remembered, and is another.
    """
    if state.upper < upper:
        return lower < state.upper
    index = _place(state, upper)
    if index > 0:
        return True
    if state.outcomes and state.outcomes[0].upper == upper and state.outcomes[0].token:
        return True  # where the first one starts is not known, so that it only tells of the times just before its end
    return _is_cut(state, lower, upper)


def remember(state: State, outcome: Outcome) -> OutcomesEdit | None:
    """How the state remembers one more outcome, and forgets the oldest for it; None where its format cannot."""
    if state.format < REMEMBERS_OUTCOMES:
        return None
    return OutcomesEdit(max(0, len(state.outcomes) + 1 - OUTCOMES_KEPT), (outcome,))


def _is_cut(state: State, lower: Antichain, upper: Antichain) -> bool:
    """Whether a batch begins between both: then these times did not come together."""
    at = bisect_left(state.trace, upper, key=lambda batch: batch.upper)
    return at < len(state.trace) and lower < state.trace[at].lower


def _place(state: State, upper: Antichain) -> int:
    """Where the first outcome is that reached `upper`."""
    return bisect_left(state.outcomes, upper, key=lambda outcome: outcome.upper)
