"""Files of records that are only appended to, and how their end is found after a crash or a power cut.

A segment is a header and then frames, each with one record. What is made durable together has one batch number. So a
frame that does not verify is torn, and was never acknowledged, if no frame of a later batch follows; else it is damage.
"""

from __future__ import annotations

import fcntl
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from persist_lib.errors import Corrupt
from persist_lib.events.api import EVENTS, Held, Key, Put
from persist_lib.events.stores.shared import FORMAT, newer

MAGIC = b"persist events\r\n"
HEADER = struct.Struct(">16sB8sQQ")
HEADER_BYTES = HEADER.size + 8
FRAME = struct.Struct(">4sIIQI")
FRAME_BYTES = FRAME.size + 8
MARK = b"\xf5evt"
CHUNK = 1 << 20
LIMIT = 1 << 30
"""The most bytes of a record."""


class Frame(NamedTuple):
    """Where a record is in its file, and what it is."""

    at: int
    number: int
    length: int
    id: int
    fragment: int

    @property
    def end(self) -> int:
        return self.at + FRAME_BYTES + self.length

    @property
    def batch(self) -> int:
        return self.number >> 1

    @property
    def next_batch(self) -> int:
        """Of which batch the frame behind it is: the last frame of a batch says that it is the last."""
        return self.batch + (self.number & 1)


def encode_header(log: bytes, epoch: int, first: int) -> bytes:
    """The first bytes of a segment: of which log it is, who wrote it, and what id its first event has."""
    start = HEADER.pack(MAGIC, FORMAT, log, epoch, first)
    return start + xxhash.xxh3_64_digest(start)


def encode_frame(put: Put, batch: int, *, is_last: bool) -> bytes:
    """What stands before a record. `is_last`: of those that become durable together."""
    length = len(put.head) + memoryview(put.body).nbytes
    start = FRAME.pack(MARK, (batch % (1 << 31)) << 1 | is_last, length, put.key.id, put.key.fragment)
    digest = xxhash.xxh3_64(start)
    digest.update(put.head)
    digest.update(put.body)
    return start + digest.digest()


def check_header(path: Path, data: bytes, log: bytes, epoch: int, first: int) -> None:
    """Raise Corrupt or NewerFormat unless these are the first bytes of that segment."""
    if len(data) == HEADER_BYTES and data[: len(MAGIC)] == MAGIC and data[len(MAGIC)] > FORMAT:
        raise newer(path, data[len(MAGIC)])
    if data != encode_header(log, epoch, first):
        found = HEADER.unpack_from(data) if len(data) >= HEADER.size else ()
        why = f"it is of another log ({found[2].hex()})" if found[:1] == (MAGIC,) and found[2] != log else "its header"
        raise Corrupt(f"{path} is damaged: {why}. Nothing was changed; restore it from a copy", key=str(path))


