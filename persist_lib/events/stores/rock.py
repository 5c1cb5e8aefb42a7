"""Event logs in RocksDB: `rock:PATH`. One synced batch makes all events durable that wait.

A record's head stands in the key, as in LMDB. RocksDB opens a database for writing in one process at a time, by a lock
that ends with the process: so a paused predecessor is not taken over, but refused (`Locked`) until it is ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rocksdict import AccessType, DBRecoveryMode, Options, Rdict, ReadOptions, WriteBatch, WriteOptions

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, Locked, NotFound, PersistError
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.stores.ending import EndMark
from persist_lib.events.stores.rock_file import check_files
from persist_lib.events.stores.shared import (
    Guard,
    as_bytes,
    decode_key,
    encode_key,
    encode_meta,
    fenced,
    key_range,
    open_meta,
    parse_epoch,
)
from persist_lib.location.directories import make_directories

DEFAULT = "events.rock"
LIMIT = 1 << 30
META, EPOCH, OWNER = b"\0meta", b"\0epoch", b"\0owner"


class _Shared:
    """A database that this process has open for writing: its readers use the same."""

    def __init__(self, db: Any) -> None:
        self.db, self.users = db, 1


_writing: dict[tuple[int, str], _Shared] = {}
_guard = Guard()


class RockRecords:
    """See `api.RecordStore`."""

    def __init__(self, path: Path, opening: Opening) -> None:
        self.limit: int | None = LIMIT
        self._path, self._key, self._pid = path, (os.getpid(), str(path.resolve())), os.getpid()
        self._opening = opening
        self._sync = WriteOptions()
        self._sync.sync = True
        self._shared: _Shared | None = None
        self._is_closed = False
        self._end = EndMark(path / "end")
        self._db: Any = self._open()
        try:
            if opening.create:
                self._create()
            self.log = open_meta(self._get_meta(META) or b"", str(path))
        except BaseException:
            self.close()
            raise

    def _open(self) -> Any:
        with _guard.lock:
            shared = _writing.get(self._key)
            if shared is not None:
                shared.users += 1
                self._shared = shared
                return shared.db
            try:
                if (self._path / "CURRENT").exists():
                    check_files(self._path)
                else:
                    self._end.check_new()
                if not self._opening.create:
                    return Rdict(str(self._path), _options(), access_type=AccessType.read_only())
                db = Rdict(str(self._path), _options(), access_type=AccessType.read_write())
            except PersistError:
                raise
            except Exception as error:
                raise _open_failed(error, self._path) from error
            self._shared = _writing[self._key] = _Shared(db)
            return db

    def _create(self) -> None:
        if self._get_meta(META) is not None:
            return
        if next(self._between(b"", b"\xff" * 16), None) is not None:
            raise InvalidUsage(f"{self._path} is a RocksDB database of another program; nothing was touched")
        self._commit({META: encode_meta(self._opening.runtime), EPOCH: b"0"}, [])

    def _get_meta(self, key: bytes) -> bytes | None:
        self._check()
        try:
            found: bytes | None = self._db.get(key)
        except Exception as error:
            raise _read_failed(error, self._path) from error
        return found

    def _check(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            raise InvalidUsage(f"the event log {self._path} was closed, or opened before a fork; open it again")

    def _commit(self, puts: dict[bytes, bytes], deletes: Sequence[tuple[bytes, bytes]]) -> None:
        """One batch, synced: deletions of ranges, and then what is put."""
        self._check()
        batch = WriteBatch(raw_mode=True)
        for start, end in deletes:
            for key, _ in self._between(start, end):
                batch.delete(key)
        for key, value in puts.items():
            batch.put(key, value)
        try:
            self._db.write(batch, self._sync)
        except Exception as error:
            raise _write_failed(error, self._path) from error

    def _check_epoch(self, epoch: int) -> None:
        found = self._newest_epoch()
        if found != epoch:  # another writer of this process
            raise fenced(str(self._path), epoch, found)

    def _newest_epoch(self) -> int:
        return parse_epoch(self._get_meta(EPOCH), str(self._path))

    def claim(self, owner: str) -> int:
        if not self._opening.create:
            raise InvalidUsage(f"the event log {self._path} was opened for reading")
        with _guard.lock:
            epoch = self._newest_epoch() + 1
            self._commit({EPOCH: b"%d" % epoch, OWNER: owner.encode()}, [])
        return epoch

    def last(self) -> int:
        return self._end.checked(self.log, self.find_last)

    def find_last(self) -> int:
        self._catch_up()
        start, end = key_range(EVENTS, 0, None)
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        try:
            found = self._db.iter(options)
            found.seek_to_last()
            key = found.key() if found.valid() else None
            found.status()  # SUBTLE: an iterator that met damage is not valid either, as at the end
        except Exception as error:
            raise _read_failed(error, self._path) from error
        # Each batch continues what is there, so there are no gaps.
        return 0 if key is None or key < start else decode_key(EVENTS, key)[0]

    def known_last(self) -> int:
        return self._end.known(self.log)

    def forget_end(self) -> None:
        self._end.write(self.log, self.find_last())

    def _catch_up(self) -> None:
        """A database that is opened for reading shows what was there then."""
        self._check()
        if self._shared is None and not self._opening.create:
            self._db.close()
            self._db = self._open()

    def discard(self, epoch: int, last: int) -> None:
        with _guard.lock:
            self._check_epoch(epoch)
            self._commit({}, [key_range(EVENTS, last + 1, None)])
        self._end.write(self.log, last)

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        old = [(start, start + b"\xff" * 256) for start in (encode_key(p.key) for p in puts if p.key.space != EVENTS)]
        with _guard.lock:
            self._check_epoch(epoch)
            self._commit({encode_key(put.key) + put.head: as_bytes(put.body) for put in puts}, old)
            self._end.note(self.log, puts)

    def get(self, key: Key) -> Held | None:
        start = encode_key(key)
        for found, value in self._between(start, start + b"\xff" * 256):
            return Held(key, memoryview(found)[len(start) :], memoryview(value))
        return None

    def _between(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._check()
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        try:
            found = self._db.iter(options)
            found.seek(start)
            while found.valid():
                yield found.key(), found.value()
                found.next()
            found.status()
        except PersistError:
            raise
        except Exception as error:
            raise _read_failed(error, self._path) from error

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        start, end = key_range(EVENTS, from_id, through + 1)
        size = len(start)
        for found, value in self._between(start, end):
            yield Held(Key(EVENTS, *decode_key(EVENTS, found)), memoryview(found)[size:], memoryview(value))

    def ids(self, space: str) -> list[int]:
        keys = (decode_key(space, key) for key, _ in self._between(*key_range(space, 0, None)))
        return [id_ for id_, fragment in keys if fragment == 0]

    def remove(self, epoch: int, space: str, below: int) -> None:
        with _guard.lock:
            self._check_epoch(epoch)
            self._commit({}, [key_range(space, 0, below)])

    def close(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._end.close()
        with _guard.lock:
            if self._shared is None:
                self._db.close()
                return
            self._shared.users -= 1
            if self._shared.users == 0:
                del _writing[self._key]
                db, self._db, self._shared.db = self._db, None, None
                try:
                    db.close()
                except Exception as error:
                    raise _read_failed(error, self._path) from error


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # The default would end the log at the first damaged record of RocksDB's own log, and forget what follows.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_keep_log_file_num(2)
    return options


CORRUPTION = "Corruption"


def _code_of(error: Exception) -> str:
    """The code of RocksDB's status, with which each text of one begins: `rocksdict` has no other type for it."""
    return str(error).partition(":")[0]


