"""One version of a shard's metadata, as immutable values.

Every type here is a frozen msgspec struct whose field order is its stored form (see `format.encoding`). A field is only
ever added at the end, with a default, and with a new format (`core.formats`). Mappings are never changed in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal

import msgspec

from persist_lib.core.sums import Sums
from persist_lib.frontier import MINIMUM, TOP, Antichain
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId
from persist_lib.schema.schema import Schema
from persist_lib.times import Unit

RETENTION = "retention"
"""The name of the hold that the retention policy moves."""
MARK = "layer.mark"
"""The name of the hold that says whose a shard is, by the layer's name as its fencing value. It keeps no history."""
COLLECTION, NAMED = "collection", "named"
"""The hold of each shard of a collection; and that for readers that opened a shard before it was a member."""
LAYERS = frozenset({"collection", "source", "stream", "events", "catalog", "pending"})
"""What stands on shards, and has some that nothing else may append to."""
INLINE_TOTAL_BYTES = 1024 * 1024
"""The most bytes of all inline batches of a shard together. It is limited, as a rollup carries them all."""
TOKENS_KEPT = 4
"""How many of its last tokens a writer's entry remembers in format 1."""
OUTCOMES_KEPT = 1024
"""How many of its last appends a shard remembers from format 2 on, whichever writer made them: some 30 bytes each."""
COUNTS_BYTES = 3
"""The format from which on a state counts the bytes that were ever written."""
PRODUCERS_MOST = 1000
"""How many producers a shard remembers. It is limited, as each copy of the state carries them all."""


