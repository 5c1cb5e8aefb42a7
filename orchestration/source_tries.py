"""For which sources a tick requests a run, and how long it waits where the last one did not get further."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from orchestration.sensors import LONGEST_WAIT_MS
from persist_lib.sources import News

FIRST_WAIT_MS = 60_000
REMEMBERED = 5000
"""The most sources that a cursor remembers."""


class Try(NamedTuple):
    """How often a source was asked for without getting further than `time`, and when last (ms)."""

    attempt: int
    at_ms: int
    time: int

    @property
    def due_ms(self) -> int:
        """When it is asked for again."""
        return self.at_ms + min(LONGEST_WAIT_MS, FIRST_WAIT_MS << min(self.attempt - 2, 20)) if self.attempt > 1 else 0


class Asked(NamedTuple):
    """What a tick asks for, why it does not, and what it remembers."""

    now: tuple[str, ...]
    reason: str
    cursor: str


def asked_now(found: Sequence[News], busy: Collection[str], tries: Mapping[str, Try], now: int) -> Asked:
    """Decide. A source that got further since it was asked for is asked for at once; else after a growing pause."""
    due, waiting, kept = [], 0, {}
    for one in found:
        if one.state not in {"new", "unread"}:
            continue
        old = tries.get(one.source, Try(0, 0, -1))
        if one.time > old.time:
            old = Try(0, 0, one.time)
        if one.state == "unread" or old.due_ms > now:  # a run could not read it either
            waiting += one.state == "new"
            kept[one.source] = old
            continue
        due.append(one.source)
        kept[one.source] = Try(old.attempt + 1, now, one.time)
    kept |= {name: tries[name] for name in busy if name in tries}
    return Asked(tuple(due), _reason(found, busy, waiting), dumps(kept))


def _reason(found: Sequence[News], busy: Collection[str], waiting: int) -> str:
    counts = Counter(one.state for one in found)
    said = [
        f"{count} {what}" for count, what in (
            (counts["none"], "with nothing new"), (counts["at work"], "with an instance at work"),
            (counts["paused"], "paused"), (len(busy), "in runs that are not finished"),
            (waiting, "that got no further in the last run, and wait"), (counts["unread"], "that could not be asked"),
        ) if count
    ]  # fmt: skip
    unread = [f"{one.source} ({one.says})" for one in found if one.state == "unread"][:3]
    total = len(found) + len(busy)
    return f"{total} sources{': ' if said else ''}{', '.join(said)}{': ' if unread else ''}{'; '.join(unread)}"


def loads(cursor: str | None) -> dict[str, Try]:
    """The tries in a cursor. One that cannot be read is taken for none."""
    try:
        return {str(name): Try(*map(int, one)) for name, one in json.loads(cursor or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def dumps(tries: Mapping[str, Try]) -> str:
    """The cursor: those that were asked for last."""
    kept = sorted(tries.items(), key=lambda item: -item[1].at_ms)[:REMEMBERED]
    return json.dumps(dict(kept), separators=(",", ":"))
