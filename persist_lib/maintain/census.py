"""The census: what a shard is made of, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persist_lib.core.cost import S3_LIST, storage_dollars
from persist_lib.core.plan.compaction import Policy, bound_of, plan_compaction, policy_of
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.plan.keepers import Keeper
from persist_lib.core.plan.look import stored_bytes
from persist_lib.core.plan.upkeep import plan_expiry
from persist_lib.core.state import Version
from persist_lib.core.trace import Level, levels
from persist_lib.format.log import decode_row
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.shard.commit import Machine
from persist_lib.shard.log import row_name
from persist_lib.times import Unit

MOST_ROWS = 1000
"""Rows of the log in which is looked for since when a reader, writer or hold is there."""


class Census(msgspec.Struct, frozen=True):
    """One shard at one version. Sizes in bytes; `debt` in updates that compaction would rewrite.

    `batches` counts the non-empty batches, and is at most `batch_bound` at rest. `collectable` is the garbage that
    could be deleted right now.
    """

    shard: str
    seqno: SeqNo
    since: Antichain
    upper: Antichain
    batches: int
    batch_bound: int
    empty_batches: int
    parts: int
    runs: int
    updates: int
    size: int
    inline_size: int
    debt: int
    debt_requests: int
    garbage: int
    garbage_size: int
    collectable: int
    collectable_size: int
    writers: int
    readers: int
    overdue: int
    holds: int
    retired: int
    rollups: int
    rollup_lag: int
    seqno_held: int
    retention: int | None
    fingerprint: int
    dollars_month: float
    levels: tuple[Level, ...]
    finished: bool
    appended_bytes: int = 0
    maintained_bytes: int = 0
    """Bytes that appends and compactions ever wrote; of an upgraded shard, those since its upgrade to format 3."""
    times: Unit | None = None
    """The clock that `since`, `upper` and `retention` count by; None: plain integers."""
    producers: int = 0
    ahead: int = 0
    """Bytes of the contents that are kept ahead of the trace. `size` is the trace alone."""

    @property
    def write_amplification(self) -> float | None:
        """Bytes that compactions wrote for each byte appended, since ever; None if no bytes were appended (see above).

        A rewrite counts in full, also of what was appended before an upgrade began to count.
        """
        return self.maintained_bytes / self.appended_bytes if self.appended_bytes else None


def take_census(machine: Machine, policy: Policy | None = None) -> Census:
    """Return the census of the shard's newest version. Reads only; never writes."""
    policy = policy_of(machine.config, policy)
    return census_of(machine.shard, machine.fetch(), machine.consensus.now(), policy)


def known_since(machine: Machine, seqno: SeqNo, keepers: Sequence[Keeper]) -> tuple[Keeper, ...]:
    """The same with the time (ms) at which each came, as far as the newest rows of the log say."""
    if not keepers:
        return ()
    came: dict[str, int] = {}
    first = SeqNo(max(1, seqno - MOST_ROWS + 1))
    oldest: int | None = None
    for stored in machine.consensus.scan(machine.shard, first, MOST_ROWS):
        row = decode_row(stored.data, row_name(machine.shard, stored.seqno))
        oldest = row.now if oldest is None else oldest
        changed = (one for diff in row.diffs for one in (*diff.writers, *diff.readers, *diff.holds, *diff.pins))
        came |= {str(name): row.now for name, old, new in changed if old is None and new is not None}
    return tuple(
        msgspec.structs.replace(one, set_ms=came.get(one.name, oldest), is_older=one.name not in came)
        for one in keepers
        if one.kind != "rollup"
    ) + tuple(one for one in keepers if one.kind == "rollup")


def census_of(shard: str, version: Version, now: int, policy: Policy | None = None) -> Census:
    """Return the census of one version. `now` is the store's clock (ms since the epoch); it decides what is overdue."""
    state, policy = version.state, policy or Policy()
    plan, collection = plan_compaction(state, policy), plan_garbage(state, version.seqno)
    filled = state.filled
    garbage_size = sum(garbage.size for garbage in state.garbage.values())
    return Census(
        shard=shard, seqno=version.seqno, since=state.since, upper=state.upper,
        batches=len(filled), batch_bound=bound_of(state), empty_batches=len(state.trace) - len(filled),
        parts=sum(len(batch.parts) for batch in filled), runs=sum(len(batch.runs) for batch in filled),
        updates=state.count, size=state.size, inline_size=state.inline_size,
        debt=plan.debt, debt_requests=len(plan.requests),
        garbage=len(state.garbage), garbage_size=garbage_size,
        collectable=len(collection.keys), collectable_size=collection.size,
        writers=len(state.writers), readers=len(state.readers), overdue=len(plan_expiry(state, now)),
        holds=len(state.holds), retired=len(state.retired), rollups=len(state.rollups),
        rollup_lag=version.seqno - state.newest_rollup, seqno_held=version.seqno - state.seqno_since(version.seqno),
        retention=state.retention, fingerprint=state.fingerprint,
        dollars_month=storage_dollars(stored_bytes(state), policy.prices or S3_LIST),
        levels=tuple(levels(state.trace)), finished=state.is_finished(),
        appended_bytes=state.appended_bytes, maintained_bytes=state.maintained_bytes, times=state.times,
        producers=len(state.producers), ahead=state.stored_size - state.size,
    )  # fmt: skip
