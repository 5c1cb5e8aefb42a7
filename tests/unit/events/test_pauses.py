"""A writer that was paused, and continues after its successor has begun: at any step, and for however long.

What was acknowledged to it is in the log, nothing of it comes into the log later, and nothing more is acknowledged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from persist_lib.errors import Fenced, Indeterminate, NotSent, PersistError
from persist_lib.events import open_store
from persist_lib.events.store import LogStore
from persist_lib.events.stores import disk
from persist_lib.events.writer import LogWriter
from persist_lib.runtime.ambient import Runtime
from tests.eventlogs import KINDS, contents, specifier, store_of, write

STEPWISE = Runtime(background=False)
"""Each write is carried out by the call itself, one request after the other."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_that_is_paused_before_it_writes_writes_nothing_after_its_successor(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    first = store.writer()
    first.write(1, b"one").result(60)
    records: Any = first._records
    put, reached, goes_on = records.put, threading.Event(), threading.Event()

    def paused(*arguments: Any) -> None:
        reached.set()
        assert goes_on.wait(60)
        put(*arguments)

    records.put = paused
    late = [first.write(id_, b"late %d" % id_) for id_ in (2, 3)]
    assert reached.wait(60)
    write(store, [b"two", b"three", b"four"])
    goes_on.set()
    for future in late:
        assert isinstance(future.exception(60), (Fenced, NotSent))
    first.close(60)
    assert contents(store) == [b"one", b"two", b"three", b"four"]


class Takeover:
    """A successor that takes over once, in the middle of a step of the predecessor."""

    def __init__(self, store: LogStore, moment: str) -> None:
        self._store, self._moment = store, moment
        self._writer: LogWriter | None = None
        self.payloads: list[bytes] = []
        self.found: list[bytes] = []
        self.is_done = False

    def around(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Take over before the step or after it; or before it, and write after it."""
        if self._moment != "after":
            self.begin()
        if self._moment == "before":
            self.end()
        done = step(*arguments)
        if self._moment == "after":
            self.begin()
        if self._moment != "before":
            self.end()
        return done

    def begin(self) -> None:
        """Become the writer. What is there now stays the beginning of the log."""
        self.is_done = True
        self._writer = self._store.writer()
        self.found = contents(self._store)
        assert len(self.found) == self._writer.last

    def end(self) -> None:
        """Write."""
        assert self._writer is not None
        for number in range(3):
            payload = b"successor %d" % number * 10
            self._writer.write(self._writer.accepted + 1, payload).result(60)
            self.payloads.append(payload)
        self._writer.close(60)


def predecessor(
    place: str, payloads: list[bytes], arrange: Callable[[Any], None]
) -> tuple[list[bytes], Exception | None]:
    """Write events until one fails. Returns what was acknowledged, and why it ended."""
    acknowledged: list[bytes] = []
    try:
        with open_store(place, runtime=STEPWISE).writer() as writer:
            arrange(writer._records)
            for payload in payloads:
                future: Future[None] = writer.write(writer.accepted + 1, payload)
                future.result(0)
                acknowledged.append(payload)
    except PersistError as error:
        return acknowledged, error
    return acknowledged, None


def check(store: LogStore, acknowledged: list[bytes], takeover: Takeover, error: Exception | None) -> None:
    """What was acknowledged, to both, is in the log, which nothing came into later."""
    assert takeover.is_done
    assert contents(store) == takeover.found + takeover.payloads
    assert takeover.found[: len(acknowledged)] == acknowledged
    assert len(takeover.found) <= len(acknowledged) + 1
    assert error is None or isinstance(error, (Fenced, NotSent, Indeterminate))
    write(store, [b"afterwards"])


PAYLOADS = [b"first %d" % number * 6 for number in range(3)]  # two fragments of at most 100 bytes


IS_ALL = os.environ.get("PERSIST_EVENTS") == "all"
MOMENTS = ("before", "between", "after")


@pytest.mark.parametrize("moment", MOMENTS if IS_ALL else ["between"])
@pytest.mark.parametrize("limit", [None, 100] if IS_ALL else [None])
def test_on_s3_the_successor_comes_at_any_request(limit: int | None, moment: str, tmp_path: Path) -> None:
    """With fragments, an event is several requests. SUBTLE: late ones arrive behind the successor's fence."""
    for strikes in range(1, 100):
        place = specifier("s3", tmp_path, limit)
        takeover, counting = Takeover(open_store(place), moment), Counting(strikes)

        def arrange(records: Any, takeover: Takeover = takeover, counting: Counting = counting) -> None:
            records._objects.put = counting.of(records._objects.put, takeover)

        acknowledged, error = predecessor(place, PAYLOADS, arrange)
        if not takeover.is_done:
            assert (acknowledged, error) == (PAYLOADS, None)
            assert strikes > 3
            return
        check(open_store(place), acknowledged, takeover, error)


class Counting:
    """Lets a successor come at the n-th call of a function in this thread, from `is_on` on."""

    def __init__(self, strikes: int) -> None:
        self._left, self._thread = strikes, threading.get_ident()
        self.is_on = True

    def of(self, real: Callable[..., Any], takeover: Takeover) -> Callable[..., Any]:
        """The function, counted."""

        def counted(*arguments: Any) -> Any:
            if not self.is_on or takeover.is_done or threading.get_ident() != self._thread:
                return real(*arguments)
            self._left -= 1
            return takeover.around(real, *arguments) if self._left == 0 else real(*arguments)

        return counted


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("step", ["write_all", "fdatasync", "fstat"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_on_disk_the_successor_comes_at_any_step(
    step: str, limit: int | None, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for strikes in range(1, 50):
        place = specifier("disk", tmp_path, limit)
        takeover, counting = Takeover(open_store(place), moment), Counting(strikes)
        counting.is_on = False
        where: Any = disk if step == "write_all" else os

        def arrange(_records: Any, counting: Counting = counting) -> None:
            counting.is_on = True

        with monkeypatch.context() as patched:
            patched.setattr(where, step, counting.of(getattr(where, step), takeover))
            acknowledged, error = predecessor(place, PAYLOADS, arrange)
        if not takeover.is_done:
            assert (acknowledged, error) == (PAYLOADS, None)
            assert strikes > 3
            return
        check(open_store(place), acknowledged, takeover, error)
