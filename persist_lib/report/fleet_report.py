"""The report of a whole location: a line for each shard, made of what a survey and the scrubs remember.

Of an idle location it costs some fifteen requests, however many shards there are; each that moved since the last survey
costs one to three more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from persist_lib.arguments import check_type
from persist_lib.catalog.describe import Owners
from persist_lib.client import Client
from persist_lib.core.budgets import Budget, has_budget
from persist_lib.core.cost import Cost, Prices, storage_dollars
from persist_lib.core.pauses import first_of
from persist_lib.core.plan.look import Look, overdue
from persist_lib.core.rules import Rule
from persist_lib.health import Limits
from persist_lib.ids import ShardId
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.scrub_memory import Remembered, known_damage
from persist_lib.maintain.survey import Survey
from persist_lib.sources.kinds import fetch_owners
from persist_lib.times import Unit


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One shard: sizes in bytes, `debt` in updates that compaction would rewrite, `dollars_month` for storage.

    `table` is the name of what it belongs to, or its own, and `kind` what that is; `owner` says whose it is where its
    name is minted. `held` is garbage that waits, `held_by` for what, and `collectable` what could go now. `damaged`
    batches are known to scrubs and not mended, the oldest since `damaged_ms`. `overdue` has the duties that nothing
    seems to carry out, and what tells so; `paused` the pauses of it. `unread` says why its state, or what
    scrubs remember, could not be read. `is_old`: it has moved since, and there was no time to look again.
    """

    shard: str
    table: str
    kind: str = "table"
    owner: str = ""
    seqno: int = 0
    mark: str = ""
    batches: int = 0
    bound: int = 0
    updates: int = 0
    upper: int | None = 0
    times: Unit | None = None
    debt: int = 0
    size: int = 0
    stored: int = 0
    dollars_month: float = 0.0
    held: int = 0
    held_by: str = ""
    collectable: int = 0
    damaged: int = 0
    damaged_ms: int | None = None
    damage: str = ""
    overdue: Mapping[str, str] = {}
    paused: tuple[str, ...] = ()
    unread: str = ""
    is_old: bool = False


class Ruled(msgspec.Struct, frozen=True):
    """A rule of the location: on how many shards it counts for something, and what is spent of its budgets today."""

    rule: Rule
    shards: int
    budgets: tuple[Budget, ...] = ()


class Fleet(msgspec.Struct, frozen=True):
    """All shards of a location by one look. `now` is the store's clock in ms since the epoch.

    `waiting` is how many moved and were not looked at, for lack of time: their rows are those of the last look, or
    empty if there was none. What was dropped is left out, and counted in `gone`.
    """

    location: str
    now: int
    rows: tuple[Row, ...]
    waiting: int = 0
    gone: int = 0
    cost: Cost = Cost()
    rules: tuple[Ruled, ...] = ()

    def most(self, by: Callable[[Row], Any], most: int | None = None) -> list[Row]:
        """The rows of which `by` is not 0, most first; of equal ones by name."""
        return sorted((row for row in self.rows if by(row)), key=lambda row: (-by(row), row.shard))[:most]

    def only(self, table: str) -> Fleet:
        """The same of the shards that one table, source, stream or timeline has."""
        return msgspec.structs.replace(self, rows=tuple(row for row in self.rows if row.table == table))

    @property
    def damaged(self) -> list[Row]:
        """The shards with damage that is known and not mended, oldest first, then those that could not be read."""
        wrong = (row for row in self.rows if row.damaged or row.unread)
        return sorted(wrong, key=lambda row: (not row.damaged, row.damaged_ms or 0, row.shard))

    @property
    def overdue(self) -> dict[str, list[Row]]:
        """The shards on which each duty is overdue, by duty: most shards first."""
        found = Counter(duty for row in self.rows for duty in row.overdue)
        return {duty: [row for row in self.rows if duty in row.overdue] for duty, _ in found.most_common()}

    def total(self, of: str) -> Any:
        """The sum of a field over all rows, as in `fleet.total("dollars_month")`."""
        return sum(getattr(row, of) for row in self.rows)


