"""Event logs in an ordered key-value store: one class holds the rules, and each engine is one small file.

An `Engine` keeps records in the order of their keys, and changes them in one atomic batch, on the condition that no
newer writer has claimed the log. How it lays them out is its own matter; `ByteEngine` is one with bytes as keys.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from persist_lib.errors import Corrupt, Determinate, InvalidUsage, Missing, PersistError
from persist_lib.events.api import EVENTS, MOST_ID, Held, Key, Opening, Put, Records, Scans
from persist_lib.events.stores.shared import EndMark, encode_meta, fenced, open_meta, parse_epoch
from persist_lib.location.directories import fsync_directory
from persist_lib.runtime.forks import Stage, enrol

T = TypeVar("T")
PAGE_BYTES = 4 << 20
"""About how many bytes of events are read at a time."""
META, EPOCH, OWNER = b"\0meta", b"\0epoch", b"\0owner"


class Span(NamedTuple):
    """The records of a space with ids from `start` through `end`."""

    space: str
    start: int
    end: int = MOST_ID


class Engine(Records, Scans, Protocol):
    """What an ordered key-value store can do. No read transaction stays open for longer than a page of a scan."""

    def change(self, epoch: int, puts: Sequence[Put], gone: Span | None = None) -> None:
        """Remove the records of a span, then put these, all durable on return; raise Fenced unless `epoch` is newest.

        A put replaces a record of another space than that of the events.
        """

    def last(self) -> int:
        """The greatest id of an event; 0 if there is none. Each batch continues what is there, so there are no gaps."""

    def verify(self) -> None:
        """Raise Corrupt unless the engine's own structures are sound."""
        return

    def let_go(self) -> None:
        """The log has lost events: change nothing of what is left, also at closing."""
        return


class OrderedRecords:
    """The store of an engine. `mark` is beside the files of an engine that has files: what was acknowledged last."""

    def __init__(self, engine: Engine, mark: EndMark | None = None) -> None:
        self.limit: int | None = engine.limit
        self.log = engine.log
        self._engine, self._mark = engine, mark
        self.get, self.ids, self.scan = engine.get, engine.ids, engine.scan
        self.find_last, self.verify = engine.last, engine.verify

    def claim(self, owner: str) -> int:
        if self._mark is not None:
            self.last()  # first, as a claim may write over what is left of a damaged log (SQLite's own log)
        return self._engine.claim(owner)

    def last(self) -> int:
        try:
            return self.find_last() if self._mark is None else self._mark.checked(self.log, self.find_last)
        except Missing:
            self._engine.let_go()
            raise

    def known_last(self) -> int:
        return 0 if self._mark is None else self._mark.known(self.log)

    def forget_end(self) -> None:
        self._note(self.find_last())

    def discard(self, epoch: int, last: int) -> None:
        self._engine.change(epoch, (), Span(EVENTS, last + 1))
        self._note(last)

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        self._engine.change(epoch, puts)
        if self._mark is not None:
            self._mark.note(self.log, puts)

    def remove(self, epoch: int, space: str, below: int) -> None:
        self._engine.change(epoch, (), Span(space, 0, below - 1))

    def _note(self, last: int) -> None:
        if self._mark is not None:
            self._mark.write(self.log, last)

    def close(self) -> None:
        self._engine.close()
        if self._mark is not None:
            self._mark.close()


class Changes(Protocol):
    """A batch that becomes durable as a whole. It reads what was there before it."""

    def get(self, key: bytes) -> bytes | None:
        """Return a small value."""

    def put(self, key: bytes, value: Any) -> None:
        """Store a value, a buffer."""

    def delete(self, start: bytes, end: bytes) -> None:
        """Remove the keys in `[start, end)`, also those that this batch has put."""


