"""Work on several shards at once, by a bounded number of threads, which wait for Spark, Arrow or stores.

The threads are daemons: when a run is interrupted, neither the caller nor the end of the program waits for one that is
stuck in a store or in Spark.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from jobs.stop import Stop
from persist_lib.location.wrap.deadline import Stopped, unless
from persist_lib.runtime.threads import SLICE_S, aside

log = logging.getLogger("persist.jobs")

Item = TypeVar("Item")
Answer = TypeVar("Answer")

IN_FLIGHT = 4
"""Shards worked on at once. A larger number hides the waiting for commits, but small merges take more memory."""
GRACE_S = 3.0
"""How long to wait, after the stop, for the items that are worked on."""


def in_parallel(
    one: Callable[[Item], Answer],
    items: Sequence[Item],
    in_flight: int,
    stop: Stop | None = None,
) -> Iterator[Answer]:
    """Yield answers as they come. If the caller stops early or is interrupted, `stop` is set.

    After the stop, items that were not begun are dropped, and work on the others ends at its next request to a Blob.
    This waits `GRACE_S` seconds for it, and then leaves it behind. If another thread sets `stop`, Stopped is raised.
    """
    stop = stop or Stop()
    crew = _Crew(one, items, stop)
    try:
        aside(partial(crew.begin, max(1, in_flight)))
        for _ in items:
            yield crew.answer()
    except BaseException:
        stop.set()
        raise
    finally:
        if stop.is_set:
            crew.leave()


class Outcome(NamedTuple, Generic[Answer]):
    """What came of one shard: what was done, or the error."""

    shard: str
    done: Answer | None
    error: Exception | None = None


def on_shards(
    do: Callable[[str], Answer], shards: Sequence[str], in_flight: int, stop: Stop | None = None
) -> Iterator[Outcome[Answer]]:
    """Do something on each shard, `in_flight` at once. Yields an outcome for each as it is done.

    An error of a shard is in its outcome, and does not stop the others. If `stop` is set, or the caller stops early,
    this ends within seconds (see `in_parallel`).
    """

    def one(shard: str) -> Outcome[Answer]:
        try:
            return Outcome(shard, do(shard))
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one shard must not stop the others
            return Outcome(shard, None, error)

    yield from in_parallel(one, shards, in_flight, stop)


class _Crew(Generic[Item, Answer]):
    """The threads, what they still have to do, and what they answered."""

    def __init__(self, one: Callable[[Item], Answer], items: Sequence[Item], stop: Stop) -> None:
        self._one, self._stop = one, stop
        # SUBTLE: one copy of the context for each item, as two threads cannot enter the same one at once.
        self._waiting: deque[tuple[Item, Context]] = deque((item, copy_context()) for item in items)
        self._answers: SimpleQueue[tuple[list[Answer], BaseException | None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._at_work: list[Item] = []

    def begin(self, threads: int) -> None:
        """Start the threads."""
        for number in range(min(threads, len(self._waiting))):
            thread = threading.Thread(target=self._work, name=f"persist-shard_{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def answer(self) -> Answer:
        """The next answer. Raises the error of an item, or Stopped when there is none at the stop."""
        while True:
            try:
                answers, error = self._answers.get(timeout=SLICE_S)
            except Empty:
                self._stop.check()
                continue
            if error is not None:
                raise error
            return answers[0]

    def leave(self) -> None:
        """Wait a moment for what is worked on, and say what is left behind."""
        deadline = time.monotonic() + GRACE_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(SLICE_S / 2)
        if self._alive() and self._at_work:
            log.warning("left behind, as they did not end within %g s of the stop: %s", GRACE_S, self._at_work)

    def _is_stopped(self) -> bool:
        return self._stop.is_set

    def _alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while self._waiting and not self._stop.is_set:
            try:
                item, context = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            self._at_work.append(item)
            try:
                answer = context.run(unless, self._is_stopped, partial(self._one, item))
            except BaseException as error:  # noqa: BLE001 - raised by `answer`
                self._answers.put(([], error))
            else:
                self._answers.put(([answer], None))
            finally:
                self._at_work.remove(item)
