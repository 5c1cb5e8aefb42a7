"""Why a shard refuses a command. Values only; `shard.refusals` makes exceptions of those that reach a caller."""

from __future__ import annotations

import msgspec

from persist_lib.core.state import Outcome, Produced
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo


class Finished(msgspec.Struct, frozen=True):
    """The shard is a tombstone."""


STAGED = "staged/"
"""What `Exists` says of an answer of a task that was appended before, and then its id."""


class Exists(msgspec.Struct, frozen=True):
    """The shard, the id or the key exists already, or existed once."""

    what: str


class Malformed(msgspec.Struct, frozen=True):
    """A name or number that could never be stored and read again."""

    reason: str


class NotLive(msgspec.Struct, frozen=True):
    """These ids are not live: expired, retired, or never registered."""

    ids: tuple[str, ...]


class InvalidBounds(msgspec.Struct, frozen=True):
    """The batch's bounds or statistics make no sense."""

    reason: str


class WrongUpper(msgspec.Struct, frozen=True):
    """The shard's upper is not where the batch starts."""

    expected: Antichain
    actual: Antichain


class OlderFormat(msgspec.Struct, frozen=True):
    """The log is written in a newer format than the one that is asked for, and never goes back."""

    asked: int
    actual: int


class AlreadyDone(msgspec.Struct, frozen=True):
    """There is nothing to change, which is a success: the token was seen before, or the data is there already."""

    outcome: Outcome | None = None


class Forgotten(msgspec.Struct, frozen=True):
    """The shard remembers all appends after `remembered` only, so not whether this one was committed after `since`."""

    since: SeqNo
    remembered: SeqNo


class AlreadyProduced(msgspec.Struct, frozen=True):
    """The producer has appended this sequence number, or a higher one: `last` says which, and where."""

    name: str
    sequence: int
    last: Produced


class TooManyProducers(msgspec.Struct, frozen=True):
    """The shard remembers as many producers as it may, and this is one more."""

    name: str
    most: int


class WrongSequence(msgspec.Struct, frozen=True):
    """The producer's last sequence number is another one; None where there is no such producer."""

    name: str
    expected: int
    actual: int | None


class NeedsFormat(msgspec.Struct, frozen=True):
    """The shard is written in a format that cannot say `what`."""

    what: str
    needed: int
    actual: int


class InlineFull(msgspec.Struct, frozen=True):
    """The state has `held` inline bytes and no room for the batch's: write the batch as an object."""

    held: int


class BelowSince(msgspec.Struct, frozen=True):
    """History at `asked` is given up already."""

    asked: Antichain
    since: Antichain


class GivesUpHistory(msgspec.Struct, frozen=True):
    """A hold at `asked` would give up history from `since` on that is kept now, or would be beyond the newest time."""

    name: str
    asked: Antichain
    since: Antichain
    newest: Antichain


class OfLayer(msgspec.Struct, frozen=True):
    """The shard belongs to a layer, and only that one appends to it."""

    layer: str


class OfMember(msgspec.Struct, frozen=True):
    """The shard is a member, and takes this only from those that name it."""

    member: str


class Overtaken(msgspec.Struct, frozen=True):
    """The command was made for the transition `expected` of the shard, which is at `actual` by now."""

    expected: SeqNo
    actual: SeqNo


class WrongOpaque(msgspec.Struct, frozen=True):
    """The hold's fencing value is another one; None where there is no such hold."""

    name: str
    expected: bytes | None
    actual: bytes | None


class NotEquivalent(msgspec.Struct, frozen=True):
    """The compaction's output does not stand for its inputs."""

    reason: str


class InputsGone(msgspec.Struct, frozen=True):
    """The compaction's inputs are no longer a contiguous slice of the trace."""

    inputs: tuple[tuple[int, int], ...]


class TooOld(msgspec.Struct, frozen=True):
    """A rollup at or below the newest one."""

    seqno: SeqNo
    newest: SeqNo


class Unknown(msgspec.Struct, frozen=True):
    """None of these is there (any more)."""

    what: tuple[str, ...]


class WrongSchema(msgspec.Struct, frozen=True):
    """The schema is not an additive change, or not of the newest one."""

    newest: int
    reason: str


class Held(msgspec.Struct, frozen=True):
    """Readers or holds are still there."""

    by: tuple[str, ...]


class StillPending(msgspec.Struct, frozen=True):
    """A pending batch has times that the shard does not have yet, as its upper is beyond the shard's."""

    key: str
    upper: Antichain
    actual: Antichain


class NothingDue(msgspec.Struct, frozen=True):
    """No lease has ended."""


Refusal = (
    Finished | Exists | Malformed | NotLive | InvalidBounds | WrongUpper | AlreadyDone | InlineFull | BelowSince
    | WrongOpaque | NotEquivalent | InputsGone | TooOld | Unknown | WrongSchema | Held | NothingDue | OlderFormat
    | StillPending | AlreadyProduced | TooManyProducers | WrongSequence | NeedsFormat | Forgotten
    | GivesUpHistory | OfLayer | OfMember | Overtaken
)  # fmt: skip
