"""What appends have in common, to one shard and to several at once: their bounds, and what precedes their commit."""

from __future__ import annotations

from persist_lib.core.state import Batch, State
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, TimedOut
from persist_lib.frontier import Antichain, parse_frontier
from persist_lib.ids import ShardId
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.batches import Built


def undoubted(shard: ShardId, error: Indeterminate) -> Determinate:
    """The error for an append of which nothing was sent yet, as what precedes it failed: that alone is in doubt."""
    return Determinate(
        f"shard {shard}: this call appended nothing, as what precedes it failed: {error.message}. Try again",
        shard=shard,
    )


def timed_out(shard: ShardId, deadline: Deadline, why: str) -> TimedOut:
    """The error for an append whose time was over before anything of it was sent."""
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as {why}. This call appended nothing; try "
        "again, or with a longer timeout",
        shard=shard, timeout_s=deadline.timeout_s,
    )  # fmt: skip


def parse_bounds(lower: object, upper: object) -> tuple[Antichain, Antichain]:
    """The bounds of an append as frontiers; InvalidUsage when they are none."""
    low, up = parse_frontier(lower, "expected_upper"), parse_frontier(upper, "new_upper")
    if not low < up:
        raise InvalidUsage(
            f"an append covers times from its lower to below its upper, so {low} must be before {up}",
            lower=low,
            upper=up,
        )
    return low, up


def whole(built: Built, _state: State) -> Batch:
    """Register a batch as it was built."""
    return built.batch
