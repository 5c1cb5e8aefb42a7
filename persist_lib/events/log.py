"""The log that is in a driver: payloads in fragments, snapshots and marks, each verified before it is given.

Every payload has a fragment 0, which is written after the others: without it, they count as discarded. The common
payload has no other; then its record is the caller's own buffer behind a head, and reading it is one request.

A snapshot's id is that of the event that it follows, and it has that event's digest as what is `previous` to it. A mark
is a row of versions with ids of their own, of which the newest counts: it is replaced whole or not at all. Marks say
how far effects are released, and whether the log continues elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from persist_lib.arguments import UNREADABLE, shown
from persist_lib.errors import Corrupt, HistoryRegressed, InvalidName, InvalidUsage, Missing, Refused
from persist_lib.events.api import EVENTS, Buffer, Held, Key, Put, Reader, RecordStore, Writer
from persist_lib.events.record import (
    DIGEST,
    EVENT,
    LONGEST_BODY,
    LONGEST_HEAD,
    MOST,
    NOTE,
    NOTHING,
    Label,
    check_digest,
    check_follows,
    check_place,
    damaged,
    encode_head,
    head_size,
    lost,
    name_of,
    open_record,
)

SNAPSHOTS = "snapshots"
MARKS = "mark-"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FORGET_EVERY = 16
"""Old versions of a mark are removed each time that so many were added."""
LEAST_LIMIT = LONGEST_HEAD + 16
"""The smallest limit on records: a head, and a few bytes."""


def check_limit(limit: int | None) -> int | None:
    """Return the limit of a store, or raise InvalidUsage if no fragment would fit."""
    if limit is not None and limit < LEAST_LIMIT:
        raise InvalidUsage(f"a record must have room for at least {LEAST_LIMIT} bytes: got limit={limit}", limit=limit)
    return limit


def space_of_mark(name: object) -> str:
    """The space of the versions of a mark. Raises InvalidName for a name that cannot be part of a path."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return MARKS + name
    raise InvalidName(f"a mark's name must be 1 to 64 letters, digits, '-' and '_': got {shown(name)}", name=name)


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
    space: str, id_: int, payload: Buffer, *, log: bytes, epoch: int, previous: bytes, limit: int | None
) -> tuple[list[Put], bytes]:
    """The records of a payload in the order in which they are written, and the digest of the whole."""
    view = memoryview(payload).cast("B")
    room, count = _cuts(view.nbytes, limit)
    kind = EVENT if space == EVENTS else NOTE
    puts: list[Put] = []
    for fragment in range(1, count):
        key, body = Key(space, id_, fragment), view[fragment * room : (fragment + 1) * room]
        puts.append(Put(key, encode_head(key, count, kind, log, epoch, previous, body), body))
    # Last, and with the digests of the others in its own: so it stands for all of them.
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
        self.payload.release()
        if self.held is not None:
            self.held.release()


