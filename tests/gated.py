"""A client with threads, whose compare-and-sets wait at a gate until a test opens it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import persist_lib as persist
from persist_lib.location import open_location
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import contents_of
from tests.worlds import SCHEMA, row

T = TypeVar("T")

LONG_S = 20.0
"""Longer than anything here takes."""


class Gate(AroundConsensus):
    """A Consensus whose compare-and-sets wait while it is shut. `waiting` is set when one does."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.open, self.waiting = threading.Event(), threading.Event()
        self.open.set()
        self.passed = 0
        self.outcome: Exception | None = None

    def shut(self) -> None:
        self.open.clear()
        self.waiting.clear()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind == "compare_and_set":
            if not self.open.is_set():
                self.waiting.set()
                assert self.open.wait(LONG_S)
            self.passed += 1
            if self.outcome is not None:
                raise self.outcome
        return call()


class Threaded:
    """A client with threads on a location of its own, whose compare-and-sets pass a gate."""

    def __init__(self, url: str, config: persist.Config, **options: Any) -> None:
        self.location = open_location(url, create=True)
        self.gate = Gate(self.location.consensus)
        self.client = persist.open(replace(self.location, consensus=self.gate), config=config)
        self.other = persist.open(replace(open_location(self.location.url)), runtime=Runtime(background=False))
        self.write = self.client.open_writer("s", SCHEMA, **options)
        assert self.write.id
        self.gate.passed = 0

    def outstanding(self, time: int = 0) -> Any:
        """One append on its way that does not arrive until the gate is opened."""
        self.gate.shut()
        future = self.write.append_async([row(time, time=time)], time, time + 1)
        assert self.gate.waiting.wait(LONG_S)
        return future

    def contents(self, as_of: int) -> Any:
        with self.other.open_reader("s") as read:
            return contents_of(read.snapshot(as_of, diff=True).to_arrow())

    def close(self) -> None:
        self.gate.open.set()
        self.gate.outcome = None
        self.client.close()
        self.other.close()


def lose(t: Threaded) -> Any:
    """An append that lost a race to a rival who went exactly as far; nobody has looked at it."""
    first = t.outstanding()
    t.other.open_writer("s", SCHEMA).compare_and_append([row(-1)], 0, 1)
    t.gate.open.set()
    wait_for(first.done)
    return first


def wait_for(is_so: Callable[[], bool], at_most_s: float = LONG_S) -> None:
    end = time.monotonic() + at_most_s
    while not is_so():
        assert time.monotonic() < end, f"not so after {at_most_s:g} s"
        time.sleep(0.002)
