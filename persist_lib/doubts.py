"""Appends that were committed together with an unknown outcome, until somebody asks by token what became of them.

The log knows the token of the commit, not those of the appends in it. SUBTLE: so a token of one of them must mean all
of them. Were one repeated alone, it could be committed alone, and the others would be taken for done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from persist_lib.batch import Built
from persist_lib.core.state import TOKENS_KEPT
from persist_lib.errors import Indeterminate
from persist_lib.pending import Appended


class Doubt(NamedTuple):
    """What was sent, and under which token."""

    built: Built
    token: bytes


class Doubts:
    """The last few doubts of a handle: as many as tokens that the state remembers of a writer."""

    def __init__(self) -> None:
        self._kept: deque[dict[bytes, tuple[Doubt, int]]] = deque(maxlen=TOKENS_KEPT)

    def add(
        self, doubt: Doubt, tokens: Sequence[bytes], counts: Sequence[int], cause: Indeterminate
    ) -> list[Appended | BaseException]:
        """Remember it; answers an error for each append in it, with a token that decides them all."""
        self._kept.append({token: (doubt, count) for token, count in zip(tokens, counts, strict=True)})
        return [
            Indeterminate(
                f"this append was sent together with {len(tokens) - 1} others, and it is not known whether they were "
                f"committed: {cause.message}. Of the others the same is true. Repeat this call on this handle with the "
                f"token {token.hex()}: it decides all of them",
                **{**cause.fields, "token": token},
            )
            for token in tokens
        ]

    def find(self, token: bytes) -> tuple[Doubt, int] | None:
        """What was sent with the append that has this token, and how many updates of it are that append's."""
        return next((kept[token] for kept in self._kept if token in kept), None)
