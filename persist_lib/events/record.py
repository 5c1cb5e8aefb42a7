"""The bytes of a record: `<fragment>:<count>:`, then who wrote it and what it follows, then a part of the payload.

    fragment, count   each one byte below 128, else 0x84 and four bytes, and a colon behind it
    version, kind     one byte each
    log               8 random bytes of the log, which tell a record of another log from one of this
    id, epoch         8 bytes each: of the event, and of the writer
    length            4 bytes: how many bytes of payload follow
    previous          16 bytes: the digest of the event before; of a snapshot, of the event that it follows
    digest            16 bytes, of all of the above, the space, the payload, and in fragment 0 of the others' digests

All numbers are big-endian. The fragment's header comes first, as a reader must know first whether that is all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import xxhash

from persist_lib.errors import Corrupt, Missing, NewerFormat, PersistError
from persist_lib.events.api import EVENTS, Buffer, Held, Key

E = TypeVar("E", bound=PersistError)
VERSION = 1
EVENT, FENCE, NOTE = 0, 1, 2
"""Kinds of records: a part of an event; the claim of a place (see `stores.s3`); a part of a snapshot or mark."""
FIELDS = struct.Struct(">BB8sQQI16s")
DIGEST = 16
NOTHING = bytes(DIGEST)
"""The digest of what precedes the first event."""
ONE_BYTE, FOUR_BYTES = 0x80, 0x84
MOST = (1 << 32) - 1
LONGEST_HEAD = 2 * 6 + FIELDS.size + DIGEST
LONGEST_BODY = MOST


class Label(NamedTuple):
    """What the head of a record says."""

    fragment: int
    fragments: int
    version: int
    kind: int
    log: bytes
    id: int
    epoch: int
    length: int
    previous: bytes
    digest: bytes


def encode_number(number: int) -> bytes:
    """One byte, or 0x84 and four."""
    return number.to_bytes(1, "big") if number < ONE_BYTE else b"\x84" + number.to_bytes(4, "big")


def head_size(count: int) -> int:
    """The most bytes of the head of a fragment of an event with so many fragments."""
    return 2 * (len(encode_number(count)) + 1) + FIELDS.size + DIGEST


def encode_head(
    key: Key, count: int, kind: int, log: bytes, epoch: int, previous: bytes, body: Buffer, others: Iterable[bytes] = ()
) -> bytes:
    """The head of a record. `others`: for fragment 0, the digests of fragments 1 and on."""
    length = memoryview(body).nbytes
    start = b"%b:%b:%b" % (
        encode_number(key.fragment), encode_number(count),
        FIELDS.pack(VERSION, kind, log, key.id, epoch, length, previous),
    )  # fmt: skip
    return start + _digest(start, key.space, body, others)


def _digest(start: bytes, space: str, body: Buffer, others: Iterable[bytes]) -> bytes:
    digest = xxhash.xxh3_128(start)
    if space != EVENTS:
        digest.update(space.encode())
    digest.update(body)
    for other in others:
        digest.update(other)
    return digest.digest()


def decode_head(record: memoryview, what: str) -> tuple[Label, int]:
    """What a record's head says, and where it ends. `what` is named in errors. Raises Corrupt, and NewerFormat."""
    fragment, at = _decode_number(record, 0, what)
    count, at = _decode_number(record, at, what)
    end = at + FIELDS.size + DIGEST
    if len(record) > at and record[at] > VERSION:
        raise NewerFormat(
            f"{what} has version {record[at]}, and this release knows up to {VERSION}: it was written by a newer "
            "release, or is damaged. Nothing was changed",
            found=record[at], known=VERSION,
        )  # fmt: skip
    if len(record) < end:
        raise damaged(what, f"it is cut in its head, at {len(record)} of {end} bytes")
    fields: tuple[Any, ...] = FIELDS.unpack_from(record, at)
    return Label._make((fragment, count, *fields, bytes(record[end - DIGEST : end]))), end


