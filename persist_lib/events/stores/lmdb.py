"""Event logs in LMDB: `lmdb:PATH`. Events are read as views of the memory map, and written from the caller's buffer.

LMDB lets one process write at a time; the epoch is checked in its turn. It checks next to nothing of a file, and a page
that is not in it would end the process (SIGBUS). So the file is looked at before it is mapped: its first two pages say,
in turns, how far it is used and where its tree is. The number of the commit tells which of the two is newer: a wrong
one would hide a commit.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb
import numpy as np

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening
from persist_lib.events.stores.ordered import (
    KEY_BYTES,
    ByteEngine,
    Changes,
    OpenOnce,
    OrderedRecords,
    decode_key,
    encode_key,
    key_range,
)
from persist_lib.events.stores.shared import EndMark, make_place, parse_path, take_option
from persist_lib.location.directories import no_room

T = TypeVar("T")
DEFAULT, DATA = "events.lmdb", "data.mdb"
MAP_BYTES = 1 << 40
"""Address space for the database, not room on disk. `map=BYTES` sets another, where a system allows less."""
LIMIT = 1 << 30
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


class _View(Held):
    """A record in the memory map: its transaction keeps the pages from being used again."""

    __slots__ = ("_array", "_transaction")

    def __init__(self, key: Key, head: bytes, array: Any, transaction: Any) -> None:
        super().__init__(key, memoryview(head), memoryview(array))
        self._array, self._transaction = array, transaction

    def release(self) -> None:
        """End the transaction. A kept slice would show what is written there next, so it is an error.

        Each view of the memory refers to the array. While there is one, the transaction stays open, and nothing is
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


_environments = OpenOnce()
"""LMDB opens a file once in a process, so writers and readers share the environment."""


def _acquire(path: Path, map_bytes: int, *, create: bool) -> Any:
    with _environments.lock:
        for inherited in _environments.inherited(path):
            # A parent's environment may not be used in a forked child, and keeps the files from being opened there.
            # Closing it here changes nothing for the parent: LMDB knows whose locks and slots of readers they are.
            inherited.close()
        if (env := _environments.take(path)) is not None:
            return env
        if (path / DATA).exists() and (path / DATA).stat().st_size:
            check_file(path / DATA)
            make_room(path / DATA)
        else:
            EndMark(path / "end").check_new()
        env = lmdb.open(str(path), map_size=map_bytes, max_readers=READERS, create=create, max_spare_txns=8)
        return _environments.add(path, env)


class _Changes:
    def __init__(self, engine: LmdbEngine, transaction: Any) -> None:
        self._engine, self._transaction = engine, transaction
        self.put = transaction.put

    def get(self, key: bytes) -> bytes | None:
        """The length is looked at first, as one that is damaged leads out of the file."""
        found = self._transaction.get(key)
        if found is not None and len(found) > SMALL_BYTES:
            raise self._engine.damaged(f"{key!r} has {len(found)} bytes")
        return None if found is None else bytes(found)

    def delete(self, start: bytes, end: bytes) -> None:
        cursor = self._transaction.cursor()
        while cursor.set_range(start) and bytes(cursor.key()) < end:
            cursor.delete()


