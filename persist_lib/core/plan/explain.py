"""Why each duty does what it does, or nothing, and why an object is still there: sentences with their numbers.

They are made of the same pure plans that the duties carry out, so that a run, the command and Dagster say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from persist_lib.core.cost import S3_LIST, storage_dollars
from persist_lib.core.leases import is_mark
from persist_lib.core.pins import pinned
from persist_lib.core.plan.compaction import Policy, bound_of, plan_compaction
from persist_lib.core.plan.garbage import can_never_be_linked, plan_garbage
from persist_lib.core.plan.look import stored_bytes
from persist_lib.core.plan.retention import plan_retention, retention_of
from persist_lib.core.plan.upkeep import plan_expiry, rollup_is_due
from persist_lib.core.state import RETENTION, State, Version
from persist_lib.ids import READER, WRITER, PartKey, parse_rollup_key, uploader_of
from persist_lib.times import show_frontier

NAMED = 3
"""How many holders of history, or reasons, a sentence names."""


class Why(NamedTuple):
    """A sentence about a duty, or about `since`, `cost` or an object."""

    about: str
    says: str


def explain(version: Version, now: int, policy: Policy, rollup_every: int, about: str | None = None) -> list[Why]:
    """What each duty would do with this version, and why not more; or only the one that is named, if it is one of them.

    `now` is the store's clock in ms.
    """
    state = version.state
    if state.is_finished():
        return [Why("shard", "it is finished for good, and only its log and a rollup are kept")]
    sentences: dict[str, Callable[[], str]] = {
        "leases": partial(_leases, state, now), "since": partial(_since, state),
        "retention": partial(_retention, state, policy), "compaction": partial(_compaction, state, policy),
        "rollups": partial(_rollups, version, rollup_every),
        "garbage": partial(_garbage, version), "cost": partial(_cost, state, policy),
    }  # fmt: skip
    return [Why(one, say()) for one, say in sentences.items() if about in (None, one)]


def explain_object(version: Version, key: str) -> Why:
    """Why an object of the shard is there. `key` is as in the state, without the shard's name before it."""
    state, part = version.state, PartKey(key)
    for batch in state.trace:
        if key in batch.keys:
            span = f"[{show_frontier(batch.lower, state.times)}, {show_frontier(batch.upper, state.times)})"
            return Why(key, f"batch {batch.lo}..{batch.hi} has it: updates with times in {span}")
    if (kept := state.contents) is not None and key in kept.keys:
        as_of = show_frontier(kept.since, state.times)
        return Why(key, f"it has the contents as of {as_of}, kept ahead for reads from then on")
    if (rolled := next((at for at, one in state.rollups.items() if one.key == key), None)) is not None:
        is_newest = rolled == state.newest_rollup
        return Why(key, f"it is the rollup of v{rolled}, {'the newest' if is_newest else 'which a newer one replaces'}")
    if (entry := state.garbage.get(part)) is not None:
        plan = plan_garbage(state, version.seqno)
        if part in plan.keys:
            return Why(key, f"nothing refers to it since v{entry.seqno}, and it can go: the duty garbage deletes it")
        since = state.seqno_since(version.seqno)
        if by := pinned(state).get(part):
            return Why(key, f"no batch has it since v{entry.seqno}, and it waits: {', '.join(by)} pins it")
        waits = plan.held[0].why if entry.seqno >= since else plan.held[-1].why
        return Why(key, f"nothing refers to it since v{entry.seqno}, and it waits: {waits}")
    if parse_rollup_key(part) is None and not any(kind.fullmatch(uploader_of(part)) for kind in (WRITER, READER)):
        return Why(key, "it is no key of an object of this shard, as in w1…/….parquet")
    if can_never_be_linked(part, state):
        return Why(key, "nothing refers to it, and nothing ever can: if it is there, the duty orphans deletes it")
    return Why(key, "nothing refers to it yet; its writer is live, and may link it, or leave it to the duty orphans")


