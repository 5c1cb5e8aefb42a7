"""Which leases have ended, and which ids to retire. `now` and `lease_until` are ms of the Consensus store's clock."""

from __future__ import annotations

from typing import NamedTuple

from persist_lib.core.state import State
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo

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
    writers = [
        Overdue(id_, now - w.lease_until, None, None)
        for id_, w in state.writers.items()
        if has_ended(w.lease_until, now)
    ]
    readers = [
        Overdue(id_, now - r.lease_until, r.since, r.seqno)
        for id_, r in state.readers.items()
        if has_ended(r.lease_until, now)
    ]
    return sorted(writers, key=_by_id) + sorted(readers, key=_by_id)


def has_ended(lease_until: int, now: int) -> bool:
    """Whether a lease is over, or can never have been meant. Retiring a live id costs its owner a retry."""
    return not now <= lease_until <= now + LONGEST_LEASE_MS


def _by_id(overdue: Overdue) -> str:
    return overdue.id
