"""Ctrl-C at random moments of writing events: the writer continues, and what it acknowledged is there, once."""

from __future__ import annotations

import _thread
import random
import threading
import time
from pathlib import Path

import pytest

from persist_lib.errors import InvalidUsage
from tests.eventlogs import contents, store_of


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb"])
def test_an_interrupted_writer_goes_on(kind: str, tmp_path: Path) -> None:
    store, rng, is_over = store_of(kind, tmp_path), random.Random(), threading.Event()
    interrupts = 0

    def interrupt() -> None:
        while not is_over.wait(rng.uniform(0.001, 0.02)):
            _thread.interrupt_main()

    writer = store.writer()
    thread = threading.Thread(target=interrupt)
    acknowledged: list[int] = []
    ends = time.monotonic() + 3
    thread.start()
    id_ = 1
    while time.monotonic() < ends:
        try:
            while time.monotonic() < ends:
                try:
                    future = writer.write(id_, b"event %d" % id_)
                except InvalidUsage:  # the one before was not accepted after all
                    id_ -= 1
                    continue
                written, id_ = id_, id_ + 1
                future.result(30)
                acknowledged.append(written)
        except KeyboardInterrupt:
            interrupts += 1
    while True:
        try:
            is_over.set()
            thread.join()
            break
        except KeyboardInterrupt:
            continue
    while True:
        try:
            writer.close(30)
            break
        except KeyboardInterrupt:
            continue
    found = contents(store)
    assert interrupts > 20
    assert found == [b"event %d" % number for number in range(1, len(found) + 1)]
    assert len(found) >= max(acknowledged)
    assert len(found) > 50
