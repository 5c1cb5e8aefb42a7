"""Reading a log on disk: which files count, where the events end, and where each one is."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from persist_lib.errors import Corrupt, Determinate, Missing
from persist_lib.events.api import EVENTS, Held, Key
from persist_lib.events.stores.disk_files import claim_name, claims_in, failing, is_held, note_name, segment_name
from persist_lib.events.stores.end_mark import REPAIR, EndMark
from persist_lib.events.stores.segments import LIMIT, Segment
from persist_lib.runtime.ambient import Runtime

OPEN_SEGMENTS = 8
TAKEOVER_S = 10.0
"""How long a reader waits for a writer that has claimed the log and not begun to write yet."""


class Place(NamedTuple):
    """A segment that counts, and the last id up to which it does (None: it is the newest)."""

    epoch: int
    first: int
    through: int | None


class DiskReading:
    """The part of the driver that reads. `_epoch` is the writer's own, and 0 for one that only reads."""

    def __init__(self, root: Path, log: bytes, runtime: Runtime) -> None:
        self.limit: int | None = LIMIT
        self.log = log
        self._root, self._events, self._runtime = root, root / EVENTS, runtime
        self._open: OrderedDict[tuple[int, int], Segment] = OrderedDict()
        self._places: list[Place] = []
        self._lock = threading.Lock()
        self._epoch = 0
        self._mark = EndMark(root / "end")

    def last(self) -> int:
        last = self._mark.checked(self.log, self._settled_last)
        self._check_closed(last)
        return last

    def known_last(self) -> int:
        closed = 0
        with contextlib.suppress(Corrupt):
            closed = self._closed_at()
        return max(self._mark.known(self.log), closed)

    def forget_end(self) -> None:
        self._mark.write(self.log, self.find_last())
        (self._root / "closed.json").unlink(missing_ok=True)

    def find_last(self) -> int:
        try:
            return self._settled_last()
        except Corrupt:
            with self._lock:
                newest = self._places[-1]
                known = self._open.get((newest.epoch, newest.first))
            return newest.first - 1 if known is None else known.last

    def _settled_last(self) -> int:
        deadline = self._runtime.deadline(TAKEOVER_S)
        with failing(Determinate, "read", self._root):
            while True:
                with self._lock:
                    last = self._find_last()
                if last is not None:
                    break
                if deadline.has_passed():
                    raise Determinate(
                        f"a writer has claimed {self._root} and does not begin to write, so where the log ends is not "
                        "decided. Try again when it has, or open another writer"
                    )
                deadline.pause(0.02)
        return last

    def _find_last(self) -> int | None:
        """The last event, durable; None while a successor decides which events of its predecessors count."""
        self._places = self._list()
        newest = self._places[-1] if self._places else Place(0, 1, None)
        last = newest.first - 1
        if self._places:
            try:
                segment = self._segment(newest)
            except FileNotFoundError:  # a successor began at the same event, and removed it: look again
                return None
            segment.scan()
            last = segment.last
            if last >= newest.first and self._epoch == 0:
                segment.sync()  # what another process wrote, it may not have synced
        claims = claims_in(self._root)
        claim = max(claims, default=0)
        is_settled = claim <= newest.epoch or claim == self._epoch or not is_held(self._root / claim_name(claim))
        return last if is_settled and newest == (self._list() or [newest])[-1] else None

    def _check_closed(self, last: int) -> None:
        """Raise Missing if the log was closed with more events than there are."""
        if (closed := self._closed_at()) > last:
            raise Missing(
                f"{self._root} ends at event {last}, and it was closed with {closed}: events {last + 1} to {closed} "
                f"are gone. Nothing was changed; restore the files from a copy. {REPAIR}",
                key=f"{last + 1}:0",
            )

    def _closed_at(self) -> int:
        """Where the log ended when it was closed; 0 if it was not. Raises Corrupt."""
        path = self._root / "closed.json"
        try:
            return int(json.loads(path.read_bytes())["last"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(
                f"{path} is damaged: {error}. It says where the log ended. {REPAIR}", key=str(path)
            ) from error

    def _list(self) -> list[Place]:
        """The segments that count, in the order of their events."""
        try:
            names = os.listdir(self._events)  # noqa: PTH208 - names only
        except FileNotFoundError:
            return []
        parts = [name.partition("-") for name in names if not name.startswith(".")]
        found = sorted((int(epoch), int(first)) for epoch, _, first in parts)
        places: list[Place] = []
        through: int | None = None
        for epoch, first in reversed(found):
            if through is None or first <= through:
                places.append(Place(epoch, first, through))
                through = first - 1
        places.reverse()
        if places and places[0].first != 1:
            raise Missing(
                f"{self._events} begins with event {places[0].first}: the files of events 1 to {places[0].first - 1} "
                "are gone. Restore them from a copy",
                key="1:0",
            )
        return places

    def _segment(self, place: Place) -> Segment:
        known = self._open.get((place.epoch, place.first))
        if known is None:
            path = self._events / segment_name(place.epoch, place.first)
            known = self._open[place.epoch, place.first] = Segment(path, self.log, place.epoch, place.first)
            while len(self._open) > OPEN_SEGMENTS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end((place.epoch, place.first))
        return known

    def get(self, key: Key) -> Held | None:
        with failing(Determinate, "read", self._root):
            if key.space != EVENTS:
                try:
                    return Held(key, memoryview((self._root / key.space / note_name(key)).read_bytes()))
                except FileNotFoundError:
                    return None
            with self._lock:
                return self._get(key) or (self._get(key) if self._look_again() else None)

    def _look_again(self) -> bool:
        found = self._list()
        is_other, self._places = found != self._places, found
        for place in found:
            if place.through is None and not is_other:
                segment = self._segment(place)
                end = segment.end
                segment.scan()
                is_other = segment.end > end
        return is_other

    def _get(self, key: Key) -> Held | None:
        place = next((place for place in reversed(self._places) if place.first <= key.id), None)
        if place is None or (place.through is not None and key.id > place.through):
            return None
        segment = self._segment(place)
        if segment.last < key.id:
            try:
                segment.scan(place.through)
            except Corrupt:
                if segment.last < key.id:  # else it is of those before the damage
                    raise
        return segment.get(key)

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        with failing(Determinate, "read", self._root):
            with self._lock:
                places = self._list()
            for place in places:
                end = through if place.through is None else min(through, place.through)
                if end < from_id or place.first > through:
                    continue
                segment = Segment(
                    self._events / segment_name(place.epoch, place.first), self.log, place.epoch, place.first
                )
                try:
                    yield from segment.read(max(from_id, place.first), end)
                finally:
                    segment.close()

    def ids(self, space: str) -> list[int]:
        with failing(Determinate, "read", self._root):
            try:
                names = os.listdir(self._root / space)  # noqa: PTH208 - names only
            except FileNotFoundError:
                return []
        return sorted(int(name[:-2]) for name in names if name.endswith(".0") and not name.startswith("."))
