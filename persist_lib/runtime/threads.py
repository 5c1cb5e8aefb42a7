"""Threads, turns and waiting that Ctrl-C leaves in order.

CPython raises KeyboardInterrupt in the main thread only, but there after almost any call: also in `finally`, at the
start of an `__exit__`, and between taking a lock and noting that it is taken. What follows from that, here and wherever
locks are used:

- `with lock:` on a lock of C is whole: taken and given back by one instruction each. One that is written in Python, as
  `threading.Condition` is, or a context manager that does it, is not.
- A lock that is waited for within a time is noted by the instruction that takes it (`taking`), and is given back by the
  first call of a `finally`.
- Nobody waits for a condition with its lock released and taken again behind a `with`. Who waits holds nothing (`Bell`),
  and looks again after a slice of time, as an interrupt may have swallowed the ring.
- What cannot be made whole, as starting a thread cannot, is done by another thread (`aside`).
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from operator import attrgetter, methodcaller
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from persist_lib.runtime.forks import Stage, enrol

T = TypeVar("T")
SLICE_S = 0.1
"""How long at a time somebody waits without looking. What an interrupt swallowed is late by so much."""
ASIDE = "persist-aside"
LINGER_S = 5.0
"""How long a thread waits for more to be done aside."""


class Lock(Protocol):
    """What `threading.Lock` and `threading.RLock` make."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it, within a time."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


def taking(lock: Lock, seconds: float = -1) -> Iterator[Lock]:
    """The lock, taken by whoever asks for it; nothing when it could not be had within so many seconds (-1: no limit).

        held: list[Lock] = []
        try:
            held += taking(lock, 1.5)
            ...
        finally:
            if held:
                lock.release()

    SUBTLE: written like this the lock is taken and is in the list by one instruction, `+=`, and no call comes between
    the end of the block and `release`. An interrupt is raised before or after, and never in between.
    """
    return filter(methodcaller("acquire", True, min(seconds, threading.TIMEOUT_MAX)), (lock,))


def giving_back(held: Iterable[Lock]) -> Callable[[], object]:
    """Gives back all locks in the list as it is when it is called; by one call, so that it is done whole. Only once."""
    return partial(any, map(methodcaller("release"), held))


def aside(call: Callable[[], T]) -> T:
    """`call`, by a thread to which no interrupt comes. After an interrupt it goes on there, and ends by itself."""
    if threading.get_ident() != threading.main_thread().ident:
        return call()
    task = _Task(partial(copy_context().run, call))
    _aside.tasks.put(task)
    while True:
        if not (_aside.idle or task.has_begun):
            _thread.start_new_thread(_start_thread, ())
        try:
            results, error = task.answers.get(timeout=SLICE_S)
        except Empty:
            continue
        if error is not None:
            raise error
        return cast("T", results[0])


class _Task:
    """What is done aside."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.has_begun = False
        self.answers: SimpleQueue[tuple[list[object], BaseException | None]] = SimpleQueue()

    def carry_out(self) -> None:
        self.has_begun = True
        try:
            answer: tuple[list[object], BaseException | None] = [self._call()], None
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            answer = [], error
        self.answers.put(answer)


class _Aside:
    """What waits to be done aside, and one entry of `idle` for each thread that waits for tasks.

    A second thread is only needed when an interrupt left one at work.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """None of the threads is here."""
        self.tasks: SimpleQueue[_Task] = SimpleQueue()
        self.idle: deque[None] = deque()


_aside = _Aside()
enrol(_aside, Stage.THREADS)


def _start_thread() -> None:
    # SUBTLE: `start` waits for the new thread with a condition, which an interrupt would leave taken. Here none comes.
    try:
        threading.Thread(target=_serve, name=ASIDE, daemon=True).start()
    except (RuntimeError, MemoryError):  # no room for one more thread: then this one does it, which is there already
        with suppress(Empty):
            _aside.tasks.get_nowait().carry_out()


def _serve() -> None:
    while True:
        _aside.idle.append(None)
        try:
            task = _aside.tasks.get(timeout=LINGER_S)
        except Empty:
            return
        finally:
            _aside.idle.pop()
        task.carry_out()
        del task


class Bell:
    """Wakes those who wait for what `lock` guards to change."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: deque[Any] = deque()

    def ring(self) -> None:
        """Let all look again. May be called with the lock or without."""
        while self._waiting:
            try:
                place = self._waiting.popleft()
            except IndexError:  # another thread rings too
                return
            place.release()

    def wait(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Wait until `is_there`, which is asked under the lock; at most for so long, and answers whether it is.

        It may answer no early: after a slice of time, so that whoever waits can see to it that somebody is at work.
        """
        place = _thread.allocate_lock()
        place.acquire()
        with self._lock:
            if is_there():
                return True
            self._waiting.append(place)
        place.acquire(True, max(0.0, min(seconds, SLICE_S)))
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
            return is_there()


class Flag:
    """Raised for one thread that waits for it. To raise it is one call of C."""

    def __init__(self) -> None:
        self._raised: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Raise it."""
        self._raised.put(None)

    def wait(self, seconds: float) -> bool:
        """Whether it is raised within so many seconds."""
        try:
            self._raised.get(timeout=seconds)
        except Empty:
            return False
        self._raised.put(None)
        return True


class Condition(threading.Condition):
    """As `threading.Condition` of a lock that its owner takes once, entered and left by one call of C each."""

    # SUBTLE: what `with` calls is looked up on the class, as a descriptor: here the lock's own methods.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait` does."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)  # type: ignore[attr-defined]
        try:
            self._lock.release()  # type: ignore[attr-defined]
            seconds = -1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            is_told = waiter.acquire(True, seconds)
        finally:
            self._lock.acquire()  # type: ignore[attr-defined]
        if not is_told and waiter in self._waiters:  # type: ignore[attr-defined]
            self._waiters.remove(waiter)  # type: ignore[attr-defined]
        return is_told


class Future(futures.Future[T]):
    """A future whose result a thread can set, whatever interrupted somebody who looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


_ends = SimpleQueue[None]()
# SUBTLE: pools wait for their threads by such hooks as well, while the main thread still counts as alive. Hooks run
# last in, first out, and theirs came in when `concurrent.futures.thread` was imported, above. There is no public name.
threading._register_atexit(_ends.put, None)  # type: ignore[attr-defined]  # noqa: SLF001


def is_ending() -> bool:
    """Whether the interpreter is about to end: the main program is over, and threads are waited for."""
    return not _ends.empty() or not threading.main_thread().is_alive()


class Threads(ThreadPoolExecutor):
    """A pool whose threads work in the context of whoever submits: its deadline, and what counts its spending."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        """As any pool does."""
        future: Future[T] = Future()
        # SUBTLE: a copy for each, as a context cannot be entered by two threads at once.
        call = partial(copy_context().run, fn, *args, **kwargs)

        def begin() -> None:
            inner = super(Threads, self).submit(_settle, future, call)
            inner.add_done_callback(lambda inner: inner.cancelled() and future.cancel())

        aside(begin)
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """As any pool does."""
        values = [list(iterable) for iterable in iterables]
        return aside(partial(super().map, fn, *values, timeout=timeout, chunksize=chunksize))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As any pool does."""
        aside(partial(super().shutdown, wait, cancel_futures=cancel_futures))


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised by `result`
        future.set_exception(error)
    else:
        future.set_result(result)