class ValueBounds(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Between which values those of one column of a part lie, both inclusive, and whether some are null.

    `column` is its place in the schema of the part. Dates and times are integers, as Arrow stores them. No value is
    NaN; -0.0 and 0.0 are equal. Without `lower` and `upper` all are null.
    """

    column: int
    lower: int | float | None
    upper: int | float | None
    has_null: bool = False


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sorted piece of a batch: an object, or inline bytes (then `key` is empty).

    The bounds are those of what the object holds: keys as `format.keys` encodes them, times inclusive. `earliest` is
    how many of its updates are at `time_lower`. After a compaction, no other update can be added up with those.

    With `at`, every update counts at that time, whatever time the object holds for it, which is one and the same for
    all. So an object can be written before it is known at which time it will be appended. Only `format` reads times.

    `sums` are those of its updates, where it says them: then a compaction can keep it as it is beside others that it
    writes, and what all of them add up to is still proven.

    `values` are bounds of some columns (`schema.bounded`), of objects that were written since the shard's format has
    them: a filter that no value within them can satisfy leaves the object out.
    """

    key: PartKey
    size: int
    rows: int
    digests: bytes
    key_lower: bytes
    key_upper: bytes
    time_lower: int
    time_upper: int
    schema: int
    inline: bytes | None = None
    earliest: int = 0
    at: int | None = None
    sums: Sums | None = None
    values: tuple[ValueBounds, ...] = ()

    def counted_at(self, time: int) -> Part:
        """The same object, with all its updates at `time`. It must hold updates of one time only."""
        if self.time_lower != self.time_upper:
            raise ValueError(f"{self!r} holds times {self.time_lower} to {self.time_upper}, not one time")
        return msgspec.structs.replace(self, time_lower=time, time_upper=time, earliest=self.rows, at=time)

    def __repr__(self) -> str:
        where = self.key or f"{len(self.inline or b''):,} B inline"
        return f"Part({where}, size={self.size}, rows={self.rows})"


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Updates with times in `[lower, upper)`, exact for every as_of at or beyond `since`.

    `count`, `diff_sum` and `fingerprint` are those of the registered bounds, which may be tighter than what the
    parts hold (`exact` is then false, and readers filter). `runs[i]` is where the i-th sorted run starts in `parts`;
    a run is sorted as a whole, and consolidated as of `since`. `(lo, hi)` is its durable place in the trace,
    `born` the seqno that put it there.
    """

    lo: int
    hi: int
    lower: Antichain
    upper: Antichain
    since: Antichain
    count: int
    diff_sum: int
    fingerprint: int
    parts: tuple[Part, ...] = ()
    runs: tuple[int, ...] = ()
    exact: bool = True
    born: SeqNo = SeqNo(0)

    @property
    def id(self) -> tuple[int, int]:
        """Its durable id."""
        return (self.lo, self.hi)

    @property
    def sums(self) -> Sums:
        """What the updates of its registered bounds add up to."""
        return Sums(self.count, self.diff_sum, self.fingerprint)

    @property
    def size(self) -> int:
        """Bytes of all its parts."""
        return sum([part.size for part in self.parts])

    @property
    def inline_size(self) -> int:
        """Bytes of its inline parts."""
        return sum([part.size for part in self.parts if part.inline is not None])

    @property
    def keys(self) -> tuple[PartKey, ...]:
        """The blobs it refers to."""
        return tuple([part.key for part in self.parts if part.inline is None])

    def run_parts(self) -> list[tuple[Part, ...]]:
        """Its parts, run by run; none for an empty batch."""
        ends = (*self.runs[1:], len(self.parts)) if self.runs else ()
        return [self.parts[start:end] for start, end in zip(self.runs, ends, strict=True)]


class Outcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an append answered: at which seqno it was committed, and the upper it left.

    In `State.outcomes` each one starts where the one before it ends. The first may be a mark without a token: from its
    upper on, every append is remembered.
    """

    token: bytes
    seqno: SeqNo
    upper: Antichain


class Writer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A live writer: its purpose, when its lease ends (ms of the store's clock), its last outcomes, oldest first.

    `owner` is a text for people. `staged` says of each answer of a task that was appended under this id where that
    was; its tokens are the ids of the answers.
    """

    purpose: Literal["ingest", "maintenance"]
    lease_until: int
    outcomes: tuple[Outcome, ...] = ()
    owner: str = ""
    staged: tuple[Outcome, ...] = ()


class Reader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A live reader: the history it needs (`since`), the oldest state it may still read, and when its lease ends."""

    since: Antichain
    seqno: SeqNo
    lease_until: int
    purpose: str = ""


class Hold(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A durable hold on history, without a lease. `opaque` fences its owners off from one another."""

    since: Antichain
    opaque: bytes = b""


class Pin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Objects that something outside refers to, as a publication does: none of them is deleted, whatever since says.

    `keys` are in order, each once. `opaque` fences those that move it off from one another. A publication is `as_of` a
    time, its last `keep` snapshots stay, and where it `follows`, each upkeep publishes again.
    """

    keys: tuple[PartKey, ...]
    opaque: bytes
    as_of: int | None = None
    keep: int = 0
    follows: bool = False


class Produced(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The last append of a producer: its sequence number, where it was committed, the upper that it left, and when.

    A producer numbers its appends, and none is committed twice: only higher numbers are. It has no lease, so that the
    answer is there for ever. `now` is ms of the store's clock, for people to read.
    """

    sequence: int
    seqno: SeqNo
    upper: Antichain
    now: int


class Rollup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole copy of the state at a seqno, in Blob."""

    key: PartKey
    size: int
    digests: bytes


class Garbage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A blob logically deleted at `seqno`: no state from there on refers to it. `size` in bytes."""

    seqno: SeqNo
    size: int


class State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One version of a shard. `core.validate` lists what always holds."""

    since: Antichain = MINIMUM
    trace: tuple[Batch, ...] = ()
    schemas: tuple[Schema, ...] = ()
    writers: Mapping[WriterId, Writer] = {}
    readers: Mapping[ReaderId, Reader] = {}
    holds: Mapping[str, Hold] = {}
    retired: Mapping[str, SeqNo] = {}
    garbage: Mapping[PartKey, Garbage] = {}
    rollups: Mapping[SeqNo, Rollup] = {}
    retention: int | None = None
    inline_size: int = 0
    fingerprint: int = 0
    count: int = 0
    size: int = 0
    format: int = 1
    outcomes: tuple[Outcome, ...] = ()
    appended_bytes: int = 0
    """Bytes of the parts, inline ones included, that appends added since the shard has a format that counts them."""
    maintained_bytes: int = 0
    """Bytes of the parts that compactions wrote since then. Parts that they kept are not among them."""
    producers: Mapping[str, Produced] = {}
    member: str = ""
    """Whose member the shard is: `<id of a collection>/<epoch>`. Empty for a shard that stands by itself."""
    contents: Batch | None = None
    """What the first batches of the trace come to as of their last time, in one run: kept ahead beside them for reads
    from that time on, and taken in their place once since is there. Its id says which batches it stands for."""
    pins: Mapping[str, Pin] = {}
    """Objects that something outside refers to, by its name: each is in a batch, or garbage."""
    identities: Mapping[str, int] = {}
    """The next number of each column that counts up, by its id; 1 for those that are not there."""

    @property
    def stored(self) -> tuple[Batch, ...]:
        """All batches that refer to objects: the trace, and the contents that are kept ahead."""
        return self.trace if self.contents is None else (*self.trace, self.contents)

    @property
    def filled(self) -> tuple[Batch, ...]:
        """The batches of the trace that have updates."""
        return tuple([batch for batch in self.trace if batch.count])

    @property
    def stored_size(self) -> int:
        """Bytes of all parts: `size` is those of the trace."""
        return self.size + (0 if self.contents is None else self.contents.size)

    def batches_at(self, as_of: int | None = None) -> tuple[Batch, ...]:
        """The batches that make the contents as of a time, or the newest: as few as there are. Some may be empty.

        Their updates up to `as_of` add up to what those of the trace do.
        """
        kept = self.contents
        if kept is None or (as_of is not None and as_of < (kept.since.time or 0)):
            return self.trace
        return (kept, *self.trace[self.index_of(kept.hi) :])

    def index_of(self, lo: int) -> int:
        """How many batches of the trace begin before `lo`, by their ids."""
        return bisect_left(self.trace, lo, key=lambda batch: batch.lo)

    @property
    def upper(self) -> Antichain:
        """The frontier up to which the shard is complete: no updates before it can be added."""
        return self.trace[-1].upper if self.trace else MINIMUM

    @property
    def next_id(self) -> int:
        """Where the next batch's id range starts."""
        return self.trace[-1].hi if self.trace else 0

    @property
    def newest_rollup(self) -> SeqNo:
        """The seqno of the newest rollup, 0 for none."""
        return max(self.rollups, default=SeqNo(0))

    @property
    def times(self) -> Unit | None:
        """The clock that times are; None for plain integers. It is the same in all schemas."""
        return self.schemas[-1].times if self.schemas else None

    def is_finished(self) -> bool:
        """Whether this is a tombstone.

        SUBTLE: it is not enough that both frontiers are empty. Writers and readers can bring both there by themselves;
        until Finish the batches and ids are still there.
        """
        is_empty = len(self.trace) == 1 and not self.trace[0].parts
        return is_empty and self.since == TOP and self.upper == TOP and not (self.writers or self.readers or self.holds)

    def seqno_since(self, seqno: SeqNo) -> SeqNo:
        """The oldest state that a live reader may still read from, given that this one is at `seqno`."""
        return min((reader.seqno for reader in self.readers.values()), default=seqno)


class Version(msgspec.Struct, frozen=True):
    """A state, and where in the log it stands. `digest` and `row_format` are those of the row that led here."""

    seqno: SeqNo
    state: State
    digest: bytes
    rollup: tuple[SeqNo, Rollup] | None = None
    row_format: int = 1
