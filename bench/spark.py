"""Compaction on Spark beside Spark's own DataFrame plan of the same work, each in a session of its own, on all cores.

The same near-distinct updates with string keys as in `bench.kernel`, in a dozen appends to a real shard; the peer reads
them from plain Parquet (with a signed time, which Spark likes better), groups, sums, sorts and writes, by the strongest
of several plans. Both are warm, and take turns. Ours runs in the session that the programs make, the peer in that of
`bench.spark_peer`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import persist_lib as persist
from bench.figures import Figure, beside, timed
from bench.kernel import RUNS, SCHEMA, SLICE, updates_of
from bench.peer import Peer
from bench.spark_peer import PLANS
from bench.workers import Usage, used
from jobs.engine import SparkEngine
from jobs.session import SparkSettings, build_session
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.requests import MergeTask, Request, TaskResult
from persist_lib.ids import WriterId
from persist_lib.maintain.compaction import commit
from persist_lib.maintain.merge_tasks import merge_tasks
from persist_lib.shard.commit import Machine

FULL, QUICK = 16_000_000, 400_000
LARGE, LARGE_QUICK = 100_000_000, 800_000
ROUNDS = 3
MEMORY = "1g"
"""What a program's session has by default."""
RATE = 4.0  # M updates/s on two cores
TASK_MIB = 512
SHARD = "near_distinct"


def spark(quick: bool) -> list[Figure]:
    """Updates per second of the whole request: read, merge, write. Ours is then committed, and has to be accepted."""
    found, rate, plan_rate = _beside(QUICK if quick else FULL, 1 if quick else ROUNDS, quick)
    return [
        Figure("spark", rate, plan_rate, "M/s", "Spark's DataFrame plan, warm", at_least=10.0,
               settings=found.settings, note=found.note),
        Figure("spark rate", rate, RATE, "M/s", "what is aimed at", at_least=1.0, note=found.cpu_note),
        Figure("spark CPU", found.cpu_s, found.plan_cpu_s, "CPU s", "Spark's DataFrame plan", at_most=0.1),
        Figure("spark task memory", found.peak_mib, TASK_MIB, "MiB", "the limit", at_most=1.0, note=PEAK_NOTE),
    ]  # fmt: skip


def spark_100m(quick: bool) -> list[Figure]:
    """The same of 100 M updates, one round after a first one; memory and speed must be those of 16 M updates.

    Beside the plan alone that is the strongest at 16 M, as each takes minutes.
    """
    small, small_rate, _ = _beside(QUICK if quick else FULL, 1, quick, plans=())
    found, rate, plan_rate = _beside(LARGE_QUICK if quick else LARGE, 1, quick, plans=PLANS[-1:])
    name, than = f"{found.updates / 1e6:g} M", f"{small.updates / 1e6:g} M updates"
    return [
        Figure(f"spark, {name}", rate, plan_rate, "M/s", "Spark's DataFrame plan, warm", at_least=10.0,
               settings=found.settings, note=found.note),
        Figure(f"spark rate, {name}", rate, small_rate, "M/s", than, at_least=0.8, note=found.cpu_note),
        Figure(f"spark CPU, {name}", found.cpu_s, found.plan_cpu_s, "CPU s", "Spark's DataFrame plan", at_most=0.1),
        Figure(f"spark task memory, {name}", found.peak_mib, TASK_MIB, "MiB", "the limit", at_most=1.0, note=PEAK_NOTE),
        Figure("spark task memory is flat", found.peak_mib, small.peak_mib, "MiB", than, at_most=1.1),
    ]  # fmt: skip


PEAK_NOTE = "peak RSS of the largest Python worker"


@dataclass(frozen=True, slots=True)
class Found:
    """What one comparison found besides the two rates."""

    updates: int
    tasks: int
    requests: int
    rows: Sequence[int]
    usage: Usage
    settings: str
    plan_cpu_s: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of our last run."""
        return self.usage.workers_s + self.usage.jvm_s

    @property
    def peak_mib(self) -> float:
        """The most memory that one of the Python workers had."""
        return self.usage.peak_mib

    @property
    def note(self) -> str:
        """How it was run."""
        spread = max(self.rows) * len(self.rows) / max(1, sum(self.rows))
        return (
            f"{self.updates:,} updates, {self.requests} requests, {self.tasks} tasks, the largest {spread:.2f}x the "
            f"mean; ours: local[*], a JVM of {MEMORY}, serial GC, C1 only"
        )

    @property
    def cpu_note(self) -> str:
        """Where its CPU time went."""
        return f"CPU of a run: workers {self.usage.workers_s:.1f} s, JVM {self.usage.jvm_s:.1f} s"


def _beside(
    updates: int, rounds: int, quick: bool, *, plans: Sequence[str] | None = None
) -> tuple[Found, float, float]:  # fmt: skip
    """What was found, our rate and the peer's in M updates/s. By default the peer runs all of its plans first."""
    with TemporaryDirectory(prefix="persist-spark-") as folder, prepared(updates, Path(folder), quick) as ours:
        tasks = ours.tasks()
        plans = (PLANS[:2] if quick else PLANS) if plans is None else plans
        if not plans:
            seconds = [timed(lambda: ours.run(tasks)) for _ in range(rounds + 1)][1:]
            return ours.found(tasks), updates / statistics.median(seconds) / 1e6, 0.0
        with Peer("bench.spark_peer:dataframe_plan", folder, ours.since) as peer:
            plan_cpu: list[float] = []

            def theirs(plan: str) -> float:
                before = peer.ask("cpu")
                [seconds] = peer.run(call=plan)
                plan_cpu.append(peer.ask("cpu") - before)
                peer.run(call="count")
                counted.append(peer.answer)
                peer.run(call="clean")
                return seconds

            counted: list[int] = []
            theirs(plans[0])  # cold
            taken = {plan: theirs(plan) for plan in plans}
            strongest = min(taken, key=taken.__getitem__)
            if len(plans) == 1:
                ours.run(tasks)
                here, plan = timed(lambda: ours.run(tasks)), taken[strongest]
            else:
                here, plan = beside(lambda: timed(lambda: ours.run(tasks)), lambda: theirs(strongest), rounds)
            ours.commit()
            left = ours.machine.state.count
            # Several requests leave as many batches, and what is in two of them is added up by readers.
            if {left} != {*counted} if ours.requests == 1 else left < max(counted):
                raise SystemExit(f"the shard has {left} updates, Spark's own plans {counted}")
        said = ", ".join(f"{plan} {seconds:.1f} s" for plan, seconds in taken.items())
        settings = f"{peer.settings}; the strongest of its plans, {strongest!r} ({said})"
        return ours.found(tasks, settings, plan_cpu[-1]), updates / here / 1e6, updates / plan / 1e6


