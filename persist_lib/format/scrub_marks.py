"""What scrubs found of a shard's batches, and of its log, as bytes: one object for each that found something new.

A batch is named by its identity: the digest of all that the state says of it. Neither its ids nor its seqno would do. A
batch that is rewritten alone keeps its ids, and after a restore of an older copy another batch may get both.

A release that adds a field to `Batch` must raise the version of `MARKS_FORM`. Older marks then count as unreadable, and
all is read again. Otherwise no mark would name a batch any more, and known damage would seem to be gone.
"""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_digest

from persist_lib.core.state import Batch
from persist_lib.format.frame import Form
from persist_lib.ids import SeqNo

_encoder = msgspec.msgpack.Encoder()


class Mark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A batch that is damaged: its identity, its id `(lo, hi)`, what is wrong, and since when (ms) that is known."""

    identity: bytes
    lo: int
    hi: int
    says: str
    since: int

    @property
    def id(self) -> tuple[int, int]:
        return (self.lo, self.hi)


class Marks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a scrub knew of the batches of the trace at `seqno`: the sound ones, by identity, and the damaged ones."""

    seqno: SeqNo
    sound: tuple[bytes, ...]
    damaged: tuple[Mark, ...]


class Walked(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A row of the log up to which all was found sound, and the digest that it had.

    It is an object of its own, so that a release that knows no such verdict still reads the marks, and leaves it.
    """

    seqno: SeqNo
    digest: bytes


MARKS_FORM = Form[Marks](b"PSTm", 1, Marks, "what a scrub wrote there", "what scrubs remember")
WALKED_FORM = Form[Walked](b"PSTw", 1, Walked, "a verdict on a log", "verdicts on logs")


def identity_of(batch: Batch) -> bytes:
    """The digest of a whole batch: another batch has another one, in any shard's past or future."""
    return xxh3_128_digest(_encoder.encode(batch))
