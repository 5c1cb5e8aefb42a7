"""What a state knows of an append by its token and its times: that it was committed, that it never will be, or neither.

Token, lower and upper together name an append, so several appends may have the same token. An append that was sent
together with others under one token was committed if an outcome with that token covers its times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from persist_lib.core.diff import OutcomesEdit
from persist_lib.core.formats import REMEMBERS_OUTCOMES
from persist_lib.core.state import OUTCOMES_KEPT, Outcome, State
from persist_lib.frontier import Antichain
from persist_lib.ids import WriterId


def find_outcome(state: State, token: bytes, lower: Antichain, upper: Antichain) -> Outcome | None:
    """The outcome of the append of `[lower, upper)` with this token, if the state remembers it."""
    index = _place(state, upper)
    if 0 < index < len(state.outcomes):
        begins, outcome = state.outcomes[index - 1].upper, state.outcomes[index]
        return outcome if outcome.token == token and begins <= lower else None
    # It is not known where these appends began; but if a batch begins in between, they did not cover these times.
    known = (*state.outcomes[:1], *(outcome for writer in state.writers.values() for outcome in writer.outcomes))
    found = (outcome for outcome in known if (outcome.token, outcome.upper) == (token, upper))
    return None if _is_cut(state, lower, upper) else next(found, None)


def outcome_since(state: State, token: bytes, since: int) -> Outcome | None:
    """The outcome of an append with this token that was committed after the version `since`, if it is remembered."""
    for outcome in reversed(state.outcomes):
        if outcome.seqno <= since:
            return None
        if outcome.token == token:
            return outcome
    return None


def staged_before(state: State, staged: Iterable[tuple[WriterId, bytes]]) -> list[Outcome]:
    """The outcomes of those answers of tasks that were appended, as far as their stages are open."""
    if not (asked := set(staged)):
        return []
    stages = {id_: state.writers[id_].staged for id_, _ in asked if id_ in state.writers}
    return [outcome for id_, known in stages.items() for outcome in known if (id_, outcome.token) in asked]


def is_excluded(state: State, lower: Antichain, upper: Antichain) -> bool:
    """Whether an append of `[lower, upper)` that `find_outcome` does not know was not committed, and never will be.

    It can only be committed when the shard's upper is its lower, and then leaves an upper at or beyond its own. So it
    is excluded when the shard's upper has been between both, when a batch begins between both, and when the append that
    reached its upper is remembered and is another one.
    """
    if state.upper < upper:
        return lower < state.upper
    index = _place(state, upper)
    if index > 0:
        return True
    if state.outcomes and state.outcomes[0].upper == upper and state.outcomes[0].token:
        return True  # it is not known where the first outcome starts, so it only tells of the times before its end
    return _is_cut(state, lower, upper)


def remember(state: State, outcome: Outcome) -> OutcomesEdit | None:
    """The edit by which the state remembers one more outcome, and forgets the oldest; None if its format cannot."""
    if state.format < REMEMBERS_OUTCOMES:
        return None
    return OutcomesEdit(max(0, len(state.outcomes) + 1 - OUTCOMES_KEPT), (outcome,))


def _is_cut(state: State, lower: Antichain, upper: Antichain) -> bool:
    """Whether a batch begins between both. Then these times were not committed together."""
    at = bisect_left(state.trace, upper, key=lambda batch: batch.upper)
    return at < len(state.trace) and lower < state.trace[at].lower


def _place(state: State, upper: Antichain) -> int:
    """The index of the first outcome that reached `upper`."""
    return bisect_left(state.outcomes, upper, key=lambda outcome: outcome.upper)
