"""What all appends have in common, to one shard or to several at once: bounds, and errors before the commit."""

from __future__ import annotations

from persist_lib.core import refusals as r
from persist_lib.core.producers import last_of
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, State
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, SchemaMismatch, TimedOut
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Built
from persist_lib.shard.commit import Machine
from persist_lib.times import Times


def undoubted(shard: ShardId, error: Indeterminate) -> Determinate:
    """The error for an append that was never sent, because a step before it failed. Only that step is in doubt."""
    return Determinate(
        f"shard {shard}: this call appended nothing, as a step before the append failed: {error.message}. Try again",
        shard=shard,
    )


def timed_out(shard: ShardId, deadline: Deadline, why: str) -> TimedOut:
    """The error for an append whose deadline passed before anything of it was sent."""
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as {why}. "
        "This call appended nothing; try again, or with a longer timeout",
        shard=shard, timeout_s=deadline.timeout_s,
    )  # fmt: skip


def outrun(machine: Machine, schema: Schema, deadline: Deadline, races: int, what_else: str = "") -> TimedOut:
    """The error for a call that other writers were faster than until its deadline passed."""
    shard, upper = machine.shard, machine.state.upper
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as other writers were first {races} times; upper is "
        f"{schema.show(upper)} now. This call wrote nothing. Try again, with a longer timeout{what_else}",
        shard=shard, timeout_s=deadline.timeout_s, upper=upper,
    )  # fmt: skip


def check_newest(machine: Machine, schema: Schema, state: State) -> None:
    """Raise SchemaMismatch unless `schema` is the shard's newest: an older one cannot retract all of a row."""
    newest = state.schemas[-1]
    if newest != schema:
        raise SchemaMismatch(
            f"shard {machine.shard} has the schema {newest} by now, and this writer has {schema}, which cannot say all "
            "of the rows that are to be replaced. Nothing was written; open a writer with the newest schema",
            shard=machine.shard, actual=newest, expected=schema,
        )  # fmt: skip


def inline_room(machine: Machine, state: State) -> int:
    """How many bytes an inline batch may have now."""
    room = INLINE_TOTAL_BYTES - state.inline_size
    return min(machine.config.inline_bytes, max(room, INLINE_TOTAL_BYTES // 2))


def check_produced(machine: Machine, producer: tuple[str, int] | None) -> None:
    """Raise AlreadyProduced before anything is uploaded, if the shard has this append of the producer already.

    The version that this process knows says so without a request; where it does, it is read again.
    """
    if (
        producer is not None
        and last_of(machine.state, *producer)
        and (last := last_of(machine.fetch().state, *producer))
    ):
        raise machine.refused(r.AlreadyProduced(*producer, last))


def parse_bounds(lower: object, upper: object, times: Times) -> tuple[Antichain, Antichain]:
    """The bounds of an append as frontiers. Raises InvalidUsage when they are not frontiers, or not in order."""
    low, up = times.frontier(lower, "expected_upper"), times.frontier(upper, "new_upper")
    if not low < up:
        raise InvalidUsage(
            f"an append covers times from its lower to below its upper, so {times.show(low)} must be before "
            f"{times.show(up)}",
            lower=low,
            upper=up,
        )
    return low, up


def whole(built: Built, _state: State) -> Batch:
    """The batch as it was built: it is registered unchanged."""
    return built.batch
