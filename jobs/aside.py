"""Calls that may not return, such as starting a JVM: made by a daemon thread, which nobody has to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from jobs.stop import Stop
from persist_lib.location.wrap.deadline import Stopped
from persist_lib.runtime.threads import SLICE_S

T = TypeVar("T")


class Call(Generic[T]):
    """One call, made by a daemon thread. Any number of threads may wait for its result."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._answers: SimpleQueue[tuple[list[T], BaseException | None]] = SimpleQueue()
        self.began = time.monotonic()
        run = partial(copy_context().run, self._make, call)
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _make(self, call: Callable[[], T]) -> None:
        try:
            self._answers.put(([call()], None))
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            self._answers.put(([], error))

    def result(self, stop: Stop, look: Callable[[], object] = lambda: None, patience_s: float = 0.0) -> T:
        """Wait for the result, or raise the error of the call. `look` is called about ten times a second.

        Raises Stopped `patience_s` seconds after the stop, and what `look` raises. The call goes on then. Once it is
        stopped, an error of the call is the cause of Stopped.
        """
        while True:
            try:
                answer = self._answers.get(timeout=SLICE_S)
            except Empty:
                if stop.is_set:
                    return self._last(patience_s)
                look()
                continue
            self._answers.put(answer)  # for others that wait
            results, error = answer
            if error is None:
                return results[0]
            if stop.is_set and not isinstance(error, Stopped):
                raise Stopped from error  # such as Spark's, that its job was cancelled
            raise error

    def _last(self, patience_s: float) -> T:
        """Wait until the call ends because of the stop, for at most `patience_s`. Always raises Stopped."""
        self._thread.join(patience_s)
        raise Stopped
