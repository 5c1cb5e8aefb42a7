"""Event logs in RocksDB: `rock:PATH`. One synced batch makes all events durable that wait.

RocksDB opens a database for writing in one process at a time, by a lock that ends with the process: so a paused
predecessor is not taken over, but refused (`Locked`) until it is ended. What it opens first is looked at before that:
on some bytes of a damaged manifest it would wait for ever.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rocksdict import AccessType, DBRecoveryMode, Options, Rdict, ReadOptions, WriteBatch, WriteOptions

from persist_lib.errors import Corrupt, Indeterminate, InvalidUsage, Locked, PersistError
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
from persist_lib.events.stores.shared import EndMark, as_bytes, make_place, parse_path

T = TypeVar("T")
DEFAULT = "events.rock"
LIMIT = 1 << 30
_writing = OpenOnce()
"""Databases that this process has open for writing: its readers use the same."""


class _Changes:
    """A batch: what is removed, and what is put after that."""

    def __init__(self, engine: RockEngine) -> None:
        self.get, self._engine = engine.value, engine
        self._puts: dict[bytes, Any] = {}
        self._deleted: list[bytes] = []

    def put(self, key: bytes, value: Any) -> None:
        self._puts[key] = as_bytes(value)

    def delete(self, start: bytes, end: bytes) -> None:
        self._deleted += self._engine.keys(start, end)
        for key in [key for key in self._puts if start <= key < end]:
            del self._puts[key]

    def batch(self) -> WriteBatch:
        batch = WriteBatch(raw_mode=True)
        for key in self._deleted:
            batch.delete(key)
        for key, value in self._puts.items():
            batch.put(key, value)
        return batch


class RockEngine(ByteEngine):
    """A database, opened for writing where it may be made."""

    name, limit, failures = "RocksDB", LIMIT, (Exception,)

    def __init__(self, path: Path, *, create: bool) -> None:
        super().__init__(path)
        self._can_write, self._is_shared = create, False
        self._sync = WriteOptions()
        self._sync.sync = True
        self._db: Any = self._open()

    def _open(self) -> Any:
        with _writing.lock:
            if (db := _writing.take(self.where)) is not None:
                self._is_shared = True
                return db
            if (self.where / "CURRENT").exists():
                check_files(self.where)
            else:
                EndMark(self.where / "end").check_new()
            access = AccessType.read_write() if self._can_write else AccessType.read_only()
            try:
                db = Rdict(str(self.where), _options(), access_type=access)
            except Exception as error:
                raise self._open_failed(error) from error
            if not self._can_write:
                return db
            self._is_shared = True
            return _writing.add(self.where, db)

    def value(self, key: bytes) -> bytes | None:
        with self.reading():
            found: bytes | None = self._db.get(key)
        return found

    def batch(self, work: Callable[[Changes], T]) -> T:
        if not self._can_write:
            raise InvalidUsage(f"the event log {self.where} was opened for reading")
        with _writing.lock:
            done = work(changes := _Changes(self))
            batch = changes.batch()
            try:
                self._db.write(batch, self._sync)
            except Exception as error:
                # Never DiskFull: RocksDB may have written a part of the bytes, and its log decides whether it counts.
                raise Indeterminate(
                    f"could not write to the RocksDB database {self.where}, and may have: {error}", path=str(self.where)
                ) from error
        return done

    def last_key(self, end: bytes) -> bytes | None:
        self._catch_up()
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        with self.reading():
            found = self._db.iter(options)
            found.seek_to_last()
            key: bytes | None = found.key() if found.valid() else None
            found.status()  # an iterator that met damage is not valid either, as at the end
        return key

    def _catch_up(self) -> None:
        """A database that is opened for reading shows what was there then."""
        self.check_open()
        if not self._is_shared:
            self._db.close()
            self._db = self._open()

    def _between(self, start: bytes, end: bytes) -> Iterator[Any]:
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        with self.reading():
            found = self._db.iter(options)
            found.seek(start)
            while found.valid():
                yield found
                found.next()
            found.status()

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        return (found.key() for found in self._between(start, end))

    def get(self, key: Key) -> Held | None:
        start = encode_key(key)
        for found in self._between(start, start + b"\xff" * 256):
            return Held(key, memoryview(found.key())[len(start) :], memoryview(found.value()))
        return None

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        for found in self._between(*key_range(EVENTS, from_id, through)):
            key = found.key()
            yield Held(Key(EVENTS, *decode_key(EVENTS, key)), memoryview(key)[KEY_BYTES:], memoryview(found.value()))

    def is_damage(self, error: Exception) -> bool:
        """Each text begins with the code of RocksDB's status: `rocksdict` has no other type for it."""
        return str(error).partition(":")[0] == "Corruption"

    def _open_failed(self, error: Exception) -> PersistError:
        if not _is_locked(self.where):
            return self.read_failed(error)
        return Locked(
            f"another process has {self.where} open for writing, alive or paused: RocksDB lets one process write. End "
            f"that one; its lock ends with it ({error})",
            owner=str(error),
        )

    def close(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        with _writing.lock:
            db, self._db = self._db, None
            try:
                if not self._is_shared or _writing.give_back(self.where):
                    db.close()
            except Exception as error:
                raise self.read_failed(error) from error


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # The default would end the log at the first damaged record of RocksDB's own log, and forget what follows.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_keep_log_file_num(2)
    return options


def _is_locked(path: Path) -> bool:
    """Whether another process holds RocksDB's lock. Asked only while this one does not, which would lose its own."""
    try:
        with (path / "LOCK").open("r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def open_rock(options: Sequence[str], opening: Opening) -> OrderedRecords:
    """Open the database in a directory: `rock:PATH`."""
    path = parse_path(options, DEFAULT, "a store of events in RocksDB is rock:PATH")
    if not (path / "CURRENT").exists():
        make_place(path, path, opening)
    return RockEngine(path, create=opening.create).records(opening)


CURRENT = re.compile(rb"MANIFEST-\d+\n")
BLOCK = 32768
HEADER = struct.Struct("<IHB")
MOST_BYTES = 1 << 18
"""How much of a manifest is verified. Ours have some hundred bytes, and a few for each file that is made later."""
POLYNOMIAL, MASK = 0x82F63B78, 0xA282EAD8


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)  # noqa: PLW2901
        found.append(value)
    return found


TABLE = _table()


def check_files(path: Path) -> None:
    """Raise Corrupt if CURRENT names no manifest that is there, or a record of that one does not verify."""
    current = path / "CURRENT"
    try:
        name = current.read_bytes()
        if not CURRENT.fullmatch(name):
            raise _damaged(current, f"it says {name[:40]!r}, where the name of a manifest belongs")
        manifest = path / name.decode().strip()
        with manifest.open("rb") as file:
            at = _first_wrong(file.read(MOST_BYTES))
    except FileNotFoundError as error:
        if current.read_bytes() != name:
            return check_files(path)  # a process that writes made a new manifest
        raise _damaged(current, f"it names {name.decode().strip()}, which is not there") from error
    if at is not None:
        raise _damaged(manifest, f"its record at byte {at} does not verify")
    return None


def _damaged(file: Path, why: str) -> Corrupt:
    return Corrupt(
        f"{file} of a RocksDB database is damaged: {why}. Nothing was changed; restore it from a copy", key=str(file)
    )


def _first_wrong(data: bytes) -> int | None:
    """Where the first whole record begins that does not verify. A record that is not whole may be torn."""
    at = 0
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        masked, length, kind = HEADER.unpack_from(data, at)
        end = at + HEADER.size + length
        if end > len(data):
            return None
        if _masked(data[at + HEADER.size - 1 : end]) != masked and (kind or length or any(data[at:])):
            return at
        at = end
    return None


def _masked(data: bytes) -> int:
    """The checksum (CRC-32C) as RocksDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


KIND = Kind(open_rock)
