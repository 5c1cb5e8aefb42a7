"""The commands that change a shard. Values only; `transitions` gives them their meaning, `refusals` lists its answers.

A command holds everything that its transition depends on, leases and random ids included, so that applying it is a pure
function. `lease_until` is always ms of the Consensus store's clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from persist_lib.core.formats import CREATED
from persist_lib.core.state import Batch, Hold, Produced, Rollup
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId
from persist_lib.schema.schema import Schema


class NamesMember(msgspec.Struct, frozen=True, kw_only=True):
    """What a member takes only from those that name it: `<id of a collection>/<epoch>`. Unset: the shard by its name.

    What is not of this kind is for anybody: heartbeats, giving up leases and history that is one's own, and upkeep.
    """

    member: str | msgspec.UnsetType = msgspec.UNSET


class Create(msgspec.Struct, frozen=True):
    """Make the shard, with its first schema, in a format. Only ever the first command of a log."""

    schema: Schema
    format: int = CREATED


class RegisterWriter(NamesMember, frozen=True, omit_defaults=True):
    """Let a freshly minted id write: `ingest` appends, `maintenance` compacts and rolls up.

    `layer` says for which layer an id appends. A shard that belongs to a layer refuses all others (`core.layers`).
    With `at`, only if this is the shard's transition of that seqno: what was planned from the version before it holds.
    """

    writer: WriterId
    purpose: Literal["ingest", "maintenance"]
    lease_until: int
    owner: str = ""
    layer: str = ""
    at: SeqNo | msgspec.UnsetType = msgspec.UNSET


class RegisterReader(NamesMember, frozen=True):
    """Let a freshly minted id read. Its since and seqno hold are those of this very transition."""

    reader: ReaderId
    lease_until: int
    purpose: str = ""


Staged = tuple[tuple[WriterId, bytes], ...]
"""Answers of tasks: for each its stage's writer id, and its own id."""


class CompareAndAppend(NamesMember, frozen=True):
    """Push `batch` if the shard's upper is exactly its lower. Its id range is given by the transition.

    A `producer` is a name and a sequence number, which must be higher than the producer's last. `now` is ms of the
    store's clock. None of the answers of tasks that are `staged` in it is ever pushed again. Unset: there are none.
    """

    writer: WriterId
    token: bytes
    batch: Batch
    lease_until: int
    producer: tuple[str, int] | None = None
    now: int = 0
    staged: Staged | msgspec.UnsetType = msgspec.UNSET


class AppendNow(NamesMember, frozen=True):
    """Push `batch`, whose updates are all of one time, at the next time, wherever upper is then.

    The next time is upper; where times are a clock, `now` (ms of the store's clock) if that is later. It is committed
    once: `since` is a version that certainly does not have it, and a state that no longer remembers all appends since
    then refuses it. In the log it is the `CompareAndAppend` that it came to.
    """

    writer: WriterId
    token: bytes
    batch: Batch
    lease_until: int
    since: SeqNo
    producer: tuple[str, int] | None = None
    now: int = 0
    staged: Staged | msgspec.UnsetType = msgspec.UNSET


class Append(NamesMember, frozen=True):
    """Push the part of `batch` that lies beyond the shard's upper. For several writers of identical data."""

    writer: WriterId
    token: bytes
    batch: Batch
    lease_until: int


class Absorb(NamesMember, frozen=True):
    """Push `batch`, which is made of pending batches, if the shard's upper is exactly its lower.

    `absorbed` are the pending batches (with their bytes) that nobody needs after it: those that the batch rewrites, and
    those of other writers for the same times. They become garbage. Pending batches that the batch refers to are
    adopted.
    """

    writer: WriterId
    token: bytes
    batch: Batch
    absorbed: tuple[tuple[PartKey, int], ...]
    lease_until: int


class DiscardPending(msgspec.Struct, frozen=True):
    """Make pending batches (with their bytes) garbage: late ones, whose times are all before the shard's upper."""

    keys: tuple[tuple[PartKey, int], ...]


class CloneReader(NamesMember, frozen=True):
    """Let a freshly minted id read what `original` can read: it has the same since and seqno hold."""

    reader: ReaderId
    original: ReaderId
    lease_until: int
    purpose: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """Extend leases; never shorten one. Refused if none of the ids is live."""

    ids: tuple[str, ...]
    lease_until: int


class DowngradeSince(msgspec.Struct, frozen=True):
    """Give up history before `since` and states before `seqno`. Neither moves back."""

    reader: ReaderId
    since: Antichain
    seqno: SeqNo
    lease_until: int


class SetHold(NamesMember, frozen=True):
    """Create or move a named hold, if its fencing value is `expected` (None: it must not exist yet).

    It keeps history: where the shard's since would move with it, the retention's hold keeps that from then on.
    """

    name: str
    since: Antichain
    expected: bytes | None
    opaque: bytes


class DowngradeHold(NamesMember, frozen=True):
    """Give up history before `since`, as the owner of a named hold; otherwise as `SetHold`. In the log it is one.

    The shard's since follows, as far as no reader and no other hold is behind.
    """

    name: str
    since: Antichain
    expected: bytes | None
    opaque: bytes


