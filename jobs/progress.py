"""How far a Spark job has come, on classic sessions and on Connect, and whether it has anything to run on.

Each job has a group of its own (classic), or is watched by the thread that waits for it (Connect).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession

from jobs.reach import SparkUnreachable

LOOK_S = 1.0
"""The time between two looks at a job."""
IDLE_S = 60.0
"""How long to wait for an executor. Spark itself waits for ever."""


def is_classic(spark: Any) -> bool:
    """Whether the session has a JVM in reach."""
    return isinstance(spark, SparkSession)


class Group:
    """A job of a classic session, by its job group.

    `begin` is called by the thread that runs the job, before it does. `look` is called by the thread that waits: how
    many of the tasks are done, and whether any runs or has run.
    """

    def __init__(self, spark: SparkSession, group: str, says: str, details: str = "") -> None:
        self.name = group
        self._context, self._says, self._details = spark.sparkContext, says, details

    def begin(self) -> None:
        self._context.setJobGroup(self.name, self._says, interruptOnCancel=True)
        if self._details:
            # What the page of a stage shows below "details": elsewhere the stack of the call.
            self._context.setLocalProperty("callSite.long", self._details)

    def look(self) -> tuple[int, bool]:
        tracker = self._context.statusTracker()
        done = 0
        is_moving = False
        for job in tracker.getJobIdsForGroup(self.name):
            for stage in getattr(tracker.getJobInfo(job), "stageIds", ()):
                if (info := tracker.getStageInfo(stage)) is not None:
                    done += info.numCompletedTasks
                    is_moving = is_moving or bool(info.numActiveTasks)
        return done, is_moving or bool(done) or has_executors(self._context)


def has_executors(context: Any) -> bool:
    """Whether a classic session has executors: in local mode the driver is one."""
    if context.master.startswith("local"):
        return True
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) > 1  # there is no public name


class Told:
    """A job of a Connect session. The server tells the thread that waits for it how far it is."""

    def __init__(self, handlers: dict[int, Told], spark: Any = None, says: str = "") -> None:
        self._handlers, self._spark, self._says = handlers, spark, says
        self._done = 0
        self._is_moving = False

    def begin(self) -> None:
        self._handlers[threading.get_ident()] = self
        if self._says and self._spark is not None:
            # The server's pages show the tags of an operation. Those of a thread end with it. A comma separates tags.
            self._spark.addTag(self._says.replace(",", ""))

    def note(self, stages: Any, inflight_tasks: int) -> None:
        """Called by that thread."""
        self._done = sum(stage.num_completed_tasks for stage in stages)
        self._is_moving = bool(inflight_tasks or self._done)

    def look(self) -> tuple[int, bool]:
        return self._done, self._is_moving


Looks = Group | Told


class Progress:
    """Looks at a job each second. Raises SparkUnreachable when for `idle_s` seconds there is nothing to run it on."""

    def __init__(self, looks: Looks, tells: Callable[[int], object], where: str, idle_s: float = IDLE_S) -> None:
        self._looks, self._tells, self._where, self._idle_s = looks, tells, where, idle_s
        self._looked = self._moved = time.monotonic()
        self._done = 0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        done, is_moving = self._looks.look()
        if done != self._done:
            self._done = done
            self._tells(done)
        if is_moving:
            self._moved = now
        elif now - self._moved > self._idle_s:
            raise no_executors(self._where, self._idle_s)


def no_executors(where: str, waited_s: float) -> SparkUnreachable:
    """The error for a Spark that has nothing to run tasks on."""
    return SparkUnreachable(
        f"Spark at {where} gave this application no executor within {waited_s:g} s. Its workers are gone, or other "
        "applications have all their cores or memory. Nothing was changed. Look at the page of the master for free "
        "workers, lower spark.executor.memory or spark.cores.max, or use engine=local",
        where=where,
    )
