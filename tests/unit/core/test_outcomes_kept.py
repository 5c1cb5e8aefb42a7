"""How many appends a shard remembers: as many as is said, and not one fewer."""

from __future__ import annotations

import pytest

from persist_lib.core.outcomes import find_outcome, remember
from persist_lib.core.state import OUTCOMES_KEPT, TOKENS_KEPT, Outcome, State
from persist_lib.frontier import at
from persist_lib.ids import SeqNo


def test_what_is_promised() -> None:
    assert (OUTCOMES_KEPT, TOKENS_KEPT) == (1024, 4), "the documentation and the servers' limits say so"


@pytest.mark.parametrize("held", [0, 1, OUTCOMES_KEPT - 1, OUTCOMES_KEPT])
def test_the_oldest_outcome_is_forgotten_only_when_there_is_no_more_room(held: int) -> None:
    state = State(format=2, outcomes=tuple(Outcome(b"%d" % n, SeqNo(n + 1), at(n + 1)) for n in range(held)))
    edit = remember(state, Outcome(b"new", SeqNo(held + 1), at(held + 1)))
    assert edit is not None
    kept = (*state.outcomes[edit.forgotten :], *edit.added)
    assert len(kept) == min(held + 1, OUTCOMES_KEPT)
    oldest = kept[-OUTCOMES_KEPT:][0]
    assert oldest is kept[0]
    after = State(format=2, outcomes=kept)
    for outcome in kept[1:]:
        upper = outcome.upper.time or 0
        assert find_outcome(after, outcome.token, at(upper - 1), at(upper)) == outcome
