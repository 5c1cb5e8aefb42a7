"""Which sources have something to ingest, and no instance at work: for what starts instances, as Dagster does.

All sources together cost one listing of the newest versions of shards, and the two lists of the catalog. Of a source on
which nothing has moved since the last look, nothing more is read in the location; where an instance writes its health,
nothing at all. Only the upstream of the others is asked, as only that knows what is new there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from persist_lib.catalog.renditions import Renditions, upper_of
from persist_lib.runtime.each import Each
from persist_lib.sources.bindings import Marks
from persist_lib.sources.health import EVERY_MS, UNSEEN_MS, fetch_rows, is_alive
from persist_lib.sources.protocol import said, settled
from persist_lib.sources.records import SourceRecord

if TYPE_CHECKING:
    from persist_lib.sources.sources import Sources

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
            time = _time(sources, record)
            bound = clock.since(time)
            known = Known(now, health, mine, time, bound.marks, clock.has_news(bound, time))
        memory[record.id] = known._replace(at=now, health=health)
        if known.is_bound:
            return News(record.name, "new", "what is there is not durable yet", known.time)
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
    found = []
    for id_ in record.collections.values():
        one = contents.collections[id_]
        timeline = Renditions(sources.client, one.shard, unit, one.name).fetch()
        found.append(upper_of(sources.client, timeline).time or 0)
    return min(found)


def _versions(heads: Mapping[str, int]) -> dict[str, Version]:
    """The versions of what belongs together: shards are named by an id, and what they are of it."""
    found: dict[str, Version] = {}
    for name, seqno in heads.items():
        id_ = name.partition(".")[0]
        count, total = found.get(id_, (0, 0))
        found[id_] = (count + 1, total + seqno)
    return found