def _is_locked(path: Path) -> bool:
    """Whether another process holds RocksDB's lock. SUBTLE: only while this one does not, which would lose its own."""
    try:
        with (path / "LOCK").open("r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def _open_failed(error: Exception, path: Path) -> PersistError:
    if _is_locked(path):
        return Locked(
            f"another process has {path} open for writing, alive or paused: RocksDB lets one process write. End that "
            f"one; its lock ends with it ({error})",
            owner=str(error),
        )
    return _read_failed(error, path)


def _read_failed(error: Exception, path: Path) -> PersistError:
    if _code_of(error) == CORRUPTION:
        return Corrupt(f"the RocksDB database {path} is damaged ({error}); restore it from a copy", key=str(path))
    return Determinate(f"could not read the RocksDB database {path}: {error}", path=str(path))


def _write_failed(error: Exception, path: Path) -> PersistError:
    # Never DiskFull: RocksDB may have written a part of the batch's bytes, and whether it counts is told by its log.
    return Indeterminate(f"could not write to the RocksDB database {path}, and may have: {error}", path=str(path))


def open_rock(options: Sequence[str], opening: Opening) -> RockRecords:
    """Open the database in a directory: `rock:PATH`."""
    if len(options) > 1 or not all(options):
        raise InvalidUsage(f"a store of events in RocksDB is rock:PATH: got {len(options)} options")
    path = Path(options[0] if options else DEFAULT).absolute()
    if not (path / "CURRENT").exists():
        if not opening.create:
            raise NotFound(f"there is no event log in {path}. Check the path; a writer makes one", path=str(path))
        make_directories(path)
    return RockRecords(path, opening)


KIND = Kind(open_rock, "a directory (./events.rock)")
