"""Liveness: extending leases, retiring ids, and the since that live readers hold. Leases never decide what is deleted.

`now` and `lease_until` are ms of the Consensus store's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.plan.upkeep import plan_expiry
from persist_lib.core.state import LAYERS, MARK, RETENTION, Hold, Reader, State
from persist_lib.frontier import Antichain, meet_all
from persist_lib.ids import ReaderId, SeqNo, WriterId


def expire(state: State, seqno: SeqNo, now: int) -> StateDiff | r.Refusal:
    """Retire all ids whose lease has ended. Since stays where it is, even when the last reader is retired."""
    return retire(state, seqno, tuple(overdue.id for overdue in plan_expiry(state, now))) or r.NothingDue()


def retire(state: State, seqno: SeqNo, ids: tuple[str, ...]) -> StateDiff | None:
    """Retire those of `ids` that are live, for ever; None when none of them is live."""
    writers = tuple((WriterId(i), state.writers[WriterId(i)], None) for i in ids if i in state.writers)
    readers = tuple((ReaderId(i), state.readers[ReaderId(i)], None) for i in ids if i in state.readers)
    retired = tuple((id_, None, seqno) for id_, *_ in (*writers, *readers))
    return StateDiff(writers=writers, readers=readers, retired=retired) if retired else None


def extend(state: State, ids: tuple[str, ...], lease_until: int) -> StateDiff | r.Refusal:
    """Extend the leases of those of `ids` that are live; refused when none is."""
    ids = tuple(dict.fromkeys(ids))
    writers, readers = (_extended(live, ids, lease_until) for live in (state.writers, state.readers))
    if not any(id_ in state.writers or id_ in state.readers for id_ in ids):
        return r.NotLive(ids)
    return StateDiff(writers=writers, readers=readers) if writers or readers else r.AlreadyDone()


def _extended(live: Mapping[Any, Any], ids: tuple[str, ...], until: int) -> tuple[tuple[Any, Any, Any], ...]:
    known = ((id_, live[id_]) for id_ in ids if id_ in live and live[id_].lease_until < until)
    return tuple((id_, one, msgspec.structs.replace(one, lease_until=until)) for id_, one in known)


def keepers(state: State, from_: Antichain | None = None) -> list[str]:
    """Which readers and holds keep the shard's since where it is; or from reaching `from_`."""

    def keeps(since: Antichain) -> bool:
        return since <= state.since if from_ is None else since < from_

    found = [f"reader {id_}" for id_, reader in sorted(state.readers.items()) if keeps(reader.since)]
    holds = ((name, hold) for name, hold in sorted(state.holds.items()) if not is_mark(name, hold))
    return found + [f"hold {name}" for name, hold in holds if keeps(hold.since)]


def needed_by(state: State) -> tuple[str, ...]:
    """Which readers, holds and pins a shard cannot be finished for: not its policy and its mark, which read nothing."""
    holds = (name for name, hold in sorted(state.holds.items()) if name != RETENTION and not is_mark(name, hold))
    return (
        *sorted(state.readers),
        *(f"hold {name}" for name in holds),
        *(f"pin {name}" for name in sorted(state.pins)),
    )


def is_mark(name: str, hold: Hold) -> bool:
    """Whether a hold only says whose the shard is."""
    return name == MARK and hold.opaque.decode(errors="replace") in LAYERS


def moved_mark(state: State, since: tuple[Antichain, Antichain] | None) -> tuple[tuple[str, Hold, Hold], ...]:
    """How the mark moves with since, so that it never is before it: also programs that know no marks check that."""
    mark = state.holds.get(MARK)
    if since is None or mark is None or not is_mark(MARK, mark) or since[1] <= mark.since:
        return ()
    return ((MARK, mark, Hold(since[1], mark.opaque)),)


def fold_since(
    state: State,
    readers: Mapping[ReaderId, Reader] | None = None,
    holds: Mapping[str, Hold] | None = None,
) -> tuple[Antichain, Antichain] | None:
    """The change of the shard's since that these readers and holds allow; None for no change. It never moves back."""
    readers = state.readers if readers is None else readers
    holds = state.holds if holds is None else holds
    frontiers = [reader.since for reader in readers.values()]
    frontiers += [hold.since for name, hold in holds.items() if not is_mark(name, hold)]
    if not frontiers or meet_all(frontiers) <= state.since:
        return None
    return (state.since, meet_all(frontiers))
