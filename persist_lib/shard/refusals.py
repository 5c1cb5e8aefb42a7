"""Refusals as sentences: what is so, and what to do. `machine.refused` makes exceptions of them.

Every refusal has a sentence: a new one does not type-check until it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from persist_lib.core import commands as c
from persist_lib.errors import InvalidUsage
from persist_lib.ids import ShardId


def named(shards: Sequence[ShardId]) -> str:
    """How messages name one shard or several."""
    return f"shard {shards[0]}" if len(shards) == 1 else f"shards {', '.join(shards)}"


def after_expiry(ids: Sequence[str]) -> str:
    """What to do, which differs: a writer registers anew by itself, a reader would not know what is gone."""
    if any(id_.startswith("r") for id_ in ids):
        return "History that it held may be gone: open a new reader"
    return "The next call on its handle registers anew by itself: look at upper, then decide"


def hold_conflict(name: str, expected: bytes | None, actual: bytes | None) -> str:
    """What is so with a hold that has not the fencing value that it was expected to have (None: no such hold)."""
    if actual is None:
        return f"there is no hold {name!r}: it was never set, or it is released already"
    if expected is None:
        return f"there is a hold {name!r} already, with the fencing value {actual!r}"
    return (
        f"hold {name!r} has the fencing value {actual!r}, not {expected!r}: somebody else set it, or it never had that"
    )


_Rare = (
    c.Exists | c.Malformed | c.InvalidBounds | c.AlreadyDone | c.InlineFull | c.TooOld | c.Unknown | c.NothingDue
    | c.OlderFormat
)  # fmt: skip
"""Refusals that whoever asks deals with, or that are checked before, so that they hardly reach a caller."""


def rarely_told(shard: ShardId, refusal: _Rare) -> InvalidUsage:
    """The exception for those."""
    return InvalidUsage(f"shard {shard}: {_sentence(refusal)}", shard=shard, refusal=refusal)


def _sentence(refusal: _Rare) -> str:
    match refusal:
        case c.Exists("shard"):
            return "it exists already. This change was not made; open it instead of creating it"
        case c.Exists(what):
            return f"{what} is there or was once, and is never used again. This change was not made; repeat it"
        case c.Malformed(reason):
            return f"{reason} could not be stored and read again. This change was not made; pass another value"
        case c.InvalidBounds(reason):
            return f"such a batch cannot be appended: {reason}. This change was not made"
        case c.AlreadyDone():
            return "it is so already, so there was nothing to change"
        case c.InlineFull(held):
            return (
                f"its state holds {held} bytes of inline batches, as many as it may. This change was not made; "
                "compact the shard, and try again"
            )
        case c.TooOld(seqno, newest):
            return f"a rollup of v{seqno} is of no use, as there is one of v{newest}; this change was not made"
        case c.Unknown(what):
            names = ", ".join(what) or "nothing"
            return f"there is no {names} to forget (any more): somebody else was first. This change was not made"
        case c.OlderFormat(asked, actual):
            return f"it is written in format {actual} already, and never goes back to {asked}. Nothing was changed"
        case c.NothingDue():
            return "no lease has ended, so nobody was retired"
        case _:
            assert_never(refusal)
