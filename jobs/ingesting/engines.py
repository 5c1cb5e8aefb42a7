"""Where the tasks of a group run: in threads of this process, or on Spark, one Spark task each."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec
import pyarrow as pa

from jobs import tasks as t
from jobs.engine import SparkEngine
from jobs.ingesting.work import Done, Work, run_task
from jobs.parallel import in_parallel
from jobs.stop import Stop
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.stage import Stage

Tells = Callable[[int, int], None]


class Engine(Protocol):
    """Runs tasks. `ahead` groups are worked on at once."""

    ahead: int

    def __call__(self, works: Sequence[Work], stage: Stage | None, says: str, tells: Tells) -> list[Done]:
        """What the tasks answered, in their order. Without a stage they answer changes by key."""


class Local:
    """Runs tasks in threads of this process, which read and parse in Arrow."""

    ahead = 1

    def __init__(self, stop: Stop, threads: int | None = None, run: Callable[..., Done] = run_task) -> None:
        self._stop, self._run = stop, run
        self._threads = threads or os.cpu_count() or 1

    def __call__(self, works: Sequence[Work], stage: Stage | None, says: str, tells: Tells) -> list[Done]:  # noqa: ARG002 - for Spark's page
        """What the tasks answered, in their order."""
        write = None if stage is None else stage.write
        found: dict[int, Done] = {}
        # SUBTLE: an error of a task sets the stop that `in_parallel` is given, and the caller's would hide the error.
        inner = Stop()
        self._stop.on_set(inner.set)

        def one(index: int) -> tuple[int, Done]:
            return index, self._run(works[index], write)

        for index, done in in_parallel(one, range(len(works)), self._threads, inner):
            found[index] = done
            tells(len(found), len(works))
        return [found[index] for index in range(len(works))]


class OnSpark:
    """Runs tasks on Spark: local, a cluster, or a Connect server."""

    ahead = 2

    def __init__(self, engine: SparkEngine) -> None:
        self._engine = engine

    def __call__(self, works: Sequence[Work], stage: Stage | None, says: str, tells: Tells) -> list[Done]:
        """What the tasks answered, in their order. Raises the first permanent error of a task."""
        encoded = pickle.dumps((None if stage is None else stage.ticket, list(works)))

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from run_all(batches, encoded)

        answers = self._engine.answers(len(works), work, says, tells)
        for row in answers:
            if row["error"] is not None:
                raise t.raised(row["error"])
        return [msgspec.msgpack.decode(row["result"], type=Done) for row in answers]


def run_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Carry out the tasks whose indices come in; yields their answers. Runs on executors."""
    ticket, works = pickle.loads(encoded)  # noqa: S301 - the driver made it
    for batch in batches:
        for index in batch.column(0).to_pylist():
            with Spending() as spent:
                outcome = t.attempt(partial(run_task, works[index], None if ticket is None else ticket.write))
            yield t.answer(index, outcome, spent.cost)
