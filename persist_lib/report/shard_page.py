"""The page of one shard: what it was each day of a month, what keeps it as it is, what each duty did and waits for.

The days are made of the log, whose rows are chained by digests and carry the store's clock. What was truncated is not
known: it is counted, and no day is made up. What was only read left no row, so reads are in no figure.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from persist_lib.arguments import did_you_mean, parse_integer
from persist_lib.client import Client
from persist_lib.config import Config
from persist_lib.core.cost import Cost, Prices, storage_dollars
from persist_lib.core.duties import DUTIES
from persist_lib.core.pauses import Pause, first_of
from persist_lib.core.plan.compaction import Policy, plan_compaction
from persist_lib.core.plan.explain import explain
from persist_lib.core.plan.keepers import Keeper
from persist_lib.core.plan.look import BY_MARK, Look, stored_bytes
from persist_lib.core.rules import BUDGETS, DEFAULT, SHARES, Value, values_of
from persist_lib.core.state import RETENTION, State, Version
from persist_lib.core.trace import levels
from persist_lib.errors import InvalidName, InvalidUsage, NotFound
from persist_lib.format.log import GENESIS, LogRow, decode_row
from persist_lib.health import Limits
from persist_lib.ids import PartKey, SeqNo, ShardId, parse_shard_id
from persist_lib.location.api import Row
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.census import Census, census_of
from persist_lib.maintain.scrub_memory import known_damage
from persist_lib.maintain.survey import ORPHANS_MS
from persist_lib.report.fleet_report import Fleet, fleet
from persist_lib.shard.log import SCAN_ROWS, apply_rows, fetch_rollup, row_name
from persist_lib.sources.kinds import owners_of

DAYS, DAY_MS = 30, 86_400_000
MOST_DAYS = 366
MONTH_DAYS = 30
"""Days of a month of which a price is given."""
MOST_ROWS = 10_000
"""Rows of the log that are read, newest first, some 10 to 20 of a request. Older ones are counted as unread."""
COMMANDS = {
    "Expire": "leases", "ApplyCompaction": "compaction", "KeepContents": "compaction", "AddRollup": "rollups",
    "ForgetGarbage": "garbage", "ForgetRetired": "orphans", "PinKeys": "publication", "Unpin": "publication",
}  # fmt: skip
"""The duty that a command of the log carries out."""


class Day(msgspec.Struct, frozen=True):
    """One day, UTC: what the shard was when it ended (or is now), and what was written on it, as far as the log says.

    `levels` has the non-empty batches by size class, `2**level` updates each. Sizes are in bytes; `stored` is batches,
    garbage and rollups, `debt` in updates. `puts` are objects that were linked, `deletes` objects that were deleted,
    `commits` transitions; `dollars` is for these and for storing it that day. `is_whole`: no row of it is missing.
    """

    day: str
    levels: Mapping[int, int]
    debt: int
    size: int
    stored: int
    garbage: int
    appended: int = 0
    rewritten: int = 0
    puts: int = 0
    deletes: int = 0
    commits: int = 0
    dollars: float = 0.0
    is_whole: bool = True

    @property
    def batches(self) -> int:
        """All of its non-empty batches."""
        return sum(self.levels.values())


class Action(msgspec.Struct, frozen=True):
    """A duty: when it last did something (ms; None: not as far as is known), at which seqno, and what is next, and why.

    `paused` says who paused it; it is empty where it is not.
    """

    duty: str
    last_ms: int | None
    seqno: int | None
    why: str
    paused: str = ""


class ShardPage(msgspec.Struct, frozen=True):
    """A shard by one look. `now` is the store's clock in ms.

    `missing` transitions are not in the log any more, and `unread` are there and were not read: what the shard was
    before `known_ms` is not known then, and where both are 0, the days are complete from its first transition on.
    `damage` has what scrubs know to be damaged, a sentence each, the oldest since `damaged_ms`; `unknown_damage` says
    why what they remember could not be read.
    """

    shard: str
    owner: str
    location: str
    now: int
    census: Census
    days: tuple[Day, ...]
    actions: tuple[Action, ...]
    holders: tuple[Keeper, ...]
    damage: tuple[str, ...]
    damaged_ms: int | None
    unknown_damage: str
    missing: int
    unread: int
    known_ms: int
    window: int = DAYS
    """How many days were asked for, up to today."""
    cost: Cost = Cost()
    policy: tuple[Value, ...] = ()
    """What upkeep goes by, and where each value is from."""


@charged
def shard(client: Client, name: str, days: int = DAYS) -> ShardPage:
    """Look at one shard, at its log, and at what surveys and scrubs remember of it. Changes nothing.

    `days` is how many days the page goes back, 1 to 366. Costs some twenty requests, and one for each 1,000 rows of the
    log, of which the newest 10,000 are read, and those from the rollup before them on. Raises NotFound, and Damage
    where the state cannot be read.
    """
    if not 1 <= parse_integer(days, "days") <= MOST_DAYS:
        raise InvalidUsage(f"days must be 1 to {MOST_DAYS}: got {days}", argument="days", value=days)
    id_ = parse_shard_id(name)
    version, now, policy, prices = client.inspect(name), client.consensus.now(), client.policy(name=name), client.prices
    log, every = fetch_log(client, id_, version), client.config.rollup_every
    memory = known_damage(client.blob, [id_]).get(id_)
    marks = sorted(memory.damaged.values(), key=lambda mark: mark.id) if memory else []
    survey, said = client.survey(most=0), client.rules_of(name)
    budgets = client.budgets() if not said.keys().isdisjoint(BUDGETS) else ()
    policy_values = values_of(
        said, version.state, given(client.config), {(one.field, one.pattern): one.shown for one in budgets}
    )
    actions = actions_of(
        version, log, now, policy, every, survey.looks.get(name), survey.pauses.get(name, ())
    )  # fmt: skip
    return ShardPage(
        name, owners_of(client).of(name), client.url, now, census_of(name, version, now, policy),
        tuple(days_of(id_, log, now, days, policy, prices)), tuple(actions), client.keepers(name),
        tuple(f"batch {mark.lo}..{mark.hi}: {mark.says}" for mark in marks),
        min((mark.since for mark in marks), default=None), memory.unreadable if memory else "",
        log.missing, log.unread, log.known_ms, days, policy=policy_values,
    )  # fmt: skip


def given(config: Config) -> dict[str, tuple[Any, str]]:
    """What a client's settings say of what rules may say, and where that is from."""
    usual = Config()
    return {
        name: (value, DEFAULT if value == getattr(usual, name) else "settings")
        for name in SHARES
        if (value := getattr(config, name)) is not None
    }


