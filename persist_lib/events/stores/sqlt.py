"""Event logs in an SQLite database: `sqlt:PATH`. One transaction makes all events durable that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from persist_lib.errors import Corrupt
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.stores.ordered import Engine, OrderedRecords, Span, scan_pages
from persist_lib.events.stores.shared import EndMark, fenced, make_place, parse_path
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.location.sqlite.connections import Database, Session
from persist_lib.runtime.ambient import Runtime

DEFAULT = "events.sqlite"
LIMIT = 900_000_000
"""SQLite keeps at most 1,000,000,000 bytes in a row."""

# Fragment 0 of each event is a row of its own table, so that the common event is one append to one tree.
SCHEMA = """
CREATE TABLE log (name BLOB NOT NULL, epoch INTEGER NOT NULL, owner TEXT NOT NULL);
INSERT INTO log VALUES (randomblob(8), 0, '');
CREATE TABLE event (id INTEGER PRIMARY KEY, head BLOB NOT NULL, body BLOB NOT NULL);
CREATE TABLE other (
    space TEXT NOT NULL, id INTEGER NOT NULL, fragment INTEGER NOT NULL, head BLOB NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (space, id, fragment)
);
"""
LAYOUT = sqlite_file.Layout(0x50524556, 1, SCHEMA)  # "PREV"

CLAIM = "UPDATE log SET epoch = epoch + 1, owner = ? RETURNING epoch"
PUT_EVENT = "INSERT OR REPLACE INTO event (id, head, body) VALUES (?, ?, ?)"
PUT_OTHER = "INSERT OR REPLACE INTO other (space, id, fragment, head, body) VALUES (?, ?, ?, ?, ?)"
DELETE_EVENTS = "DELETE FROM event WHERE id BETWEEN ? AND ?"
DELETE_OTHERS = "DELETE FROM other WHERE space = ? AND id BETWEEN ? AND ?"
GET_EVENT = "SELECT head, body FROM event WHERE id = ?"
GET_OTHER = "SELECT head, body FROM other WHERE space = ? AND id = ? AND fragment = ?"
SIZES = "SELECT id, length(body) FROM event WHERE id BETWEEN ? AND ? ORDER BY id LIMIT 8192"
SCAN_EVENTS = "SELECT id, head, body FROM event WHERE id BETWEEN ? AND ? ORDER BY id"
SCAN_OTHERS = f"SELECT fragment, head, body FROM other WHERE space = '{EVENTS}' AND id = ? ORDER BY fragment"  # noqa: S608
HAS_OTHERS = f"SELECT 1 FROM other WHERE space = '{EVENTS}' AND id BETWEEN ? AND ? LIMIT 1"  # noqa: S608
IDS = "SELECT id FROM other WHERE space = ? AND fragment = 0 ORDER BY id"


class SqliteEngine(Engine):
    """A database in a file."""

    limit = LIMIT

    def __init__(self, path: Path, runtime: Runtime) -> None:
        self._path, self._database = path, Database(path, runtime, f"the event log {path}", LAYOUT)
        self._read = self._database.read
        self.log = self._bytes(self._read("SELECT name FROM log", ())[0][0], "the log's name")

    def claim(self, owner: str) -> int:
        def claim(session: Session) -> int:
            return self._int(session.cursor.execute(CLAIM, (owner,)).fetchall()[0][0])

        return self._database.transact(claim) or 0

    def change(self, epoch: int, puts: Sequence[Put], gone: Span | None = None) -> None:
        def change(session: Session) -> bool:
            (newest,) = session.cursor.execute("SELECT epoch FROM log").fetchall()[0]
            if newest != epoch:
                raise fenced(str(self._path), epoch, self._int(newest))
            if gone is not None:
                session.cursor.execute(DELETE_OTHERS, gone)
                if gone.space == EVENTS:
                    session.cursor.execute(DELETE_EVENTS, gone[1:])
            for (space, id_, fragment), head, body in puts:
                if space == EVENTS and fragment == 0:
                    session.cursor.execute(PUT_EVENT, (id_, head, body))
                else:
                    session.cursor.execute(PUT_OTHER, (space, id_, fragment, head, body))
            return True

        self._database.transact(change)

    def last(self) -> int:
        newest = self._read("SELECT max(id) FROM event", ())[0][0]
        return 0 if newest is None else self._int(newest)

    def verify(self) -> None:
        for (found,) in self._read("PRAGMA integrity_check(1)", ()):
            if found != "ok":
                raise self._damaged(str(found))

    def _damaged(self, why: str) -> Corrupt:
        return Corrupt(f"{self._path} is damaged: {why}. Restore it from a copy", key=str(self._path))

    def _int(self, found: object) -> int:
        if type(found) is not int:  # SQLite keeps any type in any column
            raise self._damaged(f"it has {found!r} for a number")
        return found

    def _bytes(self, found: object, what: str) -> bytes:
        if not isinstance(found, bytes):
            raise self._damaged(f"{what} is no bytes")
        return found

    def get(self, key: Key) -> Held | None:
        is_event = key.space == EVENTS and key.fragment == 0
        rows = self._read(GET_EVENT, (key.id,)) if is_event else self._read(GET_OTHER, key)
        return self._held(key, *rows[0]) if rows else None

    def _held(self, key: Key, head: object, body: object) -> Held:
        what = f"record {key}"
        return Held(key, memoryview(self._bytes(head, what)), memoryview(self._bytes(body, what)))

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        def sizes(first: int, end: int) -> list[tuple[int, int]]:
            return [(self._int(id_), self._int(size)) for id_, size in self._read(SIZES, (first, end))]

        return scan_pages(sizes, self._page, from_id, through)

    def _page(self, first: int, end: int) -> Iterator[Held]:
        has_others = bool(self._read(HAS_OTHERS, (first, end)))
        for id_, head, body in self._read(SCAN_EVENTS, (first, end)):
            yield self._held(Key(EVENTS, self._int(id_), 0), head, body)
            for fragment, part, rest in self._read(SCAN_OTHERS, (self._int(id_),)) if has_others else ():
                yield self._held(Key(EVENTS, self._int(id_), self._int(fragment)), part, rest)

    def ids(self, space: str) -> list[int]:
        return [self._int(id_) for (id_,) in self._read(IDS, (space,))]

    def let_go(self) -> None:
        """Close connections without writing SQLite's log back, which would remove what is left of it."""
        self._database.connections.let_go()

    def close(self) -> None:
        self._database.connections.close()


def open_sqlite(options: Sequence[str], opening: Opening) -> OrderedRecords:
    """Open the database at a path: `sqlt:PATH`."""
    path = parse_path(options, DEFAULT, "a store of events in SQLite is sqlt:PATH")
    mark = EndMark(path.with_name(f"{path.name}-end"))
    if not path.exists():
        make_place(path, path.parent, opening)
        mark.check_new()
        sqlite_file.create(path, opening.runtime.entropy, LAYOUT)
    sqlite_file.check_format(path, LAYOUT)
    return OrderedRecords(SqliteEngine(path, opening.runtime), mark)


KIND = Kind(open_sqlite)