class LmdbEngine(ByteEngine):
    """An environment that this process has open."""

    name, limit, failures = "LMDB", LIMIT, (lmdb.Error, OSError)

    def __init__(self, path: Path, map_bytes: int, *, create: bool) -> None:
        super().__init__(path)
        with self.reading():
            self._env = _acquire(path, map_bytes, create=create)

    def is_damage(self, error: Exception) -> bool:
        return isinstance(error, DAMAGED)

    def _read(self, work: Callable[[Any], T]) -> T:
        with self.reading(), self._env.begin(buffers=True) as transaction:
            return work(transaction)

    def batch(self, work: Callable[[Changes], T]) -> T:
        self.check_open()
        is_committing = False
        try:
            with self._env.begin(write=True) as transaction:
                done = work(_Changes(self, transaction))
                is_committing = True
        except lmdb.Error as error:
            raise self._write_failed(error, is_committing=is_committing) from error
        return done

    def value(self, key: bytes) -> bytes | None:
        return self._read(lambda transaction: _Changes(self, transaction).get(key))

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        def find(transaction: Any) -> list[bytes]:
            found, cursor = [], transaction.cursor()
            for key in cursor.iternext(keys=True, values=False) if cursor.set_range(start) else ():
                if bytes(key[: len(end)]) >= end:
                    break
                found.append(bytes(key))
            return found

        return iter(self._read(find))

    def last_key(self, end: bytes) -> bytes | None:
        def find(transaction: Any) -> bytes | None:
            cursor = transaction.cursor()
            is_there = cursor.prev() if cursor.set_range(end) else cursor.last()
            return bytes(cursor.key()) if is_there else None

        return self._read(find)

    def verify(self) -> None:
        """LMDB has no checksums: but all keys are in order, and there are as many as it counts."""
        self._read(self._verify)

    def _verify(self, transaction: Any) -> None:
        before, count = b"", 0
        for found in transaction.cursor().iternext(keys=True, values=False):
            key, count = bytes(found), count + 1
            if key <= before:
                raise self.damaged("its keys are out of order")
            before = key
        if count != (expected := transaction.stat()["entries"]):
            raise self.damaged(f"{count} of {expected} records are there")

    def _write_failed(self, error: Exception, *, is_committing: bool) -> PersistError:
        """A commit writes all pages, and then one that is there already: lack of room comes before that."""
        if isinstance(error, lmdb.DiskError) and (full := no_room("events", self.where)) is not None:
            return full
        if isinstance(error, lmdb.MapFullError):
            return InvalidUsage(f"the map of the LMDB database {self.where} is full; open it with a larger map=BYTES")
        if self.is_damage(error):
            return self.read_failed(error)
        kind = Indeterminate if is_committing else Determinate
        return kind(f"could not write to the LMDB database {self.where}: {error}", path=str(self.where))

    def get(self, key: Key) -> Held | None:
        start = encode_key(key)
        with self.reading():
            transaction = self._env.begin(buffers=True)
            cursor = transaction.cursor()
            found = bytes(cursor.key()) if cursor.set_range(start) else b""
            if not found.startswith(start):
                transaction.abort()
                return None
            return _View(key, found[len(start) :], np.frombuffer(cursor.value(), np.uint8), transaction)

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        """A transaction for some records only, as an open one keeps a writer from using pages again."""
        start, end = key_range(EVENTS, from_id, through)
        while start < end:
            with self.reading():
                start = yield from self._scan_some(self._env.begin(buffers=True), start, end)

    def _scan_some(self, transaction: Any, start: bytes, end: bytes) -> Generator[Held, None, bytes]:
        """Read some records. Returns the key to continue from."""
        array, left = None, RECORDS
        try:
            cursor = transaction.cursor()
            is_there = cursor.set_range(start)
            while is_there and left and (key := bytes(cursor.key())) < end:
                array, name = np.frombuffer(cursor.value(), np.uint8), Key(EVENTS, *decode_key(EVENTS, key))
                yield _View(name, key[KEY_BYTES:], array, None)
                if sys.getrefcount(array) > 2:
                    raise _still_used(name)
                start, is_there, left = key + b"\0", cursor.next(), left - 1
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

    def close(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        with _environments.lock:
            _end_kept()
            # Closing it would unmap memory that a program still looks at. The next user gets the same.
            if _environments.give_back(self.where, is_kept=bool(_kept)):
                self._env.close()


def open_lmdb(options: Sequence[str], opening: Opening) -> OrderedRecords:
    """Open the database in a directory: `lmdb:PATH[:map=BYTES]`."""
    usage = "a store of events in LMDB is lmdb:PATH[:map=BYTES]"
    paths, maps = take_option(options, "map")
    path = parse_path(paths, DEFAULT, usage)
    if len(maps) > 1 or not all(size.isdecimal() for size in maps):
        raise InvalidUsage(f"{usage}: got {len(options)} options")
    if not (path / DATA).exists():
        make_place(path, path, opening)
    return LmdbEngine(path, int(maps[0]) if maps else MAP_BYTES, create=opening.create).records(opening)


META_PAGE = struct.Struct("=Q2xH4xII16xI92xQQ")
"""Page number, flags; magic, version; page size; last page, commit. Between them: free space, address, map size."""
MAGIC, VERSIONS, IS_META = 0xBEEFC0DE, (1, 2), 0x08
PAGE_SIZES = [1 << bits for bits in range(9, 17)]
ATTEMPTS = 5
SLACK_BYTES = 1 << 18
"""Offsets in a page have 16 bits, so a damaged one leads at most so far behind it (and that far again for a key)."""


class _Meta(NamedTuple):
    """What one of the two pages says."""

    page: int
    flags: int
    magic: int
    version: int
    page_bytes: int
    last_page: int
    commit: int


COMMIT = attrgetter("commit")


def check_file(path: Path) -> None:
    """Raise Corrupt for a file that is shorter than it must be, or whose first pages contradict each other."""
    with path.open("rb") as file:
        why = "it is empty"
        for _ in range(ATTEMPTS):  # a process that writes may commit between two reads
            if (why := _what_is_wrong(file.fileno())) == "":
                return
    raise Corrupt(
        f"the LMDB database {path} is damaged: {why}. Nothing was changed; restore it from a copy", key=str(path)
    )


def make_room(path: Path) -> None:
    """Let the file continue behind its last page, as far as a damaged offset in that page leads. It changes no page."""
    with suppress(OSError), path.open("r+b") as file:  # where it cannot be written, that page is not guarded
        first = _meta(file.fileno(), 0)
        second = first and _meta(file.fileno(), first.page_bytes)
        if first is not None and second:
            end = (max(first, second, key=COMMIT).last_page + 1) * first.page_bytes
            # Never `truncate`, which would cut off what another process appends at the same time.
            os.posix_fallocate(file.fileno(), end, SLACK_BYTES)


def _what_is_wrong(fd: int) -> str:
    first = _meta(fd, 0)
    if first is None or first.page_bytes not in PAGE_SIZES:
        return "its first page is not as LMDB wrote it"
    second = _meta(fd, first.page_bytes)
    if second is None or second.page_bytes != first.page_bytes:
        return "its second page is not as LMDB wrote it"
    for number, meta in enumerate((first, second)):
        is_ours = (meta.page, meta.flags, meta.magic) == (number, IS_META, MAGIC) and meta.version in VERSIONS
        if not is_ours or (meta.commit and meta.commit % 2 != number):
            return f"page {number} is not as LMDB wrote it"
    if abs(first.commit - second.commit) > 1:
        return f"its first two pages are of the commits {first.commit} and {second.commit}"
    size, least = os.fstat(fd).st_size, (max(first, second, key=COMMIT).last_page + 1)
    if size < least * first.page_bytes:
        return f"it is cut: {size} of {least * first.page_bytes} bytes are there"
    return ""


def _meta(fd: int, at: int) -> _Meta | None:
    data = os.pread(fd, META_PAGE.size, at)
    return None if len(data) < META_PAGE.size else _Meta(*META_PAGE.unpack(data))


KIND = Kind(open_lmdb)
