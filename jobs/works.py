"""Pieces of work on a collection, which pickle, carried out in parallel: on Spark, or by threads of this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa

from jobs import tasks as t
from jobs.engine import SparkEngine
from jobs.parallel import in_parallel
from jobs.session import Sessions
from jobs.stop import Stop
from jobs.watch import Tells
from persist_lib.client import Client

TASK_BYTES = 256 << 20
"""How much stored data a task reads."""
LOCAL_TASKS = 4
W = TypeVar("W")
A = TypeVar("A")


def engine_of(
    client: Client, shards: Iterable[str], name: str, sessions: Sessions, stop: Stop
) -> SparkEngine | None:  # fmt: skip
    """Where work that reads these shards is done; None: here. `auto`: on Spark what is more than it is started for."""
    if name == "auto":
        size = 0 if client.url.startswith("memory:") else sum(client.inspect(shard).state.size for shard in shards)
        name = "local" if size <= client.config.spark_above_bytes else "spark"
    return None if name == "local" else SparkEngine(client, sessions, stop=stop)


def pieces(size: int, engine: SparkEngine | None) -> int:
    """Into how many pieces to cut work that reads `size` bytes."""
    return LOCAL_TASKS if engine is None else max(engine.pieces(size, TASK_BYTES), 1)


def carry_out(
    works: Sequence[W], here: Callable[[W], A], there: Callable[[W], A], engine: SparkEngine | None, stop: Stop,
    says: str, tells: Tells,
) -> list[A]:  # fmt: skip
    """The answers of all pieces: those of `there` in tasks of the `engine`, or without one of `here` in threads.

    `there` is a function of a module that the executors have, and what it answers pickles.
    """
    if engine is None:
        return in_threads(works, here, LOCAL_TASKS, stop, lambda done, of: tells(says, done, of))
    work = partial(run_all, encoded=pickle.dumps((there, list(works))))
    answers = engine.answers(len(works), work, says, lambda done, of: tells(says, done, of))
    return [pickle.loads(one) for one in t.results(answers, bytes)]  # noqa: S301 - our tasks made it


def in_threads(
    works: Sequence[W], here: Callable[[W], A], threads: int, stop: Stop, tells: Callable[[int, int], object]
) -> list[A]:
    """The answers of `here`, in the order of the pieces, by so many threads."""
    found: dict[int, A] = {}
    # SUBTLE: an error of a task sets the stop that `in_parallel` is given, and the caller's would hide the error.
    inner = Stop()
    stop.on_set(inner.set)
    for index, done in in_parallel(lambda index: (index, here(works[index])), range(len(works)), threads, inner):
        found[index] = done
        tells(len(found), len(works))
    return [found[index] for index in range(len(works))]


def run_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Carry out the tasks whose indices come in; yields their answers. Runs on executors."""
    there, works = pickle.loads(encoded)  # noqa: S301 - the driver made it
    return t.answered(batches, lambda index: t.attempt(partial(_pickled, there, works[index])))


def _pickled(there: Callable[[W], object], work: W) -> bytes:
    """An answer as bytes. It may have values of all types, such as samples of rows, which pickle keeps."""
    return pickle.dumps(there(work))
