"""How the instances of a source are: a collection with a row each. It is about processes, so it is not definite.

A process that was killed cannot say so. So each row has the time at which it was written, and a reader of it sees how
long ago that is; instances take away the rows of others that were not heard of for long.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.writer import CollectionWriter
from persist_lib.errors import PersistError
from persist_lib.frontier import at
from persist_lib.schema.schema import Schema
from persist_lib.sources.protocol import Mark
from persist_lib.sources.records import Declaration
from persist_lib.sources.running import Progress
from persist_lib.times import PER_SECOND, Unit

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller


Health = Literal["running", "lagging", "stalled", "paused", "failed", "stopped"]
SCHEMA = Schema(
    key={"instance": "string not null"},
    value={
        "state": "string not null", "why": "string not null", "up_to": "timestamp[ms, UTC]", "lag": "int64",
        "behind_ms": "int64", "messages": "int64 not null", "errors": "int64 not null", "lag_messages": "int64",
        "lag_bytes": "int64", "held_back_bytes": "int64", "partitions": "string", "seen": "timestamp[ms, UTC]",
    },
    times="ms", unique=True,
)  # fmt: skip
EVERY_MS = 10_000
"""How often an instance writes that nothing has changed."""
LAGGING_MS = 60_000
"""An instance that finds more than it can make durable, and is behind the clock by that much, is lagging."""
UNSEEN_MS = 5 * 60_000
"""An instance that should be at work and was not heard of for longer may be gone."""
FORGET_MS = 3_600_000
"""Rows that were not written for longer are taken away; after a day those that say why an instance failed."""
FORGET_FAILED_MS = 24 * 3_600_000
TIDY_MS = 5 * 60_000
"""How often an instance looks for these."""
MOST_PARTITIONS = 100
"""Partitions that a row names: those that are not read, and those that have most left."""
MOST_UNREAD = 10_000
"""The most that are not read that a row names."""
MOST_NAMED = 3
AT_WORK = ("running", "lagging", "stalled", "paused")


class Report:
    """What one instance says of itself. That it cannot say so is no reason for it to stop."""

    def __init__(self, controller: Controller, collection: str, instance: str, unit: Unit | None) -> None:
        self._controller, self._collection, self._instance, self._unit = controller, collection, instance, unit
        self._writer: CollectionWriter | None = None
        self._said: tuple[str, str] = ("", "")
        self._at = self._tidied_at = 0
        self.messages = self.errors = 0

    def progress(self, progress: Progress) -> None:
        self.messages, self.errors = self.messages + progress.messages, self.errors + progress.errors
        is_lagging = bool(progress.lag) and progress.behind_ms > LAGGING_MS
        why = [f"{progress.behind_ms / 1000:,.0f} s behind"] if is_lagging else []
        why += [progress.warning] if progress.warning else []
        why += [f"not read: {named(progress.unread)}"] if progress.unread else []
        self.say("lagging" if why else "running", "; ".join(why), progress)

    def say(self, state: Health, why: str, progress: Progress | None = None) -> None:
        """Write a row, if it is another state than before, or the last one was a while ago."""
        now = self._controller.client.consensus.now()
        if (state, why) == self._said and now < self._at + EVERY_MS:
            return
        self._said, self._at = (state, why), now
        row: dict[str, object] = {
            **dict.fromkeys(SCHEMA.names), "instance": self._instance, "state": state, "why": why[:2000],
            "messages": self.messages, "errors": self.errors, "seen": SCHEMA.moment(now),
        }  # fmt: skip
        if progress is not None:
            row |= _measured(progress)
            if self._unit is not None:
                row["up_to"] = SCHEMA.moment(progress.time * 1000 // PER_SECOND[self._unit])
        with suppress(PersistError):
            self._opened().upsert([row])
        if now >= self._tidied_at + TIDY_MS:
            self._tidied_at = now
            with suppress(PersistError):
                self._tidy(now)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _tidy(self, now: int) -> None:
        rows = fetch_rows(self._controller, self._collection)
        old = [row["instance"] for row in rows if is_old(row, now) and row["instance"] != self._instance]
        if old:
            self._opened().delete([{"instance": one} for one in old])

    def _opened(self) -> CollectionWriter:
        if self._writer is None:
            name = self._controller.catalog.fetch().collections[self._collection].name
            self._writer = self._controller.open_writer(name)
        return self._writer


def fetch_rows(controller: Controller, collection: str) -> list[dict[str, Any]]:
    """What the instances of a source last said, as it is stored; none of a source that never ran.

    Without a lease, as reading must not look like an instance that writes: see `alerts`.
    """
    found = controller.catalog.fetch().collections[collection]
    with RenditionReader(controller.client, found, SCHEMA.times, None, "", is_leased=False) as read:
        if read.fetch_upper() <= at(0):
            return []
        with read.snapshot() as snapshot:
            return snapshot.to_pylist()


def unseen_ms(row: Mapping[str, Any], now: int) -> int:
    """For how long an instance was not heard of, by the store's clock."""
    seen = row.get("seen")
    return now - round(seen.timestamp() * 1000) if isinstance(seen, dt.datetime) else now


