"""What the small duties would do, as pure plans from one state: leases that ended, a rollup.

`now` and `lease_until` are ms of the Consensus store's clock.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from persist_lib.core.state import State
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, parse_rollup_key

LONGEST_LEASE_MS = 400 * 86_400_000
"""A lease that ends later than this from now was taken by a clock that was wrong. Its owner may be gone, and it would
hold history for years. So it counts as ended."""


class Overdue(NamedTuple):
    """A live id whose lease has ended: for how long (ms), and what it holds back.

    Below zero: it would end so far ahead that only a wrong clock can have taken it.
    """

    id: str
    overdue_ms: int
    since: Antichain | None
    seqno: SeqNo | None


def plan_expiry(state: State, now: int) -> list[Overdue]:
    """The leases that `Expire(now)` would retire, sorted by id: the order of a mapping differs between processes."""
    writers = (Overdue(id_, now - w.lease_until, None, None) for id_, w in state.writers.items())
    readers = (Overdue(id_, now - r.lease_until, r.since, r.seqno) for id_, r in state.readers.items())
    found = (one for side in (writers, readers) for one in sorted(side, key=attrgetter("id")))
    return [one for one in found if has_ended(now - one.overdue_ms, now)]


def has_ended(lease_until: int, now: int) -> bool:
    """Whether a lease is over, or can never have been meant. Retiring a live id costs its owner a retry."""
    return not now <= lease_until <= now + LONGEST_LEASE_MS


def rollup_is_due(state: State, seqno: SeqNo, every: int) -> bool:
    """Whether the newest rollup lags `every` transitions behind, or garbage waits for a newer one."""
    newest = state.newest_rollup
    waits = last_deletion(state) >= max(newest, 1)
    return seqno - newest >= every or waits or (state.is_finished() and newest == 0)


def rollup_is_duty(seqno: SeqNo, before: State, after: State, every: int) -> bool:
    """Whether the writer of an append has to roll up: it made the first one at or after a multiple of `every`.

    If it fails to, the writer of the first append after the next multiple does. A rollup by maintenance counts for a
    multiple that follows it by less than half of `every`.
    """
    due = seqno - seqno % every
    if 2 * (due - after.newest_rollup) < max(2, every):
        return False
    return all(not writer.outcomes or writer.outcomes[-1].seqno < due for writer in before.writers.values())


def last_deletion(state: State) -> SeqNo:
    """The seqno at which the newest garbage that waits for a rollup was logically deleted; 0 for none.

    Old rollups are garbage that waits for no newer rollup. Otherwise each rollup would make the next one due.
    """
    return max((g.seqno for key, g in state.garbage.items() if parse_rollup_key(key) is None), default=SeqNo(0))
