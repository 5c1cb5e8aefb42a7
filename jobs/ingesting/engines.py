"""Where the tasks of a group run: in threads of this process, or on Spark, one Spark task each."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from jobs import tasks as t
from jobs.engine import SparkEngine
from jobs.ingesting.work import Done, Work, run_task
from jobs.stop import Stop
from jobs.works import in_threads
from persist_lib.relation.stage import Stage

Tells = Callable[[int, int], None]


class Local:
    """Runs tasks in threads of this process, which read and parse in Arrow. `ahead` groups are worked on at once."""

    ahead = 1

    def __init__(self, stop: Stop, threads: int | None = None, run: Callable[..., Done] = run_task) -> None:
        self._stop, self._run = stop, run
        self._threads = threads or os.cpu_count() or 1

    def __call__(self, works: Sequence[Work], stage: Stage | None, says: str, tells: Tells) -> list[Done]:  # noqa: ARG002 - for Spark's page
        """What the tasks answered, in their order. Without a stage they answer changes by key."""
        write = None if stage is None else stage.write
        return in_threads(works, lambda work: self._run(work, write), self._threads, self._stop, tells)


class OnSpark:
    """Runs tasks on Spark: local, a cluster, or a Connect server."""

    ahead = 2

    def __init__(self, engine: SparkEngine) -> None:
        self._engine = engine

    def __call__(self, works: Sequence[Work], stage: Stage | None, says: str, tells: Tells) -> list[Done]:
        """What the tasks answered, in their order. Raises the first permanent error of a task."""
        work = partial(run_all, encoded=pickle.dumps((None if stage is None else stage.ticket, list(works))))
        return t.results(self._engine.answers(len(works), work, says, tells), Done)


Engine = Local | OnSpark


def run_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Carry out the tasks whose indices come in; yields their answers. Runs on executors."""
    ticket, works = pickle.loads(encoded)  # noqa: S301 - the driver made it
    write = None if ticket is None else ticket.write
    return t.answered(batches, lambda index: t.attempt(partial(run_task, works[index], write)))
