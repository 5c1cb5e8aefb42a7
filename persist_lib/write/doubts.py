"""Appends that were committed together with an unknown outcome, until somebody asks by token what became of them.

All of them have the token of that commit, and each its own times: token and times together name an append, so that the
log answers for each of them, whoever asks. On the handle that sent them, one that is repeated sends all of them again,
which decides them together.
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
    """What was sent, under which token, and how many updates of it are whose."""

    built: Built
    token: bytes
    counts: Mapping[Times, int]


class Doubts:
    """The last few doubts of a handle."""

    def __init__(self) -> None:
        self._kept: deque[Doubt] = deque(maxlen=KEPT)

    def add(self, doubt: Doubt, cause: Indeterminate) -> list[Appended | BaseException]:
        """Remember it; answers an error for each append in it, in the order of their times."""
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
        """What was sent with this append in it, and how many updates of it are that append's."""
        for doubt in self._kept:
            if doubt.token == token and (lower, upper) in doubt.counts:
                return doubt, doubt.counts[lower, upper]
        return None
