"""Consensus in an object store alone, by conditional PUT, without a database: `s3+cas://bucket/prefix`, and the like.

    <prefix>/log/<key>/v<seqno>     one object for each row, made by PUT with If-None-Match
    <prefix>/floor/<key>            the seqno that the log of the key was truncated to, which only rises

A row is appended by creating its object; of two writers, one succeeds. The remaining danger is a stale client
whose seqno had a row that truncation has deleted: it *can* create the object again. So the floor rises before anything
below it is deleted, and it is read after each PUT: a row below the floor does not count. See
docs/design/0012-consensus-on-s3-alone.md.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple
from urllib.parse import quote, unquote

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, Missing
from persist_lib.ids import SeqNo
from persist_lib.location.api import START_BYTES, Change, Entry, Newest, Row
from persist_lib.location.contract import MARKER, RemoteClock, check_limit, next_seqno, not_in_log, passes_newest
from persist_lib.location.objects.blob import enter, open_blob, open_puts
from persist_lib.location.objects.store import PAGE, CloudObjects
from persist_lib.location.objects.target import canonical
from persist_lib.location.scheme import Opening
from persist_lib.runtime.ambient import Runtime

ATTEMPT = "persist-attempt"
"""The metadata by which a PUT recognises its own object, if a proxy sent it twice and the second was refused."""
FIRST = SeqNo(1)
LARGEST = 10**20 - 1
READ_THREADS = 16
READ_AHEAD = 32
"""How many rows that are certain to have been there a scan reads at the same time as it lists which there are."""
RACES = 20
RECENT_S = 5.0
"""How long an earlier read is relied on without reading again, where that saves a request."""
KEPT_ROWS, KEPT_BYTES = 256, 1 << 16
"""Of how many keys the last row is kept, if it is not larger, so that a scan which finds it unchanged does not read it
again; and what `head` listed."""


class _Floor(NamedTuple):
    """The seqno below which no row counts, the version of the object that says so (None: there is none), and when."""

    seqno: SeqNo
    etag: str | None
    read_at: float


class _Seen(NamedTuple):
    """The highest seqno at which there was a row for certain, what that starts with if it was looked at, and when."""

    seqno: SeqNo
    start: bytes | None
    read_at: float


class _Listed(NamedTuple):
    """The object of a row, by its name and the version that a listing says."""

    seqno: SeqNo
    version: str


class _Read(NamedTuple):
    """A row and the version of its object."""

    row: Row
    version: str


class ObjectsConsensus:
    """Rows as objects. A compare-and-set is one PUT and one GET; there are no transactions over several keys."""

    def __init__(self, objects: CloudObjects, *, runtime: Runtime | None = None, page: int = PAGE) -> None:
        self._objects = objects
        self._runtime = runtime or Runtime()
        self._clock = RemoteClock(self._runtime)
        self._page = page
        self._seen: dict[str, _Seen] = {}
        """For each key, a row that existed at some time. The newest row is always that one or a later one."""
        self._kept: OrderedDict[str, _Read] = OrderedDict()
        """Of some keys, the last row that was read or written here and counted, the latest of them last."""
        self._floors: dict[str, _Floor] = {}
        self._told: OrderedDict[str, frozenset[_Listed]] = OrderedDict()
        """Of some keys, the last rows that `head` listed, for the scan that follows it."""
        objects.observe = self._clock.observe

    def _row(self, key: str, seqno: SeqNo) -> str:
        return f"{self._rows(key)}{seqno:020d}"

    def _rows(self, key: str) -> str:
        return f"log/{_quoted(key)}/v"

    def _floor_of(self, key: str) -> str:
        return f"floor/{_quoted(key)}"

    def _see(self, key: str, seqno: SeqNo, data: bytes | None, version: str = "") -> None:
        """Know that there was a row, which counted. `version` is the object's if `data` is all of it."""
        if seqno > self._last_seen(key) or (data is not None and seqno == self._last_seen(key)):
            self._seen[key] = _Seen(seqno, data if data is None else data[:START_BYTES], self._runtime.monotonic())
        if data is not None and version and len(data) <= KEPT_BYTES:
            self._kept[key] = _Read(Row(seqno, data), version)
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT_ROWS:
                self._kept.popitem(last=False)

    def _last_seen(self, key: str) -> SeqNo:
        return self._seen[key].seqno if key in self._seen else SeqNo(0)

    def _floor(self, key: str) -> _Floor:
        asked_at = self._runtime.monotonic()
        found = self._objects.get(self._floor_of(key), f"read the floor of {key!r}")
        data, version = (b"%d" % FIRST, None) if found is None else found
        if not data.isdigit():
            raise Corrupt(
                f"the floor of {key!r} holds {data[:40]!r}, no seqno; restore it: the seqno of the first row that is "
                "there without a gap after it",
                key=key, expected="digits", actual=data[:40],
            )  # fmt: skip
        self._floors[key] = floor = _Floor(SeqNo(int(data)), version, asked_at)
        return floor

    def _attempt_at(self, key: str, seqno: SeqNo) -> str | None:
        """Return the id of the PUT that made a row's object, or None when there is no such object."""
        found = self._objects.find(self._row(key, seqno), f"look for v{seqno} of {key!r}")
        return None if found is None else found.metadata.get(ATTEMPT, "")

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        seqno = next_seqno(expected)
        if not (seqno >= self._recent_floor(key) if expected is None else self._was_there(key, expected)):
            return False
        attempt = f"{self._runtime.entropy():016x}"
        done = self._objects.put(
            self._row(key, seqno), bytes(data), f"set {key!r} to v{seqno}", metadata={ATTEMPT: attempt}
        )
        if done is None and self._winner(key, seqno) != attempt:
            return False
        return self._counts(key, seqno, bytes(data), done.version if done else "")

    def _was_there(self, key: str, expected: Newest) -> bool:
        """Whether the row `expected` existed a moment ago and may be the newest. All rows before it existed as well.

        A PUT cannot depend on another object. So unless it was checked within `RECENT_S`, this reads whether it may be
        truncated, and whether the row is still the same one, and not another of its seqno after an older copy was
        restored.
        """
        if not max(FIRST, self._last_seen(key)) <= expected.seqno < LARGEST:
            return False
        seen = self._seen.get(key)
        if seen is not None and seen.seqno == expected.seqno and seen.start is not None and self._is_recent(seen):
            return seen.start.startswith(expected.start)
        if expected.seqno < self._recent_floor(key):
            return False
        start = self._start_of(key, expected.seqno)
        if start is None:
            return False  # it never existed, or it was truncated and there are newer ones
        self._see(key, expected.seqno, start)
        return start.startswith(expected.start)

    def _is_recent(self, known: _Seen | _Floor) -> bool:
        return self._runtime.monotonic() - known.read_at <= RECENT_S

    def _start_of(self, key: str, seqno: SeqNo) -> bytes | None:
        found = self._objects.get(self._row(key, seqno), f"look at v{seqno} of {key!r}", 0, START_BYTES)
        return None if found is None else found.data

    def _recent_floor(self, key: str) -> SeqNo:
        """Return a floor of at most a few seconds ago. It only saves stale clients from an Indeterminate answer."""
        known = self._floors.get(key)
        if known is None or not self._is_recent(known):
            known = self._floor(key)
        return known.seqno

    def _winner(self, key: str, seqno: SeqNo) -> str:
        """Return the id of the PUT that made the row at `seqno`: a proxy may have sent ours twice.

        Raises Indeterminate if that cannot be read, because the row may then be ours.
        """
        try:
            found = self._attempt_at(key, seqno)
        except Determinate as error:
            raise Indeterminate(f"v{seqno} of {key!r} is there, and may be this one: {error.message}") from error
        if found is None:
            raise Indeterminate(f"v{seqno} of {key!r} was there, may have been this one, and is truncated by now")
        return found

    def _counts(self, key: str, seqno: SeqNo, data: bytes, version: str) -> bool:
        """Whether the new row counts. Raises Indeterminate if it may have got a seqno that truncation had freed.

        SUBTLE: the floor is read after the PUT. Truncation raises the floor before it frees a seqno, so a freed seqno
        is below the floor that is read here. The reverse does not hold: a row below the floor may have been valid when
        it was made, with others appending and truncating after it.
        """
        try:
            floor = self._floor(key)
        except Determinate as error:
            raise Indeterminate(f"v{seqno} of {key!r} was written, but not confirmed: {error.message}") from error
        if seqno >= floor.seqno:
            self._see(key, seqno, data, version)
            return True
        self._see(key, floor.seqno, None)
        raise Indeterminate(
            f"v{seqno} of {key!r} was written, but the log is truncated to v{floor.seqno} by now: whether it was "
            "in time is told by what the newer rows say"
        )

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        """Refused: an object store changes one object at a time."""
        raise InvalidUsage(
            f"cannot set {list(changes) or 'several keys'} at once: {self._objects.target.cloud.name} alone has no "
            "transactions over several shards. "
            "Use consensus= with PostgreSQL, or append to one shard at a time"
        )

    def head(self, key: str) -> Row | None:
        """Whatever is below the floor, the newest row is above it, and is never deleted."""
        while True:
            listed = [*deque(self._listed(key, self._last_seen(key)), READ_AHEAD)]
            if not listed:
                return None
            self._told[key] = frozenset(listed)
            if len(self._told) > KEPT_ROWS:
                self._told.popitem(last=False)
            if read := self._fetch(key, listed[-1:]):
                (found,) = read
                # In its place there may be a stray by now.
                if found.version == listed[-1].version or found.row.seqno >= self._floor(key).seqno:
                    self._see(key, *found.row, found.version)
                    return found.row

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        """A LIST, and then at the same time a GET for each row and one for the floor.

        Only the LIST, if all it has is a row that counted and that this process knows whole. No row follows, so it is
        the newest one, which the floor never passes, and its object's version says that it is the same. Rows that were
        certainly there a moment ago are read while the LIST is on its way; so is the floor, if `head` listed them.

        A row counts if its object was there, in the version that was read, before the floor was asked for, and
        it is not below that. For its place had been freed before another object could be made in it, and the floor had
        risen before that. A listing says the versions. Where it does not prove all rows, the floor is read once more.
        """
        check_limit(limit)
        while True:
            listed, ahead, floor = self._list(key, from_seqno, limit)
            if limit > len(listed) == 1 and listed[0].seqno == from_seqno and (known := self._known(key, listed[0])):
                self._see(key, *known.row, known.version)
                return [known.row]
            read, floor = self._fetch_above(key, listed, ahead, floor)
            if not _proves(floor, from_seqno, listed, read):
                floor = self._floor(key)  # after the reading: what was read above it is no stray
            end = max((found.seqno for found in listed), default=FIRST)
            if floor.seqno <= from_seqno or (len(listed) < limit and floor.seqno <= end):
                first = max(from_seqno, floor.seqno)
                return self._checked(key, [found for found in read if found.row.seqno >= first], first, listed)
            from_seqno = floor.seqno

    def _list(self, key: str, from_seqno: SeqNo, limit: int) -> tuple[list[_Listed], list[_Read], _Floor | None]:
        """List rows, and at the same time read those up to the newest that was seen, but that one if it is known.

        And the floor, if `head` listed rows before; it is returned if those are all that there are.
        """
        known, kept, told = self._floors.get(key), self._kept.get(key), self._told.pop(key, frozenset())
        first = max(FIRST, from_seqno, known.seqno if known else FIRST)
        end = min(self._last_seen(key) + 1, first + min(limit, READ_AHEAD))
        wanted = [SeqNo(seqno) for seqno in range(first, end) if kept is None or kept.row.seqno != seqno]
        if not wanted:
            return [*islice(self._listed(key, from_seqno), limit)], [], None
        with self._runtime.pool(min(READ_THREADS, len(wanted) + 2), "persist-log") as pool:
            listing = pool.submit(lambda: [*islice(self._listed(key, from_seqno), limit)])
            asked = pool.submit(self._floor, key) if told else None
            reading = pool.map(partial(self._read, key), wanted)
            listed, ahead = listing.result(), [found for found in reading if found is not None]
            return listed, ahead, asked.result() if asked and told.issuperset(listed) else None

    def _listed(self, key: str, from_seqno: SeqNo) -> Iterator[_Listed]:
        """Return the objects of the rows from `from_seqno` on, ascending."""
        prefix = self._rows(key)
        after = f"{prefix}{max(0, from_seqno - 1):020d}"
        names = self._objects.entries(prefix, f"list the rows of {key!r}", after, self._page)
        return (_Listed(SeqNo(int(found.name.removeprefix(prefix))), found.version) for found in names)

    def _names(self, key: str, from_seqno: SeqNo) -> Iterator[SeqNo]:
        return (found.seqno for found in self._listed(key, from_seqno))

    def _known(self, key: str, listed: _Listed) -> _Read | None:
        """Return a listed row that this process knows whole, if its object is still the same."""
        kept = self._kept.get(key)
        return kept if kept is not None and (kept.row.seqno, kept.version) == listed else None

    def _fetch_above(
        self, key: str, listed: Sequence[_Listed], ahead: Iterable[_Read], floor: _Floor | None
    ) -> tuple[list[_Read], _Floor]:
        """Read the rows of these objects as `_fetch` does and, at the same time, the floor, unless that is known."""
        if floor is not None:
            return self._fetch(key, listed, ahead), floor
        with self._runtime.pool(1, "persist-log") as pool:
            asked = pool.submit(self._floor, key)
            return self._fetch(key, listed, ahead), asked.result()

    def _fetch(self, key: str, listed: Sequence[_Listed], ahead: Iterable[_Read] = ()) -> list[_Read]:
        """Read the rows of these objects, but those that are known or were read `ahead`. What is gone is left out."""
        was_read = {found.row.seqno: found for found in ahead}
        read = {one: self._known(key, one) or was_read.get(one.seqno) for one in listed}
        missing = [one for one, known in read.items() if known is None]
        fetch = partial(self._read, key)
        if len(missing) < 2:
            read.update({one: fetch(one.seqno) for one in missing})
        else:
            with self._runtime.pool(min(READ_THREADS, len(missing)), "persist-log") as pool:
                found = pool.map(fetch, [one.seqno for one in missing])
                read.update(zip(missing, found, strict=True))
        return [found for found in read.values() if found is not None]

    def _read(self, key: str, seqno: SeqNo) -> _Read | None:
        found = self._objects.get(self._row(key, seqno), f"read v{seqno} of {key!r}")
        return None if found is None else _Read(Row(seqno, found.data), found.version)

    def _checked(self, key: str, read: list[_Read], first: SeqNo, listed: Sequence[_Listed]) -> list[Row]:
        rows, end = [found.row for found in read], listed[-1].seqno if listed else SeqNo(first - 1)
        if [row.seqno for row in rows] != [*range(first, end + 1)]:
            raise Missing(
                f"consensus {key!r} has a gap: of v{first} to v{end} only {len(rows)} rows are there. Restore "
                "them from a copy; nothing was changed",
                key=key,
            )
        if read:
            self._see(key, *rows[-1], read[-1].version)
        return rows

    def truncate(self, key: str, seqno: SeqNo) -> int:
        """Delete the rows below `seqno`. Returns how many. Raises InvalidUsage if the newest row is below `seqno`.

        It raises the floor first, so a process that dies in between leaves rows that do not count.
        """
        if not self._raise_floor(key, seqno):
            return 0
        below = [*takewhile(lambda found: found < seqno, self._names(key, SeqNo(0)))]
        failures = self._objects.delete([self._row(key, found) for found in below], self._page)
        if failures:
            raise next(iter(failures.values()))
        return len(below)

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        """Delete the rows above `seqno` if `newest` is the newest row. Returns how many, and 0 if it is not.

        It deletes from the newest down. So the log has no gap if the process dies, and the caller can do it again.
        """
        rows = [*self._names(key, max(FIRST, min(seqno, newest.seqno)))]
        if not rows or rows[-1] != newest.seqno or not (self._start_of(key, rows[-1]) or b"").startswith(newest.start):
            return 0
        if seqno and rows[0] != seqno:
            raise not_in_log(key, seqno)
        taken = [found for found in rows if found > seqno]
        self._seen.pop(key, None)
        for found in reversed(taken):
            if failures := self._objects.delete([self._row(key, found)]):
                raise next(iter(failures.values()))
        return len(taken)

    def _raise_floor(self, key: str, seqno: SeqNo) -> bool:
        """Raise the floor to `seqno`. Returns whether it is there now."""
        for _ in range(RACES):
            floor = self._floor(key)
            if seqno < floor.seqno:
                return False
            if floor.etag is not None and seqno == floor.seqno:
                return True  # finish the deletions that another process left undone below it
            if self._attempt_at(key, max(seqno, FIRST)) is None:
                newest = self.head(key)
                if newest is None or newest.seqno < seqno:
                    raise passes_newest(key, seqno, newest.seqno if newest else None)
                continue  # another truncation has deleted it since, and has raised the floor
            if seqno <= FIRST:
                return False
            self._floors.pop(key, None)
            doing = f"truncate {key!r} to v{seqno}"
            if self._objects.put(self._floor_of(key), b"%d" % seqno, doing, replaces=floor.etag):
                return True
        raise Determinate(f"{key!r} was truncated by others during each of {RACES} attempts; nothing was deleted")

    def list_keys(self) -> Iterator[str]:
        return map(unquote, self._objects.folders("log/", "list the keys", self._page))

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        """One listing of all rows, with its pages: a request for each 1,000 rows. No row is read.

        Of some keys: a page of it if that is all, and otherwise a listing for each key from the last row on that this
        process has seen. Whatever is below a floor, the newest row is above it. A page that was listed before others
        appended to a key, and truncated it, still ends in a row that was its newest.
        """
        doing = "list the rows of all keys"
        if keys is None:
            return _newest(self._objects.entries("log/", doing, page=self._page))
        page, is_all = self._objects.page("log/", doing, page=self._page)
        if is_all:
            newest = _newest(page)
            return {key: newest[key] for key in keys if key in newest}
        with self._runtime.pool(READ_THREADS, "persist-log") as pool:
            last = pool.map(lambda key: max(self._names(key, self._last_seen(key)), default=None), keys)
            return {key: seqno for key, seqno in zip(keys, last, strict=True) if seqno is not None}

    def now(self) -> int:
        """Return the store's time in ms since the epoch, to the second: of its last answer, and what passed since."""
        return self._clock.now(self._ask)

    def _ask(self) -> int:
        self._objects.find(MARKER, "read the store's clock")
        return self._clock.last

    def close(self) -> None:
        self._objects.close()


