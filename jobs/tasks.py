"""What runs in a Spark task: one merge, or one scrub. Imported by executors; imports no Spark.

Work is sent and returned as bytes (msgpack), so that only the few names that Spark itself ships are unpickled.

A permanent error (damage, an overflow) is returned as a value: if it were raised, Spark would try the task three times
more, and the driver would get only a traceback. A failure of a store or the network is raised, and Spark tries the task
again on any executor. Each attempt writes parts under its own keys. So a second attempt, a speculative one, or one that
continues after the driver died leaves orphans at worst.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib import errors
from persist_lib.config import Config
from persist_lib.core.cost import Cost
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.errors import Damage, Determinate, Indeterminate, PersistError
from persist_lib.kernel.columns import array_of
from persist_lib.location.api import Blob
from persist_lib.location.stack import open_stack
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.maintain.scrub import SumTask, add_up_task
from persist_lib.runtime.ambient import Runtime

T = TypeVar("T")
Merge = Callable[[MergeTask, Blob, Callable[[], int]], TaskResult]

ANSWER = pa.schema([("task", pa.int64()), ("result", pa.binary()), ("error", pa.binary()), ("cost", pa.binary())])
ANSWER_DDL = "task long, result binary, error binary, cost binary"

_blobs: dict[tuple[str, str], Blob] = {}
_opening = threading.Lock()


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The tasks of one Spark job, each encoded by itself, so that a worker decodes no more than what it carries out."""

    url: str
    consensus_url: str
    tasks: tuple[bytes, ...]

    def task(self, index: int) -> MergeTask:
        """The task at `index`."""
        return msgspec.msgpack.decode(self.tasks[index], type=MergeTask)


class Told(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the driver: its class, message and fields."""

    kind: str
    message: str
    fields: dict[str, str]


def encode_work(url: str, consensus_url: str, tasks: Sequence[MergeTask]) -> bytes:
    """Encode the tasks of one Spark job."""
    return msgspec.msgpack.encode(Work(url, consensus_url, tuple(map(msgspec.msgpack.encode, tasks))))


def run_all(batches: Iterator[pa.RecordBatch], encoded: bytes, merge: Merge = run_task) -> Iterator[pa.RecordBatch]:
    """Carry out the tasks whose indices come in; yields their answers."""
    work = msgspec.msgpack.decode(encoded, type=Work)
    return answered(batches, lambda index: attempt(partial(_merged, work, merge, index)))


def add_up_all(
    batches: Iterator[pa.RecordBatch], encoded: bytes, url: str, consensus_url: str
) -> Iterator[pa.RecordBatch]:
    """Read the parts of the tasks whose indices come in; yields their sums."""
    tasks = msgspec.msgpack.decode(encoded, type=list[SumTask])

    def one(index: int) -> object:
        found = add_up_task(tasks[index], blob_at(url, consensus_url))
        return tell(found) if isinstance(found, Damage) else found

    return answered(batches, one)


def answered(batches: Iterator[pa.RecordBatch], carry_out: Callable[[int], object]) -> Iterator[pa.RecordBatch]:
    """The answers of the tasks whose indices come in, each with what it cost."""
    for batch in batches:
        for index in batch.column(0).to_pylist():
            with Spending() as spent:
                outcome = carry_out(index)
            yield answer(index, outcome, spent.cost)


def answer(index: int, outcome: object, cost: Cost) -> pa.RecordBatch:
    """One task's answer: its result or its permanent error, and the cost of its requests to the location.

    The cost of a failed attempt that Spark repeated is not counted.
    """
    error = msgspec.msgpack.encode(outcome) if isinstance(outcome, Told) else None
    result = None if error is not None else msgspec.msgpack.encode(outcome)
    told = [array_of(np.array([index])), *map(_cell, (result, error, msgspec.msgpack.encode(cost)))]
    return pa.record_batch(told, schema=ANSWER)


def _cell(value: bytes | None) -> pa.Array:
    """One value as a column.

    SUBTLE: Arrow imports pandas to look at a Python object, some 50 MiB that the worker keeps for its later tasks.
    """
    data = value or b""
    parts = [b"\0" if value is None else b"\1", np.array([0, len(data)], np.int32), data]
    return pa.Array.from_buffers(pa.binary(), 1, list(map(pa.py_buffer, parts)))


def attempt(task: Callable[[], object]) -> object:
    """What a task answers: its result, or its permanent error, told. Others are raised, and Spark tries it again."""
    try:
        return task()
    except (Determinate, Indeterminate):
        raise
    except PersistError as error:
        kind = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        return msgspec.structs.replace(tell(error), kind=kind)  # an error of a program alone has no name there


def tell(error: PersistError) -> Told:
    """Encode an error so that the driver can raise it again."""
    return Told(type(error).__name__, error.message, {name: str(value) for name, value in error.fields.items()})


def raised(encoded: bytes) -> PersistError:
    """Decode the error that a task returned."""
    told = msgspec.msgpack.decode(encoded, type=Told)
    kind: Any = getattr(errors, told.kind, PersistError)
    error: PersistError = kind(told.message, **told.fields)
    return error


def results(rows: Sequence[Mapping[str, Any]], kind: type[T]) -> list[T]:
    """What the tasks of a job answered. Raises the first permanent error of one."""
    for row in rows:
        if row["error"] is not None:
            raise raised(row["error"])
    return [msgspec.msgpack.decode(row["result"], type=kind) for row in rows]


def blob_at(url: str, consensus_url: str) -> Blob:
    """The location's Blob, opened once in each worker process, which Spark reuses for many tasks."""
    with _opening:
        if (url, consensus_url) not in _blobs:
            _blobs[url, consensus_url] = open_stack(url, consensus_url, Config(), Runtime()).blob
        return _blobs[url, consensus_url]


def _merged(work: Work, merge: Merge, index: int) -> TaskResult:
    try:
        return merge(work.task(index), blob_at(work.url, work.consensus_url), Runtime().entropy)
    except MemoryError as error:  # tried again by Spark, perhaps on an executor that has more
        raise MemoryError(f"task {index} of this Spark job: {error}") from error
