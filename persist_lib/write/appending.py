"""What appends have in common, to one shard and to several at once: their bounds, their doubts, their shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from persist_lib.core import commands as c
from persist_lib.core.state import Batch, State
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.frontier import Antichain, parse_frontier
from persist_lib.shard.batches import Built
from persist_lib.shard.commit import Build, Committed, Machine
from persist_lib.write.pending import Appended


@dataclass(frozen=True, slots=True)
class Share:
    """What one handle brings to an append to several shards: its command, and what to do with the answer."""

    machine: Machine
    build: Build
    make_room: Callable[[], None]
    """To be called before it is tried again after InlineFull."""
    done: Callable[[Committed | c.AlreadyDone], Appended]
    refused: Callable[[c.Refusal], PersistError]
    give_up: Callable[[], None]
    """To be called when the append to several shards failed: deletes what was uploaded, if that is certainly unused."""


class Undoubted:
    """What fails in here leaves no doubt about the append: it was not sent yet. A class, as it is cheaper to enter."""

    __slots__ = ("_shard",)

    def __init__(self, shard: str) -> None:
        self._shard = shard

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Indeterminate):
            raise Determinate(
                f"shard {self._shard}: this call appended nothing, as what precedes it failed: {error.message}. "
                "Try again",
                shard=self._shard,
            ) from error


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
