"""Reading a log: one event as a view, all of them in a row, snapshots and marks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from persist_lib.arguments import not_pickled, parse_integer
from persist_lib.errors import InvalidUsage, Missing, NotFound
from persist_lib.events.api import EVENTS, MOST_ID, Event, Held, RecordStore, Scans, Verifies
from persist_lib.events.log import SNAPSHOTS, Log, Whole
from persist_lib.events.record import check_follows
from persist_lib.runtime.resource import Resource


class LogReader(Resource):
    """See `api.Reader`."""

    def __init__(self, records: RecordStore, where: str) -> None:
        self._records, self._where, self._log = records, where, Log(records, where)
        self._is_closed = False
        self.last = records.last()
        self._log.check_evidence(self.last)

    __reduce__ = not_pickled("a reader of events", "Open the store there.")

    def refresh(self) -> int:
        self._check()
        self.last = self._records.last()
        return self.last

    @contextmanager
    def read(self, id: int) -> Iterator[memoryview]:  # noqa: A002
        id_ = parse_integer(id, "id", 1, MOST_ID)
        self._check()
        if id_ > self.last and id_ > self.refresh():
            raise NotFound(f"there is no event {id_} in {self._where}: the last one is {self.last}", id=id_)
        whole = self._log.fetch(EVENTS, id_)
        if whole is None:
            raise self._missing(id_)
        try:
            yield whole.payload
        finally:
            whole.release()

    def replay(self, from_id: int = 1, through: int | None = None) -> Iterator[Event]:
        first = parse_integer(from_id, "from_id", 1, MOST_ID)
        self._check()
        last = self.last if through is None else parse_integer(through, "through", 0, MOST_ID)
        if last > self.last and last > self.refresh():
            raise NotFound(f"there is no event {last} in {self._where}: the last one is {self.last}", id=last)
        return self._replay(first, last)

    def _replay(self, first: int, last: int) -> Iterator[Event]:
        if first > last:
            return
        digest, epoch = self._log.digest_of(first - 1), 0
        for id_, whole in enumerate(self._wholes(first, last), first):
            try:
                check_follows(whole.label, digest, epoch, f"event {id_} of {self._where}")
                digest, epoch = whole.label.digest, whole.label.epoch
                yield Event(id_, whole.payload)
            finally:
                whole.release()

    def _wholes(self, first: int, last: int) -> Iterator[Whole]:
        """The events, verified one by one."""
        if not isinstance(self._records, Scans):
            for id_ in range(first, last + 1):
                if (whole := self._log.fetch(EVENTS, id_)) is None:
                    raise self._missing(id_)
                yield whole
            return
        found = _Ahead(self._records.scan(first, last))
        try:
            for id_ in range(first, last + 1):
                held = found.first_of(id_)
                if held is None:
                    raise self._missing(id_)
                yield self._log.put_together(held, found.rest_of(id_))
        finally:
            found.close()

    def newest_snapshot(self, at_most: int | None = None) -> tuple[int, bytes] | None:
        self._check()
        most = self.last if at_most is None else parse_integer(at_most, "at_most", 0, MOST_ID)
        return self._log.newest_snapshot(min(most, self.last))

    def read_mark(self, name: str) -> bytes | None:
        self._check()
        return self._log.read_mark(name)

    def verify(self) -> None:
        """Check what reading the events does not touch: snapshots, and what the driver alone can tell."""
        self._check()
        if isinstance(self._records, Verifies):
            self._records.verify()
        for id_ in self._records.ids(SNAPSHOTS):
            self._log.label_of(SNAPSHOTS, id_)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._records.close()

    def _check(self) -> None:
        if self._is_closed:
            raise InvalidUsage(f"the reader of {self._where} was closed; open another one")

    def _missing(self, id_: int) -> Missing:
        return Missing(
            f"event {id_} of {self._where} is missing, and there are events behind it: the last one is {self.last}. "
            "Nothing was changed; restore it from a copy",
            key=f"{id_}:0",
        )

    def __repr__(self) -> str:
        return f"<reader of {self._where}, last {self.last}>"


class _Ahead:
    """Records of a scan, with a look at the next one."""

    def __init__(self, scan: Iterator[Held]) -> None:
        self._scan = scan
        self._next: Held | None = None

    def close(self) -> None:
        """End the scan, if it is one that can be ended."""
        if self._next is not None:
            self._next.release()
        if isinstance(self._scan, Generator):
            self._scan.close()

    def _peek(self) -> Held | None:
        if self._next is None:
            self._next = next(self._scan, None)
        return self._next

    def _take(self) -> Held | None:
        held, self._next = self._next, None
        return held

    def first_of(self, id_: int) -> Held | None:
        """Fragment 0 of an event, behind what is left of those before it."""
        while (held := self._peek()) is not None and held.key.id < id_:
            held.release()
            self._take()
        return self._take() if held is not None and held.key == (EVENTS, id_, 0) else None

    def rest_of(self, id_: int) -> Iterator[Held]:
        """The other fragments of the event that are there."""
        while (held := self._peek()) is not None and held.key.id == id_:
            self._take()
            yield held
