"""The pauses of a location: read where duties are decided due and where one begins, and changed by people.

They are in the location itself, so they hold for every program, and outlive Dagster. A client reads them again after
`AGE_S` seconds: a duty that begins later than that does not pass by a new pause. One that has begun is not stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from persist_lib.arguments import did_you_mean, parse_text, shown
from persist_lib.core.budgets import Budget, Spent, budgets_of, charge, exhausted, has_budget
from persist_lib.core.cost import Cost
from persist_lib.core.pauses import PAUSABLE, ByRule, InForce, Pause, added, first_of, resumed, without
from persist_lib.core.rules import BUDGETS, Rule, Told, parse_rules, quiet_at, told
from persist_lib.errors import InvalidUsage, NotFound, Paused
from persist_lib.format.pause_list import (
    EMPTY_SIZE,
    PREFIX,
    SPENT_FORM,
    SPENT_PREFIX,
    Wishes,
    decode_wishes,
    encode_wishes,
)
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.wrap.deadline import within
from persist_lib.maintain.numbered_value import NumberedValue, Stored
from persist_lib.runtime.ambient import Runtime
from persist_lib.times import Times, is_duration, is_time_text, show_time

AGE_S = 10.0
WISHES = Stored("the list of pauses", PREFIX, Wishes(), encode_wishes, decode_wishes, EMPTY_SIZE)
SPENT = Stored("what was spent of budgets", SPENT_PREFIX, Spent(), SPENT_FORM.encode, SPENT_FORM.decode)
_is_passed_by: ContextVar[bool] = ContextVar("passes pauses by", default=False)


@contextmanager
def even_if_paused(is_asked: bool = True) -> Iterator[None]:
    """In the block, duties that this thread begins pass pauses by."""
    token = _is_passed_by.set(is_asked or _is_passed_by.get())
    try:
        yield
    finally:
        _is_passed_by.reset(token)


class Wanted(NamedTuple):
    """What people want at a time (ms of the store's clock, None: it does not matter), by the names that it is about."""

    pauses: InForce[Pause]
    rules: InForce[Rule]
    now: int | None
    spent: Spent = Spent()

    def told(self, names: Sequence[str]) -> dict[str, dict[str, Told]]:
        """What rules say of each of these names."""
        return {name: told(rules) for name, rules in self.rules.of(names).items()}

    def paused(self, names: Sequence[str]) -> dict[str, tuple[Pause, ...]]:
        """The pauses of each of these names that has any: quiet windows and budgets that are spent among them."""
        found, now = self.pauses.of(names), self.now or 0
        for name, said in self.told(names).items() if self.now is not None else ():
            by_rule = (quiet_at(said.get("quiet"), now), exhausted(said, self.spent, now))
            if pauses := (*found.get(name, ()), *(one for one in by_rule if one is not None)):
                found[name] = pauses
        return found


class Pauses:
    """The pauses of one location for one client. `owner` finds the name of what a shard belongs to, by one look.

    What is known is only ever replaced as a whole, so that threads and forks need no lock.
    """

    def __init__(
        self, blob: Blob, consensus: Consensus, runtime: Runtime, timeout_s: float,
        owner: Callable[[], Callable[[str], str]],
    ) -> None:  # fmt: skip
        self._consensus, self._runtime, self._timeout_s = consensus, runtime, timeout_s
        self._owner = owner
        self._wishes = NumberedValue(WISHES, blob, runtime, timeout_s)
        self._spent = NumberedValue(SPENT, blob, runtime, timeout_s)
        self._in_force: tuple[float, Wanted] | None = None

    def paused(self, wanted: Wanted, names: Sequence[str]) -> dict[str, tuple[Pause, ...]]:
        """The pauses of each of these names that has any; of none where they are passed by."""
        return {} if _is_passed_by.get() else wanted.paused(names)

    def told(self, name: str) -> dict[str, Told]:
        """What rules say of a shard or a table. Asks the location each ten seconds."""
        return self._recent().told([name]).get(name, {})

    def _recent(self) -> Wanted:
        at, wanted = self._in_force or (0.0, None)
        return self.fetch() if wanted is None or self._runtime.monotonic() - at > AGE_S else wanted

    def fetch(self) -> Wanted:
        """What is wanted now: one listing, and a GET if the list is new here."""
        wishes = self.read()
        is_timed = any(one.until_ms is not None for one in wishes.pauses) or any(one.quiet for one in wishes.rules)
        return self.in_force(wishes, self._now() if is_timed or has_budget(wishes.rules) else None)

    def _now(self) -> int:
        return within(self._runtime.deadline(self._timeout_s), self._consensus.now)

    def read(self) -> Wishes:
        """All that is stored."""
        return self._wishes.read()

    def in_force(self, wishes: Wishes, now: int | None) -> Wanted:
        """What of it is wanted at a time (ms of the store's clock; None: nothing of it has an end)."""
        owner = cache(self._owner)
        pauses = InForce((one for one in wishes.pauses if not one.is_over(now or 0)), owner)
        spent = self._spent.read() if has_budget(wishes.rules) else Spent()
        wanted = Wanted(pauses, InForce(wishes.rules, owner), now, spent)
        self._in_force = (self._runtime.monotonic(), wanted)
        return wanted

    def check(self, name: str, duty: str) -> None:
        """Raise Paused if a duty may not begin on a shard or a table. Asks the location each ten seconds."""
        if _is_passed_by.get():
            return
        if (pause := first_of(self._recent().paused([name]).get(name, ()), duty)) is not None:
            ends = f"`persist maintain --resume '{pause.patterns[0]}'` ends the pause"
            ends = "`persist config --rules FILE` changes the rule" if isinstance(pause, ByRule) else ends
            raise Paused(
                f"{name}: {duty} is {pause.says}. Nothing was changed. {ends}, and --even-if-paused passes it by once",
                shard=name, duty=duty, owner=pause.owner, until=pause.until_ms, says=pause.says,
            )  # fmt: skip

    def change(
        self,
        decide: Callable[[tuple[Pause, ...], int], tuple[Pause, ...]] = lambda pauses, _now: pauses,
        rules: tuple[Rule, ...] | None = None,
    ) -> tuple[Pause, ...]:
        """Store the list that `decide` makes of the one in force at a time (ms). Returns the list before.

        `rules` take the place of the rules; None: they stay.

        `decide` is called again when another process changed the list, so it gives the same for a list that
        has its change already.
        """
        now, first = self._now(), list[tuple[Pause, ...]]()

        def make(stored: Wishes) -> Wishes:
            before = tuple(one for one in stored.pauses if not one.is_over(now))
            first.append(before)
            return Wishes(decide(before, now), stored.rules if rules is None else rules)

        self._wishes.change(make)
        self._in_force = None
        return first[0]

    def allot(self, name: str, costs: Sequence[Cost]) -> int:
        """How many of these compactions of a shard may begin now, in their order, by the budgets of rules.

        They are charged before they begin: of several processes, each sees what the others have begun.
        """
        said = {field: one for field, one in self.told(name).items() if field in BUDGETS}
        if not said or not costs:
            return len(costs)
        now, id_, granted = self._now(), self._runtime.entropy(), 0

        def decide(spent: Spent) -> Spent:
            nonlocal granted
            if id_ in spent.charges:
                return spent
            charged, granted = charge(spent, said, costs, now, id_, is_free=_is_passed_by.get())
            return charged

        self._spent.change(decide)
        self._in_force = None
        return granted

    def budgets(self) -> tuple[Budget, ...]:
        """All budgets of rules, and what is spent of each today."""
        wanted = self.fetch()
        return budgets_of(wanted.rules.wishes, wanted.spent, wanted.now or 0)


class Pausing(ABC):
    """The calls of a client about pauses."""

    _pauses: Pauses
    consensus: Consensus

    @abstractmethod
    def _check_open(self) -> None:
        """Raise InvalidUsage after `close`."""

    @abstractmethod
    def _writable(self, what: str) -> None:
        """Raise InvalidUsage if this client is read-only. `what` names the call that would change something."""

    def pauses(self) -> tuple[Pause, ...]:
        """The pauses in force, in the order in which they were set. Changes nothing."""
        self._check_open()
        return self._pauses.fetch().pauses.wishes

    def rules(self) -> tuple[Rule, ...]:
        """The rules of this location: how upkeep looks after shards and tables of some names. Changes nothing."""
        self._check_open()
        return self._pauses.fetch().rules.wishes

    def set_rules(self, rules: Sequence[Mapping[str, Any]] | str) -> tuple[Rule, ...]:
        """Set the rules of this location, in the place of those that there are, and return them.

        Each is a mapping with a `pattern` of names and some of the fields of `core.rules.Rule`, which says what they
        are; or all of them are the text of a TOML file with `[[rule]]`. They are stored in the location, and hold for
        the library, `persist maintain` and Dagster alike: at the next survey, and in programs that run from ten
        seconds later on. Raises InvalidUsage for what is no rule; nothing is changed then.
        """
        self._check_open()
        self._writable("set_rules")
        wanted = parse_rules(rules)
        self._pauses.change(rules=wanted)
        return wanted

    def budgets(self) -> tuple[Budget, ...]:
        """The budgets a day that rules say, and what compaction has begun to spend of each today (UTC)."""
        self._check_open()
        return self._pauses.budgets()

    def rules_of(self, name: str) -> dict[str, Told]:
        """What the rules say of a shard or a table: for each field the value, and the pattern that it is from."""
        self._check_open()
        return self._pauses.told(_text(name, "name"))

    def pause(
        self, pattern: str, *, owner: str, reason: str, only: Sequence[str] = (), until: object = None
    ) -> Pause:  # fmt: skip
        """Pause upkeep of the shards and tables whose names match a pattern (`orders*`), also of those made later.

        It is stored in the location, and holds for the library, `persist maintain` and Dagster alike: no duty begins
        there from then on, or in programs that run, from ten seconds later on. What has begun is not stopped, and what
        writers do by themselves (rollups, flushes) is not upkeep. `only` names duties; empty: all that can be paused.
        `until` is a time, or a length of time from now on (`"2 days"`); None: until `resume`. A pause that has the same
        pattern is replaced. Raises InvalidUsage for a duty that cannot be paused and for a time that has passed.
        """
        self._check_open()
        self._writable("pause")
        pattern, who, why = _text(pattern, "pattern"), _text(owner, "owner"), _text(reason, "reason")
        duties = parse_pausable(only)
        now = self.consensus.now()
        until_ms = None if until is None else _until(until, now)
        pause = Pause((pattern,), duties, who, why, now, until_ms)
        self._pauses.change(lambda pauses, _now: added(pauses, pause))
        return pause

    def resume(self, pattern: str) -> tuple[Pause, ...]:
        """End the pause of a pattern. Returns what was ended. Raises NotFound for a pattern that is not paused."""
        self._check_open()
        self._writable("resume")
        pattern = _text(pattern, "pattern")
        before = self._pauses.change(lambda pauses, _now: without(pauses, pattern))
        if not (ended := tuple(one for one in before if pattern in one.patterns)):
            known = sorted({each for one in before for each in one.patterns})
            there = f"There are {', '.join(known[:20])}" if known else "There is no pause"
            raise NotFound(f"nothing is paused as {pattern!r}. {did_you_mean(pattern, known)}{there}", pattern=pattern)
        return ended

    def even_if_paused(self) -> AbstractContextManager[None]:
        """A block in which this thread's calls pass pauses by: for a person who knows of them.

        with client.even_if_paused():
            client.compact("orders")
        """
        return even_if_paused()


def pause_rest(client: Pausing, shards: Iterable[str], until: Mapping[int, Sequence[str]], owner: str) -> None:
    """Pause what a cancelled run left undone on shards: the duties of each time (ms) until then."""
    names = tuple(shards)
    reason = "it was cancelled before it was done; what a person starts there ends this"

    def decide(pauses: tuple[Pause, ...], now: int) -> tuple[Pause, ...]:
        for until_ms, duties in until.items():
            pauses = added(pauses, Pause(names, tuple(duties), owner, reason, now, until_ms, is_cancel=True))
        return pauses

    client._pauses.change(decide)


def resume_rest(client: Pausing, shards: Iterable[str]) -> None:
    """End what cancelled runs left paused on these shards; none: on all."""
    names = set(shards)
    if any(one.is_cancel for one in client.pauses()):
        client._pauses.change(lambda pauses, _now: resumed(pauses, names))


def parse_pausable(only: object) -> tuple[str, ...]:
    """Names of duties that can be paused, in the order of the table."""
    named = (only,) if isinstance(only, str) else only
    if not isinstance(named, (list, tuple)):
        raise InvalidUsage(f"only must be a list of duties: got {shown(only)}", argument="only")
    wanted = list(named)
    for one in wanted:
        if one not in PAUSABLE:
            raise InvalidUsage(f"{shown(one)} cannot be paused; these can: {', '.join(PAUSABLE)}", argument="only")
    return tuple(duty for duty in PAUSABLE if duty in wanted)


def _text(value: object, what: str) -> str:
    if not (found := parse_text(value, what, 500)):
        raise InvalidUsage("a pause has a pattern, an owner and a reason: others have to know about it", argument=what)
    return found


def _until(value: object, now: int) -> int:
    """A time in ms of the store's clock, or a length of time from now on."""
    times = Times("ms", lambda: now)
    is_length = is_duration(value) and not (isinstance(value, str) and is_time_text(value))
    found = now + times.distance(value, "until") if is_length else times.as_of(value, "until")
    if found <= now:
        raise InvalidUsage(f"until must be a time to come: got {shown(value)}, and it is {show_time(now, 'ms')}")
    return found