def _newest(entries: Iterable[Entry]) -> dict[str, SeqNo]:
    newest: dict[str, SeqNo] = {}
    for found in entries:
        key, _, seqno = found.name.removeprefix("log/").rpartition("/v")
        newest[key] = max(newest.get(key, FIRST), SeqNo(int(seqno)))
    return {unquote(key): seqno for key, seqno in newest.items()}


def _quoted(key: str) -> str:
    return quote(key, safe="")


def _proves(floor: _Floor, from_seqno: SeqNo, listed: Sequence[_Listed], read: Sequence[_Read]) -> bool:
    """Whether the rows from the floor on are there without a gap, each in the version that was listed."""
    first = max(from_seqno, floor.seqno)
    expected = [one for one in listed if one.seqno >= first]
    there = [_Listed(found.row.seqno, found.version) for found in read if found.row.seqno >= first]
    is_whole = [one.seqno for one in expected] == [*range(first, first + len(expected))]
    return is_whole and there == expected and all(one.version for one in expected)


def open_consensus(url: str, opening: Opening) -> ObjectsConsensus:
    """Open the consensus of a URL of this scheme."""
    return ObjectsConsensus(enter(url, opening), runtime=opening.runtime)


__all__ = ["ObjectsConsensus", "canonical", "open_blob", "open_consensus", "open_puts"]
