"""Threads, locks and waiting that stay consistent when Ctrl-C interrupts them.

CPython raises KeyboardInterrupt in the main thread only, but there after almost any call: also in `finally`, at the
start of an `__exit__`, and between taking a lock and noting that it is taken. So these rules hold here and wherever
locks are used:

- `with lock:` is safe for a lock that is written in C: one instruction takes it and one gives it back. It is not safe
  for one that is written in Python, such as `threading.Condition`, or for a context manager that takes a lock.
- Code that waits for a lock with a timeout uses `taking`: the instruction that takes the lock also notes it. The first
  call of a `finally` gives it back.
- No thread waits for a condition inside a `with` that releases its lock and takes it again. A waiting thread holds no
  lock (`Bell`), and looks again after a slice of time, because an interrupt may have swallowed the ring.
- What an interrupt could leave half done, such as starting a thread, is done by another thread (`aside`).
"""

from __future__ import annotations

import _thread
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from operator import attrgetter, methodcaller
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from persist_lib.runtime.forks import Stage, enrol


class Resource(Protocol):
    """An object that is open until `close`, and that a `with` block closes at its end.

    An error of the block is raised as it is, also if `close` fails after it: what the failure says is added as a note.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what is held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing failed as well: {type(failure).__name__}: {failure}")


T = TypeVar("T")
SLICE_S = 0.1
"""The longest that a thread waits before it looks again. A ring that an interrupt swallowed is noticed this late."""
ASIDE = "persist-aside"
LINGER_S = 5.0
"""How long an idle thread of `aside` waits for another task before it ends."""


class Lock(Protocol):
    """What `threading.Lock` and `threading.RLock` make."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take the lock, waiting at most `timeout` seconds (-1: no limit). Returns whether it was taken."""

    def release(self) -> None: ...


def taking(lock: Lock, seconds: float = -1) -> Iterator[Lock]:
    """Take `lock` and yield it, or yield nothing if it could not be taken within `seconds` (-1: no limit).

        held: list[Lock] = []
        try:
            held += taking(lock, 1.5)
            ...
        finally:
            if held:
                lock.release()

    SUBTLE: written like this, one instruction (`+=`) takes the lock and puts it into the list. No call comes between
    the end of the block and `release`. An interrupt is raised before or after them, and never in between.
    """
    return filter(methodcaller("acquire", True, min(seconds, threading.TIMEOUT_MAX)), (lock,))


def giving_back(held: Iterable[Lock]) -> Callable[[], object]:
    """Return a function that releases all locks that `held` has when it is called, in one call of C. Call it once."""
    return partial(any, map(methodcaller("release"), held))


def aside(call: Callable[[], T]) -> T:
    """Run `call` in a thread that gets no interrupts, and return its result or raise its error.

    When an interrupt ends the wait, the call continues in that thread and ends by itself.
    """
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
    """One call of `aside`."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.has_begun = False
        self.answers: SimpleQueue[tuple[list[object], BaseException | None]] = SimpleQueue()

    def carry_out(self) -> None:
        self.has_begun = True
        try:
            answer: tuple[list[object], BaseException | None] = [self._call()], None
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            answer = [], error
        self.answers.put(answer)


class _Aside:
    """The queue of tasks, and one entry of `idle` for each thread that waits for tasks.

    A second thread is only needed when the first is still at work on a task whose caller was interrupted.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Begin with an empty queue and no threads: the child has none of the parent's."""
        self.tasks: SimpleQueue[_Task] = SimpleQueue()
        self.idle: deque[None] = deque()


_aside = _Aside()
enrol(_aside, Stage.THREADS)


def _start_thread() -> None:
    # `start` waits on a condition, which an interrupt would leave held. This thread gets no interrupts.
    try:
        threading.Thread(target=_serve, name=ASIDE, daemon=True).start()
    except (RuntimeError, MemoryError):  # no room for one more thread: this one carries out the task
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
    """Wakes the threads that wait for a change of the state that `lock` guards."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: deque[Any] = deque()

    def ring(self) -> None:
        """Wake all waiting threads, so that they look again. May be called with or without holding the lock."""
        while self._waiting:
            try:
                place = self._waiting.popleft()
            except IndexError:  # another thread rings too
                return
            place.release()

    def wait(self, is_there: Callable[[], bool], seconds: float, slice_s: float = SLICE_S) -> bool:
        """Wait until `is_there`, which is called under the lock, for at most `seconds`. Returns its last answer.

        May return False early, after `slice_s`, so that the caller can make sure that another thread is at work.
        """
        place = _thread.allocate_lock()
        place.acquire()
        with self._lock:
            if is_there():
                return True
            self._waiting.append(place)
        place.acquire(True, max(0.0, min(seconds, slice_s)))
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
            return is_there()


class Flag:
    """A flag that one thread waits for. One call of C raises it, so an interrupt cannot leave it half raised.

    The thread that waits must be one that gets no interrupts, so never the main one: between two calls of
    `wait` the flag is taken down and raised again. Others wait for a `Bell`.
    """

    def __init__(self) -> None:
        self._raised: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._raised.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; returns whether the flag is raised."""
        try:
            self._raised.get(timeout=seconds)
        except Empty:
            return False
        self._raised.put(None)
        return True


class Condition(threading.Condition):
    """A `threading.Condition` over a non-reentrant lock. One call of C enters it, and one leaves it."""

    # What `with` calls is looked up on the class, as a descriptor: here the lock's own methods.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
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
    """A future whose result a thread can still set after an interrupt hit another thread that looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


_ends = SimpleQueue[None]()
# Pools also wait for their threads in such hooks, while the main thread still counts as alive. Hooks run last
# in, first out, and theirs was added when `concurrent.futures.thread` was imported above. There is no public name.
threading._register_atexit(_ends.put, None)  # type: ignore[attr-defined]


def is_ending() -> bool:
    """Whether the interpreter is about to end: the main program is over, and the interpreter waits for threads."""
    return not _ends.empty() or not threading.main_thread().is_alive()


class Threads(ThreadPoolExecutor):
    """A pool whose tasks run in the context of the submitting thread: with its deadline and its spending counters."""

    _is_used = False

    @property
    def width(self) -> int:
        """The most threads that it has."""
        return self._max_workers

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        future: Future[T] = Future()
        # One copy per task, as two threads cannot enter the same context at once.
        call = partial(copy_context().run, fn, *args, **kwargs)

        def begin() -> None:
            inner = super(Threads, self).submit(_settle, future, call)
            inner.add_done_callback(lambda inner: inner.cancelled() and future.cancel())

        self._is_used = True
        aside(begin)
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        values = [list(iterable) for iterable in iterables]
        self._is_used = True
        return aside(partial(super().map, fn, *values, timeout=timeout, chunksize=chunksize))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        end = partial(super().shutdown, wait, cancel_futures=cancel_futures)
        # Without a thread that was started there is nothing to wait for, and so nothing that an interrupt could hurt.
        aside(end) if self._is_used else end()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised by `result`
        future.set_exception(error)
    else:
        future.set_result(result)
