"""Settings (a dozen numbers with units and reasons) and the runtime (everything ambient).

Components such as stores, clocks and random numbers are arguments, never settings. Nothing here reads the environment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

KIB = 1024
MIB = 1024 * KIB


class CacheConfig(BaseModel):
    """A cache of what is read: parts and rollups, in chunks of up to 8 MiB. It holds no more than these many bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = None
    """A directory on a local disk, which several processes and locations may share. None: in memory only."""
    disk_bytes: int = Field(1024 * MIB, ge=0)
    """All files together, whichever process or location they are from. What is more than half of it is not kept."""
    memory_bytes: int = Field(64 * MIB, ge=0)
    """In each client. Found there, a chunk is not even read from disk."""


class Config(BaseModel):
    """Settings of a client. Sizes in bytes, durations as the name says. Values out of bounds are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inline_bytes: int = Field(16 * KIB, ge=0, le=256 * KIB)
    """A batch at most this large is stored in the state itself: one compare-and-set, no object."""
    part_bytes: int = Field(128 * MIB, ge=64 * KIB, le=1024 * MIB)
    """About the size of one object. Larger costs memory per task, smaller costs requests."""
    lease_ms: int = Field(15 * 60_000, ge=100)
    """How long a reader or writer lives without a heartbeat. Longer delays collection after a crash."""
    rollup_every: int = Field(128, ge=1)
    """Transitions between rollups: the most that opening a shard has to replay."""
    timeout_s: float = Field(60.0, gt=0)
    """What a call may take unless it says otherwise."""
    poll_s: float = Field(0.01, gt=0)
    """How often a listener looks for news at first; it backs off to twice that when nothing comes."""
    buffer_bytes: int = Field(64 * MIB, ge=64 * KIB)
    """What a writer accepts by `append_async` while an append is outstanding: memory, and the most that is committed at
    once."""
    merge_bytes: int = Field(256 * MIB, ge=1 * MIB)
    """Memory for buffered windows of a merge."""
    read_threads: int = Field(4, ge=1, le=64)
    """Objects fetched in parallel."""
    spark_above_bytes: int = Field(64 * MIB, ge=0)
    """Compactions that read more than this go to Spark when the engine is `auto`."""
    task_bytes: int = Field(128 * MIB, ge=64 * KIB)
    """Input of one merge task."""
    cache: CacheConfig | None = None
    """Keep what snapshots and listeners read. None: they ask the store each time."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything ambient that client code uses. Tests and simulations replace it."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: random.Random = field(default_factory=random.SystemRandom)
    background: bool = True
    """Whether leases are kept up in the background; a simulation calls `client.heartbeat()` itself."""

    def entropy(self) -> int:
        """64 random bits."""
        return self.random.getrandbits(64)

    def token(self) -> bytes:
        """128 random bits, by which a transition is recognised in the log."""
        return self.random.getrandbits(128).to_bytes(16, "big")

    def pool(self, threads: int, name: str) -> Executor:
        """Threads for what may happen at the same time; without background work, whoever submits does it at once.

        They know the deadline of whoever submits, and what they ask of locations is counted as asked by that one.
        """
        return Threads(threads, thread_name_prefix=name) if self.background else _AtOnce()

    def deadline(self, timeout_s: float) -> Deadline:
        """The moment at which a call that starts now has to give up."""
        return Deadline(self, timeout_s, self.monotonic() + timeout_s)


class Threads(ThreadPoolExecutor):
    """A pool whose threads work in the context of whoever submits: its deadline, and what counts its spending."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As any pool does."""
        # SUBTLE: a copy for each, as a context cannot be entered by two threads at once.
        return super().submit(partial(copy_context().run, fn, *args, **kwargs))


class _AtOnce(Executor):
    """No threads: in a simulation only the scheduler decides what happens when."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by `result`, as from a thread
            done.set_exception(error)
        return done


class Deadline(msgspec.Struct, frozen=True):
    """When a call gives up."""

    runtime: Runtime
    timeout_s: float
    ends: float

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.ends - self.runtime.monotonic())

    def has_passed(self) -> bool:
        """Whether nothing is left."""
        return self.runtime.monotonic() >= self.ends

    def pause(self, seconds: float, jitter: float = 0.5) -> None:
        """Sleep for `seconds`, give or take that part of them, but not beyond the deadline."""
        self.runtime.sleep(min(self.remaining_s(), seconds * self.runtime.random.uniform(1 - jitter, 1 + jitter)))
