"""One value of a location that many processes change: an object with all of it, and a new one for each change.

The greatest number is the value in force. A key is written once, so of two that change it at once one has lost, and
decides again from what the other stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from persist_lib.errors import Corrupt
from persist_lib.format.paths import number_in, numbered_key
from persist_lib.location.api import Blob
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Backoff, Deadline, Runtime

T = TypeVar("T")


class Stored(NamedTuple, Generic[T]):
    """How a value is stored: below which prefix, and as which bytes. `what` is its name in errors.

    `empty_size` is how long `empty` is: where no other value is as short, a listing tells it from the others.
    """

    what: str
    prefix: str
    empty: T
    encode: Callable[[T], bytes]
    decode: Callable[[bytes, str], T]
    empty_size: int = -1


class NumberedValue(Generic[T]):
    """One such value, as one client sees it. What is known is only ever replaced as a whole: it needs no lock."""

    def __init__(self, stored: Stored[T], blob: Blob, runtime: Runtime, timeout_s: float) -> None:
        self._stored, self._blob, self._runtime, self._timeout_s = stored, blob, runtime, timeout_s
        self._known: tuple[int, T] = (0, stored.empty)

    def read(self) -> T:
        """The value in force: one listing, and a GET where it is new here."""
        deadline = self._runtime.deadline(self._timeout_s)
        self._known = within(deadline, partial(self._read, deadline))
        return self._known[1]

    def change(self, decide: Callable[[T], T]) -> None:
        """Store the value that `decide` makes of the one in force.

        `decide` is called again when another process changed it, so it gives the same for a value that has its change
        already; or something in the value tells each change from all others.
        """
        deadline, backoff = self._runtime.deadline(self._timeout_s), Backoff(0.01, 0.5)
        while True:
            number, value = within(deadline, partial(self._read, deadline))
            wanted = decide(value)
            if wanted == value or self._has_stored(number + 1, wanted, deadline):
                return
            self._check(deadline)
            deadline.pause(backoff.take())

    def _check(self, deadline: Deadline) -> None:
        if deadline.has_passed():
            raise deadline.gave_up(self._stored.what, "as others change it all the time")

    def _has_stored(self, number: int, value: T, deadline: Deadline) -> bool:
        """Store a value under its number. False when another process was first.

        Older values are deleted, so a number that is free may be one that was used. The value counts only if it
        is the newest one after that; else it is made again from what is.
        """
        prefix = self._stored.prefix
        try:
            within(deadline, partial(self._blob.set, numbered_key(prefix, number), self._stored.encode(value)))
        except Corrupt:
            return False
        keys = [entry.key for entry in within(deadline, lambda: list(self._blob.list(prefix)))]
        if max((number_in(prefix, key) for key in keys), default=0) != number:
            self._blob.delete(numbered_key(prefix, number))  # nothing counts it, nor will
            return False
        if older := [key for key in keys if 0 < number_in(prefix, key) < number]:
            self._blob.delete_many(older)
        return True

    def _read(self, deadline: Deadline) -> tuple[int, T]:
        stored = self._stored
        while True:
            found = self._blob.list(stored.prefix)
            newest = max(found, key=lambda entry: number_in(stored.prefix, entry.key), default=None)
            number = 0 if newest is None else number_in(stored.prefix, newest.key)
            if newest is None or number == self._known[0]:
                return self._known if number else (0, stored.empty)
            if newest.size == stored.empty_size:
                return number, stored.empty
            if (data := self._blob.get(newest.key)) is not None:
                return number, stored.decode(data, newest.key)
            self._check(deadline)  # one that is gone was replaced by a newer one
