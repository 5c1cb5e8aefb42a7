"""Listening to a table while it is promoted; when something was written to it, and how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from persist_lib.errors import MemberOf, SinceViolation
from persist_lib.frontier import MAX_TIME
from persist_lib.kernel.columns import integers
from persist_lib.relation.listen import Event, Listener
from persist_lib.schema.schema import DIFF, TIME

if TYPE_CHECKING:
    from persist_lib.relation.changes import Changes
    from persist_lib.table.table import Table
    from persist_lib.times import TimeLike


def kept_changes(table: Table, from_: TimeLike | None, to: TimeLike | None, timeout: float | None) -> Changes:
    """The changes after `from_`; by default after since, before which there are none that can be told."""
    while True:
        since = table.describe().since.time
        try:
            return table.changes(from_ if from_ is not None else since or None, to, timeout=timeout)
        except SinceViolation:
            if from_ is not None or table.describe().since.time == since:
                raise


def counted_by_time(changes: Changes, limit: int) -> pa.Table:
    """The newest times of the changes, at most `limit`: `_time`, and how many rows were `added` and `retracted`."""
    counts: dict[int, list[int]] = {}
    for batch in changes.batches():
        times, diffs = batch.column(TIME).cast(pa.int64()).to_numpy(), integers(batch.column(DIFF))
        for sign, place in ((1, 0), (-1, 1)):
            found = diffs * sign > 0
            at, index = np.unique(times[found], return_inverse=True)
            sums = np.zeros(at.size, np.int64)
            np.add.at(sums, index, np.abs(diffs[found]))
            for time, total in zip(at.tolist(), sums.tolist(), strict=True):
                counts.setdefault(time, [0, 0])[place] += total
    newest = sorted(counts, reverse=True)[:limit]
    columns = [pa.array(newest, pa.int64()).cast(changes.schema.field(TIME).type)]
    columns += [pa.array([counts[time][place] for time in newest], pa.int64()) for place in (0, 1)]
    return pa.table(columns, names=[TIME, "added", "retracted"])


T = TypeVar("T")


class Continuing(Listener):
    """A listener of a table, and then of what it was promoted to. Each update comes once.

    `listen` listens to the table after a time, on what carries it by then. History from there on is kept: by the lease
    of the first listener, and by the hold that the collection has for such readers.
    """

    def __init__(self, first: Listener, listen: Callable[[int], Listener]) -> None:
        self._now, self._listen = first, listen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def __next__(self) -> Event:
        return self._try(next)

    def poll(self) -> list[Event]:
        return self._try(lambda listener: listener.poll())

    def close(self) -> None:
        self._now.close()

    def _fetch(self) -> Iterator[None]:
        raise AssertionError("it is asked for nothing: the listener of now is")

    def _pause(self) -> None:
        self._fetch()

    def _try(self, call: Callable[[Listener], T]) -> T:
        try:
            return call(self._now)
        except MemberOf:
            # What was delivered ends with a progress, as the next step begins with a look at the shard.
            time = self._now.frontier.time
            following = self._listen(MAX_TIME if time is None else time - 1)
        former, self._now = self._now, following
        former.close()
        return call(self._now)
