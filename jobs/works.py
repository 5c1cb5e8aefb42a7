"""Pieces of work on a collection, which pickle, carried out in parallel: on Spark, or by threads of this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import pyarrow as pa

from jobs import tasks as t
from jobs.engine import SparkEngine
from jobs.parallel import in_parallel
from jobs.stop import Stop
from jobs.watch import Tells
from persist_lib.location.wrap.spending import Spending

TASK_BYTES = 256 << 20
"""How much stored data a task reads."""
LOCAL_TASKS = 4
W = TypeVar("W")
A = TypeVar("A")


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
        return _in_threads(works, here, stop, says, tells)
    encoded = pickle.dumps((there, list(works)))

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from run_all(batches, encoded)

    answers = engine.answers(len(works), work, says, lambda done, of: tells(says, done, of))
    for row in answers:
        if row["error"] is not None:
            raise t.raised(row["error"])
    return [pickle.loads(msgspec.msgpack.decode(row["result"])) for row in answers]  # noqa: S301 - our tasks made it


def _in_threads(works: Sequence[W], here: Callable[[W], A], stop: Stop, says: str, tells: Tells) -> list[A]:
    inner = Stop()
    stop.on_set(inner.set)
    found = []
    for answer in in_parallel(here, works, LOCAL_TASKS, inner):
        found.append(answer)
        tells(says, len(found), len(works))
    return found


def run_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Carry out the tasks whose indices come in; yields their answers. Runs on executors."""
    there, works = pickle.loads(encoded)  # noqa: S301 - the driver made it
    for batch in batches:
        for index in batch.column(0).to_pylist():
            with Spending() as spent:
                outcome = t.attempt(partial(_pickled, there, works[index]))
            yield t.answer(index, outcome, spent.cost)


def _pickled(there: Callable[[W], object], work: W) -> bytes:
    """An answer as bytes. It may have values of all types, such as samples of rows, which pickle keeps."""
    return pickle.dumps(there(work))
