"""The pending area of a shard: the names of its batches, and what the commands about them do.

A batch in the pending area was put there by a writer that registered nowhere. All that is known of it beforehand is in
its name. Its key in a state is `-pending/<writer>/<lower>-<upper>-<count>-<digest>.parquet`, and `format.paths` says
where that is in Blob. `docs/design/0044-pending-area.md` tells why each rule here is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import PENDING_AREA
from persist_lib.core.state import Batch, Garbage, Part, Reader, State
from persist_lib.core.trace import CHUNK_BYTES, known_keys
from persist_lib.frontier import MAX_TIME, TOP, Antichain
from persist_lib.ids import NAME, PENDING, READER, PartKey, SeqNo, is_pending

DIGITS = 20
KEY = re.compile(rf"{PENDING}/([^/]+)/(\d{{20}})-(\d{{20}}|top)-(0|[1-9]\d{{0,18}})-([0-9a-f]{{32}})\.parquet")


class PendingName(msgspec.Struct, frozen=True, order=True):
    """What the name of a pending batch says: whose it is, its times `[lower, upper)`, its updates, its bytes.

    `digest` is the digest of the object's bytes in hexadecimal: of its chunks' digests, if it has several.
    """

    writer: str
    lower: int
    upper: Antichain
    count: int
    digest: str

    @property
    def key(self) -> PartKey:
        """Its key in a state."""
        upper = "top" if self.upper.time is None else f"{self.upper.time:0{DIGITS}d}"
        name = f"{self.lower:0{DIGITS}d}-{upper}-{self.count}-{self.digest}.parquet"
        return PartKey(f"{PENDING}/{self.writer}/{name}")


def parse_pending_key(key: str) -> PendingName | None:
    """What the key of a pending batch says; None for anything that no writer names so."""
    if (match := KEY.fullmatch(key)) is None or not NAME.fullmatch(match[1]) or not key.isascii():
        return None
    lower, upper = int(match[2]), None if match[3] == "top" else int(match[3])
    if lower > MAX_TIME or (upper is not None and not lower < upper <= MAX_TIME):
        return None
    return PendingName(match[1], lower, TOP if upper is None else Antichain(upper), int(match[4]), match[5])


def absorption_problem(command: c.Absorb) -> str | None:
    """Why these pending batches do not make up the batch that is to be absorbed; None if they do.

    The rule for adoption is here. Its keys are of no live writer and outside of the shard's prefix. They may be linked
    because their names say which times they hold: each time of the batch is in exactly one of them, or the batch has
    parts of its own instead.
    """
    batch = command.batch
    if batch.upper.is_top():
        return "a pending batch without an end is not absorbed"
    adopted = tuple(part for part in batch.parts if part.inline is None and is_pending(part.key))
    if adopted and len(adopted) < len(batch.parts):
        return "it has parts of its own beside adopted ones"
    gone = [key for key, _ in command.absorbed]
    keys = [*gone, *(part.key for part in adopted)]
    if len(set(keys)) != len(keys):
        return "a pending batch is named twice"
    names = {key: parse_pending_key(key) for key in keys}
    found = [name for name in names.values() if name is not None]
    if len(found) != len(keys):
        return f"{next(key for key, name in names.items() if name is None)} is the name of no pending batch"
    if beyond := next((name for name in found if batch.upper < name.upper), None):
        return f"{beyond.key} has an upper beyond the batch's {batch.upper}"
    # What an adopted batch refers to has all of its updates, so that only empty pending batches can stand between.
    whole = [name for name in found if name.key not in gone or not name.count] if adopted else found
    if reason := _gap(whole, batch):
        return reason
    return _adoption_problem([(part, name) for part in adopted if (name := names[part.key]) is not None], batch)


def _gap(names: Iterable[PendingName], batch: Batch) -> str | None:
    """Where times of the batch are in none of the pending batches; None if there is no such time."""
    reached = batch.lower
    for name in sorted(names, key=lambda name: name.lower):
        if reached < Antichain(name.lower):
            break
        reached = reached.join(name.upper)
    return None if batch.upper <= reached else f"no pending batch continues from {reached}"


def _adoption_problem(adopted: Sequence[tuple[Part, PendingName]], batch: Batch) -> str | None:
    """Why these objects cannot be linked as they are. The times of two of them must not overlap."""
    before = None
    for part, name in sorted(adopted, key=lambda pair: pair[1].lower):
        if before is not None and not before <= Antichain(name.lower):
            return f"{part.key} has times that an adopted one before it has too"
        before = name.upper
        if part.at is not None or not (name.lower <= part.time_lower and name.upper.has_passed(part.time_upper)):
            return f"{part.key} is said to have times that its name does not have"
        if part.rows != name.count or (part.size <= CHUNK_BYTES and part.digests.hex() != name.digest):
            return f"{part.key} is said to hold something else than its name says"
        if name.upper <= batch.lower:
            return f"{part.key} ends before the batch begins"
    return None


def absorbed_garbage(command: c.Absorb, seqno: SeqNo) -> tuple[tuple[PartKey, Garbage | None, Garbage | None], ...]:
    """What an absorption makes garbage. What it adopts is referred to, so it is not among it."""
    return tuple((key, None, Garbage(seqno, size)) for key, size in sorted(command.absorbed))


def discard(state: State, seqno: SeqNo, command: c.DiscardPending) -> StateDiff | r.Refusal:
    """What making late pending batches garbage changes.

    SUBTLE: a late batch is never deleted at sight. A reader at an older version may follow its writer, and only the
    seqno of this transition tells when that reader has moved on.
    """
    if state.format < PENDING_AREA:
        return r.NeedsFormat("a pending area", PENDING_AREA, state.format)
    sizes = dict(command.keys)
    if not sizes:
        return r.AlreadyDone()
    for key in sizes:
        if (name := parse_pending_key(key)) is None:
            return r.Malformed(f"the name of a pending batch {key!r}")
        if not name.upper <= state.upper:
            return r.StillPending(key, name.upper, state.upper)
    if known := known_keys(state, sizes):
        return r.Exists(known[0])
    return StateDiff(garbage=tuple((key, None, Garbage(seqno, sizes[key])) for key in sorted(sizes)))


def clone(state: State, command: c.CloneReader) -> StateDiff | r.Refusal:
    """What cloning a reader changes. The clone has the since and the seqno hold of the original, not the newest."""
    if state.format < PENDING_AREA:
        return r.NeedsFormat("the clone of a reader", PENDING_AREA, state.format)
    if not READER.fullmatch(command.reader):
        return r.Malformed(f"reader id {command.reader!r}")
    if command.reader in state.readers or command.reader in state.retired:
        return r.Exists(command.reader)
    if (original := state.readers.get(command.original)) is None:
        return r.NotLive((command.original,))
    made = Reader(original.since, original.seqno, command.lease_until, command.purpose)
    return StateDiff(readers=((command.reader, None, made),))
