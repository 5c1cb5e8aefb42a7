"""What came of a transition of one shard or of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome, State
from persist_lib.ids import SeqNo


class Committed(NamedTuple):
    """An acknowledged transition: its seqno and token in the log, the states before and after it, and the attempts.

    In a row of several commands, `before` is the state that the ones before it left, and `after` that of the whole row.
    With an `outcome` of an append, both may be one and the same, an older state, as nothing was read back.
    `due`: what a server says that its sender has to do. `after` is the newest state then.
    """

    seqno: SeqNo
    token: bytes
    before: State
    after: State
    attempts: int
    outcome: Outcome | None = None
    due: tuple[str, ...] = ()

    @property
    def is_read_back(self) -> bool:
        """Whether its states are those before and after it."""
        return self.before is not self.after


Build = Callable[[State, int], c.Command]
"""Makes a command from the newest state and the store's clock (ms). Called again after every lost race."""

Done = Committed | r.AlreadyDone
"""A success: a transition, or nothing to change."""


class Undone(NamedTuple):
    """Nothing was changed. Maps the place of each refused transition to its refusal. Never empty.

    `due`: what a server says that the sender of the first one has to do before it tries again.
    """

    refusals: dict[int, r.Refusal]
    due: tuple[str, ...] = ()
