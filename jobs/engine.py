"""Engines: they run the tasks of compactions and scrubs on Spark, or in this process, depending on what the tasks read.

One Spark task carries out one of these tasks, without a shuffle, because the inputs are already sorted.
`spark.range(0, n, 1, n)` makes n tasks in local, standalone and Connect sessions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, functions

from jobs import tasks as t
from jobs.aside import Call
from jobs.cutting import pieces
from jobs.lost import lost
from jobs.progress import IDLE_S, Group, Looks, Progress, Told, has_executors, is_classic, no_executors
from jobs.reach import SparkUnreachable
from jobs.session import Sessions
from jobs.stop import Stop
from jobs.watch import Tells, silent
from jobs.words import ranges
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.core.cost import Cost
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.core.state import Part
from persist_lib.core.sums import Sums
from persist_lib.errors import Damage, InvalidUsage
from persist_lib.location.wrap.deadline import Stopped
from persist_lib.maintain import Engine, local_engine
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.maintain.scrub import Adder, SumTask, local_adder

EngineName = Literal["auto", "spark", "local"]


CONNECT = "the Connect server"
TASKS_AT_ONCE = 1024
"""The most tasks in one Spark job; the driver sends them all at once, some kB each."""

Task = TypeVar("Task")
Answer = TypeVar("Answer")


MOST_SLOTS = 1 << 20
SLOT_ROWS = 100_000
"""Rows of the table by which a Connect server is asked for its slots. No server cuts it further."""
SLOTS_S = 30.0
"""How long the Spark job for that may take, once there is an executor."""
START_S = 180.0
"""How long a session may take to start. Spark asks a master that does not register it for a minute."""
AGAIN_S = 60.0
"""How long the error of a start stands for later requests, before Spark is started again."""
ENDING_S = 2.0
"""How long a thread waits, after the stop, for its Spark job to end."""
CANCELLING_S = 10.0
"""How long to continue cancelling, after the stop: a job that was about to start may only be there a moment later."""


class Shuffled(NamedTuple):
    """A second step of a job, in so many tasks. Rows of `ddl` go to the task that their first column of `by` numbers.

    There they come in the order of `by`, and `work` makes rows of `tasks.ANSWER` of them.
    """

    tasks: int
    ddl: str
    by: tuple[str, ...]
    work: Any


class SparkEngine:
    """Runs the tasks of one request as one Spark job. All shards of an application share it, in several threads.

    Once `stop` is set, its jobs are cancelled, and its callers get Stopped within seconds, also while Spark starts.
    Parts that its tasks wrote and that were not committed are orphans.
    """

    def __init__(
        self,
        client: Client,
        sessions: Sessions,
        merge: t.Merge = run_task,
        *,
        stop: Stop | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        if client.url.startswith("memory:") or client.consensus_url.startswith("memory:"):
            raise InvalidUsage(f"{client.url} lives in this process only, so Spark cannot reach it; use engine='local'")
        self._client, self._url, self._consensus_url = client, client.url, client.consensus_url
        self._sessions = sessions
        self._merge = merge
        self._tag = f"persist-{client.runtime.entropy():016x}"
        self._lock = threading.Lock()
        self._starting: Call[SparkSession] | None = None
        self._try_again_at = float("inf")
        self._counting: Call[int] | None = None
        self._spark: SparkSession | None = None
        self._running = self._jobs = 0
        self._idle_s = idle_s
        self._handlers: dict[int, Told] = {}
        self.tasks_run = 0
        self.stop = stop or Stop()
        self.stop.on_set(self._cancel)

    def __call__(self, tasks: Sequence[MergeTask], tells: Tells = silent) -> Iterable[TaskResult]:
        """Yield the tasks' results, in the order of the tasks. Raises the first permanent error of a task.

        `tells` is called as tasks are done. More than TASKS_AT_ONCE tasks are several Spark jobs, one after the other.
        """
        says, many = f"{merging(tasks)} on Spark", "1 key range" if len(tasks) < 2 else f"{len(tasks):,} key ranges"
        for start in range(0, len(tasks), TASKS_AT_ONCE):
            some = tasks[start : start + TASKS_AT_ONCE]
            work = partial(t.run_all, encoded=t.encode_work(self._url, self._consensus_url, some), merge=self._merge)

            def told(done: int, _: int, start: int = start) -> None:
                tells(says, start + done, len(tasks))

            try:
                answers = self.answers(len(some), work, f"{some[0].shard}: {says}, {many}", told, ranges(some))
            except Exception as error:
                if (found := lost(error, some)) is not None:
                    raise found from error
                raise
            yield from t.results(answers, TaskResult)

    def pieces(self, size: int, task_bytes: int) -> int:
        """How many tasks a request is worth that reads `size` bytes. Starts Spark to find out how many run at once."""
        return pieces(size, task_bytes, self.slots())

    def slots(self) -> int:
        """How many tasks run at once. Waits for the first executor, and raises SparkUnreachable if none comes."""
        spark = self._session()
        with self._lock:
            if self._counting is None:
                self._counting = Call(partial(count_slots, spark, self._idle_s), "persist-spark-slots")
            counting = self._counting
        deadline = time.monotonic() + self._idle_s + SLOTS_S

        def look() -> None:
            if time.monotonic() > deadline:
                raise no_executors(CONNECT, self._idle_s)

        try:
            return counting.result(self.stop, look)
        except Stopped:
            raise
        except Exception:
            with self._lock:
                if self._counting is counting:
                    self._counting = None  # so that a later request tries it again
            raise

    def add_up(self, tasks: Sequence[SumTask], tells: Tells = silent) -> Iterator[Sums | Damage]:
        """Yield the sums or the damage that each task of a scrub found, in the order of the tasks."""
        says = f"{scrubbing(tasks)} on Spark" if tasks else ""
        for start in range(0, len(tasks), TASKS_AT_ONCE):
            some = tasks[start : start + TASKS_AT_ONCE]
            encoded, url, consensus_url = msgspec.msgpack.encode(some), self._url, self._consensus_url
            work = partial(t.add_up_all, encoded=encoded, url=url, consensus_url=consensus_url)

            def told(done: int, _: int, start: int = start) -> None:
                tells(says, start + done, len(tasks))

            for row in self.answers(len(some), work, f"{some[0].shard}: {says}", told):
                if row["error"] is None:
                    yield msgspec.msgpack.decode(row["result"], type=Sums)
                elif isinstance(error := t.raised(row["error"]), Damage):
                    yield error
                else:
                    raise error

    def answers(
        self, count: int, work: Any, says: str, tells: Callable[[int, int], object], details: str = "",
        shuffled: Shuffled | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Run `work`, which yields rows of `tasks.ANSWER`, as one Spark job; return the rows in the order of the tasks.

        If the job is `shuffled`, `work` yields rows for a second step instead.

        Starts Spark if it does not run. The client is charged for what the tasks asked of the location.

        Spark's pages say what the job does, and on the page of its stage the details.
        """
        spark = self._session()
        self.stop.check()
        with self._lock:
            self._jobs += 1
            looks: Looks = Told(self._handlers, spark, says)
            if is_classic(spark):
                looks = Group(spark, f"{self._tag}-{self._jobs}", says, details)
        total = count + (0 if shuffled is None else shuffled.tasks)
        tells(0, total)
        where = str(spark.sparkContext.master) if is_classic(spark) else CONNECT
        progress = Progress(looks, lambda done: tells(min(done, total), total), where, self._idle_s)
        job = Call(partial(self._run, spark, count, work, shuffled, looks), "persist-spark")
        try:
            answers = job.result(self.stop, progress, patience_s=ENDING_S)
        except SparkUnreachable:
            if isinstance(looks, Group):  # cancel the one job that is waited for no longer
                spark.sparkContext.cancelJobGroup(looks.name)
            raise
        tells(total, total)
        charge(self._client, answers)
        with self._lock:
            self.tasks_run += total
        return sorted(answers, key=lambda row: row["task"])

    def _run(
        self, spark: SparkSession, count: int, work: Any, shuffled: Shuffled | None, looks: Looks
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Run one Spark job, in a thread of its own: tags and groups belong to the thread."""
        with self._lock:
            self._running += 1
        try:
            _tag(spark, self._tag)
            looks.begin()
            self.stop.check()
            return fan_out(spark, count, work, t.ANSWER_DDL, shuffled)
        finally:
            self._handlers.pop(threading.get_ident(), None)
            with self._lock:
                self._running -= 1

    def cancel(self) -> None:
        """Stop: end the tasks of this engine, and refuse others."""
        self.stop.set()

    def _cancel(self) -> None:
        """Cancel the jobs that run, until none does."""
        deadline = time.monotonic() + CANCELLING_S
        while self._spark is not None and self._running and time.monotonic() < deadline:
            _interrupt(self._spark, self._tag)
            time.sleep(0.2)

    def _session(self) -> SparkSession:
        """The session. It is built by a daemon thread, so that a stop need not wait for it.

        Raises SparkUnreachable if it is not there after `START_S`. An error is raised again for `AGAIN_S`, so that many
        shards do not wait for the same refusal one after the other.
        """
        with self._lock:
            if self._starting is None or time.monotonic() > self._try_again_at:
                self._starting, self._try_again_at = Call(self._start, "persist-spark-start"), float("inf")
            starting = self._starting
        try:
            self._spark = starting.result(self.stop, partial(_check_start, starting.began))
        except Stopped:
            raise
        except Exception:
            with self._lock:
                self._try_again_at = min(self._try_again_at, time.monotonic() + AGAIN_S)
            raise
        return self._spark

    def _start(self) -> SparkSession:
        spark = self._sessions()
        if hasattr(spark, "registerProgressHandler"):
            with suppress(NotImplementedError, PySparkException):  # a classic session has the name, and refuses
                spark.registerProgressHandler(cast("Any", self._note))
        return spark

    def _note(self, stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:  # noqa: ARG002 - Spark passes them by name
        if (told := self._handlers.get(threading.get_ident())) is not None:
            told.note(stages, inflight_tasks)


def _check_start(began: float) -> None:
    if time.monotonic() - began > START_S:
        raise SparkUnreachable(
            f"Spark did not start within {START_S:g} s. Nothing was changed. Look at the log of the master or of the "
            "Connect server, or use engine=local",
            where="",
        )


def _tag(spark: Any, tag: str) -> None:
    """Tag the Spark jobs that this thread starts from now on."""
    if isinstance(spark, SparkSession):
        spark.sparkContext.addJobTag(tag)
        spark.sparkContext.setInterruptOnCancel(True)
    else:
        spark.addTag(tag)


def _interrupt(spark: Any, tag: str) -> None:
    """Stop the jobs with this tag, including those that other threads started.

    SUBTLE: a session's own interruptTag knows only the tags of the calling thread, except on Spark Connect.
    """
    if isinstance(spark, SparkSession):
        spark.sparkContext.cancelJobsWithTag(tag)
    else:
        spark.interruptTag(tag)


def fan_out(
    spark: SparkSession, count: int, work: Any, ddl: str, shuffled: Shuffled | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """Run `work` once for each of the indices 0 to count - 1, each in a task of its own, and collect its rows."""
    tasks = spark.range(0, count, 1, count)
    if shuffled is None:
        found = tasks.mapInArrow(work, ddl)
    else:
        sent = tasks.mapInArrow(work, shuffled.ddl).repartitionById(shuffled.tasks, functions.col(shuffled.by[0]))
        found = sent.sortWithinPartitions(*shuffled.by).mapInArrow(shuffled.work, ddl)
    rows: list[dict[str, Any]] = found.toArrow().to_pylist()
    return rows


def charge(client: Client, answers: Iterable[dict[str, Any]]) -> None:
    """Charge the tasks' requests to this client and to its current call, at the client's prices."""
    for row in answers:
        client.charge(msgspec.msgpack.decode(row["cost"], type=Cost).priced(client.prices))


def count_slots(spark: Any, idle_s: float) -> int:
    """How many tasks of this session run at once: its cores, or what Spark would cut a table into by itself.

    A cluster counts the executors that are there, so this waits for the first. Raises SparkUnreachable if none comes.
    """
    if not is_classic(spark):
        found = spark.range(0, SLOT_ROWS).select(functions.spark_partition_id().alias("p")).distinct().count()
        return max(1, int(found))
    context = spark.sparkContext
    deadline = time.monotonic() + idle_s
    while not has_executors(context):
        if time.monotonic() > deadline:
            raise no_executors(context.master, idle_s)
        time.sleep(0.1)
    return max(1, int(context.defaultParallelism))


def engine_for(
    client: Client, shard: str, name: EngineName, spark: SparkEngine | None, tells: Tells = silent
) -> Engine:
    """Return the engine for one shard. `tells` is called as tasks are done.

    `auto`: what a rule says of the shard; else Spark for a request that reads more than `spark_above_bytes` and is
    worth more than one task, and local for others.
    """
    here = told_here(local_engine(client.machine(shard)), tells, lambda tasks: f"{merging(tasks)} here")
    there, above = _chosen(client, shard, name, spark)
    return here if there is None else Fitting(here, there, tells, above)


def _chosen(
    client: Client, shard: str, name: EngineName, spark: SparkEngine | None
) -> tuple[SparkEngine | None, int | None]:
    """The engine that was named, or else the one of a rule, as far as there is a choice; None: this process.

    And above how many bytes it is used; None: always.
    """
    if name == "auto" and spark is not None and (said := client.rules_of(shard).get("engine")) is not None:
        name = cast("EngineName", said.value)
    if name == "local" or (name == "auto" and spark is None):
        return None, None
    if spark is None:
        raise InvalidUsage("engine='spark' needs a Spark session")
    return spark, None if name == "spark" else client.config.spark_above_bytes


class Fitting:
    """Runs each request where it is quicker: here, or on Spark. `above` is in bytes; None: always on Spark."""

    def __init__(self, here: Engine, spark: SparkEngine, tells: Tells, above: int | None) -> None:
        self._here, self._spark, self._tells, self._above = here, spark, tells, above

    def __call__(self, tasks: Sequence[MergeTask]) -> Iterable[TaskResult]:
        """Return the results of the tasks, in their order."""
        if self._is_for_spark(bytes_read(tasks), len(tasks)):
            return self._spark(tasks, self._tells)
        return self._here(tasks)

    def pieces(self, size: int, task_bytes: int) -> int:
        """How many tasks a request is worth."""
        # With as many slots as there can be: if that is one task, Spark is not asked how many it has.
        if not self._is_for_spark(size, pieces(size, task_bytes, MOST_SLOTS)):
            return pieces(size, task_bytes, 1)
        return self._spark.pieces(size, task_bytes)

    def _is_for_spark(self, size: int, tasks: int) -> bool:
        return self._above is None or (size > self._above and tasks > 1)


def told_here(
    here: Callable[[Sequence[Task]], Iterable[Answer]], tells: Tells, what: Callable[[Sequence[Task]], str]
) -> Callable[[Sequence[Task]], Iterator[Answer]]:
    """The same engine or adder of this process, which calls `tells` as tasks are done."""

    def run(tasks: Sequence[Task]) -> Iterator[Answer]:
        says = what(tasks) if tasks else ""
        tells(says, 0, len(tasks))
        for done, answer in enumerate(here(tasks), 1):
            tells(says, done, len(tasks))
            yield answer

    return run


def adder_for(client: Client, shard: str, name: EngineName, spark: SparkEngine | None, tells: Tells = silent) -> Adder:
    """Return the adder for one shard. `tells` is called as tasks are done.

    `auto`: what a rule says; else Spark if a scrub reads more than `spark_above_bytes` in more than one task, or local.
    """
    here = told_here(local_adder(client.machine(shard).blob), tells, lambda tasks: f"{scrubbing(tasks)} here")
    there, above = _chosen(client, shard, name, spark)

    def run(tasks: Sequence[SumTask]) -> Iterable[Sums | Damage]:
        is_here = there is None or (above is not None and (bytes_scrubbed(tasks) <= above or len(tasks) < 2))
        return here(tasks) if there is None or is_here else there.add_up(tasks, tells)

    return run


def merging(tasks: Sequence[MergeTask]) -> str:
    """What the tasks of one request do, in words."""
    updates = sum(part.rows for part in parts_read(tasks))
    return f"compacting {updates:,} updates, {bytes_read(tasks) / MIB:,.1f} MiB,"


def scrubbing(tasks: Sequence[SumTask]) -> str:
    """What the tasks of one scrub do, in words."""
    updates = sum(part.rows for task in tasks for part in task.parts.parts)
    return f"scrubbing {updates:,} updates, {bytes_scrubbed(tasks) / MIB:,.1f} MiB,"


def bytes_scrubbed(tasks: Sequence[SumTask]) -> int:
    """The bytes that the tasks of one scrub read. Each task refers to its own parts."""
    return sum(part.size for task in tasks for part in task.parts.parts)


def bytes_read(tasks: Sequence[MergeTask]) -> int:
    """The bytes of the parts that the tasks read."""
    return sum(part.size for part in parts_read(tasks))


def parts_read(tasks: Sequence[MergeTask]) -> Iterable[Part]:
    """The parts that the tasks read, each once: a part that lies across key ranges is an input of several tasks."""
    return {(part.key, part.inline): part for task in tasks for run in task.inputs for part in run.parts}.values()
