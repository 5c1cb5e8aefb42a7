"""Renewal after a fork: one registry of all objects that a forked child cannot share with its parent.

The child has one thread. A lock that another thread held during the fork stays held in the child for ever, the other
threads do not exist there, and open connections belong to the parent. So the registry calls each object that has locks,
threads or connections at every fork:

- `before_fork`, if the object has it: end what is under way, and begin nothing more. Stages go from the top down.
- `after_fork_in_parent`, if the object has `before_fork`: continue. Stages go from the bottom up.
- `after_fork_in_child`: replace what belongs to the parent. Stages go from the bottom up, so that what an object
  depends on is renewed before it.

The registry holds weak references, so it keeps no object alive. Python calls it for forks by `os.fork` and
multiprocessing. It does not learn of forks by native code.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

T = TypeVar("T")


class Stage(IntEnum):
    """Which objects depend on which, from the bottom up. Within a stage, objects are in the order of enrolling."""

    THREADS = 0
    COUNTS = 1
    STORES = 2
    SHARDS = 3
    HANDLES = 4


class Renewed(Protocol):
    """An object that is renewed in a forked child."""

    def after_fork_in_child(self) -> None:
        """Replace locks, threads and connections of the parent. Only the calling thread exists in the child."""


@runtime_checkable
class Paused(Renewed, Protocol):
    """An object that must not be in use while the process forks."""

    def before_fork(self) -> None:
        """End what is under way, and begin nothing more."""

    def after_fork_in_parent(self) -> None:
        """Resume what `before_fork` stopped."""


_lock = threading.RLock()
"""Held during each fork. An object that another thread makes during a fork can enrol, and so begin, only after it."""
_numbers = itertools.count()
_enrolled: dict[int, tuple[Stage, Callable[[], Renewed | None]]] = {}
_forking: list[Renewed] = []
_paused: list[Paused] = []


@overload
def enrol(renewed: Renewed, stage: Stage) -> None: ...
@overload
def enrol(renewed: T, stage: Stage, renew: Callable[[T], None]) -> None: ...
def enrol(renewed: Any, stage: Stage, renew: Callable[[Any], None] | None = None) -> None:
    """Call `renewed` at each fork from now on, while it is referenced elsewhere. Enrol an object before its use.

    What callers have, and so shows no `after_fork_in_child`, gives a function that renews it.
    """
    with _lock:
        number = next(_numbers)
        ref = weakref.ref(renewed, lambda _: _enrolled.pop(number, None))
        of = ref if renew is None else lambda: None if (one := ref()) is None else _Renewing(partial(renew, one))
        _enrolled[number] = stage, of


class _Renewing(NamedTuple):
    """An object that another function renews."""

    after_fork_in_child: Callable[[], None]


def _in_order() -> list[Renewed]:
    # A copy, made by one call of C, as objects may be collected and leave the registry at any moment.
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
        # An object that an interrupt kept from being paused is left alone: its process id says that it is inherited.
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
    """Call `tell` for each object, the last one first. Raises the first failure at the end, and Python reports it."""
    failure: BaseException | None = None
    while pending:
        try:
            tell(pending.pop())
        except BaseException as error:  # noqa: BLE001 - a failure must not keep the others from being renewed
            failure = failure or error
    if failure is not None:
        raise failure


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)  # noqa: TID251 - the one place
