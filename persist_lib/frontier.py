"""Frontiers: how far something has come. The only module that compares them.

Times are totally ordered u64, so an antichain holds one time or none. `at(t)` says "everything before t"; the empty
antichain `TOP` is greater than all others and means "everything, for ever".

SUBTLE: the empty antichain is an object like any other and is *truthy*; never test a frontier by its truth value.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import force_setattr

from persist_lib.arguments import parse_integer, shown
from persist_lib.errors import InvalidUsage

MAX_TIME = 2**64 - 1


class Antichain(msgspec.Struct, frozen=True, array_like=True, eq=True, forbid_unknown_fields=True):
    """A frontier. `time` is None for the empty antichain, the greatest of all; otherwise it is in [0, 2**64)."""

    time: int | None = None

    def __post_init__(self) -> None:
        time = self.time
        if time is not None and not (type(time) is int and 0 <= time <= MAX_TIME):
            force_setattr(self, "time", parse_time(time, "time"))

    def __bool__(self) -> bool:
        raise TypeError("a frontier has no truth value; compare it, or ask is_top()")

    def is_top(self) -> bool:
        """Whether this is the empty antichain: complete, nothing comes after it."""
        return self.time is None

    def __lt__(self, other: Antichain) -> bool:
        if not isinstance(other, Antichain):
            raise _no_frontier(other)
        return self.time is not None and (other.time is None or self.time < other.time)

    def __le__(self, other: Antichain) -> bool:
        if not isinstance(other, Antichain):
            raise _no_frontier(other)
        return other.time is None or (self.time is not None and self.time <= other.time)

    def __gt__(self, other: Antichain) -> bool:
        return not self <= other

    def __ge__(self, other: Antichain) -> bool:
        return not self < other

    def is_before(self, time: int) -> bool:
        """Whether `time` is at or beyond this frontier: updates at `time` may still come."""
        time = time if type(time) is int and 0 <= time <= MAX_TIME else parse_time(time, "time")
        return self.time is not None and self.time <= time

    def has_passed(self, time: int) -> bool:
        """Whether `time` lies strictly below this frontier, so that it is complete."""
        time = time if type(time) is int and 0 <= time <= MAX_TIME else parse_time(time, "time")
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
    """The frontier at one time, an integer in [0, 2**64)."""
    return Antichain(parse_time(time, "time"))


def meet_all(frontiers: Iterable[Antichain]) -> Antichain:
    """The least of them; the empty antichain for none."""
    return min(frontiers, default=TOP)


def parse_time(value: object, what: str) -> int:
    """The time that `value` is: an integer in [0, 2**64), also one of numpy's."""
    if type(value) is int and 0 <= value <= MAX_TIME:
        return value
    try:
        return parse_integer(value, what, 0, MAX_TIME)
    except InvalidUsage:
        raise InvalidUsage(f"{what} must be an integer in [0, 2**64), got {shown(value)}", **{what: value}) from None


def _no_frontier(value: object) -> InvalidUsage:
    return InvalidUsage(f"a frontier compares with frontiers, as in persist.at(5): got {shown(value)}", value=value)