class Segment:
    """One file. `first` is the id of its first event. `scan` finds what is in it, and what was added since."""

    def __init__(self, path: Path, log: bytes, epoch: int, first: int) -> None:
        self.path, self.epoch, self.first = path, epoch, first
        self.starts = array("Q")
        """For each event from `first` on that is whole: where its first frame is."""
        self.end = HEADER_BYTES
        self.batch = 0
        """Of which batch the next frame is."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._start: int | None = None  # of the event whose fragment 0 has not come yet
        self._places: tuple[int, dict[int, Frame]] = (0, {})
        try:
            check_header(path, os.pread(self._fd, HEADER_BYTES, 0), log, epoch, first)
        except BaseException:
            self.close()
            raise

    @property
    def last(self) -> int:
        """The id of the last event that is whole; `first - 1` if there is none."""
        return self.first + len(self.starts) - 1

    def sync(self) -> None:
        """Make durable what is there, also what another process wrote."""
        os.fsync(self._fd)

    def scan(self, through: int | None = None) -> None:
        """Take notice of all whole events, or of those up to an id. Raises Corrupt for damage."""
        for frame, _ in self._frames(self.end, verify=True):
            if through is not None and frame.id > through:
                return
            self._note(frame)
        if through is None or self.last < through:  # what lies behind an event that counts as the last may be damaged
            self._check_torn()

    def _note(self, frame: Frame) -> None:
        expected = self.last + 1
        if frame.id > expected or frame.id < self.first:
            raise Corrupt(
                f"{self.path} is damaged at byte {frame.at}: event {frame.id} follows event {self.last}. Nothing was "
                "changed; restore it from a copy",
                key=f"{expected}:0",
            )
        if frame.id == expected:
            start = frame.at if self._start is None else self._start
            self._start = None if frame.fragment == 0 else start
            if frame.fragment == 0:
                self.starts.append(start)
        self.end, self.batch = frame.end, frame.next_batch

    def _frames(self, at: int, *, verify: bool) -> Iterator[tuple[Frame, memoryview]]:
        """The frames from a place on, and their records, as far as they are sound."""
        data, begin = b"", at
        while True:
            frame, record = _parse(data, begin, at, verify=verify)
            if record is not None and frame is not None:
                yield frame, record
                at = frame.end
                continue
            wanted = CHUNK if frame is None else max(CHUNK, frame.end - at)
            more = os.pread(self._fd, max(0, min(wanted, os.fstat(self._fd).st_size - at)), at)
            if begin == at and len(more) <= len(data):
                break
            data, begin = more, at

    def _check_torn(self) -> None:
        """Raise Corrupt if what does not verify at the end is followed by a frame of a later batch."""
        at = self.end
        rest = os.pread(self._fd, max(0, os.fstat(self._fd).st_size - at), at)
        found = rest.find(MARK, 1)
        while found >= 0:
            frame, record = _parse(rest, 0, found, verify=True)
            if frame is not None and record is not None and frame.batch > self.batch:
                raise Corrupt(
                    f"{self.path} is damaged at byte {at}, behind event {self.last}: a record there does not verify, "
                    f"and event {frame.id} behind it was written later. Nothing was changed; restore it from a copy",
                    key=f"{self.last + 1}:0",
                )
            found = rest.find(MARK, found + 1)

    def get(self, key: Key) -> Held | None:
        """One read for fragment 0 of an event that has no other."""
        if not self.first <= key.id <= self.last:
            return None
        at, end = self._span(key.id)
        if key.fragment == 0 and end - at <= CHUNK:
            data = os.pread(self._fd, end - at, at)
            alone, record = _parse(data, at, at, verify=False)
            if alone is not None and record is not None and alone.end == end:
                return Held(key, record)
        frames = self._frames_of(key.id)
        if (frame := frames.get(key.fragment)) is None:
            return None
        return Held(key, memoryview(os.pread(self._fd, frame.length, frame.at + FRAME_BYTES)))

    def _frames_of(self, id_: int) -> dict[int, Frame]:
        if self._places[0] != id_:
            places: dict[int, Frame] = {}
            at, end = self._span(id_)
            while at < end:
                frame, _ = _parse(os.pread(self._fd, FRAME_BYTES, at), at, at, verify=False)
                if frame is None:
                    break
                places[frame.fragment] = frame
                at = frame.end
            self._places = id_, places
        return self._places[1]

    def _span(self, id_: int) -> tuple[int, int]:
        index = id_ - self.first
        if index + 1 < len(self.starts):
            return self.starts[index], self.starts[index + 1]
        # Fragments of an event that never came may lie behind the last one.
        return self.starts[index], self.end if self._start is None else self._start

    def read(self, from_id: int, through: int) -> Iterator[Held]:
        """The records of events that are there, by id and fragment. It need not have been scanned before."""
        is_known = self.first <= from_id <= self.last
        waiting: list[Held] = []
        for frame, record in self._frames(self._span(from_id)[0] if is_known else HEADER_BYTES, verify=False):
            if frame.id > through:
                return
            if frame.id < from_id:
                continue
            held = Held(Key(EVENTS, frame.id, frame.fragment), record)
            if frame.fragment:
                waiting.append(held)
                continue
            yield held
            yield from waiting
            if frame.id == through:  # what lies behind it may be torn, or of no account
                return
            waiting = []

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _parse(data: bytes, begin: int, at: int, *, verify: bool) -> tuple[Frame | None, memoryview | None]:
    """The frame at a place of a file, of which `data` begins at `begin`. No record: it is not whole, or not sound."""
    start = at - begin
    if len(data) - start < FRAME_BYTES:
        return None, None
    mark, *fields = FRAME.unpack_from(data, start)
    frame = Frame(at, *fields)
    if mark != MARK or frame.length > LIMIT:
        return None, None
    body = start + FRAME_BYTES
    if len(data) < body + frame.length:
        return frame, None
    record = memoryview(data)[body : body + frame.length]
    if verify:
        digest = xxhash.xxh3_64(data[start : start + FRAME.size])
        digest.update(record)
        if digest.digest() != data[body - 8 : body]:
            return None, None
    return frame, record


MOST_VECTORS = 1020
CLAIM = "epoch-"


def claim_name(epoch: int) -> str:
    """The file that claims an epoch."""
    return f"{CLAIM}{epoch:010d}"


def claims_in(root: Path) -> list[int]:
    """The epochs that are claimed."""
    names = os.listdir(root)  # noqa: PTH208 - names only
    return [int(name.removeprefix(CLAIM)) for name in names if name.startswith(CLAIM)]


def segment_name(epoch: int, first: int) -> str:
    """The file of the events that a writer wrote, from an id on."""
    return f"{epoch:010d}-{first:020d}"


def note_name(key: Key) -> str:
    """The file of a record of a snapshot or mark."""
    return f"{key.id:020d}.{key.fragment}"


def is_held(claim: Path) -> bool:
    """Whether the process that made a claim lives (or is paused)."""
    try:
        fd = os.open(claim, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # replaced by a newer one: look again
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write_all(fd: int, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
    """Write buffers one after the other, without joining them. Returns how many bytes they have."""
    total = 0
    for start in range(0, len(pieces), MOST_VECTORS):
        views = [memoryview(piece).cast("B") for piece in pieces[start : start + MOST_VECTORS]]
        while views:
            written = os.writev(fd, views)
            total += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
    return total