def is_alive(row: Mapping[str, Any], now: int) -> bool:
    """Whether an instance is at work, as far as is known."""
    return row["state"] in AT_WORK and unseen_ms(row, now) <= UNSEEN_MS


def is_old(row: Mapping[str, Any], now: int) -> bool:
    """Whether what a row says is too old to be of use."""
    return unseen_ms(row, now) > (FORGET_FAILED_MS if row["state"] == "failed" else FORGET_MS)


def shown_rows(rows: Sequence[Mapping[str, Any]], now: int) -> list[dict[str, Any]]:
    """The rows for readers: one that should be at work and was not heard of for long is `unseen`, and says how long."""
    found = []
    for row in sorted(rows, key=lambda one: str(one["instance"])):
        shown = dict(row)
        if row["state"] in AT_WORK and not is_alive(row, now):
            ago = f"not seen for {unseen_ms(row, now) // 60_000:,} min"
            shown |= {
                "state": "unseen",
                "why": f"{ago}; before that {row['state']}{': ' if row['why'] else ''}{row['why']}",
            }
        found.append(shown)
    return found


def left_of(rows: Sequence[Mapping[str, Any]], now: int) -> dict[str, dict[str, Any]]:
    """What is left of each partition, as the instance that was heard of last and is at work says it."""
    return _partitions([row for row in rows if is_alive(row, now)], now)


def unread_of(rows: Sequence[Mapping[str, Any]], now: int) -> dict[str, str]:
    """What is there and is not read, with why, as the instance says it that looked last, also if it has ended."""
    return {name: one["unread"] for name, one in _partitions(rows, now).items() if "unread" in one}


def _partitions(rows: Sequence[Mapping[str, Any]], now: int) -> dict[str, dict[str, Any]]:
    newest = max((row for row in rows if row.get("partitions")), key=lambda row: -unseen_ms(row, now), default=None)
    found: dict[str, dict[str, Any]] = {} if newest is None else msgspec.json.decode(str(newest["partitions"]))
    return found


def named(unread: Mapping[str, str]) -> str:
    """What is not read in a sentence: how much it is, and the first ones with why."""
    first = [f"{name} ({why})" for name, why in sorted(unread.items())[:MOST_NAMED]]
    return f"{len(unread):,}: {'; '.join(first)}{'; and others' if len(unread) > MOST_NAMED else ''}"


def _measured(progress: Progress) -> dict[str, object]:
    names = sorted(
        {*progress.lag, *progress.unread}, key=lambda name: (name not in progress.unread, -progress.lag.get(name, 0))
    )
    partitions: dict[str, object] = {}
    for name in names[: max(MOST_PARTITIONS, len(progress.unread))][:MOST_UNREAD]:
        behind, why = progress.behind.get(name), progress.unread.get(name)
        known = {} if behind is None else msgspec.to_builtins(behind)
        partitions[name] = {
            "left": progress.lag.get(name, 0),
            **known,
            **({} if why is None else {"unread": why[:500]}),
        }
    counts = {what: [one for each in progress.behind.values() if (one := getattr(each, what)) is not None]
              for what in ("messages", "bytes")}  # fmt: skip
    return {
        "lag": sum(progress.lag.values()), "behind_ms": progress.behind_ms, "held_back_bytes": progress.held_back,
        "lag_messages": sum(counts["messages"]) if counts["messages"] or not progress.lag else None,
        "lag_bytes": sum(counts["bytes"]) if counts["bytes"] or not progress.lag else None,
        "partitions": msgspec.json.encode(partitions).decode(),
    }  # fmt: skip


class SourceDescription(Declaration, frozen=True, kw_only=True):
    """A source: what is declared of it, and how it is.

    `collections` are those that it writes, by what they are for. `time` is t: all before it is durable.

    `bound` says up to which address each partition has times, and `durable` up to which it is durable. `instances` are
    the rows of its health collection; one that was not heard of for five minutes has the state "unseen". `behind_ms` is
    how far t is behind the store's clock (or the collection that it reads), `errors` how many messages were bad, and
    `left` what is left of partitions, as an instance says it: addresses (`left`), messages, bytes and seconds.
    `unread` is what is there and is not read, with why, as the instance said it that looked last.
    """

    name: str
    id: str
    state: str
    collections: Mapping[str, str]
    time: int
    bound: Mapping[str, Mark]
    durable: Mapping[str, Mark]
    instances: Sequence[Mapping[str, object]]
    behind_ms: int = 0
    errors: int = 0
    why: str = ""
    left: Mapping[str, Mapping[str, object]] = {}
    unread: Mapping[str, str] = {}

    @property
    def alive(self) -> Sequence[Mapping[str, object]]:
        """The instances that are at work, as far as is known."""
        return [one for one in self.instances if one["state"] in AT_WORK]
