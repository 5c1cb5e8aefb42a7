"""What can be asked of a shard, and how it can say no. Values only; `transitions` gives them their meaning.

A command holds everything that its transition depends on, leases and random ids included, so that applying it is a
function. `lease_until` is always ms of the Consensus store's clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from persist_lib.core.formats import CREATED
from persist_lib.core.state import Batch, Outcome, Rollup
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId
from persist_lib.schema.schema import Schema


class Create(msgspec.Struct, frozen=True):
    """Make the shard, with its first schema, in a format. Only ever the first command of a log."""

    schema: Schema
    format: int = CREATED


class RegisterWriter(msgspec.Struct, frozen=True):
    """Let a freshly minted id write: `ingest` appends, `maintenance` compacts and rolls up."""

    writer: WriterId
    purpose: Literal["ingest", "maintenance"]
    lease_until: int


class RegisterReader(msgspec.Struct, frozen=True):
    """Let a freshly minted id read. Its since and seqno hold are those of this very transition."""

    reader: ReaderId
    lease_until: int
    purpose: str = ""


class CompareAndAppend(msgspec.Struct, frozen=True):
    """Push `batch` if the shard's upper is exactly its lower. Its id range is given by the transition."""

    writer: WriterId
    token: bytes
    batch: Batch
    lease_until: int


class Append(msgspec.Struct, frozen=True):
    """Push what of `batch` lies beyond the shard's upper. For several writers of identical data."""

    writer: WriterId
    token: bytes
    batch: Batch
    lease_until: int


class Heartbeat(msgspec.Struct, frozen=True):
    """Extend leases, never by less than what they had. Ids that are not live are refused together."""

    ids: tuple[str, ...]
    lease_until: int


class DowngradeSince(msgspec.Struct, frozen=True):
    """Give up history before `since` and states before `seqno`. Neither moves back."""

    reader: ReaderId
    since: Antichain
    seqno: SeqNo
    lease_until: int


class SetHold(msgspec.Struct, frozen=True):
    """Create or move a named hold, if its fencing value is `expected` (None: it must not exist yet)."""

    name: str
    since: Antichain
    expected: bytes | None
    opaque: bytes


class ReleaseHold(msgspec.Struct, frozen=True):
    """Drop a named hold, if its fencing value is `expected`."""

    name: str
    expected: bytes


class SetRetention(msgspec.Struct, frozen=True):
    """Keep history up to `distance` behind upper; None: keep all that holds and readers keep."""

    distance: int | None


class Expire(msgspec.Struct, frozen=True):
    """Retire the ids whose lease ended before `now`. Does not move since."""

    now: int


class Retire(msgspec.Struct, frozen=True):
    """Retire an id at its own wish, as `close()` does."""

    id: str


class ApplyCompaction(msgspec.Struct, frozen=True):
    """Replace the contiguous batches `inputs` by `output`, which stands for them as of `output.since`."""

    worker: WriterId
    inputs: tuple[tuple[int, int], ...]
    output: Batch


class AddRollup(msgspec.Struct, frozen=True):
    """Link a copy of the state at `seqno`, already in Blob."""

    worker: WriterId
    seqno: SeqNo
    rollup: Rollup


class ForgetGarbage(msgspec.Struct, frozen=True):
    """Drop keys from garbage whose blobs are physically gone."""

    keys: tuple[PartKey, ...]


class ForgetRetired(msgspec.Struct, frozen=True):
    """Drop retired ids below whose prefix nothing is left."""

    ids: tuple[str, ...]


class EvolveSchema(msgspec.Struct, frozen=True):
    """Add a schema, if the newest one is still number `expected`. Additive changes only."""

    expected: int
    schema: Schema


class Upgrade(msgspec.Struct, frozen=True):
    """Write the log in a newer format from this very row on. Programs that do not know it refuse the shard then."""

    format: int


class Finish(msgspec.Struct, frozen=True):
    """Make the shard a tombstone: upper and since both empty. Final."""


Command = (
    Create | RegisterWriter | RegisterReader | CompareAndAppend | Append | Heartbeat | DowngradeSince | SetHold
    | ReleaseHold | SetRetention | Expire | Retire | ApplyCompaction | AddRollup | ForgetGarbage | ForgetRetired
    | EvolveSchema | Upgrade | Finish
)  # fmt: skip


class Finished(msgspec.Struct, frozen=True):
    """The shard is a tombstone."""


class Exists(msgspec.Struct, frozen=True):
    """The shard, the id or the key is there already or was there once."""

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
    """Nothing to change, and that is a success: a token seen before, or data already covered."""

    outcome: Outcome | None = None


class InlineFull(msgspec.Struct, frozen=True):
    """The state carries as many inline bytes as it may; write the batch as an object. Bytes."""

    held: int


class BelowSince(msgspec.Struct, frozen=True):
    """History at `asked` is given up already."""

    asked: Antichain
    since: Antichain


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


class NothingDue(msgspec.Struct, frozen=True):
    """No lease has ended."""


Refusal = (
    Finished | Exists | Malformed | NotLive | InvalidBounds | WrongUpper | AlreadyDone | InlineFull | BelowSince
    | WrongOpaque | NotEquivalent | InputsGone | TooOld | Unknown | WrongSchema | Held | NothingDue | OlderFormat
)  # fmt: skip
