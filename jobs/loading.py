"""Loading much of a source on Spark: ranges of it are decoded by tasks, and rows by key are shuffled to others.

What a task answers is sent along with the rows that it sends, so that of a task that ran twice exactly one answer
counts: the one whose rows were used.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from jobs import tasks as t
from jobs.engine import Shuffled, SparkEngine
from jobs.watch import Tells
from persist_lib.core.cost import Cost
from persist_lib.location.wrap.spending import Spending
from persist_lib.sources.loading import Answer, Piece, Work, begin, settle

SENT = pa.schema([("bucket", pa.int32()), ("place", pa.int64()), ("data", pa.binary())])
SENT_DDL = "bucket int, place long, data binary"
FIRST = -1
"""The place of answers that are sent along."""


class OnSpark:
    """Carries out the tasks of a load on Spark: local, a cluster, or a Connect server."""

    def __init__(self, engine: SparkEngine, tells: Tells) -> None:
        self._engine, self._tells = engine, tells

    def __call__(self, work: Work, says: str) -> Sequence[Answer]:
        """What all tasks answered. Raises the first permanent error of one."""
        encoded = pickle.dumps(work)
        told: Callable[[int, int], object] = lambda done, of: self._tells(says, done, of)  # noqa: E731
        if work.buckets:
            then = Shuffled(work.buckets, SENT_DDL, ("bucket", "place"), partial(settle_all, encoded=encoded))
            rows = self._engine.answers(work.tasks, partial(send_all, encoded=encoded), says, told, shuffled=then)
        else:
            rows = self._engine.answers(work.tasks, partial(decode_all, encoded=encoded), says, told)
        return [pickle.loads(one) for one in t.results(rows, bytes)]  # noqa: S301 - our tasks made it


class Outcome(NamedTuple):
    """What a task came to: its answer or its permanent error, and what it cost."""

    task: int
    result: object
    cost: Cost


def decode_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Decode the ranges whose indices come in, of which nothing is sent on; yields answers. Runs on executors."""
    for one in _each(batches, encoded):
        if isinstance(one, Outcome):
            yield t.answer(*one)


def send_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Decode the ranges whose indices come in; yields rows of `SENT`. Runs on executors."""
    work: Work = pickle.loads(encoded)  # noqa: S301 - the driver made it
    for one in _each(batches, encoded):
        if isinstance(one, Outcome):
            one = Piece(one.task % work.buckets, FIRST, pickle.dumps(one))  # noqa: PLW2901 - it goes the same way
        yield pa.record_batch(
            [pa.array([cell], field.type) for cell, field in zip(one, SENT, strict=True)], schema=SENT
        )


def settle_all(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[pa.RecordBatch]:
    """Make updates of what was sent, bucket by bucket; pass on the answers that were sent along. Runs on executors."""
    work: Work = pickle.loads(encoded)  # noqa: S301 - the driver made it
    for bucket, sent in groupby(_sent(batches), key=attrgetter("bucket")):
        rows: list[Piece] = []
        for one in sent:
            if one.place == FIRST:
                yield t.answer(*pickle.loads(one.data))  # noqa: S301 - our tasks made it
            else:
                rows.append(one)
        with Spending() as spent:
            outcome = t.attempt(lambda: pickle.dumps(settle(work, bucket, rows)))  # noqa: B023 - called at once
        yield t.answer(work.tasks + bucket, outcome, spent.cost)


def _sent(batches: Iterator[pa.RecordBatch]) -> Iterator[Piece]:
    for batch in batches:
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield Piece(*row)


def _each(batches: Iterator[pa.RecordBatch], encoded: bytes) -> Iterator[Piece | Outcome]:
    """Carry out the tasks whose indices come in: what each sends, and at last what it came to."""
    work: Work = pickle.loads(encoded)  # noqa: S301 - the driver made it
    for batch in batches:
        for index in batch.column(0).to_pylist():
            with Spending() as spent:
                last: list[object] = []
                sending = begin(work, index)
                while (one := t.attempt(partial(next, sending, None))) is not None:
                    if isinstance(one, Piece):
                        yield one
                        continue
                    last.append(pickle.dumps(one) if isinstance(one, Answer) else one)
                    break
            yield Outcome(index, last[0], spent.cost)
