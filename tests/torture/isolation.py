"""Whether a recorded history of transactions has the isolation that docs/tables.md promises.

A history is what clients saw, whatever they talked to: at which time each transaction read, what it found and wrote,
and when it was committed. The checker knows nothing of tables but that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

Key = tuple[str, int]
Value = tuple[int, str]
"""An amount, and the transaction that wrote it: so each value is written once."""
Outcome = Literal["committed", "refused", "unknown"]
START = (0, "")


class Recorded(NamedTuple):
    """One transaction, as its client saw it: `began` and `ended` are of one clock that all clients share."""

    id: str
    client: str
    as_of: int
    reads: Mapping[Key, Value | None]
    writes: Mapping[Key, Value]
    outcome: Outcome
    time: int | None
    began: int
    ended: int


def anomalies(history: Iterable[Recorded], initial: Mapping[Key, Value]) -> list[str]:
    """What is wrong with a history, in words that begin with the anomaly's name; empty if nothing is.

    A transaction whose outcome is unknown counts as committed if the caller gives the time that it was found at.
    """
    recorded = list(history)
    by_id = {one.id: one for one in recorded}
    committed = [one for one in recorded if one.time is not None and one.outcome != "refused"]
    versions: dict[Key, list[tuple[int, Value]]] = defaultdict(list)
    for key, value in initial.items():
        versions[key].append((-1, value))
    for one in sorted(committed, key=lambda one: one.time or 0):
        for key, value in one.writes.items():
            versions[key].append((one.time or 0, value))
    return [
        *_twice(committed), *_lost_updates(committed),
        *(found for one in recorded for found in _reads(one, by_id, versions)), *_orders(recorded),
    ]  # fmt: skip


def _twice(committed: list[Recorded]) -> list[str]:
    times: dict[int | None, str] = {}
    return [
        f"same time: {one.id} and {times[one.time]} at {one.time}"
        for one in committed if one.writes and times.setdefault(one.time, one.id) != one.id
    ]  # fmt: skip


def _lost_updates(committed: list[Recorded]) -> list[str]:
    """Two transactions that changed one key, where the later one read before the earlier one was committed."""
    writers: dict[Key, list[Recorded]] = defaultdict(list)
    for one in sorted(committed, key=lambda one: one.time or 0):
        for key in one.writes:
            writers[key].append(one)
    return [
        f"lost update: {later.id} changed {key} at {later.time} from what it was at {later.as_of}, and {first.id} "
        f"changed it at {first.time}"
        for key, those in writers.items()
        for first, later in pairwise(those)
        if later.as_of < (first.time or 0)
    ]  # fmt: skip


def _reads(
    one: Recorded, by_id: Mapping[str, Recorded], versions: Mapping[Key, list[tuple[int, Value]]]
) -> Iterable[str]:
    """Each read is the newest version as of the transaction's time; what it is otherwise has a name."""
    wrong = []
    seen = []
    for key, value in one.reads.items():
        history = versions.get(key, [])
        expected = bisect_right([time for time, _ in history], one.as_of) - 1
        right = history[expected][1] if expected >= 0 else None
        if value == right:
            seen.append(("right", key))
            continue
        writer = by_id.get(value[1]) if value is not None else None
        if value is not None and value not in [v for _, v in history]:
            state = "nobody" if writer is None else f"{writer.id}, which was {writer.outcome},"
            wrong.append(f"dirty read: {one.id} found {value} in {key}, written by {state}")
        else:
            wrong.append(f"wrong snapshot: {one.id} found {value} in {key} as of {one.as_of}, and it was {right}")
    if wrong and seen:
        wrong.append(f"fractured read: {one.id} found {seen[0][1]} as of {one.as_of}, but not {len(wrong)} others")
    return wrong


def _orders(recorded: list[Recorded]) -> Iterable[str]:
    """What begins after something was acknowledged, or was read, sees it; and a client never goes back."""
    events = sorted(recorded, key=lambda one: one.ended)
    found = []
    ended = [one.ended for one in events]
    most: list[tuple[int, str]] = []
    for one in events:
        known = one.time if one.time is not None and one.outcome == "committed" else one.as_of
        most.append(max((known, one.id), most[-1] if most else (known, one.id)))
    for one in recorded:
        before = bisect_right(ended, one.began) - 1
        if before >= 0 and most[before][0] > one.as_of:
            found.append(
                f"non-monotonic reads: {one.id} read as of {one.as_of}, and {most[before][1]} had ended before that "
                f"and knew {most[before][0]}"
            )
    return found