def _leases(state: State, now: int) -> str:
    if overdue := plan_expiry(state, now):
        longest = max(overdue, key=lambda one: one.overdue_ms)
        ago = f"{longest.overdue_ms / 1000:,.0f} s ago" if longest.overdue_ms >= 0 else "so late that a clock was wrong"
        return f"{len(overdue)} have ended and can be retired; {longest.id} ended {ago}"
    ends = [one.lease_until for one in state.writers.values()] + [one.lease_until for one in state.readers.values()]
    if not ends:
        return "nothing has a lease"
    live = f"{len(state.writers)} writers and {len(state.readers)} readers are live"
    return f"{live}; the next lease ends in {(min(ends) - now) / 1000:,.0f} s"


def _since(state: State) -> str:
    shown = show_frontier(state.since, state.times)
    holders = [f"reader {id_} ({one.purpose})" for id_, one in state.readers.items() if one.since <= state.since]
    holders += [
        f"hold {name}" for name, one in state.holds.items() if one.since <= state.since and not is_mark(name, one)
    ]
    if not holders:
        return f"history is kept from {shown} on; nothing needs it, and it moves when a reader or a hold does"
    more = f" and {len(holders) - NAMED} more" if len(holders) > NAMED else ""
    return f"history is kept from {shown} on, for {', '.join(sorted(holders)[:NAMED])}{more}"


def _retention(state: State, policy: Policy) -> str:
    if state.member:
        return "it is a part of a collection, whose retention counts"
    if (kept := retention_of(state, policy.retention)) is None:
        return "there is no policy: all history is kept until something gives it up"
    if kept.distance is None:
        return f"it keeps {kept.says}"
    target = plan_retention(state, policy.retention)
    if target is not None:
        return f"the hold can move to {show_frontier(target, state.times)}, {kept.says} behind the newest time"
    hold = state.holds.get(RETENTION)
    at = "" if hold is None else f" at {show_frontier(hold.since, state.times)}"
    return f"the hold stands{at}, {kept.says} behind the newest time, where it should"


def _compaction(state: State, policy: Policy) -> str:
    plan = plan_compaction(state, policy)
    batches = len(state.filled)
    there = "1 batch" if batches == 1 else f"{batches:,} batches"
    at_rest = f"{there}, and at rest there are at most {bound_of(state)}"
    if not plan.requests:
        if not batches:
            return "there are no updates"
        return f"nothing is due: {at_rest}; each holds at least {policy.weight:g} of what is newer"
    reasons = [request.reason for request in plan.requests]
    counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
    return (
        f"{plan.debt:,} of {state.count:,} updates are due to be rewritten ({counted}), for ${plan.cost.dollars:.6f}: "
        f"{at_rest}"
    )


def _rollups(version: Version, every: int) -> str:
    newest, lag = version.state.newest_rollup, version.seqno - version.state.newest_rollup
    ago = f"{lag:,} transitions"
    at = f"the newest is of v{newest}, {ago} ago" if newest else f"there was never one, in {ago}"
    if not rollup_is_due(version.state, version.seqno, every):
        return f"none is due: {at}, and each {every:,}th is due"
    return f"one is due: {at}" + ("" if lag >= every else ", and garbage waits for a newer one")


def _garbage(version: Version) -> str:
    state = version.state
    plan = plan_garbage(state, version.seqno)
    if not state.garbage:
        return "there is no garbage"
    told = [f"{len(plan.keys):,} objects of {plan.size:,} bytes can go now"] if plan.keys else []
    told += [f"{held.keys:,} objects of {held.size:,} bytes wait: {held.why}" for held in plan.held]
    return "; ".join(told)


def _cost(state: State, policy: Policy) -> str:
    garbage, rollups = sum(one.size for one in state.garbage.values()), sum(one.size for one in state.rollups.values())
    prices = policy.prices or S3_LIST
    dollars = storage_dollars(stored_bytes(state), prices)
    ahead = state.stored_size - state.size
    kept = f"{state.size:,} bytes of {state.count:,} updates, {garbage:,} of garbage, {rollups:,} of rollups"
    kept += f", {ahead:,} of contents ahead" if ahead else ""
    written = ""
    if state.appended_bytes:
        ratio = state.maintained_bytes / state.appended_bytes
        written = f"; compaction wrote {ratio:.2f} bytes for each that was appended"
    moved = "nothing here moves objects to another class of storage"
    return f"{kept}: ${dollars:.6f} a month at ${prices.gib_month:g} a GiB{written}; {moved}"
