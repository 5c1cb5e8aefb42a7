"""What each shard in flight is doing: said when it starts, and again every half minute for as long as it continues.

    with Watch(log.info) as watch, watch.doing("orders") as tells:
        tells("compacting 120,000 updates, 31.0 MiB, on Spark", 0, 40)

A daemon thread says it, so that it keeps no program alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from jobs.stop import Stop
from persist_lib.telemetry import span

Tells = Callable[[str, int, int], None]
"""Called with what is being done, how many tasks of it are done, and how many there are."""

Moves = Callable[[str, str, int, int], object]
"""Called with the shard besides, and with 0 of 0 when it is done."""

EVERY_S = 30.0


@dataclass
class _Doing:
    shard: str
    what: str = "starting"
    done: int = 0
    total: int = 0
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        seconds = f"{time.monotonic() - self.since:.0f} s"
        tasks = f"{self.done} of {self.total} tasks, " if self.total else ""
        return f"shard {self.shard}: {self.what}, {tasks}{seconds}"


class Watch:
    """Says through `says` what begins, and each `every_s` seconds what is still going on. For use in a `with` block."""

    def __init__(
        self, says: Callable[[str], object], every_s: float = EVERY_S, moves: Moves = lambda _s, _w, _d, _t: None
    ) -> None:
        self._says, self._every_s, self._moves = says, every_s, moves
        self._doing: dict[int, _Doing] = {}
        self._ended = Stop()

    @contextmanager
    def doing(self, shard: str) -> Iterator[Tells]:
        """Name a shard that is worked on for the length of the block; yields what its work calls."""
        one = _Doing(shard)
        self._doing[id(one)] = one

        def tells(what: str, done: int, total: int) -> None:
            if what != one.what:
                one.since = time.monotonic()
            self._moves(shard, what, done, total)
            is_new, one.what, one.done, one.total = what != one.what, what, done, total
            if is_new and total:
                self._says(f"shard {shard}: {what}, {total} {'task' if total == 1 else 'tasks'}")

        try:
            with span("shard", shard):
                yield tells
        finally:
            self._doing.pop(id(one), None)
            self._moves(shard, "", 0, 0)

    def lines(self) -> list[str]:
        """What is going on now, one line a shard."""
        return [str(one) for one in list(self._doing.values())]

    def __enter__(self) -> Self:
        threading.Thread(target=self._repeat, name="persist-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _repeat(self) -> None:
        while not self._ended.wait(self._every_s):
            for line in self.lines():
                self._says(line)


def silent(_what: str, _done: int, _total: int) -> None:
    """Tell nobody."""
