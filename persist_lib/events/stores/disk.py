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
from collections.abc import Sequence
from pathlib import Path

from persist_lib.errors import (
    Corrupt,
    Determinate,
    Fenced,
    Indeterminate,
    InvalidUsage,
    NotFound,
    PersistError,
)
from persist_lib.events.api import EVENTS, Kind, Opening, Put
from persist_lib.events.stores.disk_files import (
    claim_name,
    claims_in,
    failing,
    note_name,
    segment_name,
    write_all,
    write_file,
)
from persist_lib.events.stores.disk_reading import DiskReading
from persist_lib.events.stores.segments import FORMAT, HEADER_BYTES, encode_frame, encode_header, newer
from persist_lib.location.directories import fsync_directory, make_directories, no_room
from persist_lib.runtime.ambient import Runtime

DEFAULT = "events"
SEGMENT_BYTES = 16 << 20
"""A segment that has become so large is not continued: its events are looked up by reading it once."""


class DiskRecords(DiskReading):
    """See `api.RecordStore`."""

    def __init__(self, root: Path, log: bytes, runtime: Runtime) -> None:
        super().__init__(root, log, runtime)
        self._claim_fd = self._fd = -1
        self._end = self._batch = self._last_put = 0
        self._is_sound = True

    def claim(self, owner: str) -> int:
        with failing(Determinate, "become the writer of", self._root):
            while True:
                claims = claims_in(self._root)
                epoch = max([*claims, *(place.epoch for place in self._list())], default=0) + 1
                if (fd := self._try_claim(epoch, owner)) is not None:
                    break
            self._claim_fd, self._epoch = fd, epoch
            # SUBTLE: only now, and before the files of predecessors are read. Later claims are later writers'.
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
        """Begin a segment, durably. SUBTLE: it gets its name when its header is durable, so none is ever without."""
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
        """Append a batch, and sync. SUBTLE: after a failure its bytes are cut off, as nobody knows what is durable."""
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
            raise Fenced(
                f"another writer took over {self._root} (epoch {found}, and this one is {self._epoch}). What was "
                "acknowledged is in the log; whether what was not acknowledged is, only the log says. Open a writer "
                "again if this program is to write",
                epoch=self._epoch, found=found,
            )  # fmt: skip

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
                    write_file(self._root / "closed.json", {"last": self._last_put}, self._runtime)
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
    if len(options) > 1 or not all(options):
        raise InvalidUsage(f"a store of events on disk is disk:PATH: got {len(options)} options ({', '.join(options)})")
    root = Path(options[0] if options else DEFAULT).absolute()
    marker = root / "format.json"
    with failing(Determinate, "open", root):
        if not marker.exists():
            if not opening.create:
                raise NotFound(f"there is no event log in {root}. Check the path; a writer makes one", path=str(root))
            _create(root, opening.runtime)
        return DiskRecords(root, _check_marker(marker), opening.runtime)


def _create(root: Path, runtime: Runtime) -> None:
    """Make an empty log. Of several processes, one is first."""
    make_directories(root)
    if foreign := [name for name in os.listdir(root) if not name.startswith(".") and name != "format.json"]:  # noqa: PTH208
        raise InvalidUsage(f"{root} holds other files ({foreign[0]}) and no event log. Choose another directory")
    temporary = root / f".format.{runtime.entropy():016x}"
    with temporary.open("xb") as file:
        log = runtime.entropy().to_bytes(8, "big").hex()
        file.write(json.dumps({"events": FORMAT, "log": log}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(temporary, root / "format.json")
    temporary.unlink()
    fsync_directory(root)


def _check_marker(marker: Path) -> bytes:
    """The log's name. Raises NewerFormat, before anything else is looked at."""
    try:
        found = json.loads(marker.read_bytes())
        version, log = found["events"], bytes.fromhex(found["log"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"{marker} is not what Persist wrote: {error}. Restore it from a copy", key=str(marker)
        ) from error
    if not isinstance(version, int) or version > FORMAT:
        raise newer(marker, version)
    return log


KIND = Kind(open_disk, "a directory (./events)")