class Log(NamedTuple):
    """The newest rows of a log, stored and decoded, the version before the first of them, and since when (ms) that was.

    `missing` rows before it are truncated; `unread` are there, and were not read.
    """

    start: Version
    stored: Sequence[Row]
    rows: Sequence[LogRow]
    known_ms: int
    missing: int = 0
    unread: int = 0


def fetch_log(client: Client, id_: ShardId, newest: Version, most: int = MOST_ROWS) -> Log:
    """The rows after the oldest version that can still be had: the empty one, or that of a rollup."""
    consensus = client.consensus
    oldest = consensus.scan(id_, SeqNo(0), 1)
    begins = oldest[0].seqno if oldest else newest.seqno
    start = _oldest(client, id_, newest, begins, SeqNo(max(begins, newest.seqno - most)))
    stored: list[Row] = []
    at = SeqNo(max(1, start.seqno))  # with the row of the rollup, which says when that was
    while at <= newest.seqno and (more := consensus.scan(id_, at, min(SCAN_ROWS, newest.seqno - at + 1))):
        stored += more
        at = SeqNo(stored[-1].seqno + 1)
    if not stored or stored[0].seqno != max(1, start.seqno):  # truncated since
        start, stored = newest, [row for row in stored if row.seqno == newest.seqno]
    rows = [decode_row(row.data, row_name(id_, row.seqno)) for row in stored]
    known_ms, after = rows[0].now if rows else consensus.now(), 1 if start.seqno else 0
    return Log(start, stored[after:], rows[after:], known_ms, begins - 1, max(0, start.seqno - begins))


def _oldest(client: Client, id_: ShardId, newest: Version, begins: SeqNo, least: SeqNo) -> Version:
    """The version to start at: what the row `least` starts at, if that is there; else the oldest rollup that is.

    A row names the newest rollup by then. Newer states do not: it became garbage, and is there until that is deleted.
    """
    named = [decode_row(row.data, row_name(id_, row.seqno)).rollup for row in client.consensus.scan(id_, least, 1)]
    if begins == 1 and named == [None]:
        return Version(SeqNo(0), State(), GENESIS)
    rollups = [one for one in named if one is not None and one[0] >= begins]
    rollups += sorted((one for one in newest.state.rollups.items() if one[0] >= begins), key=itemgetter(0))
    found = (fetch_rollup(client.blob, id_, one) for one in rollups)
    return next((one for one in found if one is not None), newest)


