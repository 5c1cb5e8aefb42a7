"""A writer that was paused, and goes on after its successor has begun: at any step, and for however long.

What it was told is durable is in the log, nothing of it comes into the log later, and it is told nothing more.
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
    """A successor that takes over once, in the middle of what the predecessor does."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.payloads: list[bytes] = []
        self.found: list[bytes] = []
        self.is_done = False

    def run(self) -> None:
        """Take over, and write. What was there stays the beginning of the log."""
        if not self.is_done:
            self.is_done = True
            with self._store.writer() as writer:
                self.found = contents(self._store)
                assert len(self.found) == writer.last
                for number in range(3):
                    payload = b"successor %d" % number * 10
                    writer.write(writer.accepted + 1, payload).result(60)
                    self.payloads.append(payload)


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


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("limit", [None, 100])
def test_on_s3_the_successor_comes_before_or_after_any_request(
    limit: int | None, is_after: bool, tmp_path: Path
) -> None:
    """With fragments, an event is several requests. SUBTLE: late ones arrive behind the successor's fence."""
    for strikes in range(1, 100):
        place = specifier("s3", tmp_path, limit)
        takeover = Takeover(open_store(place))
        left = strikes

        def arrange(records: Any, takeover: Takeover = takeover) -> None:
            put = records._places.put

            def counted(*arguments: Any) -> bool:
                nonlocal left
                left -= 1
                if left == 0 and not is_after:
                    takeover.run()
                done: bool = put(*arguments)
                if left == 0 and is_after:
                    takeover.run()
                return done

            records._places.put = counted

        acknowledged, error = predecessor(place, PAYLOADS, arrange)
        if not takeover.is_done:
            assert (acknowledged, error) == (PAYLOADS, None)
            assert strikes > 3
            return
        check(open_store(place), acknowledged, takeover, error)


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("step", ["_write_all", "fdatasync", "fstat"])
@pytest.mark.parametrize("is_after", [False, True])
def test_on_disk_the_successor_comes_before_or_after_any_step(
    step: str, limit: int | None, is_after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for strikes in range(1, 50):
        place = specifier("disk", tmp_path, limit)
        takeover = Takeover(open_store(place))
        left = strikes
        where: Any = disk if step == "_write_all" else os
        real = getattr(where, step)
        is_arranged, this = False, threading.get_ident()

        def counted(*arguments: Any, real: Any = real, takeover: Takeover = takeover) -> Any:
            nonlocal left
            mine = is_arranged and not takeover.is_done and threading.get_ident() == this
            left -= mine
            if mine and left == 0 and not is_after:
                takeover.run()
            done = real(*arguments)
            if mine and left == 0 and is_after:
                takeover.run()
            return done

        def arrange(_records: Any) -> None:
            nonlocal is_arranged
            is_arranged = True

        with monkeypatch.context() as patched:
            patched.setattr(where, step, counted)
            acknowledged, error = predecessor(place, PAYLOADS, arrange)
            is_arranged = False
        if not takeover.is_done:
            assert (acknowledged, error) == (PAYLOADS, None)
            assert strikes > 3
            return
        check(open_store(place), acknowledged, takeover, error)