@charged
def fleet(client: Client, limits: Limits | None = None, survey: Survey | None = None) -> Fleet:
    """Look at all shards of a location. Changes nothing.

    `limits` are those of `health.check`: from when on a duty is overdue, and how long the look may take. `survey` is
    one that the caller has made already. Raises what a location raises that does not answer; a shard that cannot be
    read is a row that says why.
    """
    limits = check_type(limits or Limits(), Limits, "limits", "health.Limits(overdue_s=3600)")
    found = client.survey(seconds=limits.seconds) if survey is None else survey
    with client.controller() as controller:
        owners = fetch_owners(controller)
    damage = known_damage(client.blob, [ShardId(shard) for shard in found.heads]) if found.heads else {}
    report = fleet_of(found, owners, damage, client.url, client.prices, limits, client.config.rollup_every)
    budgets = client.budgets() if has_budget(found.rules) else ()
    return msgspec.structs.replace(report, rules=ruled_of(found, budgets))


def ruled_of(survey: Survey, budgets: Sequence[Budget]) -> tuple[Ruled, ...]:
    """The rules, as the shards of a survey have them."""
    counts = Counter(pattern for said in survey.told.values() for pattern in {one.pattern for one in said.values()})
    return tuple(
        Ruled(rule, counts[rule.pattern], tuple(one for one in budgets if one.pattern == rule.pattern))
        for rule in survey.rules
    )


def fleet_of(
    survey: Survey, owners: Owners, damage: Mapping[ShardId, Remembered], location: str, prices: Prices,
    limits: Limits, rollup_every: int,
) -> Fleet:  # fmt: skip
    """The report that follows from a survey, from whose the shards are, and from what scrubs remember. Pure."""

    def rows() -> Iterator[Row]:
        for shard, head in survey.heads.items():
            look = survey.looks.get(shard)
            if owners.is_gone(shard) or (look is not None and look.is_tombstone and look.seqno == head):
                continue
            owner, (kind, table) = owners.of(shard), owners.place_of(shard)
            row = Row(shard=shard, table=table, kind=kind or ("shard" if owner else "table"), owner=owner)
            if (memory := damage.get(ShardId(shard))) is not None:
                row = _with_damage(row, memory)
            if look is not None:
                most = limits.by(survey.told.get(shard, {})).garbage
                late = overdue(look, survey.now, limits.overdue_s, most, rollup_every)
                row = _with_look(row, look, prices, late, is_old=look.seqno != head)
            pauses = survey.pauses.get(shard, ())
            late = {
                duty: says if first_of(pauses, duty) is None else f"{says}, and it is paused"
                for duty, says in row.overdue.items()
            }
            unread = "; ".join(filter(None, (survey.unread.get(shard, ""), row.unread)))
            paused = tuple(f"{one.shown}: {one.says}" for one in pauses)
            yield msgspec.structs.replace(row, overdue=late, paused=paused, unread=unread)

    found = tuple(sorted(rows(), key=lambda row: row.shard))
    return Fleet(location, survey.now, found, survey.waiting, len(survey.heads) - len(found))


def _with_look(row: Row, look: Look, prices: Prices, late: Mapping[str, str], *, is_old: bool) -> Row:
    signs = look.signs
    return msgspec.structs.replace(
        row, seqno=look.seqno, mark=look.mark, batches=signs.batches, bound=signs.bound, updates=signs.updates,
        upper=signs.upper, times=signs.times, debt=look.debt, size=signs.size, stored=signs.stored,
        dollars_month=storage_dollars(signs.stored, prices), held=signs.held, held_by=signs.waits_for,
        collectable=signs.collectable, overdue=late, is_old=is_old,
    )  # fmt: skip


def _with_damage(row: Row, memory: Remembered) -> Row:
    marks: Sequence[Any] = sorted(memory.damaged.values(), key=lambda mark: (mark.since, mark.id))
    first = marks[0] if marks else None
    return msgspec.structs.replace(
        row, damaged=len(marks), damaged_ms=first and first.since, damage=first.says if first else "",
        unread=memory.unreadable and f"what scrubs remember cannot be read: {memory.unreadable}",
    )  # fmt: skip