class Log:
    """What a driver keeps, checked. `where` names it in messages."""

    def __init__(self, records: RecordStore, where: str) -> None:
        self.records, self.where = records, where

    def fetch(self, space: str, id_: int) -> Whole | None:
        """Read a payload; None if its fragment 0 is not there. One request for each fragment."""
        first = self.records.get(Key(space, id_, 0))
        if first is None:
            return None
        others = (self.records.get(Key(space, id_, fragment)) for fragment in range(1, MOST))
        return self.put_together(first, others)

    def put_together(self, first: Held, others: Iterator[Held | None]) -> Whole:
        """Verify the fragments of a payload and put them together. One alone is not copied.

        `others` gives fragments 1 and on, None for one that is not there. Raises Missing for that, and Corrupt for a
        fragment that is not of this payload.
        """
        try:
            return self._put_together(first, others)
        except BaseException:
            with suppress(InvalidUsage):  # no caller has a part of it, but this error's frames hold some
                first.release()
            raise

    def _put_together(self, first: Held, others: Iterator[Held | None]) -> Whole:
        log, where = self.records.log, self.where
        label, head, body = open_record(first, where)
        check_place(label, first.key, None, log, where)
        if label.fragments == 1:
            check_digest(label, first.key, head, body, (), where)
            return Whole(label, body, first)
        # Copied before the next record is asked for, which may end the life of this one.
        head, parts, digests = memoryview(bytes(head)), [bytes(body)], []
        first.release()
        for fragment in range(1, label.fragments):
            key = Key(first.key.space, label.id, fragment)
            part, digest = self._part(next(others, None), key, label)
            parts.append(part)
            digests.append(digest)
        check_digest(label, first.key, head, parts[0], digests, where)
        return Whole(label, memoryview(b"".join(parts)), None)

    def _part(self, held: Held | None, key: Key, first: Label) -> tuple[bytes, bytes]:
        """A verified part of a payload, and its digest."""
        what = name_of(key, self.where)
        try:
            if held is None or held.key.fragment != key.fragment:
                raise Missing(
                    f"{what} is missing: fragment {key.fragment} of {first.fragments}, and fragment 0 is there. "
                    "Restore it from a copy",
                    key=str(key),
                )
            label, head, body = open_record(held, self.where)
            check_place(label, key, first.fragments, self.records.log, self.where)
            if label.epoch != first.epoch or label.previous != first.previous:
                raise damaged(what, f"it is of another event of the same id (epoch {label.epoch})")
            check_digest(label, key, head, body, (), self.where)
            return bytes(body), label.digest
        finally:
            if held is not None:
                held.release()

    def label_of(self, space: str, id_: int) -> Label | None:
        """What a payload's head says; all of the payload is verified. None if it is not there."""
        whole = self.fetch(space, id_)
        if whole is None:
            return None
        whole.release()
        return whole.label

    def event(self, id_: int) -> Label:
        """The same of an event that must be there."""
        label = self.label_of(EVENTS, id_)
        if label is None:
            raise Missing(f"event {id_} of {self.where} is missing. Restore it from a copy", key=f"{id_}:0")
        return label

    def digest_of(self, id_: int) -> bytes:
        """The digest of an event, which is verified."""
        return self.event(id_).digest if id_ else NOTHING

    def check_tail(self, last: int) -> bytes:
        """Verify the last event and that it follows the one before. Returns its digest."""
        if last == 0:
            return NOTHING
        label = self.event(last)
        check_follows(label, self.digest_of(last - 1), 0, f"event {last} of {self.where}")
        return label.digest

    def check_evidence(self, last: int) -> None:
        """Raise Missing if a snapshot shows that there were more events: it became durable after the one it follows."""
        newest = max(self.records.ids(SNAPSHOTS), default=0)
        if newest > last:
            raise lost(self.where, last, newest, f"there is a snapshot of the state after event {newest}")

    def newest_snapshot(self, at_most: int) -> tuple[int, bytes] | None:
        """See `api.Reader`."""
        for id_ in reversed(self.records.ids(SNAPSHOTS)):
            if id_ > at_most:
                continue
            with suppress(Corrupt, Missing):
                found = self.fetch(SNAPSHOTS, id_)
                if found is not None and found.label.previous == self.digest_of(id_):
                    return id_, bytes(found.payload)
        return None

    def read_mark(self, name: str) -> bytes | None:
        """See `api.Reader`. A damaged version raises: an older one would say something else."""
        space = space_of_mark(name)
        for _ in range(FORGET_EVERY):
            if not (there := self.records.ids(space)):
                return None
            if (found := self.fetch(space, there[-1])) is not None:
                return bytes(found.payload)
        return None


T = TypeVar("T", bound=msgspec.Struct)
RELEASED = "released"
ELSEWHERE = "elsewhere"


class Released(msgspec.Struct, frozen=True):
    """The effects of all events up to and with `through` are released."""

    through: int = 0


class Elsewhere(msgspec.Struct, frozen=True):
    """The log continues in another store: this one was moved, or it is a copy that is not complete yet (`is_part`).

    `store` is the other one's specifier, without a password, and `log` the id of the log in it, in hexadecimal digits.
    Empty: the log continues here.
    """

    store: str = ""
    log: str = ""
    is_part: bool = False

    @property
    def is_moved(self) -> bool:
        """Whether the log was moved to the other store."""
        return bool(self.store) and not self.is_part


def read_released(reader: Reader) -> int:
    """Up to and with which event effects are released, as far as the log says; 0 if it says nothing."""
    return _read(reader, RELEASED, Released).through


def write_released(writer: Writer, through: int) -> Future[None]:
    """Store that the effects of all events up to and with this one are released."""
    return writer.write_mark(RELEASED, msgspec.json.encode(Released(through)))


def read_elsewhere(reader: Reader) -> Elsewhere:
    """Where the log continues."""
    return _read(reader, ELSEWHERE, Elsewhere)


def write_elsewhere(writer: Writer, mark: Elsewhere) -> Future[None]:
    """Store where the log continues."""
    return writer.write_mark(ELSEWHERE, msgspec.json.encode(mark))


def check_here(reader: Reader, name: str) -> None:
    """Raise Refused if the log continues in another store."""
    if (found := read_elsewhere(reader)).store:
        other, why = found.store, "this is a copy that is not complete" if found.is_part else "it was moved there"
        raise Refused(
            f"the log in {name} continues in {other}: {why}. Nothing was changed. Open the other store; or move the "
            "log here, with that one as the source and this one as the store, which also finishes a copy",
            store=name, other=other,
        )  # fmt: skip


def check_released(reader: Reader, name: str) -> int:
    """Up to which event effects are released. Raises HistoryRegressed if that one is beyond the log."""
    released = read_released(reader)
    if released > reader.last and released > reader.refresh():  # a program may be writing to it
        raise HistoryRegressed(
            f"{name} ends at event {reader.last}, and effects were released up to event {released}: the log was "
            "restored from an older copy, or lost events. No event was changed. Continue from a newer copy; or, if "
            f"those events are lost for good, say so: `persist events mark {name} --through {reader.last}`. Ids are "
            "used again then, and effects have other keys",
            seen=released, head=reader.last,
        )  # fmt: skip
    return released


def _read(reader: Reader, name: str, kind: type[T]) -> T:
    data = reader.read_mark(name)
    if data is None:
        return kind()
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise Corrupt(f"the mark {name!r} of an event log does not decode: {error}", key=name) from error
