"""Pauses: which duties may not begin on which shards and tables, until when, and who wanted that.

A pause names shards and tables by patterns (`orders*`), so that it holds for what is made later, too. It is a wish of
people about upkeep: appends and reads, and what writers do by themselves (a rollup, a flush), know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Generic, Protocol, TypeVar

import msgspec

from persist_lib.core.duties import BY_NAME
from persist_lib.times import show_time

PAUSABLE = tuple(name for name in BY_NAME if name != "census")
"""The duties that can be paused. To count changes nothing, and shows what is paused."""
WILD = frozenset("*?[")


class Pause(msgspec.Struct, frozen=True, array_like=True):
    """A pause of some duties (`duties`; empty: of all) of what has a name of one of the `patterns`.

    It holds from `set_ms` until `until_ms` (None: until it is ended), in ms of the store's clock. `is_cancel`: it was
    made by the cancel of a run, and what a person then starts there ends it.
    """

    patterns: tuple[str, ...]
    duties: tuple[str, ...] = ()
    owner: str = ""
    reason: str = ""
    set_ms: int = 0
    until_ms: int | None = None
    is_cancel: bool = False

    def is_over(self, now: int) -> bool:
        """Whether its time has come."""
        return self.until_ms is not None and self.until_ms <= now

    def holds_for(self, duty: str) -> bool:
        """Whether it pauses a duty."""
        return duty in PAUSABLE and (not self.duties or duty in self.duties)

    @property
    def shown(self) -> str:
        """What is paused: the duties, and where."""
        more = f" and {len(self.patterns) - 3} more" if len(self.patterns) > 3 else ""
        return f"{', '.join(self.duties) or 'all upkeep'} of {', '.join(self.patterns[:3])}{more}"

    @property
    def says(self) -> str:
        """Who paused it, since when, until when, and why."""
        until = "" if self.until_ms is None else f" until {show_time(self.until_ms, 'ms')}"
        return f"paused by {self.owner} since {show_time(self.set_ms, 'ms')}{until}: {self.reason}"


class ByRule(Pause, frozen=True, array_like=True):
    """A pause that follows from a rule: it is stored nowhere, and ends by itself or with the rule."""


class Named(Protocol):
    """A wish about what has names of these patterns."""

    @property
    def patterns(self) -> tuple[str, ...]: ...


N = TypeVar("N", bound=Named)


class InForce(Generic[N]):
    """The wishes in force, by the names for which they hold. `owner` is the name of what a shard belongs to."""

    def __init__(self, wishes: Iterable[N], owner: Callable[[], Callable[[str], str]]) -> None:
        self.wishes = tuple(wishes)
        self._owner = owner
        self._exact: dict[str, list[N]] = {}
        self._wild: list[tuple[str, N]] = []
        for wish in self.wishes:
            for pattern in wish.patterns:
                if WILD.isdisjoint(pattern):
                    self._exact.setdefault(pattern, []).append(wish)
                else:
                    self._wild.append((pattern, wish))

    def of(self, names: Sequence[str]) -> dict[str, tuple[N, ...]]:
        """The wishes about each of these shards or tables. Whose a shard is, is only asked where some are."""
        if not self.wishes:
            return {}
        owner = self._owner()
        found = {name: self._of(name, owner(name)) for name in names}
        return {name: wishes for name, wishes in found.items() if wishes}

    def _of(self, *names: str) -> tuple[N, ...]:
        exact = [wish for name in names for wish in self._exact.get(name, ())]
        wild = [wish for pattern, wish in self._wild if any(fnmatchcase(name, pattern) for name in names)]
        return tuple(dict.fromkeys((*exact, *wild)))


def first_of(pauses: Iterable[Pause], duty: str) -> Pause | None:
    """The one that pauses a duty; None if it is free."""
    return next((pause for pause in pauses if pause.holds_for(duty)), None)


def added(pauses: Iterable[Pause], new: Pause) -> tuple[Pause, ...]:
    """The list with a pause. One of the same patterns by a person, or by the same cancelled run, is replaced."""
    return (*(one for one in pauses if not _is_same(one, new)), new)


def _is_same(one: Pause, new: Pause) -> bool:
    if one.is_cancel != new.is_cancel:
        return False
    return one.owner == new.owner and one.duties == new.duties if new.is_cancel else one.patterns == new.patterns


def without(pauses: Iterable[Pause], pattern: str) -> tuple[Pause, ...]:
    """The list without that pattern."""
    return tuple(_cut(pauses, {pattern}))


def resumed(pauses: Iterable[Pause], names: set[str]) -> tuple[Pause, ...]:
    """The list when a person starts something on these shards (none: on all): what cancelled runs left there is free.

    That is also what they left of other duties: a person is at work there.
    """
    return tuple(
        kept for one in pauses for kept in (_cut((one,), names or set(one.patterns)) if one.is_cancel else (one,))
    )


def _cut(pauses: Iterable[Pause], patterns: set[str]) -> Iterable[Pause]:
    for one in pauses:
        if kept := tuple(pattern for pattern in one.patterns if pattern not in patterns):
            yield one if kept == one.patterns else msgspec.structs.replace(one, patterns=kept)
