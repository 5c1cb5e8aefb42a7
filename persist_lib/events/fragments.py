"""Fragments: a payload cut into as many records as a store's limit asks for, and put together again.

Every payload has a fragment 0, which is written after the others: without it, they count as discarded. The common
payload has no other; then its record is the caller's own buffer behind a head, and reading it is one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from persist_lib.errors import Corrupt, InvalidUsage, Missing
from persist_lib.events.api import Buffer, Held, Key, Put, RecordStore
from persist_lib.events.record import (
    DIGEST,
    LONGEST_BODY,
    LONGEST_HEAD,
    MOST,
    NOTE,
    Label,
    check_digest,
    check_place,
    damaged,
    encode_head,
    head_size,
    name_of,
    open_record,
)

LEAST_LIMIT = LONGEST_HEAD + 16
"""The smallest limit on records: a head, and a few bytes."""


def check_limit(limit: int | None) -> int | None:
    """Return the limit of a store, or raise InvalidUsage if no fragment would fit."""
    if limit is not None and limit < LEAST_LIMIT:
        raise InvalidUsage(f"a record must have room for at least {LEAST_LIMIT} bytes: got limit={limit}", limit=limit)
    return limit


def _cuts(size: int, limit: int | None) -> tuple[int, int]:
    """How many bytes of the payload go into a fragment, and how many fragments there are."""
    count = 1
    for assumed in (1, MOST):  # what a number below 128 takes, or any
        room = LONGEST_BODY if limit is None else min(LONGEST_BODY, limit - head_size(assumed))
        count = max(1, -(-size // room))
        if head_size(count) <= head_size(assumed):
            return room, count
    raise InvalidUsage(f"a payload of {size} bytes would need {count} records, and {MOST} is the most", size=size)


def cut(
    space: str, id_: int, payload: Buffer, *, kind: int, log: bytes, epoch: int, previous: bytes, limit: int | None
) -> tuple[list[Put], bytes]:
    """The records of a payload in the order in which they are written, and the digest of the whole."""
    view = memoryview(payload).cast("B")
    room, count = _cuts(view.nbytes, limit)
    puts: list[Put] = []
    for fragment in range(1, count):
        key, body = Key(space, id_, fragment), view[fragment * room : (fragment + 1) * room]
        puts.append(Put(key, encode_head(key, count, kind, log, epoch, previous, body), body))
    # SUBTLE: last, and with the digests of the others in its own: so it stands for all of them.
    key, body = Key(space, id_, 0), view[:room] if count > 1 else view
    head = encode_head(key, count, kind, log, epoch, previous, body, [put.head[-DIGEST:] for put in puts])
    puts.append(Put(key, head, body))
    return puts, head[-DIGEST:]


class Whole(NamedTuple):
    """A payload that was read and verified: what fragment 0 says, the bytes, and what to release (None: nothing)."""

    label: Label
    payload: memoryview
    held: Held | None

    def release(self) -> None:
        """End the life of the payload."""
        self.payload.release()
        if self.held is not None:
            self.held.release()


def put_together(first: Held, others: Iterator[Held | None], log: bytes, where: str) -> Whole:
    """Verify the fragments of a payload and put them together. One alone is not copied.

    `others` gives fragments 1 and on, None for one that is not there. Raises Missing for that, and Corrupt for a
    fragment that is none of this payload.
    """
    try:
        return _put_together(first, others, log, where)
    except BaseException:
        with suppress(InvalidUsage):  # nobody was given a part of it, but this error's frames hold some
            first.release()
        raise


def _put_together(first: Held, others: Iterator[Held | None], log: bytes, where: str) -> Whole:
    label, body = open_record(first, where)
    check_place(label, first.key, None, log, where)
    head = first.record[: len(first.record) - (body.nbytes if first.body is None else 0)]
    if label.fragments == 1:
        check_digest(label, first.key, head, body, (), where)
        return Whole(label, body, first)
    # SUBTLE: copied before the next record is asked for, which may end the life of this one.
    head, parts, digests = memoryview(bytes(head)), [bytes(body)], []
    first.release()
    for fragment in range(1, label.fragments):
        held = next(others, None)
        if held is None or held.key.fragment != fragment:
            if held is not None:
                held.release()
            key = Key(first.key.space, label.id, fragment)
            raise Missing(
                f"{name_of(key, where)} is missing: fragment {fragment} of {label.fragments}, and fragment 0 is there. "
                "Restore it from a copy",
                key=str(key),
            )
        part, digest = _open_part(held, fragment, label, log, where)
        parts.append(part)
        digests.append(digest)
    check_digest(label, first.key, head, parts[0], digests, where)
    return Whole(label, memoryview(b"".join(parts)), None)


def _open_part(held: Held, fragment: int, first: Label, log: bytes, where: str) -> tuple[bytes, bytes]:
    try:
        return _verified_part(held, fragment, first, log, where)
    finally:
        held.release()


def _verified_part(held: Held, fragment: int, first: Label, log: bytes, where: str) -> tuple[bytes, bytes]:
    key = Key(held.key.space, first.id, fragment)
    label, body = open_record(held, where)
    check_place(label, key, first.fragments, log, where)
    if label.epoch != first.epoch or label.previous != first.previous:
        raise damaged(name_of(key, where), f"it is of another event of the same id (epoch {label.epoch})")
    head = held.record[: len(held.record) - (body.nbytes if held.body is None else 0)]
    check_digest(label, key, head, body, (), where)
    return bytes(body), label.digest


def fetch(records: RecordStore, space: str, id_: int, where: str) -> Whole | None:
    """Read a payload; None if its fragment 0 is not there. One request for each fragment."""
    first = records.get(Key(space, id_, 0))
    if first is None:
        return None
    others = (records.get(Key(space, id_, fragment)) for fragment in range(1, MOST))
    return put_together(first, others, records.log, where)


def is_damage(error: Exception) -> bool:
    """Whether a snapshot or mark can be passed over."""
    return isinstance(error, (Corrupt, Missing))


__all__ = ["LEAST_LIMIT", "NOTE", "Whole", "check_limit", "cut", "fetch", "is_damage", "put_together"]
