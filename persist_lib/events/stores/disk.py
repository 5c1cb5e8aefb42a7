"""Event logs in a directory: files that are only appended to, one fsync for all events that wait.

    format.json                       the log's format and name
    epoch-<epoch>                     the claim of the newest writer, who holds a lock on it while it lives
    events/<epoch>-<first id>         a segment: the events that this writer wrote, from this id on
    <space>/<id>.<fragment>           snapshots and marks
    closed.json                       where the log ended when its writer was closed; gone while there is a writer

A writer appends to files of its own only. SUBTLE: it acknowledges an event after it was written, synced, and its claim
was still there *after that*. A successor removes that claim first, and reads the predecessor's files after that. So it
finds all that was acknowledged, also by a predecessor that was paused in between; and its first segment says from which
id on older files do not count, so nothing that the predecessor writes later is part of the log. No lock is waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from persist_lib.arguments import UNPARSED
from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, Missing, PersistError
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.record import REPAIR, lost
from persist_lib.events.stores.segments import (
    HEADER_BYTES,
    LIMIT,
    Segment,
    claim_name,
    claims_in,
    encode_frame,
    encode_header,
    is_held,
    note_name,
    segment_name,
    write_all,
)
from persist_lib.events.stores.shared import EndMark, encode_meta, failing, fenced, make_place, open_meta, parse_path
from persist_lib.location.directories import fsync_directory, make_directories, no_room, write_file
from persist_lib.runtime.ambient import Runtime

DEFAULT = "events"
SEGMENT_BYTES = 16 << 20
"""A segment that has become so large is not continued: its events are looked up by reading it once."""
OPEN_SEGMENTS = 8
TAKEOVER_S = 10.0
"""How long a reader waits for a writer that has claimed the log and not begun to write yet."""


class Place(NamedTuple):
    """A segment that counts, and the last id up to which it does (None: it is the newest)."""

    epoch: int
    first: int
    through: int | None


class DiskRecords:
    """See `api.RecordStore`. `_epoch` is the writer's own, and 0 for one that only reads."""

    def __init__(self, root: Path, log: bytes, runtime: Runtime) -> None:
        self.limit: int | None = LIMIT
        self.log = log
        self._root, self._events, self._runtime = root, root / EVENTS, runtime
        self._open: OrderedDict[tuple[int, int], Segment] = OrderedDict()
        self._places: list[Place] = []
        self._lock = threading.Lock()
        self._mark = EndMark(root / "end")
        self._epoch = 0
        self._claim_fd = self._fd = -1
        self._end = self._batch = self._last_put = 0
        self._is_sound = True

    # --- reading: which files count, where the events end, and where each one is ---

    def last(self) -> int:
        last = self._mark.checked(self.log, self._settled_last)
        if (closed := self._closed_at()) > last:
            raise lost(self._root, last, closed, f"it was closed with {closed}", REPAIR)
        return last

    def known_last(self) -> int:
        closed = 0
        with contextlib.suppress(Corrupt):
            closed = self._closed_at()
        return max(self._mark.known(self.log), closed)

    def forget_end(self) -> None:
        self._mark.write(self.log, self.find_last())
        (self._root / "closed.json").unlink(missing_ok=True)

    def find_last(self) -> int:
        try:
            return self._settled_last()
        except Corrupt:
            with self._lock:
                newest = self._places[-1]
                known = self._open.get((newest.epoch, newest.first))
            return newest.first - 1 if known is None else known.last

    def _settled_last(self) -> int:
        deadline = self._runtime.deadline(TAKEOVER_S)
        with failing(Determinate, "read", self._root):
            while True:
                with self._lock:
                    last = self._find_last()
                if last is not None:
                    break
                if deadline.has_passed():
                    raise Determinate(
                        f"a writer has claimed {self._root} and does not begin to write, so where the log ends is not "
                        "decided. Try again when it has, or open another writer"
                    )
                deadline.pause(0.02)
        return last

    def _find_last(self) -> int | None:
        """The last event, durable; None while a successor decides which events of its predecessors count."""
        self._places = self._list()
        newest = self._places[-1] if self._places else Place(0, 1, None)
        last = newest.first - 1
        if self._places:
            try:
                segment = self._segment(newest)
            except FileNotFoundError:  # a successor began at the same event, and removed it: look again
                return None
            segment.scan()
            last = segment.last
            if last >= newest.first and self._epoch == 0:
                segment.sync()  # what another process wrote, it may not have synced
        claims = claims_in(self._root)
        claim = max(claims, default=0)
        is_settled = claim <= newest.epoch or claim == self._epoch or not is_held(self._root / claim_name(claim))
        return last if is_settled and newest == (self._list() or [newest])[-1] else None

    def _closed_at(self) -> int:
        """Where the log ended when it was closed; 0 if it was not. Raises Corrupt."""
        path = self._root / "closed.json"
        try:
            return int(json.loads(path.read_bytes())["last"])
        except FileNotFoundError:
            return 0
        except (*UNPARSED, KeyError, TypeError) as error:
            raise Corrupt(
                f"{path} is damaged: {error}. It says where the log ended. {REPAIR}", key=str(path)
            ) from error

    def _list(self) -> list[Place]:
        """The segments that count, in the order of their events."""
        try:
            names = os.listdir(self._events)  # noqa: PTH208 - names only
        except FileNotFoundError:
            return []
        parts = [name.partition("-") for name in names if not name.startswith(".")]
        found = sorted((int(epoch), int(first)) for epoch, _, first in parts)
        places: list[Place] = []
        through: int | None = None
        for epoch, first in reversed(found):
            if through is None or first <= through:
                places.append(Place(epoch, first, through))
                through = first - 1
        places.reverse()
        if places and places[0].first != 1:
            raise Missing(
                f"{self._events} begins with event {places[0].first}: the files of events 1 to {places[0].first - 1} "
                "are gone. Restore them from a copy",
                key="1:0",
            )
        return places

    def _segment(self, place: Place) -> Segment:
        known = self._open.get((place.epoch, place.first))
        if known is None:
            known = self._open[place.epoch, place.first] = self._opened(place)
            while len(self._open) > OPEN_SEGMENTS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end((place.epoch, place.first))
        return known

    def _opened(self, place: Place) -> Segment:
        return Segment(self._events / segment_name(place.epoch, place.first), self.log, place.epoch, place.first)

    def get(self, key: Key) -> Held | None:
        with failing(Determinate, "read", self._root):
            if key.space != EVENTS:
                try:
                    return Held(key, memoryview((self._root / key.space / note_name(key)).read_bytes()))
                except FileNotFoundError:
                    return None
            with self._lock:
                return self._get(key) or (self._get(key) if self._look_again() else None)

    def _look_again(self) -> bool:
        found = self._list()
        is_other, self._places = found != self._places, found
        for place in found:
            if place.through is None and not is_other:
                segment = self._segment(place)
                end = segment.end
                segment.scan()
                is_other = segment.end > end
        return is_other

    def _get(self, key: Key) -> Held | None:
        place = next((place for place in reversed(self._places) if place.first <= key.id), None)
        if place is None or (place.through is not None and key.id > place.through):
            return None
        segment = self._segment(place)
        if segment.last < key.id:
            try:
                segment.scan(place.through)
            except Corrupt:
                if segment.last < key.id:  # else it is of those before the damage
                    raise
        return segment.get(key)

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        with failing(Determinate, "read", self._root):
            with self._lock:
                places = self._list()
            for place in places:
                end = through if place.through is None else min(through, place.through)
                if end < from_id or place.first > through:
                    continue
                with contextlib.closing(self._opened(place)) as segment:
                    yield from segment.read(max(from_id, place.first), end)

    def ids(self, space: str) -> list[int]:
        with failing(Determinate, "read", self._root):
            try:
                names = os.listdir(self._root / space)  # noqa: PTH208 - names only
            except FileNotFoundError:
                return []
        return sorted(int(name[:-2]) for name in names if name.endswith(".0") and not name.startswith("."))

    # --- writing ---

    def claim(self, owner: str) -> int:
        with failing(Determinate, "become the writer of", self._root):
            while True:
                claims = claims_in(self._root)
                epoch = max([*claims, *(place.epoch for place in self._list())], default=0) + 1
                if (fd := self._try_claim(epoch, owner)) is not None:
                    break
            self._claim_fd, self._epoch = fd, epoch
            # Only now, and before the files of predecessors are read. Later claims are later writers'.
            for old in claims_in(self._root):
                if old < epoch:
                    (self._root / claim_name(old)).unlink(missing_ok=True)
            fsync_directory(self._root)
        return epoch

    def _try_claim(self, epoch: int, owner: str) -> int | None:
        """Make the claim, locked from the moment at which it is visible; None if another writer has this epoch."""
        temporary = self._root / f".{claim_name(epoch)}.{self._runtime.entropy():016x}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, json.dumps({"owner": owner, "pid": os.getpid()}).encode())
            os.link(temporary, self._root / claim_name(epoch))
        except FileExistsError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(self._root)
        return fd

    def discard(self, epoch: int, last: int) -> None:
        with failing(Indeterminate, "begin to write", self._root):
            with contextlib.suppress(FileExistsError):
                self._events.mkdir()
            fsync_directory(self._root)
            with self._lock:
                places = self._list()
                for place in places:  # what it stands on is durable, also if another process wrote it and died
                    if place.through is None:
                        self._segment(place).sync()
            self._begin(last + 1)
            self._check_claim(epoch)
            self._forget_dead(last + 1)
            (self._root / "closed.json").unlink(missing_ok=True)
            fsync_directory(self._root)
        self._last_put = last
        self._mark.write(self.log, last)

    def _forget_dead(self, first: int) -> None:
        """Remove the files of predecessors of which nothing counts. Readers that have them open look again."""
        for name in os.listdir(self._events):  # noqa: PTH208 - names only
            epoch, _, begins = name.removeprefix(".").partition("-")
            if int(epoch) < self._epoch and (name.startswith(".") or int(begins) >= first):
                (self._events / name).unlink(missing_ok=True)

    def _begin(self, first: int) -> None:
        """Begin a segment, durably. It gets its name when its header is durable, so none is ever without."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        path = self._events / segment_name(self._epoch, first)
        temporary = path.with_name(f".{path.name}")
        self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        write_all(self._fd, [encode_header(self.log, self._epoch, first)])
        os.fsync(self._fd)
        temporary.replace(path)
        fsync_directory(self._events)
        self._end, self._batch = HEADER_BYTES, 0

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        events = [put for put in puts if put.key.space == EVENTS]
        self._check_claim(epoch)
        if events:
            self._append(events)
        for put in puts:
            if put.key.space != EVENTS:
                self._put_note(put)

    def _append(self, puts: list[Put]) -> None:
        """Append a batch, and sync. After a failure its bytes are cut off, durable or not."""
        if self._end >= SEGMENT_BYTES:
            with failing(Determinate, "begin a file in", self._events):
                self._begin(puts[0].key.id)
        try:
            pieces: list[bytes | bytearray | memoryview] = []
            for put in puts:
                frame = encode_frame(put, self._batch, is_last=put is puts[-1])
                pieces += (frame, put.head, put.body)
            written = write_all(self._fd, pieces)
            os.fdatasync(self._fd)
        except OSError as error:
            self._is_sound = False
            raise self._take_back(error) from error
        self._end += written
        self._batch += 1
        self._check_claim(self._epoch)
        self._last_put = max(self._last_put, puts[-1].key.id)
        self._mark.note(self.log, puts)

    def _take_back(self, error: OSError) -> PersistError:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            self._check_claim(self._epoch)
            return no_room("events", self._events, error) or Determinate(
                f"could not write to {self._events}: {error}. What was written of it was taken back", errno=error.errno
            )
        return Indeterminate(f"could not write to {self._events}, and it may be there: {error}", errno=error.errno)

    def _check_claim(self, epoch: int) -> None:
        """Raise Fenced if a successor has removed this writer's claim."""
        if epoch != self._epoch or self._claim_fd < 0 or os.fstat(self._claim_fd).st_nlink == 0:
            found = max(claims_in(self._root), default=0)
            raise fenced(str(self._root), self._epoch, found, is_certain=False)

    def _put_note(self, put: Put) -> None:
        folder = self._root / put.key.space
        with failing(Indeterminate, "write", folder):
            if not folder.exists():
                make_directories(folder)
            path = folder / note_name(put.key)
            temporary = folder / f".{path.name}.{self._epoch}"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                write_all(fd, [put.head, put.body])
                os.fsync(fd)
            finally:
                os.close(fd)
            self._check_claim(self._epoch)
            temporary.replace(path)
            fsync_directory(folder)

    def remove(self, epoch: int, space: str, below: int) -> None:
        self._check_claim(epoch)
        with failing(Indeterminate, "remove from", self._root / space):
            for name in os.listdir(self._root / space):  # noqa: PTH208 - names only
                if name.startswith(".") or int(name.partition(".")[0]) < below:
                    (self._root / space / name).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0 and self._is_sound and self._claim_fd >= 0 and os.fstat(self._claim_fd).st_nlink:
                with contextlib.suppress(OSError):  # only so that a loss is noticed
                    write_file(self._root / "closed.json", b'{"last": %d}\n' % self._last_put, self._runtime.entropy)
            for fd in (self._fd, self._claim_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._claim_fd = -1
            self._mark.close()
            for segment in self._open.values():
                segment.close()
            self._open.clear()


def open_disk(options: Sequence[str], opening: Opening) -> DiskRecords:
    """Open the log in a directory: `disk:PATH`."""
    root = parse_path(options, DEFAULT, "a store of events on disk is disk:PATH")
    marker = root / "format.json"
    with failing(Determinate, "open", root):
        if not marker.exists():
            make_place(root, root, opening)
            _create(root, opening.runtime)
        return DiskRecords(root, open_meta(marker.read_bytes(), str(marker)), opening.runtime)


def _create(root: Path, runtime: Runtime) -> None:
    """Make an empty log. Of several processes, one is first."""
    if foreign := [name for name in os.listdir(root) if not name.startswith(".") and name != "format.json"]:  # noqa: PTH208
        raise InvalidUsage(f"{root} holds other files ({foreign[0]}) and no event log. Choose another directory")
    write_file(root / "format.json", encode_meta(runtime) + b"\n", runtime.entropy, once=True)


KIND = Kind(open_disk)