class ReleaseHold(NamesMember, frozen=True):
    """Drop a named hold, if its fencing value is `expected`."""

    name: str
    expected: bytes


class ForgetProducer(NamesMember, frozen=True):
    """Forget a producer, if its last sequence number is still `expected`. All of its numbers are then new again."""

    name: str
    expected: int


class Reserve(NamesMember, frozen=True):
    """Take `count` numbers of a column that counts up, from `first` on, if that is its next one.

    `column` is the column's id. No other command ever takes one of them again, whether they are used or not.
    """

    column: str
    first: int
    count: int


class SetRetention(NamesMember, frozen=True, omit_defaults=True):
    """Keep history up to `distance` behind upper; None: keep all that holds and readers keep.

    The policy's hold is there from this transition on, at the shard's since: only the duty moves it. A `layer` becomes
    its fencing value, and so the shard that layer's.
    """

    distance: int | None
    layer: str = ""


class Expire(msgspec.Struct, frozen=True):
    """Retire the ids whose lease ended before `now`. Does not move since."""

    now: int


class Retire(msgspec.Struct, frozen=True):
    """Retire an id at the request of its owner, as `close()` does."""

    id: str


class ApplyCompaction(msgspec.Struct, frozen=True):
    """Replace the contiguous batches `inputs` by `output`, which stands for them as of `output.since`."""

    worker: WriterId
    inputs: tuple[tuple[int, int], ...]
    output: Batch


class KeepContents(msgspec.Struct, frozen=True):
    """Keep `contents` ahead: what the batches of the trace before `contents.hi` come to as of `contents.since`.

    They replace those that were kept before; with None these are given up. A compaction may have replaced
    batches that they were made of until then, as that changes no sum.
    """

    worker: WriterId
    contents: Batch | None


class PinKeys(msgspec.Struct, frozen=True, omit_defaults=True):
    """Make or move a pin, if its fencing value is `expected` (None: it must not exist yet), as `state.Pin` says.

    Refused unless each key is in a batch, or pinned already: what is garbage otherwise may be deleted by now.
    """

    name: str
    keys: tuple[PartKey, ...]
    expected: bytes | None
    opaque: bytes
    as_of: int | None = None
    keep: int = 0
    follows: bool = False


class Unpin(msgspec.Struct, frozen=True):
    """Drop a pin, if its fencing value is `expected`."""

    name: str
    expected: bytes


class AddRollup(msgspec.Struct, frozen=True):
    """Link a copy of the state at `seqno`, already in Blob."""

    worker: WriterId
    seqno: SeqNo
    rollup: Rollup


class ForgetGarbage(msgspec.Struct, frozen=True):
    """Drop keys from garbage whose blobs are physically gone."""

    keys: tuple[PartKey, ...]


class ForgetRetired(msgspec.Struct, frozen=True):
    """Drop retired ids that have no objects left under their prefix."""

    ids: tuple[str, ...]


class EvolveSchema(NamesMember, frozen=True):
    """Add a schema, if the newest one is still number `expected`. Additive changes only."""

    expected: int
    schema: Schema


class Upgrade(msgspec.Struct, frozen=True):
    """Write the log in a newer format from this row on. Programs that do not know the format then refuse the shard."""

    format: int


class Adopt(msgspec.Struct, frozen=True):
    """Make the shard a member, if this is its transition `seqno`: what went with its name goes to the collection.

    It keeps history by the collection's hold at its since; the retention's hold and all others go. In one transaction
    with `Inherit`, which was made of the state just before.

    With `former`, the member that it was (empty: none), it is a collection's already, whose writers are
    other ones from now on: nothing else changes.
    """

    member: str
    seqno: SeqNo
    former: str | None = None


class Inherit(msgspec.Struct, frozen=True):
    """Take over, as a rendition shard whose upper is `lower`, what a shard had that becomes its member.

    History begins at `since`, kept by the collection's hold and by `NAMED`; `upper` is promised.
    """

    token: bytes
    lower: Antichain
    upper: Antichain
    since: Antichain
    holds: tuple[tuple[str, Hold], ...]
    producers: tuple[tuple[str, Produced], ...]


class Finish(NamesMember, frozen=True):
    """Make the shard a tombstone: upper and since both empty. Final."""


Command = (
    Create | RegisterWriter | RegisterReader | CloneReader | CompareAndAppend | AppendNow | Append | Absorb
    | DiscardPending | Heartbeat | DowngradeSince | SetHold | DowngradeHold | ReleaseHold | ForgetProducer
    | Reserve | SetRetention | Expire | Retire | ApplyCompaction | KeepContents | PinKeys | Unpin | AddRollup
    | ForgetGarbage | ForgetRetired | EvolveSchema | Upgrade | Adopt | Inherit | Finish
)  # fmt: skip

STORED_AS: dict[type, str] = {AppendNow: CompareAndAppend.__name__, DowngradeHold: SetHold.__name__}
"""The commands that the log calls by the name of another one, which comes to the same change."""


def stored_name(command: Command) -> str:
    """What the log calls this command."""
    return STORED_AS.get(type(command)) or type(command).__name__
