"""What a shard was when it was last looked at, so that a pass over many shards visits those where something is due.

A look is a pure function of one version and of the settings. So it holds for as long as the shard's newest seqno is the
one that was looked at, and the state need not be read again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from persist_lib.core.pins import behind
from persist_lib.core.plan.compaction import Policy, bound_of, plan_compaction
from persist_lib.core.plan.garbage import GarbagePlan, plan_garbage
from persist_lib.core.plan.keepers import keepers_of
from persist_lib.core.plan.retention import plan_retention
from persist_lib.core.plan.upkeep import has_ended, rollup_is_due
from persist_lib.core.state import State, Version
from persist_lib.ids import SeqNo
from persist_lib.times import Unit

RULES = 7
"""To be raised when a release makes another look of the same state. Looks of other rules are not used."""
BY_STATE = ("retention", "compaction", "publication", "rollups", "garbage")
"""The duties whose work can be told from the state."""
BY_MARK = ("orphans", "scrub", "census")
"""The duties whose work cannot: they are due once the shard has moved since they were done."""
STALLED = {"orphans": 3 * 86_400, "scrub": 21 * 86_400}
"""Seconds after which a duty that was done before is overdue on a shard that has moved: three times its schedule."""


class Signs(msgspec.Struct, frozen=True, array_like=True):
    """What tells how a shard is. Sizes in bytes.

    `batches` are the non-empty ones, and `bound` how many there are at most at rest. `collectable` is garbage that can
    be deleted right now, `held` garbage that waits, and `waits_for` what for.
    """

    size: int = 0
    batches: int = 0
    bound: int = 0
    rollup_lag: int = 0
    collectable: int = 0
    held: int = 0
    waits_for: str = ""
    writers: int = 0
    readers: int = 0
    holds: int = 0
    kept: int = 0
    keeper: str = ""
    """How much one reader or hold keeps alone, and which keeps most. The retention is left out, as that is wanted."""
    stored: int = 0
    """All that is stored: batches, garbage and rollups."""
    updates: int = 0
    upper: int | None = 0
    """None: it is closed. By the clock `times`; None: plain integers."""
    times: Unit | None = None


class Look(msgspec.Struct, frozen=True, array_like=True):
    """What one version of a shard calls for.

    `due` names the duties of `BY_STATE` that have work, and `debt` is how many updates compaction would rewrite.
    `leases_until` is the time (ms of the store's clock) from which on a lease has ended; 0: there is no lease. `mark`
    changes with the data and with since, but not with leases. `looked_ms` is when this was found out.

    `done` says for duties of `BY_MARK` at which seqno and when (ms) they were last done. For `garbage` it says from
    which seqno on the log has rows, and when that was found out.
    """

    seqno: SeqNo
    looked_ms: int
    due: tuple[str, ...] = ()
    debt: int = 0
    mark: str = ""
    leases_until: int = 0
    done: Mapping[str, tuple[SeqNo, int]] = {}
    signs: Signs = Signs()

    @property
    def is_tombstone(self) -> bool:
        """Whether nothing can be read of the shard any more: its since is empty."""
        return self.mark.endswith(".None")

    @property
    def log_begins(self) -> SeqNo:
        """The seqno of the oldest row of the log, as far as it is known."""
        return self.done["garbage"][0] if "garbage" in self.done else SeqNo(1)


def look_at(version: Version, now: int, policy: Policy, rollup_every: int, log_begins: SeqNo = SeqNo(1)) -> Look:  # noqa: B008 - a number
    """Look at a version. `now` is the store's clock in ms, and `log_begins` the seqno of the oldest row of the log."""
    state, seqno = version.state, version.seqno
    compaction, garbage = plan_compaction(state, policy), plan_garbage(state, seqno)
    is_called_for = (
        plan_retention(state, policy.retention) is not None,
        bool(compaction.requests),
        bool(behind(state)),
        rollup_is_due(state, seqno, rollup_every),
        bool(garbage.keys) or garbage.truncate_below > log_begins,
    )
    return Look(
        seqno, now,
        due=tuple(duty for duty, is_it in zip(BY_STATE, is_called_for, strict=True) if is_it),
        debt=compaction.debt, mark=f"{state.next_id}.{state.since.time}", leases_until=leases_until(state, now),
        done={"garbage": (log_begins, now)}, signs=_signs(version, garbage),
    )  # fmt: skip


def _signs(version: Version, garbage: GarbagePlan) -> Signs:
    state = version.state
    people = [one for one in keepers_of(state, version.seqno) if one.kind in ("reader", "hold") and one.size]
    kept, keeper = (people[0].size, f"{people[0].kind} {people[0].name}") if people else (0, "")
    return Signs(
        state.stored_size, len(state.filled),
        bound_of(state), version.seqno - state.newest_rollup, garbage.size,
        sum(held.size for held in garbage.held), "; ".join(held.why for held in garbage.held),
        len(state.writers), len(state.readers), len(state.holds), kept, keeper,
        stored_bytes(state), state.count, state.upper.time, state.times,
    )  # fmt: skip


def stored_bytes(state: State) -> int:
    """Bytes of all that is stored of a shard: batches, contents, garbage and rollups. The log is not counted."""
    return sum(one.size for kind in (state.garbage, state.rollups) for one in kind.values()) + state.stored_size


def overdue(look: Look, now: int, overdue_s: float, garbage: int, rollup_every: int) -> dict[str, str]:
    """The duties that nothing seems to carry out on a shard, and what tells so.

    `now` is the store's clock in ms; a lease may have ended for `overdue_s` seconds, and `garbage` bytes may wait.
    """
    signs, late = look.signs, dict[str, str]()
    if signs.batches > 2 * signs.bound:
        late["compaction"] = f"{signs.batches} batches, of {signs.bound} at rest"
    if signs.rollup_lag > 4 * rollup_every:
        late["rollups"] = f"{signs.rollup_lag:,} transitions since the newest one"
    if signs.collectable > max(garbage, signs.size):
        late["garbage"] = f"{signs.collectable:,} bytes can go"
    if 0 < look.leases_until < now - overdue_s * 1000:
        late["leases"] = f"a lease ended {(now - look.leases_until) / 1000:,.0f} s ago"
    for duty, longest_s in STALLED.items():
        seqno, done_ms = look.done.get(duty, (look.seqno, 0))
        if seqno != look.seqno and (ago_s := (now - done_ms) / 1000) > longest_s:
            late[duty] = f"last done {ago_s / 86_400:,.0f} days ago"
    return late


def leases_until(state: State, now: int) -> int:
    """The first ms in which a lease has ended; 0 if there is none.

    A lease that ends too far ahead counts as ended (see `has_ended`), so it has ended by `now`.
    """
    leases = [one.lease_until for one in state.writers.values()] + [one.lease_until for one in state.readers.values()]
    return min((max(1, min(until, now) if has_ended(until, now) else until + 1) for until in leases), default=0)


def settings_of(policy: Policy, rollup_every: int) -> str:
    """The settings on which a look depends, as text. Looks of other settings are not used."""
    thresholds = f"{policy.weight!r} {policy.advance!r} {policy.ahead!r} {policy.format!r} {policy.inline_fill!r}"
    kept = "" if policy.retention is None else f" {policy.retention!r}"
    return f"{RULES} {thresholds} {rollup_every}{kept}"


class Debts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The looks at all shards that the caller may see, by the store's clock `now` (ms).

    `moved` has the newest seqnos of those shards only whose look is of another seqno, or that have none: they wait to
    be looked at, or are `unread`, which says why they could not be.
    """

    now: int
    looks: Mapping[str, Look]
    moved: Mapping[str, SeqNo]
    unread: Mapping[str, str]

    @property
    def heads(self) -> dict[str, SeqNo]:
        """The newest seqno of every shard."""
        return {**{name: look.seqno for name, look in self.looks.items()}, **self.moved}

    @property
    def waiting(self) -> int:
        """How many shards wait to be looked at."""
        return sum(1 for name in self.moved if name not in self.unread)
