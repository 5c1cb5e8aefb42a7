"""What a running loop stores beside its events: the released-through mark, and snapshots of the state.

Both only shorten the next start, so they are written seldom, and nobody waits for them. Their order matters: first
effects are released, then the mark says so, then a snapshot up to the mark is written. Whoever starts takes the newest
snapshot that is not beyond the mark, as the events behind the mark must be computed for their effects.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from persist_lib.errors import PersistError
from persist_lib.events.api import Writer
from persist_lib.events.marks import write_released


class Snapshot(NamedTuple):
    """The state after an event, as it is stored."""

    event_id: int
    data: bytes


class Keeping:
    """The mark and the snapshots of one loop. `tick` is called by one thread, `offer` by another.

    `told` is called with a failure, which may be in any thread: the writer takes nothing more after it.
    """

    def __init__(
        self, writer: Writer, marked: int, newest: int, every_s: float, told: Callable[[PersistError], None]
    ) -> None:
        self._writer, self._marked, self.newest = writer, marked, newest
        self._every_s, self._next_s, self._told = every_s, 0.0, told
        self._offered: Snapshot | None = None

    def is_due(self, event_id: int, every: int) -> bool:
        """Whether the state after this event is to be offered."""
        return self._offered is None and event_id - self.newest >= every

    def offer(self, snapshot: Snapshot) -> None:
        """Store this one as soon as the mark has come so far."""
        self._offered, self.newest = snapshot, snapshot.event_id

    def tick(self, released: int, now_s: float) -> None:
        """Store that the effects up to and with this event are released, if that is due."""
        if released > self._marked and now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self.keep(released)

    def keep(self, released: int) -> None:
        """Store that now, and the snapshot that waits for it."""
        try:
            if released > self._marked:
                self._watch(write_released(self._writer, released))
                self._marked = released
            if (snapshot := self._offered) is not None and snapshot.event_id <= self._marked:
                self._watch(self._writer.write_snapshot(*snapshot))
                self._offered = None
        except PersistError as error:
            self._told(error)

    def _watch(self, answer: Future[None]) -> None:
        answer.add_done_callback(self._look)

    def _look(self, answer: Future[None]) -> None:
        error = answer.exception()
        if isinstance(error, PersistError):
            self._told(error)
