"""The runtime: clock, sleep, randomness and background work, as one value that tests and simulations replace.

Nothing here reads the environment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from persist_lib.arguments import check_callable, check_type, parse_flag
from persist_lib.errors import TimedOut
from persist_lib.runtime.threads import Threads

T = TypeVar("T")


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything ambient that client code uses. Tests and simulations replace it."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: random.Random = field(default_factory=random.SystemRandom)
    background: bool = True
    """Whether leases are kept up in the background; a simulation calls `client.heartbeat()` itself."""
    clock_ms: Callable[[], int] = _clock_ms
    """Now, in milliseconds since 1970. A clock's next time and "1 hour ago" come from it; it deletes nothing."""

    def __post_init__(self) -> None:
        check_callable(self.monotonic, "monotonic", "nothing")
        check_callable(self.sleep, "sleep", "seconds")
        check_type(self.random, random.Random, "random", "random.Random(7)")
        parse_flag(self.background, "background")
        check_callable(self.clock_ms, "clock_ms", "nothing")

    def entropy(self) -> int:
        """Return 64 random bits, of which ids are made."""
        return self.random.getrandbits(64)

    def token(self) -> bytes:
        """Return 16 random bytes. A writer uses them to recognise its own transition in the log."""
        return self.random.getrandbits(128).to_bytes(16, "big")

    def pool(self, threads: int, name: str) -> Executor:
        """Return an executor with at most `threads` threads. Without background work, `submit` runs the task itself.

        A task runs with the deadline of the thread that submitted it. Its requests to locations are counted as requests
        of that thread.
        """
        return Threads(threads, thread_name_prefix=name) if self.background else _AtOnce()

    def deadline(self, timeout_s: float) -> Deadline:
        """Return the deadline of a call that starts now and may take `timeout_s` seconds."""
        return Deadline(self, timeout_s, self.monotonic() + timeout_s)


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
    """The moment at which a call gives up: `ends`, on the monotonic clock of `runtime`, in seconds."""

    runtime: Runtime
    timeout_s: float
    ends: float

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.ends - self.runtime.monotonic())

    def left_s(self) -> float:
        """Seconds left, as the timeout of a call: at least a millisecond, as calls take no less."""
        return max(0.001, self.remaining_s())

    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.runtime.monotonic() >= self.ends

    def gave_up(self, what: str, why: str, **fields: object) -> TimedOut:
        """The error for a call that certainly changed nothing until then."""
        return TimedOut(
            f"{what}: gave up after {self.timeout_s:g} s, {why}; this call changed nothing. "
            "Try again, or with a longer timeout",
            timeout_s=self.timeout_s, **fields,
        )  # fmt: skip

    def pause(self, seconds: float, jitter: float = 0.5) -> None:
        """Sleep for `seconds`, shortened or lengthened by up to the share `jitter`, but not beyond the deadline."""
        self.runtime.sleep(min(self.remaining_s(), seconds * self.runtime.random.uniform(1 - jitter, 1 + jitter)))


class Backoff:
    """The pauses between the attempts of one call: `first_s`, then each `growth` times the last, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float, growth: float = 2.0) -> None:
        self._first_s, self._longest_s, self._growth = first_s, longest_s, growth
        self.reset()

    def reset(self) -> None:
        """Begin with the first pause again, as an attempt has succeeded."""
        self.pause_s = min(self._first_s, self._longest_s)
        """The next pause, in seconds."""

    def take(self) -> float:
        """The next pause, in seconds. The one after it is longer."""
        taken, self.pause_s = self.pause_s, min(self._longest_s, self.pause_s * self._growth)
        return taken
