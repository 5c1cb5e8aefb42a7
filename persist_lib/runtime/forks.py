"""What a fork renews: one registry, in which whatever a forked child cannot share with its parent enrols.

The child has one thread. A lock that another thread held during the fork is held in the child for ever, the threads
that would ring or serve are not there, and open connections are the parent's. So an object with locks, threads or
connections is told of each fork:

- `before_fork`, if it has one: end what is under way, and begin nothing more. The stages go from the top down.
- `after_fork_in_parent`, if it has a `before_fork`: go on. From the bottom up.
- `after_fork_in_child`: make new what is the parent's. From the bottom up: what an object stands on is renewed first.

The registry keeps nobody alive. It is told of forks by Python (`os.fork`, multiprocessing), and not of those by native
code.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


class Stage(IntEnum):
    """What stands on what, from the bottom up. Within a stage the order is that of enrolling."""

    THREADS = 0
    COUNTS = 1
    STORES = 2
    SHARDS = 3
    HANDLES = 4


class Renewed(Protocol):
    """What a forked child begins anew with."""

    def after_fork_in_child(self) -> None:
        """Take nothing for granted that another thread held. Only this thread is there."""
        ...


@runtime_checkable
class Paused(Renewed, Protocol):
    """What must not be in use while the process forks."""

    def before_fork(self) -> None:
        """End what is under way, and begin nothing more."""
        ...

    def after_fork_in_parent(self) -> None:
        """Go on."""
        ...


_lock = threading.RLock()
"""Held from before a fork until after it: what is made meanwhile by another thread enrols, and so begins, after it."""
_numbers = itertools.count()
_enrolled: dict[int, tuple[Stage, weakref.ref[Renewed]]] = {}
_forking: list[Renewed] = []
_paused: list[Paused] = []


def enrol(renewed: Renewed, stage: Stage) -> None:
    """Tell an object of each fork from now on, as long as somebody keeps it. Enrol it before it is used."""
    with _lock:
        number = next(_numbers)
        _enrolled[number] = stage, weakref.ref(renewed, lambda _: _enrolled.pop(number, None))


def _in_order() -> list[Renewed]:
    # SUBTLE: a copy, made by one call of C: objects may go, and leave the registry, at any moment.
    found = sorted(_enrolled.copy().items(), key=lambda item: (item[1][0], item[0]))
    return [renewed for _, (_, of) in found if (renewed := of()) is not None]


def _before() -> None:
    _lock.acquire()
    _forking[:] = _in_order()
    _tell([one for one in _forking if isinstance(one, Paused)], _pause)


def _pause(one: Paused) -> None:
    _paused.append(one)
    one.before_fork()


def _in_parent() -> None:
    try:
        _tell(_paused, lambda one: one.after_fork_in_parent())
    finally:
        _end()


def _in_child() -> None:
    try:
        # What an interrupt kept from being paused is left as it is: it knows by its process id that it is inherited.
        paused = {id(one) for one in _paused}
        renewed = [one for one in reversed(_forking) if id(one) in paused or not isinstance(one, Paused)]
        _tell(renewed, lambda one: one.after_fork_in_child())
    finally:
        _end()


def _end() -> None:
    _forking.clear()
    _paused.clear()
    _lock.release()


def _tell(pending: list[T], tell: Callable[[T], None]) -> None:
    """Tell each of them, the last one first. The first failure is raised at the end, and Python reports it."""
    failure: BaseException | None = None
    while pending:
        try:
            tell(pending.pop())
        except BaseException as error:  # noqa: BLE001 - one that fails keeps none of the others from being renewed
            failure = failure or error
    if failure is not None:
        raise failure


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)  # noqa: TID251 - the one place
