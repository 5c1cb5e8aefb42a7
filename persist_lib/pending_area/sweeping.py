"""Going through the contents of a listing in the order of their times: what goes on from a frontier, what overlaps it.

Pure, and each content is looked at while it is around the frontier, so that a pass over all of them is short.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from persist_lib.pending_area.listing import Content


class Sweep:
    """A frontier that moves through contents, which are in the order of their lowers."""

    def __init__(self, contents: Sequence[Content], frontier: int) -> None:
        self.frontier = frontier
        self._contents = contents
        self._next = 0
        self._around: list[Content] = []

    def advance(self, to: int) -> None:
        """Move the frontier. It never moves back."""
        self.frontier = to
        self._around = [content for content in self._around if content.upper > to]

    def candidates(self) -> list[Content]:
        """The contents that go on from the frontier, the best first: what reaches furthest, and is not cut."""
        self._read(self.frontier + 1)
        found = [content for content in self._around if content.lower <= self.frontier]
        return sorted(found, key=lambda content: (-content.upper, content.lower != self.frontier, content.id))

    def overlapping(self, upper: int) -> list[Content]:
        """The contents that have some of the times from the frontier to `upper`."""
        self._read(upper)
        return [content for content in self._around if content.lower < upper]

    def _read(self, before: int) -> None:
        """Have all contents around that begin before a time, and end after the frontier."""
        while self._next < len(self._contents) and self._contents[self._next].lower < before:
            content = self._contents[self._next]
            self._next += 1
            if content.upper > self.frontier:
                self._around.append(content)


def chain_of(contents: Sequence[Content], frontier: int) -> list[Content]:
    """The contents that a sweep would pick if all of them were sound, one after the other without a gap."""
    chain: list[Content] = []
    heap: list[tuple[int, bool, int, Content]] = []
    place = 0
    while True:
        while place < len(contents) and contents[place].lower <= frontier:
            content = contents[place]
            heapq.heappush(heap, (-content.upper, content.lower != frontier, place, content))
            place += 1
        if not heap or (best := heap[0][3]).upper <= frontier:
            return chain
        chain.append(best)
        frontier = best.upper