def days_of(shard: ShardId, log: Log, now: int, days: int, policy: Policy, prices: Prices) -> Iterator[Day]:
    """The days from the first that is known on, at most so many. Pure; raises Corrupt where the rows are no chain."""
    today, seen = now // DAY_MS, {key for batch in log.start.state.stored for key in batch.keys}
    on = list(accumulate((min(today, row.now // DAY_MS) for row in log.rows), max))
    known = min(today, log.known_ms // DAY_MS)
    begins, version = max(today - days + 1, known), log.start
    ends = [bisect_left(on, day) for day in range(begins, today + 2)]
    version = apply_rows(shard, version, list(log.stored[: ends[0]]))
    seen.update(key for row in log.rows[: ends[0]] for key in _linked(row))
    for day, (start, end) in zip(range(begins, today + 1), pairwise(ends), strict=True):
        before, version = version.state, apply_rows(shard, version, list(log.stored[start:end]))
        rows, state = log.rows[start:end], version.state
        fresh = {key for row in rows for key in _linked(row)} - seen
        seen |= fresh
        edits = [edit for row in rows for diff in row.diffs for edit in diff.garbage]
        cost = Cost(
            puts=len(fresh), commits=len(rows), deletes=sum(1 for _, old, new in edits if old and new is None)
        ).priced(prices)
        stored = stored_bytes(state)
        yield Day(
            dt.datetime.fromtimestamp(day * DAY_MS / 1000, dt.UTC).date().isoformat(),
            {level.level: level.batches for level in reversed(levels(state.trace)) if level.level >= 0},
            plan_compaction(state, policy).debt, state.size, stored,
            sum(one.size for one in state.garbage.values()),
            state.appended_bytes - before.appended_bytes, state.maintained_bytes - before.maintained_bytes,
            cost.puts, cost.deletes, cost.commits, cost.dollars + storage_dollars(stored, prices) / MONTH_DAYS,
            is_whole=day > known or not (log.missing or log.unread),
        )  # fmt: skip


def _linked(row: LogRow) -> Iterator[PartKey]:
    """The objects that a row refers to: of batches, and rollups."""
    for diff in row.diffs:
        if diff.trace is not None:
            yield from (key for batch in diff.trace.added for key in batch.keys)
        if diff.contents is not None and diff.contents[1] is not None:
            yield from diff.contents[1].keys
        yield from (new.key for _, old, new in diff.rollups if old is None and new is not None)


def actions_of(
    version: Version, log: Log, now: int, policy: Policy, rollup_every: int, look: Look | None, pauses: Sequence[Pause]
) -> Iterator[Action]:  # fmt: skip
    """What each duty did last, as far as the log and surveys say, and what is next. Pure."""
    last = {name: (row.seqno, row.now) for row in log.rows for name in _carried_out(row)}
    done = {} if look is None else look.done
    for name, (seqno, at_ms) in done.items():
        if name in BY_MARK and at_ms > last.get(name, (0, 0))[1]:
            last[name] = seqno, at_ms
    said = dict(explain(version, now, policy, rollup_every))
    for duty in DUTIES:
        found = last.get(duty.name)
        why = said.get("shard") or said.get(duty.name) or _by_mark(duty.name, version.seqno, now, done.get(duty.name))
        pause = first_of(pauses, duty.name)
        paused = "" if pause is None else pause.says
        yield Action(duty.name, found and found[1], found and found[0], why, paused)


def _carried_out(row: LogRow) -> Iterator[str]:
    for step in row.steps:
        if step.diff is not None and (duty := COMMANDS.get(step.command)) is not None:
            yield duty
        elif step.diff is not None and step.command == "SetHold":
            yield from ("retention" for name, _, _ in step.diff.holds if name == RETENTION)


def _by_mark(duty: str, seqno: SeqNo, now: int, done: tuple[int, int] | None) -> str:
    """Why a duty that the state says nothing of is due, or is not."""
    if done is None:
        return "it is due: surveys remember no pass that did it"
    if done[0] != seqno:
        return f"it is due: {seqno - done[0]:,} transitions since then"
    if duty == "orphans" and not 0 <= now - done[1] <= ORPHANS_MS:
        return (
            f"it is due: it was done {(now - done[1]) / DAY_MS:,.0f} days ago, as an upload leaves no trace in the log"
        )
    return "nothing is due: the shard has not moved since then"


def look(
    client: Client, name: str | None = None, *, days: int = DAYS, limits: Limits | None = None
) -> Fleet | ShardPage:
    """Report on a whole location, or on what has this name. Changes nothing.

    A shard, and a table with one, is a page of `days` days; a table, source, stream or timeline with several is a fleet
    of its shards. Raises NotFound for a name that nothing has, and what `fleet` and `shard` raise.
    """
    if name is None:
        return fleet(client, limits)
    try:
        return shard(client, name, days)
    except (NotFound, InvalidName):
        found = fleet(client, limits)
    if not (own := found.only(name)).rows:
        known = sorted({row.table for row in found.rows})
        raise NotFound(
            f"there is no shard, table or source {name!r} in {client.url}. {did_you_mean(name, known)}`persist tables` "
            "lists tables, `persist shard list --names` shards",
            name=name,
        )
    return own if len(own.rows) > 1 else shard(client, own.rows[0].shard, days)
