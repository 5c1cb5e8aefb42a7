"""The scheme `memory:`. A named location lives as long as the process, an unnamed one as long as it is open."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

from persist_lib.errors import NotFound
from persist_lib.ids import SeqNo
from persist_lib.location.api import Blob, BlobEntry, Change, Consensus, Newest, Row
from persist_lib.location.contract import (
    Clock,
    check_key,
    check_limit,
    check_prefix,
    check_range,
    is_newest,
    machine_clock,
    next_seqno,
    not_in_log,
    now_ms,
    passes_newest,
    written_before,
)
from persist_lib.location.scheme import Opening, Scheme

S = TypeVar("S", "MemoryBlob", "MemoryConsensus")


class MemoryBlob:
    """A dict of objects. `close` does nothing, because a store that is shared by name outlives each user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._objects.get(check_key(key))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        check_range(key, start, end)
        data = self._objects.get(key)
        return None if data is None else data[start:end]

    def set(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        copy = bytes(data)
        with self._lock:
            if self._objects.setdefault(key, copy) != copy:
                raise written_before(key, len(copy), len(self._objects[key]))

    @property
    def address(self) -> str:
        """Only this process can read what is here."""
        return "memory:/"

    def point(self, key: str, data: bytes, follows: bytes | None) -> bool:
        with self._lock:
            if (found := self._objects.get(check_key(key))) in (follows, data):
                self._objects[key] = data
            return found in (follows, data)

    def delete(self, key: str) -> bool:
        return self._objects.pop(check_key(key), None) is not None

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Delete several objects. It never fails, so it returns no errors."""
        for key in keys:
            self.delete(key)
        return {}

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        check_prefix(prefix)
        with self._lock:
            found = [BlobEntry(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix)]
        return iter(found)

    def close(self) -> None:
        """Nothing to do."""


class MemoryConsensus:
    """A dict of logs. Truncation never empties a key's log, so it cannot make a key look new."""

    def __init__(self, clock: Clock = machine_clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logs: dict[str, list[Row]] = {}

    def head(self, key: str) -> Row | None:
        rows = self._logs.get(key)
        return rows[-1] if rows else None

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        check_limit(limit)
        with self._lock:
            rows = self._logs.get(key)
            if not rows:
                return []
            first = max(0, from_seqno - rows[0].seqno)
            return rows[first : first + limit]

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        return self.compare_and_set_many({key: (expected, data)})

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        with self._lock:
            if not all(is_newest(expected, self.head(key)) for key, (expected, _) in changes.items()):
                return False
            rows = [Row(next_seqno(expected), bytes(data)) for expected, data in changes.values()]
            logs = [self._logs.setdefault(key, []) for key in changes]
            any(map(list.append, logs, rows))  # one call, so that no interrupt leaves it half done
            return True

    def truncate(self, key: str, seqno: SeqNo) -> int:
        with self._lock:
            head = self.head(key)
            if head is None or seqno > head.seqno:
                raise passes_newest(key, seqno, head and head.seqno)
            rows = self._logs[key]
            dropped = max(0, seqno - rows[0].seqno)
            # A new list, so that a concurrent read of the head still sees the whole old one.
            self._logs[key] = rows[dropped:]
            return dropped

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        with self._lock:
            if not is_newest(newest, self.head(key)):
                return 0
            rows = self._logs[key]
            if seqno and not rows[0].seqno <= seqno <= rows[-1].seqno:
                raise not_in_log(key, seqno)
            kept = [row for row in rows if row.seqno <= seqno]
            if kept:
                self._logs[key] = kept
            else:
                del self._logs[key]
            return len(rows) - len(kept)

    def list_keys(self) -> Iterator[str]:
        with self._lock:
            return iter([key for key, rows in self._logs.items() if rows])

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        with self._lock:
            asked = self._logs if keys is None else keys
            return {key: rows[-1].seqno for key in asked if (rows := self._logs.get(key))}

    def now(self) -> int:
        return now_ms(self._clock)

    def close(self) -> None:
        """Nothing to release."""


UNNAMED = "memory:#"
"""The prefix of generated names. The rest is random, so that an unpickled URL never opens an unrelated location."""

_lock = threading.Lock()
_blobs: WeakValueDictionary[str, MemoryBlob] = WeakValueDictionary()
_consensuses: WeakValueDictionary[str, MemoryConsensus] = WeakValueDictionary()
_kept: list[MemoryBlob | MemoryConsensus] = []
_minted: set[str] = set()


def _named(url: str, opening: Opening) -> str:
    if url != "memory:":
        return url
    drawn = f"{UNNAMED}{opening.runtime.entropy():016x}"
    with _lock:
        # Two runtimes with the same seed draw the same name. Exactly one number is drawn in any case, so that
        # other open locations do not change what a simulation draws next.
        names = itertools.chain([drawn], (f"{drawn}.{n}" for n in itertools.count(2)))
        minted = next(name for name in names if name not in _minted and name not in _blobs and name not in _consensuses)
        _minted.add(minted)
    return minted


def _shared(stores: WeakValueDictionary[str, S], url: str, opening: Opening, make: Callable[[], S]) -> S:
    """The store of this name; a new one, if there is none and it may be made."""
    with _lock:
        store = stores.get(url)
        if store is None:
            if not opening.create and url not in _minted:
                raise NotFound(
                    f"there is no location {url} in this process; memory is not shared among processes. Open it "
                    "with create=True",
                    url=url,
                )
            store = stores[url] = make()
            if not url.startswith(UNNAMED):
                _kept.append(store)
        return store


def _open_blob(url: str, opening: Opening) -> Blob:
    return _shared(_blobs, url, opening, MemoryBlob)


def _open_consensus(url: str, opening: Opening) -> Consensus:
    consensus = _shared(_consensuses, url, opening, lambda: MemoryConsensus(opening.clock))
    _minted.discard(url)
    return consensus


SCHEME = Scheme(_open_blob, _open_consensus, named=_named)