def _decode_number(record: memoryview, at: int, what: str) -> tuple[int, int]:
    if len(record) <= at:
        raise damaged(what, f"it is cut in its head, at {len(record)} bytes")
    first = record[at]
    size = 1 if first < ONE_BYTE else 5
    if first > ONE_BYTE - 1 and first != FOUR_BYTES:
        raise damaged(what, f"unsupported length 0x{first:02x} in its head (known: below 0x80, and 0x84)")
    if len(record) <= at + size:
        raise damaged(what, f"it is cut in its head, at {len(record)} bytes")
    if record[at + size] != ord(":"):
        raise damaged(what, f"there is no ':' at byte {at + size} of its head")
    return (first if size == 1 else int.from_bytes(record[at + 1 : at + 5], "big")), at + size + 1


def open_record(held: Held, where: str) -> tuple[Label, memoryview, memoryview]:
    """What the head of a record says, the head, and its part of the payload. Nothing is verified yet."""
    what = name_of(held.key, where)
    label, end = decode_head(held.record, what)
    body = held.record[end:] if held.body is None else held.body
    if body.nbytes < label.length:
        raise damaged(what, f"it is cut: {body.nbytes} of {label.length} bytes of payload are there")
    if body.nbytes > label.length:
        raise damaged(what, f"it has {body.nbytes - label.length} bytes too many")
    return label, held.record[:end] if held.body is None else held.record, body


def check_place(label: Label, key: Key, count: int | None, log: bytes, where: str) -> None:
    """Raise Corrupt unless the head is of this place: this log, id and fragment. Names what it is instead."""
    what = name_of(key, where)
    if label.log != log:
        raise damaged(what, f"it is of another log ({label.log.hex()}, and this one is {log.hex()})")
    if label.id != key.id:
        raise damaged(what, f"it is swapped: what is there is of id {label.id}")
    if label.fragment != key.fragment:
        raise damaged(what, f"it is out of order: what is there is fragment {label.fragment} of {label.fragments}")
    if label.fragments != (count or label.fragments) or not 0 <= label.fragment < label.fragments:
        raise damaged(what, f"it is fragment {label.fragment} of {label.fragments}, and there must be {count} of them")


def check_digest(label: Label, key: Key, head: memoryview, body: Buffer, others: Sequence[bytes], where: str) -> None:
    """Raise Corrupt unless the bytes are those that the digest was taken of."""
    if (found := _digest(bytes(head[: len(head) - DIGEST]), key.space, body, others)) != label.digest:
        raise damaged(name_of(key, where), f"its digest is {found.hex()}, and must be {label.digest.hex()}")


def check_follows(label: Label, digest: bytes, epoch: int, what: str) -> None:
    """Raise Corrupt unless an event follows the one of this digest and epoch."""
    if label.previous != digest:
        raise damaged(what, f"it follows another event {label.id - 1} than the one that is there")
    if label.epoch < epoch:
        raise damaged(what, f"its epoch is {label.epoch}, and the event before it is of epoch {epoch}")


def name_of(key: Key, where: str) -> str:
    """How messages name a record."""
    return f"record {key} of {where}"


def damaged(what: str, why: str) -> Corrupt:
    """The error for a record that is not what was written."""
    return Corrupt(f"{what} is damaged: {why}. Nothing was changed; restore it from a copy", key=what)


REPAIR = "`persist events check --repair` says what is left, and can continue from there"


def caused(error: E, cause: BaseException | None) -> E:
    """The error with its cause, where it is not raised at once."""
    error.__cause__ = cause
    return error


def lost(where: object, last: int, known: int, why: str, hint: str = "") -> Missing:
    """The error for a log that ends too early, as something else says."""
    return Missing(
        f"{where} ends at event {last}, and {why}: events {last + 1} to {known} are gone. Nothing was changed; restore "
        f"them from a copy{hint and f'. {hint}'}",
        key=f"{last + 1}:0",
    )
