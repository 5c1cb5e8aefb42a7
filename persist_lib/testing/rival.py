"""A race without threads: a rival acts just before the next compare-and-set.

rival = Rival(consensus)
rival.before_next(lambda: other_writer.append(…))
writer.append(…)                                  # loses the race, on every machine, every time
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from persist_lib.location.api import Consensus
from persist_lib.location.wrap.around import AroundConsensus, Operation

T = TypeVar("T")
RACED = frozenset({"compare_and_set", "compare_and_set_many", "commit_commands"})
"""Through a shard server, the commands are sent where a client would make its compare-and-set otherwise."""


class Rival(AroundConsensus):
    """A Consensus that calls an act just before a compare-and-set: each act once, in the order of `before_next`."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self._acts: deque[Callable[[], object]] = deque()

    def before_next(self, act: Callable[[], object]) -> None:
        """Call `act` just before the next compare-and-set that has no act yet. The act may use this same Consensus."""
        self._acts.append(act)

    @property
    def waiting(self) -> int:
        """How many acts have not been called yet. It is 0 at the end of a test in which every race took place."""
        return len(self._acts)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Call the next act first, if `operation` is a compare-and-set."""
        if operation.kind in RACED and self._acts:
            # Taken off before it is called: the act's own compare-and-sets must not race against it again.
            acts, self._acts = self._acts, deque()
            act = acts.popleft()
            try:
                act()
            finally:
                self._acts.extendleft(reversed(acts))
        return call()
