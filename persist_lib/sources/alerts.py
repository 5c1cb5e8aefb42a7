"""Looking at sources from outside: which have something to ingest, and what is wrong with them, by limits.

`look` is for what starts instances, as Dagster does, and `check` one answer for `persist health`, Dagster, and
other monitors. All sources together cost one listing of the newest versions of shards, and the two lists of the
catalog. Of a source on which nothing has moved since the last look, nothing more is read in the location; where an
instance writes its health, nothing at all. Only the upstream of the others is asked, as only that knows what is new.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from persist_lib.arguments import parse_integer, shown
from persist_lib.catalog.renditions import Renditions, upper_of
from persist_lib.config import MIB
from persist_lib.errors import InvalidUsage
from persist_lib.runtime.each import Each
from persist_lib.sources.bindings import Marks, bound_from
from persist_lib.sources.health import EVERY_MS, UNSEEN_MS, SourceDescription, fetch_rows, is_alive, named
from persist_lib.sources.protocol import said, settled
from persist_lib.sources.records import SourceRecord

if TYPE_CHECKING:
    from persist_lib.sources.sources import Sources

Check = Literal["instances", "lag", "errors", "held_back", "unread"]
CHECKS: tuple[Check, ...] = ("instances", "lag", "errors", "held_back", "unread")
UNSETTLED = {
    "making": "it is being created: `persist ingest`, or creating it again, finishes that",
    "dropping": "it is being dropped: dropping it again finishes that",
}
"""What is said of a source whose making or dropping may have been cut off."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From when on something is wrong. None: never.

    `instances` is how many have to be at work; `behind_s`, `lag_messages` and `lag_bytes` how far it may be behind;
    `errors` how many bad messages there may be, `errors_share` which share of the messages of present instances, or
    of the last one; and
    `held_back_bytes` how much the upstream may have to keep.
    """

    instances: int | None = 1
    behind_s: int | None = 300
    lag_messages: int | None = None
    lag_bytes: int | None = None
    errors: int | None = None
    errors_share: float | None = 0.01
    held_back_bytes: int | None = 10 * 1024 * MIB

    def __post_init__(self) -> None:
        for name in ("instances", "behind_s", "lag_messages", "lag_bytes", "errors", "held_back_bytes"):
            if (value := getattr(self, name)) is not None:
                parse_integer(value, name, 0)
        share = self.errors_share
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1
        ):
            raise InvalidUsage(f"errors_share must be from 0 to 1: got {shown(share)}")


class Alert(msgspec.Struct, frozen=True):
    """The verdict of one check. `value` is what was measured, None if it is not known."""

    check: Check
    passed: bool
    says: str
    value: float | None = None


def check(
    sources: Sources, limits: Limits | None = None, names: Sequence[str] = (), *, news: Sequence[News] | None = None
) -> dict[str, list[Alert]]:
    """All verdicts on sources, by name: on all of them, or on those that are named. Changes nothing.

    Where no instance is at work, the upstream is asked from here, or `news` has what a look just found. A source of
    which not even that can be told is wrong, and ends nothing. Raises NotFound for a name that no source has.
    """
    declared = sources.declared.fetch()
    for name in names:
        sources.declared.find(name)
    wanted = sorted(set(names) or set(declared))
    found = look(sources, {}, leave_out=set(declared) - set(wanted)) if news is None else news
    by_name = {one.source: one for one in found}
    tried = Each[list[Alert]]().add(
        wanted, lambda name: _checked(sources, declared.get(name), name, limits, by_name.get(name))
    )
    unknown = {name: _unknown(says) for name, says in tried.why.items()}
    return {name: unknown.get(name) or tried.done[name] for name in wanted}


def _checked(
    sources: Sources, record: SourceRecord | None, name: str, limits: Limits | None, news: News | None
) -> list[Alert]:  # fmt: skip
    state = "dropping" if record is None else record.state
    if state in UNSETTLED:  # to find it would finish that, and a check changes nothing
        return _unknown(UNSETTLED[state])
    return judge(sources.show(name), limits, news)


def _unknown(says: str) -> list[Alert]:
    return [Alert(one, one != "unread", says if one == "unread" else "it is not known") for one in CHECKS]


def judge(found: SourceDescription, limits: Limits | None = None, news: News | None = None) -> list[Alert]:
    """All verdicts on a source, in the order of `CHECKS`. A paused one only has to have no errors, and to read all.

    `news` is what a look at its upstream told: if nothing is left there, a source that stands still is not behind.
    """
    limits = limits or Limits()
    is_idle = news is not None and news.state == "none"
    lag = Alert("lag", True, "there is nothing new", 0) if is_idle else _lag(found, limits)
    return [_instances(found, limits), lag, _errors(found, limits), _held_back(found, limits), _unread(found, news)]


def _unread(found: SourceDescription, news: News | None) -> Alert:
    if news is not None and news.state == "unread":
        return Alert("unread", False, f"the upstream could not be read: {news.says}")
    unread: Mapping[str, str] = found.unread
    if news is not None and news.state in {"none", "new"}:
        # A look stops at the first that is new. What it did not come to is as the last instance said.
        unread = news.unread if news.state == "none" else {**unread, **news.unread}
    if not unread:
        return Alert("unread", True, "all that is there is read", 0)
    return Alert("unread", False, f"what is there and is not read: {named(unread)}", len(unread))


def _instances(found: SourceDescription, limits: Limits) -> Alert:
    alive = len(found.alive)
    if found.state == "paused":
        return Alert("instances", True, f"it is paused{': ' if found.why else ''}{found.why}", alive)
    failed = next((one for one in found.instances if one["state"] == "failed"), None)
    passed = limits.instances is None or alive >= limits.instances
    newest = _newest(found)
    if newest is not None and newest["state"] == "failed" and not alive:
        return Alert("instances", False, f"the last one failed: {newest['why']}", alive)
    # Where none is at work, what the newest one said counts: a failure before it is over.
    why = "" if failed is None or passed or not alive else f"; one failed: {failed['why']}"
    return Alert("instances", passed, f"{alive} at work, and {limits.instances or 0} should be{why}", alive)


def _newest(found: SourceDescription) -> Mapping[str, object] | None:
    return max(found.instances, key=lambda one: str(one["seen"]), default=None)


def _lag(found: SourceDescription, limits: Limits) -> Alert:
    behind_s = found.behind_ms / 1000
    if found.state == "paused":
        return Alert("lag", True, f"it is paused, {behind_s:,.0f} s behind", behind_s)
    wrong = []
    if limits.behind_s is not None and behind_s > limits.behind_s:
        behind = f"{behind_s:,.0f} s behind" if found.time else "nothing was ever ingested"
        wrong.append(f"{behind}, and {limits.behind_s:,} s are allowed")
    for name, what in (("lag_messages", "messages"), ("lag_bytes", "bytes")):
        left = max((int(str(one[name])) for one in found.alive if one.get(name) is not None), default=None)
        limit = getattr(limits, name)
        if limit is not None and left is not None and left > limit:
            wrong.append(f"{left:,} {what} are left, and {limit:,} are allowed")
    return Alert("lag", not wrong, "; ".join(wrong) or f"{behind_s:,.0f} s behind", behind_s)


def _errors(found: SourceDescription, limits: Limits) -> Alert:
    wrong = []
    if limits.errors is not None and found.errors > limits.errors:
        wrong.append(f"{found.errors:,} messages were bad, and {limits.errors:,} are allowed")
    newest = _newest(found)
    instances = found.alive or ([] if newest is None else [newest])  # such as one that Dagster ran a minute ago
    messages = sum(int(str(one["messages"])) for one in instances)
    bad = sum(int(str(one["errors"])) for one in instances)
    share = bad / messages if messages else 0.0
    if limits.errors_share is not None and share > limits.errors_share:
        wrong.append(f"{bad:,} of the last {messages:,} messages were bad: see {found.collections.get('errors', '')}")
    return Alert("errors", not wrong, "; ".join(wrong) or f"{found.errors:,} bad messages in all", found.errors)


def _held_back(found: SourceDescription, limits: Limits) -> Alert:
    kept = [int(str(one["held_back_bytes"])) for one in found.instances if one.get("held_back_bytes") is not None]
    if not kept:
        return Alert("held_back", True, "the upstream holds back nothing that is known")
    most = max(kept)
    passed = limits.held_back_bytes is None or most <= limits.held_back_bytes
    says = f"the upstream holds back {most / MIB:,.0f} MiB of its log for this source"
    return Alert("held_back", passed, says, most)


OWNER = "look for news"
Version = tuple[int, int]
"""How many shards, and the sum of their newest versions: it changes when any of them does."""


class News(msgspec.Struct, frozen=True):
    """What is to be done for a source. `time` is its t, -1 where that was not looked at.

    "new": there is something to ingest, and no instance at work. "none": there is nothing. "unread": it could not be
    asked. `unread` is what is there and is not read, with why, where the upstream was asked.
    """

    source: str
    state: Literal["new", "none", "at work", "paused", "unread"]
    says: str
    time: int = -1
    unread: Mapping[str, str] = {}


class Known(NamedTuple):
    """What a look found out, and of which versions: it need not be read again while these are so."""

    at: int
    health: Version
    versions: tuple[Version, ...]
    time: int
    marks: Marks
    is_bound: bool


Memory = dict[str, Known]
"""By the ids of sources. Keep it from one look to the next; without it all is read again."""


def look(sources: Sources, memory: Memory, *, leave_out: Collection[str] = ()) -> list[News]:
    """Look at all sources but those to leave out, sorted by name. Changes nothing, but `memory`."""
    records = sorted(sources.declared.fetch().items())
    if not records:
        return []
    versions, now = _versions(sources.client.consensus.heads()), sources.client.consensus.now()
    ids = {record.id for _, record in records}
    for gone in set(memory) - ids:
        del memory[gone]
    wanted = {
        name: record for name, record in records if name not in leave_out and record.state in {"running", "paused"}
    }
    tried = Each[News]().add(wanted, lambda name: _look(sources, wanted[name], memory, versions, now))
    unread = {name: News(name, "unread", says) for name, says in tried.why.items()}
    return [unread.get(name) or tried.done[name] for name in wanted]


def _look(
    sources: Sources, record: SourceRecord, memory: Memory, versions: Mapping[str, Version], now: int
) -> News:  # fmt: skip
    if record.state == "paused":
        return News(record.name, "paused", f"it is paused{': ' if record.why else ''}{record.why}")
    known = memory.get(record.id)
    health = versions.get(record.health, (0, 0))
    if _is_at_work(sources, record, known, health, now):
        old = known or Known(now, health, (), -1, {}, False)
        memory[record.id] = old._replace(at=now, health=health)
        return News(record.name, "at work", "an instance is at work")
    parts = [record.id, *record.collections.values(), *([record.input.id] if record.input else [])]
    mine = tuple(versions.get(part, (0, 0)) for part in parts)
    with closing(record.reader.clock(sources.controller, record, OWNER, is_leased=False)) as clock:
        if known is None or known.versions != mine:
            time, bound = bound_from(clock, lambda: _time(sources, record))
            known = Known(now, health, mine, time, bound.marks, clock.has_news(bound, time))
        memory[record.id] = known._replace(at=now, health=health)
        if known.is_bound:
            return News(record.name, "new", "what is there is not durable yet", known.time)
        if waiting := [table for table in record.joined if table not in known.marks]:
            return News(record.name, "new", f"{', '.join(waiting)} was added to it", known.time)
        if not record.reader.has_upstream:
            return News(record.name, "none", "there is nothing new", known.time)
        with closing(record.reader.open_reader(sources.client, record, clock)) as reader:
            new = reader.high_watermarks(known.marks, 1)
            unread = settled(said(reader, "unread", {}), now)
    says = f"{', '.join(sorted(new)[:3])} and others" if len(new) > 3 else ", ".join(sorted(new))
    state: Literal["new", "none"] = "new" if new else "none"
    says = f"there is more in {says}" if new else "there is nothing new"
    return News(record.name, state, says, known.time, unread)


def _is_at_work(
    sources: Sources, record: SourceRecord, known: Known | None, health: Version, now: int
) -> bool:  # fmt: skip
    """Whether an instance says so: at each of its rounds one row is written."""
    if known is not None and known.health != health and now - known.at <= UNSEEN_MS:
        return True
    if known is not None and known.health == health and now - known.at >= 2 * EVERY_MS:
        return False
    return any(is_alive(row, now) for row in fetch_rows(sources.controller, record.health))


def _time(sources: Sources, record: SourceRecord) -> int:
    contents, unit = sources.controller.catalog.fetch(), record.schema.times
    found = {}
    for role, id_ in record.collections.items():
        one = contents.collections[id_]
        timeline = Renditions(sources.client, one.shard, unit, one.name).fetch()
        found[role] = upper_of(sources.client, timeline).time or 0
    return record.least(found)


def _versions(heads: Mapping[str, int]) -> dict[str, Version]:
    """The versions of what belongs together: shards are named by an id, and what they are of it."""
    found: dict[str, Version] = {}
    for name, seqno in heads.items():
        id_ = name.partition(".")[0]
        count, total = found.get(id_, (0, 0))
        found[id_] = (count + 1, total + seqno)
    return found
