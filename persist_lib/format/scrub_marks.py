"""What scrubs found of a shard's batches, and of its log, as bytes: one object for each that found something new.

A batch is named by its identity: the digest of all that the state says of it. Neither its ids nor its seqno would do. A
batch that is rewritten alone keeps its ids, and after a restore of an older copy another batch may get both.

A release that adds a field to `Batch` must raise `VERSION`. Older marks then count as unreadable, and all is
read again. Otherwise no mark would name a batch any more, and known damage would seem to be gone.
"""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_digest

from persist_lib.core.state import Batch
from persist_lib.format.frame import decode_framed, framed
from persist_lib.ids import SeqNo

MAGIC = b"PSTm"
VERSION = 1
WALKED_MAGIC = b"PSTw"
WALKED_VERSION = 1
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


_decoder = msgspec.msgpack.Decoder(Marks)
_walked = msgspec.msgpack.Decoder(Walked)


def identity_of(batch: Batch) -> bytes:
    """The digest of a whole batch: another batch has another one, in any shard's past or future."""
    return xxh3_128_digest(_encoder.encode(batch))


def encode_marks(marks: Marks) -> bytes:
    """The bytes of an object of marks."""
    return framed(MAGIC, VERSION, _encoder.encode(marks))


def decode_marks(data: bytes, key: str) -> Marks:
    """The marks that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
    return decode_framed(
        data, key, MAGIC, VERSION, _decoder, what="what a scrub wrote there", kind="what scrubs remember"
    )


def encode_walked(walked: Walked) -> bytes:
    """The bytes of a verdict on the log."""
    return framed(WALKED_MAGIC, WALKED_VERSION, _encoder.encode(walked))


def decode_walked(data: bytes, key: str) -> Walked:
    """The verdict that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
    return decode_framed(
        data, key, WALKED_MAGIC, WALKED_VERSION, _walked, what="a verdict on a log", kind="verdicts on logs"
    )
