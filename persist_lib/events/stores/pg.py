r"""Event logs in PostgreSQL: `pg:URL[:NAME]`, as in `pg:postgresql\://user@host/db:ledger`.

Any URL of libpq, with `persist_schema=` for the schema of the tables, as for locations. A put is one statement and one
transaction, and looks at the epoch under a lock of the log's row. So a paused writer holds no lock on the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

import psycopg
from psycopg import sql

from persist_lib.errors import Corrupt, InvalidUsage, NotFound
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.stores.ordered import Engine, OrderedRecords, Span, pages, scan_pages
from persist_lib.events.stores.shared import FORMAT, as_bytes, fenced, sent_again
from persist_lib.location.postgres.consensus import Database, Values
from persist_lib.location.postgres.layout import Layout, check_layout, create_layout, reading
from persist_lib.location.postgres.sessions import BYTEA, INT8, TEXT, Record, Value, decode_int

DEFAULT = "events"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LIMIT = 256 << 20
"""PostgreSQL takes messages of at most 1 GiB."""
ROWS = 2000
"""The most records in a statement, which takes at most 65,535 parameters."""
STATEMENT_BYTES = 256 << 20

TABLES = """
CREATE TABLE {s}.event_log (
    number int4 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE,
    log bytea NOT NULL, epoch int8 NOT NULL, owner text NOT NULL
) WITH (fillfactor = 40);
CREATE TABLE {s}.event_record (
    number int4 NOT NULL, space text COLLATE "C" NOT NULL, id int8 NOT NULL, fragment int8 NOT NULL,
    head bytea NOT NULL, body bytea NOT NULL, PRIMARY KEY (number, space, id, fragment)
);
ALTER TABLE {s}.event_record ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE {s}.event_layout (version int4 NOT NULL);
INSERT INTO {s}.event_layout VALUES ({version});
"""
LAYOUT = Layout("event_layout", FORMAT, TABLES, 0x5052_4556_0000_0001)  # "PREV"
# Parameters: the lock timeout $1, the log's number $2, the epoch $3, and what follows.
FENCE = """{settings}, fence AS MATERIALIZED (
    SELECT log.number FROM {s}.event_log AS log, settings WHERE log.number = $2 AND log.epoch = $3
    FOR NO KEY UPDATE OF log
)"""
ANSWER = "SELECT (SELECT count(*) FROM fence), (SELECT count(*) FROM done), {clock}, $"
PUT = f"""WITH {FENCE}, done AS (
    INSERT INTO {{s}}.event_record AS old (number, space, id, fragment, head, body)
    SELECT fence.number, new.* FROM fence, (VALUES %s) AS new (space, id, fragment, head, body)
    ON CONFLICT (number, space, id, fragment) DO UPDATE SET head = excluded.head, body = excluded.body RETURNING 1
) {ANSWER}"""  # noqa: S608 - of constants
ROW = "(${}::text, ${}::int8, ${}::int8, ${}::bytea, ${}::bytea)"
DELETE = f"""WITH {FENCE}, done AS (
    DELETE FROM {{s}}.event_record AS old USING fence
    WHERE old.number = fence.number AND old.space = $4 AND old.id BETWEEN $5 AND $6 RETURNING 1
) {ANSWER}"""  # noqa: S608 - of constants
CLAIM = """WITH {settings}, done AS (
    UPDATE {s}.event_log AS log SET epoch = log.epoch + 1, owner = $3 FROM settings WHERE log.number = $2
    RETURNING log.epoch
) SELECT (SELECT epoch FROM done), {clock}, $4"""
NEWEST_EPOCH = reading("epoch", "FROM {s}.event_log WHERE number = $1", 1)
OF_SPACE = "FROM {s}.event_record WHERE number = $1 AND space = $2"
LAST = reading("id", f"{OF_SPACE} AND fragment = 0 ORDER BY id DESC LIMIT 1", 2)
IDS = reading("id", f"{OF_SPACE} AND fragment = 0", 2)
GET = reading("head, body", f"{OF_SPACE} AND id = $3 AND fragment = $4", 4)
OF_IDS = f"{OF_SPACE} AND id BETWEEN $3 AND $4"
SIZES = reading("id, sum(octet_length(body))::int8", f"{OF_IDS} GROUP BY id ORDER BY id LIMIT 4096", 4)
SCAN = reading("id, fragment, head, body", OF_IDS, 4)


class PgEngine(Engine):
    """The rows of a log. After a failure of the connection, a write is Indeterminate."""

    limit = LIMIT

    def __init__(self, url: str, log_name: str, opening: Opening) -> None:
        self._runtime = opening.runtime
        self._database = Database(url, opening.runtime, 2, what=f"log {log_name!r} of ")
        self._number, self.log, self._name = self._database.opened(partial(_find_log, log_name, opening))

    def _read(self, text: str, values: Values) -> list[Record]:
        return sent_again(self._runtime, lambda: self._database.read(text, [(self._number, INT8), *values]))

    def _fenced(self, epoch: int, text: str, values: Values, doing: str) -> None:
        """Done twice it has the same effect, as long as the epoch is this one. So it is sent again."""
        text, attempts = f"{text}{len(values) + 4}", 0

        def attempt() -> Record:
            nonlocal attempts
            attempts += 1
            return self._database.write(text, [(self._number, INT8), (epoch, INT8), *values], doing)

        answer = sent_again(self._runtime, attempt)
        if decode_int(answer[0]) != 1:
            raise fenced(self._name, epoch, self._newest_epoch(), is_certain=attempts == 1)

    def _newest_epoch(self) -> int:
        return max((decode_int(epoch) for (epoch,) in self._read(NEWEST_EPOCH, [])), default=0)

    def claim(self, owner: str) -> int:
        values: Values = [(self._number, INT8), (owner, TEXT)]
        # Sent again, it claims another epoch: that is no harm.
        (found, *_) = sent_again(self._runtime, lambda: self._database.write(CLAIM, values, "claim an epoch"))
        if (epoch := decode_int(found)) == 0:
            raise NotFound(f"the {self._name} was dropped; open the store again")
        return epoch

    def last(self) -> int:
        return max((decode_int(id_) for (id_,) in self._read(LAST, [(EVENTS, TEXT)])), default=0)

    def change(self, epoch: int, puts: Sequence[Put], gone: Span | None = None) -> None:
        """In this order: what is kept of the puts, if they take several statements, is a prefix of them."""
        if gone is not None:
            values: list[tuple[Value, int]] = [(gone.space, TEXT), (gone.start, INT8), (gone.end, INT8)]
            self._fenced(epoch, DELETE, values, f"remove {gone.space}")
        sizes = [(at, memoryview(put.body).nbytes) for at, put in enumerate(puts)]
        for start in range(0, len(puts), ROWS):
            for first, end in pages(sizes[start : start + ROWS], STATEMENT_BYTES):
                self._put(epoch, puts[first : end + 1])

    def _put(self, epoch: int, puts: Sequence[Put]) -> None:
        rows = ", ".join(ROW.format(*range(4 + 5 * n, 9 + 5 * n)) for n in range(len(puts)))
        values: list[tuple[Value, int]] = []
        for (space, id_, fragment), head, body in puts:
            values += [(space, TEXT), (id_, INT8), (fragment, INT8), (head, BYTEA), (as_bytes(body), BYTEA)]
        self._fenced(epoch, PUT % rows, values, f"write {len(puts)} records")

    def get(self, key: Key) -> Held | None:
        rows = self._read(GET, [(key.space, TEXT), (key.id, INT8), (key.fragment, INT8)])
        return Held(key, memoryview(rows[0][0] or b""), memoryview(rows[0][1] or b"")) if rows else None

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        def sizes(first: int, end: int) -> list[tuple[int, int]]:
            return [(decode_int(id_), decode_int(size)) for id_, size in self._between(SIZES, first, end)]

        return scan_pages(sizes, self._page, from_id, through)

    def _page(self, first: int, end: int) -> Iterator[Held]:
        found = [
            (decode_int(id_), decode_int(fragment), head, body)
            for id_, fragment, head, body in self._between(SCAN, first, end)
        ]
        for id_, fragment, head, body in sorted(found, key=lambda row: row[:2]):
            yield Held(Key(EVENTS, id_, fragment), memoryview(head or b""), memoryview(body or b""))

    def _between(self, text: str, from_id: int, through: int) -> list[Record]:
        return self._read(text, [(EVENTS, TEXT), (from_id, INT8), (through, INT8)])

    def ids(self, space: str) -> list[int]:
        return sorted(decode_int(id_) for (id_,) in self._read(IDS, [(space, TEXT)]))

    def close(self) -> None:
        self._database.close()


def _find_log(
    log_name: str, opening: Opening, connection: psycopg.Connection, schema: str, name: str
) -> tuple[int, bytes, str]:
    """The number and the name of the log, and what messages call it. Makes it, and the tables, if that is wanted."""
    place = sql.Identifier(schema)
    is_there = check_layout(connection, schema, name, LAYOUT)
    query = sql.SQL("SELECT number, log FROM {}.event_log WHERE name = %s").format(place)
    found = connection.execute(query, (log_name,), prepare=False).fetchone() if is_there else None
    if found is None and not opening.create:
        raise NotFound(f"there is no {name} (schema {schema}). Check the URL and the name; a writer makes one")
    if found is None:
        with connection.transaction():
            create_layout(connection, schema, name, LAYOUT)
            insert = sql.SQL(
                "INSERT INTO {}.event_log (name, log, epoch, owner) VALUES (%s, %s, 0, '') ON CONFLICT DO NOTHING"
            ).format(place)
            log = opening.runtime.entropy().to_bytes(8, "big")
            connection.execute(insert, (log_name, log), prepare=False)
        found = connection.execute(query, (log_name,), prepare=False).fetchone()
    if found is None or len(found[1]) != 8:
        raise Corrupt(f"{name} is damaged: what its row in event_log says is {found!r}", key=name)
    return int(found[0]), bytes(found[1]), name


def open_pg(options: Sequence[str], opening: Opening) -> OrderedRecords:
    """Open a log: `pg:URL[:NAME]`."""
    if not 1 <= len(options) <= 2 or not options[0].startswith(("postgresql://", "postgres://")):
        raise InvalidUsage(
            r"a store of events in PostgreSQL is pg:URL[:NAME], with \: for each colon in the URL, as in "
            r"pg:postgresql\://user@host/database:ledger"
        )
    name = options[1] if len(options) == 2 else DEFAULT
    if not NAME.fullmatch(name):
        raise InvalidUsage(f"a log's name must be 1 to 64 letters, digits, '.', '-' and '_': got {name!r}", name=name)
    return OrderedRecords(PgEngine(options[0], name, opening))


KIND = Kind(open_pg)
