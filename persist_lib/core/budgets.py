"""What compaction has begun to spend by rules with a budget a day: pure, and counted before anything is read.

A budget is of a rule: all shards for which it says one spend from it together. What was begun counts, whatever became
of it: a compaction that fails each time spends each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.pauses import ByRule
from persist_lib.core.rules import BUDGETS, DAY_MS, Rule, Told
from persist_lib.core.units import dollars, size

KEPT_DAYS, KEPT_CHARGES = 31, 100


class Entry(NamedTuple):
    """How much of the `field` of a rule was spent on a day (days since the epoch, UTC), and when last (ms)."""

    day: int
    field: str
    pattern: str
    amount: float
    last_ms: int


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """All that was spent on the last days, and the random ids of the last charges, the newest last.

    By its id, a charge that another one followed at once is known to have been made.
    """

    entries: tuple[Entry, ...] = ()
    charges: tuple[int, ...] = ()

    def on(self, day: int, field: str, pattern: str) -> Entry:
        """What was spent on a day of one budget."""
        mine = (one for one in self.entries if one[:3] == (day, field, pattern))
        return next(mine, Entry(day, field, pattern, 0, 0))


class Budget(NamedTuple):
    """One budget of a rule: its `field`, how much of it may be spent a day, and was on this one, UTC."""

    pattern: str
    field: str
    limit: float
    spent: float

    @property
    def shown(self) -> str:
        """Both for people."""
        show = size if self.field == "bytes_day" else dollars
        return f"{show(self.spent)} of {show(self.limit)}"


def has_budget(rules: Iterable[Rule]) -> bool:
    """Whether any rule says one."""
    return any(getattr(rule, field) is not None for rule in rules for field in BUDGETS)


def budgets_of(rules: Iterable[Rule], spent: Spent, now: int) -> tuple[Budget, ...]:
    """All budgets of rules, and what is spent of each on the day of `now`."""
    return tuple(
        Budget(rule.pattern, field, limit, spent.on(now // DAY_MS, field, rule.pattern).amount)
        for rule in rules
        for field in BUDGETS
        if (limit := getattr(rule, field)) is not None
    )


def exhausted(said: Mapping[str, Told], spent: Spent, now: int) -> ByRule | None:
    """The pause of compaction that a budget makes once it is spent, until the day ends; None while there is some."""
    day = now // DAY_MS
    for field in BUDGETS:
        if (one := said.get(field)) is None:
            continue
        found = spent.on(day, field, one.pattern)
        if found.amount >= one.value:
            shown = Budget(one.pattern, field, one.value, found.amount).shown
            since, until = found.last_ms or day * DAY_MS, (day + 1) * DAY_MS
            reason = f"{shown} a day are spent ({field})"
            return ByRule((one.pattern,), ("compaction",), one.source, reason, since, until)
    return None


def charge(
    spent: Spent, said: Mapping[str, Told], costs: Iterable[Cost], now: int, id_: int, *, is_free: bool = False
) -> tuple[Spent, int]:
    """Charge what is to be begun, in this order, and return how much of it may begin.

    Each may begin as long as something is left of each budget, so a day ends at most one of them above it. With
    `is_free` all of it may, and is counted.
    """
    granted = 0
    for cost in costs:
        if not is_free and exhausted(said, spent, now) is not None:
            break
        amounts = {"bytes_day": cost.bytes_read + cost.bytes_written, "dollars_day": cost.dollars}
        for field in BUDGETS:
            if field in said:
                spent = _with(spent, now, field, said[field].pattern, amounts[field])
        granted += 1
    if not granted:
        return spent, 0
    return msgspec.structs.replace(spent, charges=(*spent.charges, id_)[-KEPT_CHARGES:]), granted


def _with(spent: Spent, now: int, field: str, pattern: str, amount: float) -> Spent:
    day = now // DAY_MS
    mine = spent.on(day, field, pattern)
    others = tuple(one for one in spent.entries if one[:3] != mine[:3] and day - KEPT_DAYS < one.day)
    mine = mine._replace(amount=mine.amount + amount, last_ms=now)
    return msgspec.structs.replace(spent, entries=(*others, mine))
