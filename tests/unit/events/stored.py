"""A log in memory with the face of a store, whose writes wait or fail as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from persist_lib.errors import Fenced, NotFound, NotSent
from persist_lib.events.api import Event
from persist_lib.runtime.threads import Resource


class MemoryStore(Resource):
    """`hold` keeps writes from being acknowledged until `let` is called; `failures` are raised by the next writes."""

    def __init__(self, name: str = "memory") -> None:
        self.specifier = name
        self.events: list[bytes] = []
        self.marks: dict[str, bytes] = {}
        self.snapshots: dict[int, bytes] = {}
        self.written: list[str] = []
        """What became durable, in order: `event 1`, `mark released`, `snapshot 1`."""
        self.epoch = 0
        self.is_there = False
        self.held: list[Callable[[], None]] | None = None
        self.fail: Callable[[int], Exception | None] = lambda _: None
        self.fail_marks: Exception | None = None
        self.records: Any = SimpleNamespace(log=name.encode())
        self.lock = threading.RLock()

    def hold(self) -> None:
        self.held = []

    def let(self, count: int | None = None) -> None:
        assert self.held is not None
        with self.lock:
            now = self.held[:count]
            del self.held[:count]
            if count is None:
                self.held = None
        for one in now:
            one()

    def writer(self, *, owner: str = "") -> MemoryWriter:
        self.epoch += 1
        self.is_there = True
        return MemoryWriter(self)

    def reader(self) -> MemoryReader:
        if not self.is_there:
            raise NotFound(f"there is no log in {self.specifier}")
        return MemoryReader(self)

    def close(self) -> None:
        pass


class MemoryWriter(Resource):
    def __init__(self, store: MemoryStore) -> None:
        self.store, self.epoch = store, store.epoch
        self.last = self.accepted = len(store.events)
        self.is_closed = False
        self.failure: Exception | None = None

    def _do(self, what: str, act: Callable[[], object], failure: Exception | None) -> Future[None]:
        answer: Future[None] = Future()

        def carry_out() -> None:
            store = self.store
            with store.lock:
                if self.failure is not None:
                    error: Exception | None = NotSent("an earlier one failed", earlier=str(self.failure))
                elif self.epoch != store.epoch:
                    error = self.failure = Fenced("another writer", epoch=self.epoch, found=store.epoch, owner="")
                else:
                    error = self.failure = failure
                if error is None:
                    act()
                    store.written.append(what)
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        with self.store.lock:
            if self.store.held is not None:
                self.store.held.append(carry_out)
                return answer
        carry_out()
        return answer

    def write(self, id: int, payload: Any, *, timeout: float | None = None) -> Future[None]:  # noqa: A002
        assert id == self.accepted + 1, "explicit ids, without gaps"
        assert not self.is_closed
        self.accepted = id

        def act() -> None:
            self.store.events.append(bytes(payload))
            self.last = id

        return self._do(f"event {id}", act, self.store.fail(id))

    def write_snapshot(self, event_id: int, state: Any) -> Future[None]:
        assert event_id <= self.accepted

        def act() -> None:
            self.store.snapshots[event_id] = bytes(state)
            for old in sorted(self.store.snapshots)[:-2]:
                del self.store.snapshots[old]

        return self._do(f"snapshot {event_id}", act, None)

    def write_mark(self, name: str, value: Any) -> Future[None]:
        return self._do(f"mark {name}", lambda: self.store.marks.update({name: bytes(value)}), self.store.fail_marks)

    def flush(self, timeout: float | None = None) -> None:
        pass

    def close(self, timeout: float | None = None) -> None:
        self.is_closed = True


class MemoryReader(Resource):
    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.last = len(store.events)

    def refresh(self) -> int:
        self.last = len(self.store.events)
        return self.last

    @contextmanager
    def read(self, id: int) -> Iterator[memoryview]:  # noqa: A002
        with memoryview(self.store.events[id - 1]) as view:
            yield view

    def replay(self, from_id: int = 1, through: int | None = None) -> Iterator[Event]:
        for id_ in range(from_id, (self.last if through is None else through) + 1):
            with memoryview(self.store.events[id_ - 1]) as view:
                yield Event(id_, view)

    def newest_snapshot(self, at_most: int | None = None) -> tuple[int, bytes] | None:
        most = self.last if at_most is None else at_most
        ids = [id_ for id_ in self.store.snapshots if id_ <= most]
        return (max(ids), self.store.snapshots[max(ids)]) if ids else None

    def read_mark(self, name: str) -> bytes | None:
        return self.store.marks.get(name)

    def close(self) -> None:
        pass
