"""Listening to a table while it is promoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from persist_lib.errors import MemberOf
from persist_lib.frontier import MAX_TIME
from persist_lib.relation.listen import Event, Listener

T = TypeVar("T")


class Continuing(Listener):
    """A listener of a table, and then of what it was promoted to. Each update comes once.

    `listen` listens to the table after a time, on what carries it by then. History from there on is kept: by the lease
    of the first listener, and by the hold that the collection has for such readers.
    """

    def __init__(self, first: Listener, listen: Callable[[int], Listener]) -> None:
        self._now, self._listen = first, listen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def __next__(self) -> Event:
        return self._try(next)

    def poll(self) -> list[Event]:
        return self._try(lambda listener: listener.poll())

    def close(self) -> None:
        self._now.close()

    def _fetch(self) -> Iterator[None]:
        raise AssertionError("it is asked for nothing: the listener of now is")

    def _pause(self) -> None:
        self._fetch()

    def _try(self, call: Callable[[Listener], T]) -> T:
        try:
            return call(self._now)
        except MemberOf:
            # SUBTLE: what was delivered ends with a progress, as the next step begins with a look at the shard.
            time = self._now.frontier.time
            following = self._listen(MAX_TIME if time is None else time - 1)
        former, self._now = self._now, following
        former.close()
        return call(self._now)
