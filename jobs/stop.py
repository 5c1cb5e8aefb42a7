"""The stop of a run: set once, by any thread. From then on nothing new begins, and what runs ends at its next step.

stop = Stop()
for answer in in_parallel(one, shards, in_flight, stop):
    ...
"""

from __future__ import annotations

import _thread
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from persist_lib.location.wrap.deadline import Stopped
from persist_lib.runtime.threads import Flag

log = logging.getLogger("persist.jobs")


class Stop:
    """Says whether to stop. `calls` are called at the stop, each in a daemon thread of its own."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.is_set = False
        self._flag = Flag()
        self._calls = deque(calls)

    def set(self) -> None:
        """Stop. Returns at once. Doing it again changes nothing."""
        self.is_set = True
        self._flag.set()
        self._begin_calls()

    def on_set(self, call: Callable[[], object]) -> None:
        """Have `call` called at the stop; now, if that was already."""
        self._calls.append(call)
        if self.is_set:
            self._begin_calls()

    def wait(self, seconds: float) -> bool:
        """Wait for the stop, for at most `seconds`. Returns whether it is set."""
        return self.is_set or self._flag.wait(seconds)

    def check(self) -> None:
        """Raise Stopped, which is a Determinate, if it is set."""
        if self.is_set:
            raise Stopped

    def _begin_calls(self) -> None:
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread sets it too
                return
            _thread.start_new_thread(_quietly, (call,))


@contextmanager
def stopping() -> Iterator[Stop]:
    """A stop that is set when the block is left by an error or an interrupt, such as the cancel of a run."""
    stop = Stop()
    try:
        yield stop
    except BaseException:
        stop.set()
        raise


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the run ends in any case
        log.warning("could not stop everything: %s: %s", type(error).__name__, error)
