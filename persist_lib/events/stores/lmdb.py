"""Event logs in LMDB: `lmdb:PATH`. Events are read as views of the memory map, and written from the caller's buffer.

A record's head stands in the key, behind what the record is looked up by, and its body is the value. So neither side
joins or cuts anything: one seek finds both. LMDB lets one process write at a time; the epoch is checked in its turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, NotFound, PersistError
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.stores.ending import EndMark
from persist_lib.events.stores.lmdb_file import check_file, make_room
from persist_lib.events.stores.shared import (
    Guard,
    decode_key,
    encode_key,
    encode_meta,
    fenced,
    key_range,
    open_meta,
    parse_epoch,
)
from persist_lib.location.directories import fsync_directory, make_directories, no_room

T = TypeVar("T")
DEFAULT, DATA = "events.lmdb", "data.mdb"
MAP_BYTES = 1 << 40
"""Address space for the database, not room on disk. `map=BYTES` sets another, where a system allows less."""
LIMIT = 1 << 30
META, EPOCH = b"\0meta", b"\0epoch"
READERS = 512
SMALL_BYTES = 1024
DAMAGED = (
    lmdb.BadChecksumError, lmdb.BadDbiError, lmdb.BadTxnError, lmdb.BadValsizeError, lmdb.CorruptedError,
    lmdb.CursorFullError, lmdb.IncompatibleError, lmdb.InvalidError, lmdb.PageFullError, lmdb.PageNotFoundError,
    lmdb.PanicError, lmdb.ProblemError, lmdb.VersionMismatchError,
)  # fmt: skip
"""What LMDB says of pages that cannot be what it wrote. It has no checksums, so it says it when it stumbles."""
RECORDS = 1000
"""How many records are read in one transaction."""
KEY_BYTES = len(encode_key(Key(EVENTS, 0, 0)))


class _View(Held):
    """A record in the memory map: its transaction keeps the pages from being used again."""

    __slots__ = ("_array", "_transaction")

    def __init__(self, key: Key, head: bytes, array: Any, transaction: Any) -> None:
        super().__init__(key, memoryview(head), memoryview(array))
        self._array, self._transaction = array, transaction

    def release(self) -> None:
        """End the transaction. SUBTLE: whoever kept a slice would read what is written there next, so it is told.

        Each view of the memory refers to the array. While there is one, the transaction goes on, and nothing is
        written there: memory that a program still looks at never changes.
        """
        if self.body is not None:
            self.body.release()
        array, transaction = self._array, self._transaction
        self._array = self._transaction = None
        if transaction is None:  # released before, or of a scan, which looks itself
            return
        if sys.getrefcount(array) > 2:
            _kept[id(array)] = array, transaction
            raise _still_used(self.key)
        transaction.abort()
        _end_kept()


_kept: dict[int, tuple[Any, Any]] = {}
"""Transactions of which a program kept slices."""


def _still_used(key: Key) -> InvalidUsage:
    return InvalidUsage(f"a part of the view of event {key.id} is still in use after its block. Copy what outlives it")


def _end_kept() -> None:
    for number, entry in list(_kept.items()):
        if sys.getrefcount(entry[0]) <= 2 and _kept.pop(number, None) is not None:
            entry[1].abort()


class _Shared:
    """An environment of this process. LMDB opens a file once in a process, so writers and readers share it."""

    def __init__(self, env: Any) -> None:
        self.env, self.users = env, 0


_environments: dict[tuple[int, str], _Shared] = {}
_guard = Guard()


def _acquire(path: Path, map_bytes: int, *, create: bool) -> _Shared:
    key = os.getpid(), str(path.resolve())
    with _guard.lock:
        shared = _environments.get(key)
        for inherited in [other for other in _environments if other[0] != key[0] and other[1] == key[1]]:
            # A forked child has its parent's, which may not be used here and keeps the files from being opened anew.
            # Closing it here changes nothing for the parent: LMDB knows whose locks and slots of readers they are.
            _environments.pop(inherited).env.close()
        if shared is None:
            if (path / DATA).exists() and (path / DATA).stat().st_size:
                check_file(path / DATA)
                make_room(path / DATA)
            else:
                EndMark(path / "end").check_new()
            env = lmdb.open(str(path), map_size=map_bytes, max_readers=READERS, create=create, max_spare_txns=8)
            shared = _environments[key] = _Shared(env)
        shared.users += 1
        return shared


def _release(path: Path, shared: _Shared) -> None:
    key = os.getpid(), str(path.resolve())
    with _guard.lock:
        shared.users -= 1
        _end_kept()
        # SUBTLE: closing it would unmap memory that a program still looks at. Whoever opens it next gets the same.
        if shared.users == 0 and not _kept and _environments.get(key) is shared:
            del _environments[key]
            shared.env.close()


class LmdbRecords:
    """See `api.RecordStore`."""

    def __init__(self, path: Path, shared: _Shared) -> None:
        self.limit: int | None = LIMIT
        self._path, self._shared, self._env = path, shared, shared.env
        self._pid, self._is_closed = os.getpid(), False
        self._end = EndMark(path / "end")
        self.log = open_meta(self._read(lambda transaction: _small(transaction, META, path)) or b"", str(path))

    def _check(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            raise InvalidUsage(f"the event log {self._path} was closed, or opened before a fork; open it again")

    def _read(self, work: Callable[[Any], T]) -> T:
        self._check()
        try:
            with self._env.begin(buffers=True) as transaction:
                return work(transaction)
        except lmdb.Error as error:
            raise _read_failed(error, self._path) from error

    def _write(self, work: Callable[[Any], T], epoch: int | None) -> T:
        """Run `work` in a transaction, if the epoch is the newest (None: whatever it is)."""
        self._check()
        is_committing = False
        try:
            with self._env.begin(write=True) as transaction:
                found = _epoch(transaction, self._path)
                if epoch is not None and found != epoch:
                    raise fenced(str(self._path), epoch, found)
                done = work(transaction)
                is_committing = True
        except lmdb.Error as error:
            raise _write_failed(error, self._path, is_committing=is_committing) from error
        return done

    def claim(self, owner: str) -> int:
        def claim(transaction: Any) -> int:
            epoch = _epoch(transaction, self._path) + 1
            transaction.put(EPOCH, b"%d" % epoch)
            transaction.put(b"\0owner", owner.encode())
            return epoch

        return self._write(claim, None)

    def last(self) -> int:
        return self._end.checked(self.log, self.find_last)

    def find_last(self) -> int:
        return self._read(_last)

    def known_last(self) -> int:
        return self._end.known(self.log)

    def forget_end(self) -> None:
        self._end.write(self.log, self.find_last())

    def verify(self) -> None:
        """LMDB has no checksums: but all keys are in order, and there are as many as it counts."""
        self._read(lambda transaction: _verify(transaction, self._path))

    def discard(self, epoch: int, last: int) -> None:
        self._write(lambda transaction: _delete(transaction, *key_range(EVENTS, last + 1, None)), epoch)
        self._end.write(self.log, last)

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        def put_all(transaction: Any) -> None:
            for key, head, body in puts:
                start = encode_key(key)
                if key.space != EVENTS:
                    _delete(transaction, start, start + b"\xff" * 256)
                transaction.put(start + head, body)

        self._write(put_all, epoch)
        self._end.note(self.log, puts)

    def get(self, key: Key) -> Held | None:
        start = encode_key(key)
        transaction = self._begin()
        try:
            cursor = transaction.cursor()
            found = bytes(cursor.key()) if cursor.set_range(start) else b""
            if not found.startswith(start):
                transaction.abort()
                return None
            return _View(key, found[len(start) :], np.frombuffer(cursor.value(), np.uint8), transaction)
        except lmdb.Error as error:
            raise _read_failed(error, self._path) from error

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        """SUBTLE: a transaction for some records only, as an open one keeps a writer from using pages again."""
        start, end = key_range(EVENTS, from_id, through + 1)
        while start < end:
            start = yield from self._scan_some(start, end)

    def _scan_some(self, start: bytes, end: bytes) -> Generator[Held, None, bytes]:
        """Read some records. Returns the key to go on from."""
        transaction, array, left = self._begin(), None, RECORDS
        try:
            cursor = transaction.cursor()
            is_there = cursor.set_range(start)
            while is_there and left and (key := bytes(cursor.key())) < end:
                array, name = np.frombuffer(cursor.value(), np.uint8), Key(EVENTS, *decode_key(EVENTS, key))
                yield _View(name, key[KEY_BYTES:], array, None)
                if sys.getrefcount(array) > 2:
                    raise _still_used(name)
                start, is_there, left = key + b"\0", cursor.next(), left - 1
        except lmdb.Error as error:
            raise _read_failed(error, self._path) from error
        except GeneratorExit:
            if array is not None and sys.getrefcount(array) > 2:
                raise _still_used(name) from None
            raise
        finally:
            if array is not None and sys.getrefcount(array) > 2:
                _kept[id(array)] = array, transaction
            else:
                transaction.abort()
                _end_kept()
        return end if left else start

    def _begin(self) -> Any:
        self._check()
        try:
            return self._env.begin(buffers=True)
        except lmdb.Error as error:
            raise _read_failed(error, self._path) from error

    def ids(self, space: str) -> list[int]:
        def find(transaction: Any) -> list[int]:
            start, end = key_range(space, 0, None)
            found, cursor = [], transaction.cursor()
            for key in cursor.iternext(keys=True, values=False) if cursor.set_range(start) else ():
                if bytes(key[: len(end)]) >= end:
                    break
                id_, fragment = decode_key(space, bytes(key))
                if fragment == 0:
                    found.append(id_)
            return found

        return self._read(find)

    def remove(self, epoch: int, space: str, below: int) -> None:
        self._write(lambda transaction: _delete(transaction, *key_range(space, 0, below)), epoch)

    def close(self) -> None:
        if not self._is_closed and self._pid == os.getpid():
            self._is_closed = True
            self._end.close()
            _release(self._path, self._shared)


def _last(transaction: Any) -> int:
    """Each transaction continues what is there, so the last event is before the first key behind the events."""
    start, end = key_range(EVENTS, 0, None)
    cursor = transaction.cursor()
    is_there = (cursor.prev() if cursor.set_range(end) else cursor.last()) and bytes(cursor.key()) >= start
    return decode_key(EVENTS, bytes(cursor.key()))[0] if is_there else 0


def _epoch(transaction: Any, path: Path) -> int:
    return parse_epoch(_small(transaction, EPOCH, path), str(path))


def _small(transaction: Any, key: bytes, path: Path) -> bytes | None:
    """A small value. SUBTLE: its length is looked at first, as one that is damaged leads out of the file."""
    found = transaction.get(key)
    if found is not None and len(found) > SMALL_BYTES:
        raise Corrupt(
            f"the LMDB database {path} is damaged: {key!r} has {len(found)} bytes. Restore it from a copy",
            key=str(path),
        )
    return None if found is None else bytes(found)


def _verify(transaction: Any, path: Path) -> None:
    before, count = b"", 0
    for found in transaction.cursor().iternext(keys=True, values=False):
        key, count = bytes(found), count + 1
        if key <= before:
            raise Corrupt(f"the LMDB database {path} is damaged: its keys are out of order", key=str(path))
        before = key
    if count != (expected := transaction.stat()["entries"]):
        raise Corrupt(f"the LMDB database {path} is damaged: {count} of {expected} records are there", key=str(path))


def _delete(transaction: Any, start: bytes, end: bytes) -> None:
    cursor = transaction.cursor()
    while cursor.set_range(start) and bytes(cursor.key()) < end:
        cursor.delete()


def _read_failed(error: Exception, path: Path) -> PersistError:
    if isinstance(error, DAMAGED):
        return Corrupt(f"the LMDB database {path} is damaged ({error}); restore it from a copy", key=str(path))
    return Determinate(f"could not read the LMDB database {path}: {error}", path=str(path))


def _write_failed(error: Exception, path: Path, *, is_committing: bool) -> PersistError:
    """SUBTLE: a commit writes all pages, and then one that is there already: lack of room comes before that."""
    if isinstance(error, lmdb.DiskError) and (full := no_room("events", path)) is not None:
        return full
    if isinstance(error, lmdb.MapFullError):
        return InvalidUsage(f"the map of the LMDB database {path} is full; open it with a larger map=BYTES")
    if isinstance(error, DAMAGED):
        return _read_failed(error, path)
    kind = Indeterminate if is_committing else Determinate
    return kind(f"could not write to the LMDB database {path}: {error}", path=str(path))


def open_lmdb(options: Sequence[str], opening: Opening) -> LmdbRecords:
    """Open the database in a directory: `lmdb:PATH[:map=BYTES]`."""
    paths = [option for option in options if not option.startswith("map=")]
    maps = [option.removeprefix("map=") for option in options if option.startswith("map=")]
    if len(paths) > 1 or not all(paths) or len(maps) > 1 or not all(size.isdecimal() for size in maps):
        raise InvalidUsage(f"a store of events in LMDB is lmdb:PATH[:map=BYTES]: got {len(options)} options")
    path = Path(paths[0] if paths else DEFAULT).absolute()
    is_there = (path / DATA).exists()
    if not is_there and not opening.create:
        raise NotFound(f"there is no event log in {path}. Check the path; a writer makes one", path=str(path))
    try:
        if not is_there:
            make_directories(path)
        shared = _acquire(path, int(maps[0]) if maps else MAP_BYTES, create=opening.create)
    except (lmdb.Error, OSError) as error:
        raise _read_failed(error, path) from error
    try:
        if opening.create:
            _create(shared.env, path, opening)
        return LmdbRecords(path, shared)
    except BaseException:
        _release(path, shared)
        raise


def _create(env: Any, path: Path, opening: Opening) -> None:
    try:
        with env.begin() as transaction:
            if transaction.get(META) is not None:
                return
            if transaction.stat()["entries"]:
                raise InvalidUsage(f"{path} is an LMDB database of another program; nothing was touched")
        with env.begin(write=True) as transaction:
            transaction.put(META, encode_meta(opening.runtime), overwrite=False)
        fsync_directory(path)
    except lmdb.Error as error:
        raise _write_failed(error, path, is_committing=True) from error


KIND = Kind(open_lmdb, "a directory (./events.lmdb), map=BYTES of address space")
