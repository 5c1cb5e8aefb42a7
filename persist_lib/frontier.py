"""Frontiers: how far something has come. The only module that compares them.

Times are totally ordered u64, so an antichain holds one time or none. `at(t)` says "everything before t"; the empty
antichain `TOP` is greater than all others and means "everything, for ever".

SUBTLE: the empty antichain is an object like any other and is *truthy*; never test a frontier by its truth value.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from persist_lib.errors import InvalidUsage

MAX_TIME = 2**64 - 1


class Antichain(msgspec.Struct, frozen=True, array_like=True, eq=True, forbid_unknown_fields=True):
    """A frontier. `time` is None for the empty antichain, the greatest of all."""

    time: int | None = None

    def __bool__(self) -> bool:
        raise TypeError("a frontier has no truth value; compare it, or ask is_top()")

    def is_top(self) -> bool:
        """Whether this is the empty antichain: complete, nothing comes after it."""
        return self.time is None

    def __lt__(self, other: Antichain) -> bool:
        if self.time is None:
            return False
        return other.time is None or self.time < other.time

    def __le__(self, other: Antichain) -> bool:
        return not other < self

    def __gt__(self, other: Antichain) -> bool:
        return other < self

    def __ge__(self, other: Antichain) -> bool:
        return not self < other

    def is_before(self, time: int) -> bool:
        """Whether `time` is at or beyond this frontier: updates at `time` may still come."""
        return self.time is not None and self.time <= time

    def has_passed(self, time: int) -> bool:
        """Whether `time` lies strictly below this frontier, so that it is complete."""
        return self.time is None or time < self.time

    def meet(self, other: Antichain) -> Antichain:
        """The lesser of both."""
        return self if self <= other else other

    def join(self, other: Antichain) -> Antichain:
        """The greater of both."""
        return other if self <= other else self

    def __str__(self) -> str:
        return "[]" if self.time is None else f"[{self.time}]"


TOP = Antichain(None)
MINIMUM = Antichain(0)


def at(time: int) -> Antichain:
    """The frontier at one time."""
    return Antichain(time)


def meet_all(frontiers: Iterable[Antichain]) -> Antichain:
    """The least of them; the empty antichain for none."""
    return min(frontiers, default=TOP)


def parse_time(value: object, what: str) -> int:
    """Check that `value` is a time: an integer in [0, 2**64)."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TIME:
        raise InvalidUsage(f"{what} must be an integer in [0, 2**64), got {value!r}", **{what: value})
    return value


def parse_frontier(value: object, what: str) -> Antichain:
    """A frontier from what users write: an Antichain, a time, or `[]` / `()` for the empty one."""
    if isinstance(value, Antichain):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 0:
        return TOP
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return at(parse_time(value[0], what))
    return at(parse_time(value, what))
