"""A survey by way of a shard server, which keeps the looks at all shards in its memory: one request for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from persist_lib.core.plan.debts import Debts
from persist_lib.location.api import AnswersDebts
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline, Runtime

ROUND_S = 5.0
"""How long one request may take. What is not looked at by then is asked for by the next one."""
GRACE_S = 30.0
"""How much longer than a survey's own time a request is tried, if the server does not answer at once."""


def ask_for_debts(
    answers: AnswersDebts,
    settings: str,
    done: Mapping[str, Sequence[str]],
    most: int | None,
    deadline: Deadline | None,
    runtime: Runtime,
    progress: Callable[[int, int], None] | None,
) -> Debts | None:
    """What is due on all shards, as a survey of its own would find it; None if the server has other settings.

    Asks again for shards that wait to be looked at, until the deadline, or once if `most` is given. Those that move
    again meanwhile are not waited for.
    """
    first: Debts | None = None
    while True:
        seconds = ROUND_S if deadline is None else min(ROUND_S, deadline.remaining_s())
        call = partial(answers.debts, settings, done if first is None else {}, most, seconds)
        if (found := within(runtime.deadline(seconds + GRACE_S), call)) is None:
            return None
        first = first or found
        left = _left(first, found)
        if progress is not None:
            progress(len(found.heads) - left, len(found.heads))
        if not left or most is not None or (deadline is not None and deadline.has_passed()):
            return found


def _left(first: Debts, found: Debts) -> int:
    """How many shards have not been looked at since the first answer."""
    waits = (name for name in found.moved if name in first.moved and name not in found.unread)
    return sum(1 for name in waits if name not in found.looks or found.looks[name].looked_ms < first.now)