class ByteEngine(Engine):
    """An engine with bytes as keys: a record's head stands in its key, behind what it is looked up by; its body is the
    value. So neither side joins or cuts anything, and one seek finds both. `where` is its path.
    """

    name: ClassVar[str]
    failures: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, where: Path) -> None:
        self.where, self._pid, self._is_closed = where, os.getpid(), False

    def records(self, opening: Opening) -> OrderedRecords:
        """The store over this engine, in which the log is made if it may be. Closes the engine if that fails."""
        try:
            if opening.create and self.value(META) is None:
                if self.last_key(b"\xff" * 16) is not None:
                    raise InvalidUsage(f"{self.where} is a database of another program; nothing was touched")
                self.batch(lambda changes: self._create(changes, encode_meta(opening.runtime)))
                fsync_directory(self.where)
            self.log = open_meta(self.value(META) or b"", str(self.where))
        except BaseException:
            self.close()
            raise
        return OrderedRecords(self, EndMark(self.where / "end"))

    def _create(self, changes: Changes, meta: bytes) -> None:
        if changes.get(META) is None:
            changes.put(META, meta)

    @abstractmethod
    def value(self, key: bytes) -> bytes | None:
        """Return a small value."""

    @abstractmethod
    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        """Yield the keys in `[start, end)`, in order."""

    @abstractmethod
    def last_key(self, end: bytes) -> bytes | None:
        """The greatest key below `end`."""

    @abstractmethod
    def batch(self, work: Callable[[Changes], T]) -> T:
        """Carry out what `work` does with the changes, durably on return; nothing of it if it raises."""

    @abstractmethod
    def is_damage(self, error: Exception) -> bool:
        """Whether an error of the engine says that its files are damaged."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise errors of the engine as what they mean for a reader, and InvalidUsage if it is not open any more."""
        self.check_open()
        try:
            yield
        except PersistError:
            raise
        except self.failures as error:
            raise self.read_failed(error) from error

    def read_failed(self, error: Exception) -> PersistError:
        if self.is_damage(error):
            return self.damaged(str(error))
        return Determinate(f"could not read the {self.name} database {self.where}: {error}", path=str(self.where))

    def damaged(self, why: str) -> Corrupt:
        text = f"the {self.name} database {self.where} is damaged: {why}. Restore it from a copy"
        return Corrupt(text, key=str(self.where))

    def check_open(self) -> None:
        """Raise InvalidUsage after `close`, and in a forked child."""
        if self._is_closed or self._pid != os.getpid():
            raise InvalidUsage(f"the event log {self.where} was closed, or opened before a fork; open it again")

    def claim(self, owner: str) -> int:
        def claim(changes: Changes) -> int:
            epoch = parse_epoch(changes.get(EPOCH), str(self.where)) + 1
            changes.put(EPOCH, b"%d" % epoch)
            changes.put(OWNER, owner.encode())
            return epoch

        return self.batch(claim)

    def change(self, epoch: int, puts: Sequence[Put], gone: Span | None = None) -> None:
        def change(changes: Changes) -> None:
            if (found := parse_epoch(changes.get(EPOCH), str(self.where))) != epoch:
                raise fenced(str(self.where), epoch, found)
            if gone is not None:
                changes.delete(*key_range(*gone))
            for key, head, body in puts:
                start = encode_key(key)
                if key.space != EVENTS:
                    changes.delete(start, start + b"\xff" * 256)
                changes.put(start + head, body)

        self.batch(change)

    def last(self) -> int:
        start, end = key_range(EVENTS, 0)
        key = self.last_key(end)
        return 0 if key is None or key < start else decode_key(EVENTS, key)[0]

    def ids(self, space: str) -> list[int]:
        found = (decode_key(space, key) for key in self.keys(*key_range(space, 0)))
        return [id_ for id_, fragment in found if fragment == 0]


class OpenOnce:
    """What a process may open once, by path: it is shared, and closed with its last user. Use it under `lock`."""

    def __init__(self) -> None:
        self._users: dict[tuple[int, str], list[Any]] = {}
        enrol(self, Stage.STORES)
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Renew the lock, which a thread of the parent may hold."""
        self.lock = threading.Lock()

    def inherited(self, path: Path) -> list[Any]:
        """What the parent of a forked child had open there; it is forgotten."""
        keys = [key for key in self._users if key[0] != os.getpid() and key[1] == str(path.resolve())]
        return [self._users.pop(key)[0] for key in keys]

    def take(self, path: Path) -> Any:
        """Use what is open, if something is."""
        if (found := self._users.get(_process_key(path))) is None:
            return None
        found[1] += 1
        return found[0]

    def add(self, path: Path, opened: T) -> T:
        """Share what was opened, and use it."""
        self._users[_process_key(path)] = [opened, 1]
        return opened

    def give_back(self, path: Path, *, is_kept: bool = False) -> bool:
        """End a use. Returns whether to close it now; if it `is_kept`, it stays for the next user."""
        found = self._users[_process_key(path)]
        found[1] -= 1
        if found[1] or is_kept:
            return False
        del self._users[_process_key(path)]
        return True


def _process_key(path: Path) -> tuple[int, str]:
    return os.getpid(), str(path.resolve())


def encode_key(key: Key) -> bytes:
    """A key as bytes, in the order of ids and fragments within a space."""
    return b"\1%b\0%b%b" % (key.space.encode(), key.id.to_bytes(8, "big"), key.fragment.to_bytes(4, "big"))


KEY_BYTES = len(encode_key(Key(EVENTS, 0, 0)))
"""Of an event's key; the head of the record follows."""


def decode_key(space: str, key: bytes) -> tuple[int, int]:
    """The id and the fragment of a key of this space. What follows is left alone."""
    at = len(space) + 2
    return int.from_bytes(key[at : at + 8], "big"), int.from_bytes(key[at + 8 : at + 12], "big")


def key_range(space: str, start: int, end: int = MOST_ID) -> tuple[bytes, bytes]:
    """The keys of a span: the first one, and the first behind them. Without an `end`: all from the start on."""
    behind = encode_key(Key(space, end + 1, 0)) if end < MOST_ID else b"\1%b\1" % space.encode()
    return encode_key(Key(space, start, 0)), behind


def pages(sizes: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """The first and the last id of each page, of ids and their sizes in order. A page has `most` bytes, or one id."""
    start, total = 0, 0
    for at, (_, size) in enumerate(sizes):
        if at > start and total + size > most:
            yield sizes[start][0], sizes[at - 1][0]
            start, total = at, 0
        total += size
    if sizes:
        yield sizes[start][0], sizes[-1][0]


def scan_pages(
    sizes_of: Callable[[int, int], Sequence[tuple[int, int]]], read: Callable[[int, int], Iterator[Held]],
    from_id: int, through: int,
) -> Iterator[Held]:  # fmt: skip
    """A scan that asks for the next ids and their sizes, and then for as many as make a page."""
    while sizes := sorted(sizes_of(from_id, through)):
        for first, end in pages(sizes, PAGE_BYTES):
            yield from read(first, end)
        from_id = sizes[-1][0] + 1
