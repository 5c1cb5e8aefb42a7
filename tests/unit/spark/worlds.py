"""Random histories and what must be read of them; and Spark's part in a stream, played without a JVM."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

import persist_lib as persist
from persist_lib.spark.source import PersistSource

SCHEMA = persist.Schema(key={"a": "int64 not null", "b": "string"}, value={"v": "int64"})
TINY: dict[str, Any] = {"inline_bytes": 0, "part_bytes": 64 * 1024, "task_bytes": 64 * 1024}

Data = tuple[int, str | None, int | None]
Trigger = Literal["processing", "available now", "once"]


def drawn(
    rng: random.Random, upper: int, rows: int, *, times: int, negative: bool
) -> tuple[list[tuple[Data, int, int]], pa.Table]:
    """Random updates over some times from `upper` on, and the same as a table."""
    fresh: list[tuple[Data, int, int]] = []
    for _ in range(rows):
        data = (rng.randrange(40), rng.choice(["", "x", "yy", None]), rng.choice([None, 1, 2, 3]))
        fresh.append((data, upper + rng.randrange(times), rng.choice([1, 1, 2, -1] if negative else [1, 1, 2])))
    columns = list(zip(*(data for data, _, _ in fresh), strict=True)) if fresh else [(), (), ()]
    table = pa.table({
        "a": pa.array(columns[0], pa.int64()), "b": pa.array(columns[1], pa.string()),
        "v": pa.array(columns[2], pa.int64()), "_time": pa.array([t for _, t, _ in fresh], pa.uint64()),
        "_diff": pa.array([d for _, _, d in fresh], pa.int64()),
    })  # fmt: skip
    return fresh, table


@dataclass
class World:
    """A shard, and an account of every update ever written to it."""

    client: persist.Client
    name: str = "orders"
    updates: list[tuple[Data, int, int]] = field(default_factory=list)
    upper: int = 0

    def append(self, rng: random.Random, rows: int, *, times: int = 1, negative: bool = True) -> None:
        """Append random updates over some times."""
        fresh, table = drawn(rng, self.upper, rows, times=times, negative=negative)
        with self.client.open_writer(self.name, SCHEMA) as writer:
            writer.compare_and_append(table, self.upper, self.upper + times)
        self.updates += fresh
        self.upper += times

    def contents(self, as_of: int) -> Counter[Data]:
        """Added up one by one."""
        return added((data, diff) for data, time, diff in self.updates if time <= as_of)

    def changes(self, after: int | None, to: int) -> Counter[tuple[Data, int]]:
        """The updates with times in `(after, to]`."""
        lower = -1 if after is None else after
        return added(((data, time), diff) for data, time, diff in self.updates if lower < time <= to)


def added(pairs: Iterable[tuple[Any, int]]) -> Counter[Any]:
    """Sums that are not zero."""
    found: Counter[Any] = Counter()
    for one, diff in pairs:
        found[one] += diff
    return Counter({one: diff for one, diff in found.items() if diff})


def source(client: persist.Client, name: str = "orders", **options: str) -> PersistSource:
    """The source with options, as Spark makes it."""
    return PersistSource({"location": client.url, "table": name, **options})


def read(reader: DataSourceReader | DataSourceStreamReader, partitions: Iterable[Any]) -> pa.Table | None:
    """What tasks read of partitions."""
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    return pa.Table.from_batches(batches) if batches else None


def rows(table: pa.Table | None, *names: str) -> list[tuple[Any, ...]]:
    """Its rows as tuples of some columns."""
    return [] if table is None else list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def load(client: persist.Client, filters: list[Any] | None = None, **options: str) -> pa.Table | None:
    """One batch read, as Spark does it."""
    made = source(client, **options, **({} if filters is None else {"pushdown": "true"}))
    reader: Any = made.reader(made.schema())
    if filters is not None:
        assert list(reader.pushFilters(filters)) == filters, "Spark applies all of them once more"
    return read(reader, reader.partitions())


class Stream:
    """A streaming query: what Spark keeps in a checkpoint, and how it drives a reader."""

    def __init__(self, client: persist.Client, sink: Callable[[int, pa.Table | None], None], **options: str) -> None:
        self._client, self._sink, self._options = client, sink, options
        self.planned: list[str] = []  # the offset log: ends of batches
        self.done = 0  # the commit log
        self._reader: Any = None
        self._limit: ReadLimit | None = None

    def start(self, trigger: Trigger = "processing") -> None:
        """A new process, which knows only the checkpoint."""
        made = source(self._client, **self._options)
        reader: Any = made.streamReader(made.schema())
        if trigger == "available now":
            reader.prepareForTriggerAvailableNow()
        self._reader, self._limit = reader, ReadAllAvailable() if trigger == "once" else None
        if self.done:
            self._reader.commit(json.loads(self.planned[self.done - 1]))

    def plan(self, limit: ReadLimit | None = None) -> bool:
        """Whether there is a batch to do; its end is in the offset log then. Spark may have a limit of its own.

        The first batch is done even if nothing is new.
        """
        if len(self.planned) > self.done:
            return True
        before = self._before(self.done)
        end = self._reader.latestOffset(before, limit or self._limit or self._reader.getDefaultReadLimit())
        if self.done and json.dumps(end) == json.dumps(before):
            return False
        self.planned.append(json.dumps(end))
        if self.done:
            self._reader.commit(json.loads(self.planned[self.done - 1]))
        return True

    def run(self) -> None:
        """Do the batch that is planned. Its sink knows batches by number, so that one may be repeated.

        Tasks have copies of the reader and of its partitions.
        """
        end = json.loads(self.planned[self.done])
        parts = self._reader.partitions(self._before(self.done), end)
        copy, found = pickle.loads(pickle.dumps((self._reader, list(parts))))
        self._sink(self.done, read(copy, found))

    def finish(self) -> None:
        """Note that the batch is done."""
        self.done += 1

    def step(self) -> bool:
        """A whole batch; False if there is nothing to do."""
        if not self.plan():
            return False
        self.run()
        self.finish()
        return True

    def _before(self, batch: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.planned[batch - 1]) if batch else self._reader.initialOffset()
        return found