class Ours:
    """A shard in debt and a session. `run` carries out all requests, and `commit` commits what it made."""

    def __init__(
        self, machine: Machine, engine: SparkEngine, worker: WriterId, requests: Sequence[Request], since: int
    ) -> None:
        self.machine, self.since = machine, since
        self._engine, self._worker, self._requests = engine, worker, requests
        self._sizes: list[int] = []
        self._results: list[TaskResult] = []
        self._usage = Usage()

    @property
    def requests(self) -> int:
        """How many there are: more than one where a merge of all would need too much memory."""
        return len(self._requests)

    def tasks(self, count: int | None = None) -> list[MergeTask]:
        """The requests, each cut as a compaction cuts it, or into about so many tasks."""
        cut = _Cut(self._engine, count)
        found = [merge_tasks(self.machine, self._worker, request, cut) for request in self._requests]
        self._sizes = [len(tasks) for tasks in found]
        return [task for tasks in found for task in tasks]

    def run(self, tasks: Sequence[MergeTask]) -> float:
        """The seconds that the request takes."""
        before, began = used(), time.perf_counter()
        self._results = list(self._engine(tasks))
        seconds = time.perf_counter() - began
        self._usage = used() - before
        return seconds

    def found(self, tasks: Sequence[MergeTask], settings: str = "", plan_cpu_s: float = 0.0) -> Found:
        """What the last run used."""
        rows = [result.sums.count for result in self._results]
        updates = sum(request.count for request in self._requests)
        return Found(updates, len(tasks), self.requests, rows, self._usage, settings, plan_cpu_s)

    def commit(self) -> None:
        """Commit the last run, which has to be accepted."""
        results = iter(self._results)
        for request, size in zip(self._requests, self._sizes, strict=True):
            if commit(self.machine, self._worker, request, list(islice(results, size)))[0] is None:
                raise SystemExit("what was merged was not accepted")


class _Cut:
    """The engine, asked for a number of tasks of our choice."""

    def __init__(self, engine: SparkEngine, count: int | None) -> None:
        self._engine, self._count = engine, count

    def pieces(self, size: int, task_bytes: int) -> int:
        return self._engine.pieces(size, task_bytes) if self._count is None else self._count

    def __call__(self, tasks: Sequence[MergeTask]) -> Sequence[TaskResult]:
        return list(self._engine(tasks))


@contextmanager
def prepared(updates: int, folder: Path, quick: bool) -> Iterator[Ours]:
    """A shard of so many updates below `folder`, the same updates as plain Parquet, and a session."""
    config = persist.Config(task_bytes=256 * 1024) if quick else persist.Config()
    with persist.open(f"file:{folder}/data", config=config) as client:
        since = fill(client, updates, folder / "plain")
        session = build_session(SparkSettings(driver_memory=MEMORY))
        machine, engine = client.machine(SHARD), SparkEngine(client, lambda: session)
        requests = plan_compaction(machine.fetch().state).requests
        try:
            with client.worker(SHARD) as worker:
                yield Ours(machine, engine, worker.id, requests, since)
        finally:
            session.stop()


def fill(client: persist.Client, updates: int, plain: Path) -> int:
    """A shard in debt, and the same updates as plain Parquet, at most `SLICE` at a time; answers its since."""
    plain.mkdir(parents=True)
    random = np.random.default_rng(1)
    write, read = client.open_shard(SHARD, SCHEMA)
    with write, read:
        for number in range(RUNS):
            rows = updates // RUNS
            sizes = [min(SLICE, rows - start) for start in range(0, rows, SLICE)]
            table = pa.concat_tables([updates_of(random, size, updates, number) for size in sizes])
            write.compare_and_append(table, write.upper, 100 * number + 100, timeout=600)
            times = pa.array(table.column("_time").to_numpy().astype(np.int64))
            pq.write_table(table.set_column(3, "_time", times), plain / f"{number}.parquet")
        since = 100 * RUNS // 2
        read.downgrade_since(since)
    return since
