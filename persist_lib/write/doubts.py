"""Appends that were sent together and whose outcome is unknown. They are kept until a caller repeats one of them.

All of them have the token of that commit, and each has its own times. Token and times together name an append, so the
log can tell what became of each of them, whichever process asks. When the handle that sent them repeats one of them,
it sends all of them again, which decides them together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from persist_lib.errors import Indeterminate
from persist_lib.frontier import Antichain
from persist_lib.shard.batches import Built
from persist_lib.write.pending import Appended

KEPT = 4


Times = tuple[Antichain, Antichain]
"""Lower and upper of an append."""


class Doubt(NamedTuple):
    """The batch that was sent, its token, and how many of its updates belong to each append."""

    built: Built
    token: bytes
    counts: Mapping[Times, int]


class Doubts:
    """The last few doubts of a handle: at most `KEPT`."""

    def __init__(self) -> None:
        self._kept: deque[Doubt] = deque(maxlen=KEPT)

    def add(self, doubt: Doubt, cause: Indeterminate) -> list[Appended | BaseException]:
        """Remember a doubt. Returns one error for each append in it, in the order of their times."""
        self._kept.append(doubt)
        others = len(doubt.counts) - 1
        return [
            Indeterminate(
                f"this append was sent together with {others} others, and it is not known whether they were "
                f"committed: {cause.message}. The same is true of the others",
                **{**cause.fields, "token": doubt.token, "lower": lower, "upper": upper},
            )
            for lower, upper in doubt.counts
        ]

    def find(self, token: bytes, lower: Antichain, upper: Antichain) -> tuple[Doubt, int] | None:
        """The doubt that contains this append, and how many of its updates belong to the append; None if not kept."""
        for doubt in self._kept:
            if doubt.token == token and (lower, upper) in doubt.counts:
                return doubt, doubt.counts[lower, upper]
        return None
