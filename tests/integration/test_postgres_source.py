"""A table of PostgreSQL as a source, on a real server: what is made of it, what is refused, and what is left behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Diverged, Gone, InvalidUsage, NotFound, SchemaChanged
from persist_lib.sources import Decoding, Meaning, Postgres, Sources
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.conformance import check_diverged, check_gone, check_many, check_reader, read_all
from persist_lib.sources.postgres import reader as reading
from persist_lib.sources.postgres import snapshot
from persist_lib.sources.postgres.reader import TableReader
from persist_lib.sources.postgres.server import parse_lsn
from persist_lib.sources.postgres.stream import Wire
from persist_lib.sources.protocol import START, Mark
from tests import servers
from tests.sourced import Sourced

NAMES = itertools.count()
DROP = """
SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active;
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT temporary AND NOT active;
"""


class Shop(Sourced):
    """A schema of its own on the server, and a world with sources of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.server = servers.logical_server()
        self.schema = f"shop{next(NAMES)}"
        self.sql = psycopg.connect(self.server.url, autocommit=True)
        self.run(f"CREATE SCHEMA {self.schema}; SET search_path = {self.schema}")

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.sql.execute(statement.encode())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.sql.execute(query.encode()).fetchall()

    def declared(self, table: str = "t", **options: Any) -> Postgres:
        return Postgres(url=self.server.url, table=f"{self.schema}.{table}", **options)

    def create(self, table: str = "t", **options: Any) -> Any:
        return self.sources.create("s", self.declared(table), **options)

    def follow(self, table: str = "t", **options: Any) -> Any:
        """A source of a table, which has its rows."""
        self.create(table, **options)
        return self.catch_up()

    def reader(self, table: str = "t") -> TableReader:
        """A reader of a source that was created, as an instance has it."""
        record = self.sources.find("s")
        reader = record.reader
        assert isinstance(reader, Postgres)
        return TableReader(reader, record.id, Choices(self.world.client(), record.choices))

    def slot(self) -> str:
        return f"persist_{self.sources.find('s').id}"

    def confirmed(self) -> int:
        ((found,),) = self.rows(
            f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{self.slot()}'"
        )
        return parse_lsn(found)

    def slots(self) -> list[str]:
        return sorted(name for (name,) in self.rows("SELECT slot_name FROM pg_replication_slots"))

    def publications(self) -> list[str]:
        return sorted(name for (name,) in self.rows("SELECT pubname FROM pg_publication"))

    def close(self) -> None:
        super().close()
        with suppress(psycopg.Error):
            for _ in range(2):
                self.run(*(one for one in DROP.split(";") if one.strip()))
        for name in self.publications():
            self.run(f'DROP PUBLICATION "{name}"')
        self.run(f"DROP SCHEMA {self.schema} CASCADE")
        self.sql.close()


def wait_for(is_so: Callable[[], bool]) -> None:
    """The server notices a moment later that a connection is closed."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def words(shop: Shop) -> None:
    shop.run("CREATE TABLE t (id int PRIMARY KEY, word text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")


def followed(shop: Shop) -> None:
    """A source of two rows, which has them."""
    words(shop)
    shop.follow()


def test_a_table_becomes_a_collection_that_follows_it(shop: Shop) -> None:
    words(shop)
    found = shop.create()
    assert str(found.schema) == "(id: int32 not null) -> (word: string), times=ms"
    first = shop.catch_up()
    shop.run(
        "BEGIN", "INSERT INTO t VALUES (3, 'c')", "UPDATE t SET word = 'B' WHERE id = 2", "COMMIT",
        "BEGIN", "INSERT INTO t VALUES (9, 'never')", "ROLLBACK",
        "UPDATE t SET id = 10 WHERE id = 1", "DELETE FROM t WHERE id = 3",
    )  # fmt: skip
    second = shop.catch_up()
    shop.run("TRUNCATE t", "INSERT INTO t VALUES (4, 'd')")
    shop.catch_up()
    assert shop.words() == {4: "d"}
    assert shop.words(second.time - 1) == {2: "B", 10: "a"}
    assert shop.words(first.time - 1) == {1: "a", 2: "b"}
    found = shop.sources.show("s")
    assert found.durable == found.bound
    assert shop.catch_up().lag == {}


def test_conformance(shop: Shop) -> None:
    """The snapshot, then transactions of several changes; large rows; and a table that nothing is written to."""
    words(shop)
    shop.create()
    reader = shop.reader()
    marks = reader.high_watermarks({}, 1)
    for n in range(20):
        shop.run("BEGIN", f"INSERT INTO t VALUES ({100 + n}, repeat('x', {n * 1000}))")
        shop.run(f"UPDATE t SET word = '{n}' WHERE id = 1", "COMMIT", "CREATE TABLE other ()", "DROP TABLE other")
    (partition,) = marks
    bound = dict(marks)
    while new := reader.high_watermarks(bound, 1 << 20):
        bound |= new
    values = read_all(reader, partition, START, bound[partition]).column("value").to_pylist()
    assert len(values) == 2 + 40
    reader.close()
    check_reader(shop.reader, {partition: values})


def test_a_table_without_rows_has_a_snapshot_too(shop: Shop) -> None:
    shop.run("CREATE TABLE t (id int PRIMARY KEY, word text)")
    shop.follow()
    assert shop.contents() == []
    shop.run("INSERT INTO t VALUES (1, '')")
    shop.catch_up()
    assert shop.words() == {1: ""}


def test_values_of_all_kinds_are_the_same_in_the_snapshot_and_in_changes(shop: Shop) -> None:
    shop.run(
        """CREATE TABLE t (id bigint PRIMARY KEY, b bool, i2 int2, i4 int4, f4 float4, f8 float8, n numeric(12, 3),
           free numeric, d date, ts timestamp, tz timestamptz, raw bytea, a int[], j json, jb jsonb, u uuid, c char(5),
           v varchar(9), e interval, ti time, twice bigint GENERATED ALWAYS AS (id * 2) STORED)""",
        """INSERT INTO t VALUES (1, true, -5, 7, 'NaN', '-Infinity', -0.125, 'NaN', '2024-02-29',
           '2024-01-01 01:02:03.000004', '2024-01-01 01:02:03+05', '\\x00ff5c',
            '{1,NULL,3}', '{"a": [1, "x"]}', '{"b":2}',
           '00000000-0000-0000-0000-000000000001', 'ab', 'ü"\\,''', '1 day 2 hours', '23:59:59.5'),
           (2, false, null, null, 0.1, 1e-300, null, 1e30, null, null, null, '', null, null, null, null, null,
            E'\t\n\r',           null, null)""",
    )
    shop.follow()
    first = shop.contents()
    assert "twice" not in first[0]
    assert shop.contents("s/errors") == []
    shop.run(
        "SET bytea_output = 'escape'; SET datestyle = 'SQL'; SET timezone = 'Asia/Tokyo'; SET extra_float_digits = -10"
    )
    shop.run("CREATE TEMP TABLE kept AS SELECT * FROM t", "DELETE FROM t")
    names = "id, b, i2, i4, f4, f8, n, free, d, ts, tz, raw, a, j, jb, u, c, v, e, ti"
    shop.catch_up()
    assert shop.contents() == []
    shop.run(f"INSERT INTO t ({names}) SELECT {names} FROM kept")
    shop.catch_up()
    assert repr(shop.contents()) == repr(first)
    one, two = first
    assert (str(one["n"]), one["free"], one["a"], one["c"], one["raw"]) == (
        "-0.125",
        "NaN",
        "{1,NULL,3}",
        "ab   ",
        b"\0\xff\\",
    )
    assert (one["tz"].isoformat(), two["v"], two["free"]) == ("2023-12-31T20:02:03+00:00", "\t\n\r", "1" + "0" * 30)


def test_what_no_type_holds_is_an_error_and_a_column_of_text_holds_it(shop: Shop) -> None:
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz)", "INSERT INTO t VALUES (1, 'infinity'), (2, '2024-01-01')"
    )
    shop.follow()
    assert [one["id"] for one in shop.contents()] == [2]
    (error,) = shop.contents("s/errors")
    assert "'infinity' is no timestamp[us, UTC]; a column declared as string would hold it" in error["reason"]
    shop.sources.drop("s")
    schema = persist.Schema(key={"key": "int64 not null"}, value={"at": "string", "lsn": "uint64"})
    shop.create(
        schema=schema, decoding=Decoding(decoder="pgoutput", columns={"key": "id"}),
        meaning=Meaning(envelope="changes", include={"lsn": "address"}),
    )  # fmt: skip
    shop.catch_up()
    found = shop.contents()
    assert [(one["key"], one["at"]) for one in found] == [(1, "infinity"), (2, "2024-01-01 00:00:00+00")]
    assert found[0]["lsn"] == found[1]["lsn"] > 0


def test_json_is_a_document_where_it_is_declared(shop: Shop) -> None:
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, j json, jb jsonb, word text)",
        """INSERT INTO t VALUES (1, '{"b": 1, "a": [1.50, 2e0]}', '{"b": 1, "a": [1.50, 2e0]}', '"w"'),
           (2, 'null', 'null', null), (3, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}', null)""",
    )
    shop.follow(schema=persist.Schema({"id": "int64 not null"}, {"j": "json", "jb": "json", "word": "json"}))
    shop.run("UPDATE t SET word = '[]' WHERE id = 1", "INSERT INTO t VALUES (4, '[1]', '[1]', 'no JSON')")
    shop.catch_up()
    assert [tuple(row.values())[:4] for row in shop.contents()] == [
        (1, {"a": [1.5, 2.0], "b": 1}, {"a": [1.5, 2], "b": 1}, []),
        (2, None, None, None),
    ], "jsonb has numbers without an exponent"
    reasons = sorted(row["reason"] for row in shop.contents("s/errors"))
    assert [reason.split(":")[0] for reason in reasons] == ["column j", "column word"]


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_large_values_that_did_not_change_are_kept(shop: Shop, identity: str) -> None:
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, word text, big text)", "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        f"ALTER TABLE t REPLICA IDENTITY {identity}", "INSERT INTO t VALUES (1, 'a', repeat('x', 100000))",
    )  # fmt: skip
    shop.follow()
    shop.run("UPDATE t SET word = 'b'", "UPDATE t SET word = 'c', id = 2", "UPDATE t SET word = 'd'")
    shop.catch_up()
    shop.run("UPDATE t SET id = 3")
    shop.catch_up()
    (row,) = shop.contents()
    assert (row["id"], row["word"], len(row["big"])) == (3, "d", 100000)


def test_a_transaction_that_began_before_the_snapshot_and_ends_after_it_is_in_it_once(shop: Shop) -> None:
    words(shop)
    shop.create()
    with psycopg.connect(shop.server.url) as other:
        other.execute(f"INSERT INTO {shop.schema}.t VALUES (5, 'long')".encode())
        writes = iter(range(10))
        copied = snapshot.copied

        def committed(*args: Any) -> Iterator[bytes]:
            next(writes)
            other.commit()  # the slot waits for it
            parts = copied(*args)
            yield next(parts)
            shop.run("INSERT INTO t VALUES (6, 'while it is copied')")
            yield from parts

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(snapshot, "copied", committed)
            shop.catch_up()
    shop.catch_up()
    assert shop.words() == {1: "a", 2: "b", 5: "long", 6: "while it is copied"}
    assert len(shop.contents()) == 4


@pytest.mark.parametrize("statement", ["TRUNCATE t", "ALTER TABLE t ALTER word TYPE text USING upper(word)"])
def test_a_table_that_is_emptied_or_rewritten_as_its_snapshot_begins_is_copied_anew(
    shop: Shop, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier snapshot does not see its rows, once the table has another file."""
    words(shop)
    shop.create()
    ask, statements = Wire.ask, [statement, "INSERT INTO t VALUES (3, 'c')"]

    def between(self: Wire, command: str) -> Any:
        if command.startswith("LOCK TABLE") and statements:
            shop.run(*statements)
            statements.clear()
        return ask(self, command)

    monkeypatch.setattr(Wire, "ask", between)
    reader = shop.reader()
    with pytest.raises(Determinate, match="copied again"):
        reader.high_watermarks({}, 1)
    reader.close()
    shop.catch_up()
    assert shop.words() == ({3: "c"} if "TRUNCATE" in statement else {1: "A", 2: "B", 3: "c"})


def test_two_that_copy_at_once_agree_on_one_snapshot(shop: Shop) -> None:
    """The other one is first, with another snapshot, between this one's copy and its commit."""
    words(shop)
    shop.create()
    one, other = shop.reader(), shop.reader()
    commit = Choices.commit

    def rivalled(choices: Choices, chosen: Any, number: int) -> None:
        parts = list(chosen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Choices, "commit", commit)
            shop.run("INSERT INTO t VALUES (3, 'c')")
            marks.append(other.high_watermarks({}, 1))
        commit(choices, parts, number)

    marks: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choices, "commit", rivalled)
        mine = one.high_watermarks({}, 1)
    assert marks == [mine]
    ((partition, mark),) = mine.items()
    found = [read_all(reader, partition, START, mark) for reader in (one, other)]
    assert found[0].equals(found[1])
    assert found[0].num_rows == 3
    for reader in (one, other):
        reader.close()


def test_one_that_dies_while_it_copies_leaves_nothing_and_the_next_one_copies_anew(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    words(shop)
    shop.create()
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1)
    copied, deaths = snapshot.copied, iter(range(3))

    def cut(*args: Any) -> Iterator[bytes]:
        end = next(deaths, None)
        for n, part in enumerate(copied(*args)):
            if n == end:
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr(snapshot, "copied", cut)
    for n in range(3):
        shop.run(f"INSERT INTO t VALUES ({10 + n}, 'n')")
        with pytest.raises(KeyboardInterrupt):
            shop.catch_up()
    shop.catch_up()
    assert shop.words() == {1: "a", 2: "b", 10: "n", 11: "n", 12: "n"}
    wait_for(lambda: shop.slots() == [shop.slot()])


@pytest.mark.parametrize("is_at_snapshot", [True, False])
def test_an_instance_that_was_overtaken_is_not_told_that_what_it_wants_is_gone_and_starts_again(
    shop: Shop, is_at_snapshot: bool
) -> None:
    """Others make durable what it is about to read: the snapshot, which is forgotten then, or what the log has."""
    words(shop)
    shop.create(retention=0)
    new = iter([] if is_at_snapshot else range(10, 14))
    if not is_at_snapshot:
        shop.catch_up()
        shop.run(f"INSERT INTO t VALUES ({next(new)}, 'c')")
    late = Sources(shop.world.client().controller()).open("s")
    read = TableReader.read
    with pytest.MonkeyPatch.context() as patch:

        def overtaken(self: TableReader, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
            patch.setattr(TableReader, "read", read)
            for _ in range(3):
                shop.run(*(f"INSERT INTO t VALUES ({id_}, 'c')" for id_ in itertools.islice(new, 1)))
                shop.world.clock.advance(10)
                shop.catch_up()
            if not is_at_snapshot:
                assert shop.confirmed() > start.address
                self.close()
            return read(self, partition, start, end)

        patch.setattr(TableReader, "read", overtaken)
        with pytest.raises(
            Determinate, match="others" if is_at_snapshot else "others were faster|instances were faster"
        ):
            late.step()
    late.step()
    late.close()
    assert shop.words() == {1: "a", 2: "b"} | ({} if is_at_snapshot else dict.fromkeys(range(10, 14), "c"))


def test_the_slot_moves_with_the_bindings_since_and_never_beyond_what_is_durable(shop: Shop) -> None:
    words(shop)
    shop.follow(retention=0)
    start = shop.confirmed()
    other = shop.sources.client
    record = shop.sources.find("s")
    since = other.inspect(record.bindings).state.since
    other.set_hold(record.bindings, "another", since, opaque=b"x", expected=None)
    for n in range(3):
        shop.run(f"INSERT INTO t VALUES ({10 + n}, 'x')")
        shop.world.clock.advance(10)
        shop.catch_up()
        assert shop.confirmed() == start, "another hold keeps the bindings"
    other.release_hold(record.bindings, "another")
    for n in range(3):
        shop.run(f"INSERT INTO t VALUES ({20 + n}, 'x')")
        shop.world.clock.advance(10)
        shop.catch_up()
        assert start <= shop.confirmed() <= shop.sources.show("s").durable[f"{shop.schema}.t"].address
    assert shop.confirmed() > start


def test_an_idle_table_lets_the_server_go_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    words(shop)
    shop.follow(retention=0)
    monkeypatch.setattr(reading, "IDLE_BYTES", 1 << 16)
    shop.run("CREATE TABLE other (id int)", "INSERT INTO other SELECT generate_series(1, 20000)")
    before = shop.confirmed()
    for _ in range(3):
        shop.world.clock.advance(10)
        last = shop.catch_up()
    assert shop.confirmed() >= before + (1 << 16)
    assert last.lag == {}
    assert last.messages == 0


def test_what_the_slot_holds_back_is_said_and_warned_of(shop: Shop) -> None:
    words(shop)
    shop.sources.create("s", shop.declared(most_retained=1000))
    record = shop.sources.find("s")
    shop.sources.client.set_hold(record.bindings, "another", 0, opaque=b"x", expected=None)
    shop.run("INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(10, 1000) n")
    last = shop.catch_up()
    assert last.held_back > 1000
    assert "holds back" in last.warning
    (instance,) = shop.contents("s/health")
    assert instance["held_back_bytes"] == last.held_back


def test_lag_is_in_bytes_of_the_log(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    followed(shop)
    instance = shop.sources.open("s")
    instance.step()
    shop.run("INSERT INTO t SELECT n, 'x' FROM generate_series(10, 1000) n", "INSERT INTO t VALUES (2000, 'x')")
    monkeypatch.setattr("persist_lib.sources.running.Ingestion.step_bytes", 1000)
    shop.world.clock.advance(1)
    behind = instance.step()
    assert behind.messages == 991
    (lag,) = behind.lag.values()
    assert 0 < lag < 10_000_000

    def is_level() -> bool:
        shop.world.clock.advance(1)
        return not instance.step().lag

    assert any(is_level() for _ in range(5)), "the server's own records may come in between, such as a snapshot's"
    instance.close()


def test_many_rows_come_in_bounded_tables(shop: Shop) -> None:
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, word text)",
        "INSERT INTO t SELECT n, repeat('x', 300) FROM generate_series(1, 50000) n",
    )
    shop.create()
    partition = f"{shop.schema}.t"
    assert check_many(shop.reader, partition, 50_000) < 16 << 20
    shop.run("UPDATE t SET word = repeat('y', 300)")
    bound: dict[str, Mark] = {}
    tables: list[pa.Table] = []
    with closing(shop.reader()) as reader:
        for _ in range(200):  # the server sends what it has decoded, when it has
            with suppress(persist.Determinate):  # it may take long, beside other load
                bound |= reader.high_watermarks(bound, 64 << 20)
                tables = list(reader.read(partition, START, bound[partition]))
            if sum(table.num_rows for table in tables) == 100_000:
                break
            time.sleep(0.1)
        assert sum(table.num_rows for table in tables) == 100_000
        assert max(table.nbytes for table in tables) < 16 << 20


def test_a_lost_slot_is_gone_and_reset_begins_anew(shop: Shop) -> None:
    followed(shop)
    shop.run(f"SELECT pg_drop_replication_slot('{shop.slot()}')", "INSERT INTO t VALUES (3, 'c')")
    with pytest.raises(Gone, match=r"slot .* is not there.*persist source reset"):
        shop.catch_up()
    (state,) = {one["state"] for one in shop.contents("s/health")} - {"stopped"}
    assert state == "failed"
    bound = shop.sources.show("s").bound
    ((partition, mark),) = bound.items()
    reader = shop.reader()
    check_gone(reader, partition, mark, Mark(mark.address + 1000, mark.check))
    reader.close()
    shop.sources.reset("s")
    shop.catch_up()
    assert shop.words() == {1: "a", 2: "b", 3: "c"}


def test_a_slot_that_the_server_gave_up_is_gone(shop: Shop) -> None:
    with servers.PostgresServer({**servers.LOGICAL, "max_slot_wal_keep_size": "1MB"}) as small:
        with psycopg.connect(small.url, autocommit=True) as sql:
            sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
            shop.sources.create("s", Postgres(url=small.url, table="public.t"))
            shop.catch_up()
            for n in range(6):
                sql.execute("INSERT INTO t VALUES (%s)", [n])
                sql.execute("SELECT pg_switch_wal()")
            sql.execute("CHECKPOINT")
        with pytest.raises(Gone, match=r"given up by the server.*max_slot_wal_keep_size"):
            shop.catch_up()
        assert shop.sources.drop("s") == []


def test_a_slot_that_was_moved_is_gone(shop: Shop) -> None:
    followed(shop)
    shop.run("INSERT INTO t VALUES (3, 'c')")
    shop.run(f"SELECT pg_replication_slot_advance('{shop.slot()}', pg_current_wal_flush_lsn())")
    with pytest.raises(Gone, match="it was moved"):
        shop.catch_up()
    assert shop.words() == {1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DROP TABLE t", "dropped or renamed"),
        ("ALTER TABLE t RENAME TO u", "dropped or renamed"),
        ("DROP PUBLICATION {slot}", "publication"),
        ("ALTER PUBLICATION {slot} SET TABLE ONLY t WHERE (id > 1)", "publication"),
    ],
)
def test_a_table_or_a_publication_that_is_taken_away_is_gone(shop: Shop, statement: str, said: str) -> None:
    followed(shop)
    shop.run(statement.format(slot=shop.slot()))
    with pytest.raises(Gone, match=said):
        shop.catch_up()


def test_another_table_of_the_name_or_another_server_is_diverged(shop: Shop) -> None:
    followed(shop)
    ((partition, mark),) = shop.sources.show("s").bound.items()
    for check in ("1 1 1", mark.check.replace(" ", "9 ", 1), mark.check.replace(" 1 ", " 2 ")):
        reader = shop.reader()
        check_diverged(reader, partition, Mark(mark.address, check), Mark(mark.address + 1, check))
        reader.close()
    reader = shop.reader()
    check_diverged(reader, partition, mark, Mark(mark.address + (1 << 40), mark.check))
    reader.close()
    shop.run("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, word text)")
    shop.run(f"ALTER PUBLICATION {shop.slot()} ADD TABLE ONLY t")
    with pytest.raises(Diverged, match="another table of this name"):
        shop.catch_up()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE t DROP COLUMN word", "it has no column 'word'"),
        ("ALTER TABLE t RENAME COLUMN word TO text", "it has no column 'word'"),
        ("ALTER TABLE t ALTER count TYPE numeric(10, 2)", r"'count' is decimal128\(10, 2\), and int32 is declared"),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (word)", "told apart by"),
    ],
)
def test_a_change_of_the_columns_stops_the_source_before_the_first_row_of_it(
    shop: Shop, statement: str, said: str
) -> None:
    words(shop)
    shop.run("ALTER TABLE t ADD COLUMN count int")
    shop.follow()
    shop.run("INSERT INTO t VALUES (3, 'c')", statement, "DELETE FROM t WHERE id = 1")
    shop.run("INSERT INTO t (id) VALUES (4)" if "ADD" not in statement else "INSERT INTO t VALUES (4, 'd')")
    with pytest.raises(SchemaChanged, match=said):
        shop.catch_up()
    (why,) = (one["why"] for one in shop.contents("s/health") if one["state"] == "failed")
    assert "Declare a source of the table under another name" in why
    assert shop.words() == {1: "a", 2: "b"}


def test_columns_that_are_added_are_left_out(shop: Shop) -> None:
    followed(shop)
    shop.run("ALTER TABLE t ADD COLUMN more int DEFAULT 7", "INSERT INTO t VALUES (3, 'c', 1)")
    shop.catch_up()
    assert shop.words() == {1: "a", 2: "b", 3: "c"}


@pytest.mark.parametrize(
    ("made", "said", "mended"),
    [
        ("CREATE TABLE t (id int)", "no primary key", 'ALTER TABLE "{schema}"."t" REPLICA IDENTITY FULL;'),
        ("CREATE TABLE t (id int PRIMARY KEY);ALTER TABLE t REPLICA IDENTITY NOTHING", "not apart", "IDENTITY DEFAULT"),
        ("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE)", "deferrable", "REPLICA IDENTITY FULL"),
        ("CREATE UNLOGGED TABLE t (id int PRIMARY KEY)", "not in the server's log", "SET LOGGED"),
        ("CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)", "partitioned", ""),
        ("CREATE VIEW t AS SELECT 1 AS id", "no plain table", ""),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_followed_is_refused_before_anything_is_made(
    shop: Shop, made: str, said: str, mended: str
) -> None:
    shop.run(*made.split(";"))
    with pytest.raises(InvalidUsage, match=said) as raised:
        shop.create()
    assert mended.format(schema=shop.schema) in str(raised.value)
    assert (shop.slots(), shop.publications(), shop.sources.list()) == ([], [], [])
    with pytest.raises(NotFound, match="no table"):
        shop.create("nothing")


def test_what_the_role_lacks_is_refused_with_what_to_run(shop: Shop) -> None:
    words(shop)
    user = f"reader_{shop.schema}"
    shop.run(f"CREATE ROLE {user} LOGIN", f"GRANT USAGE ON SCHEMA {shop.schema} TO {user}")
    url = shop.server.url.replace("postgres@", f"{user}@")
    declared = Postgres(url=url, table=f"{shop.schema}.t")
    try:
        for said in (
            "ALTER ROLE {user} REPLICATION",
            'GRANT SELECT ON "{schema}"."t" TO {user}',
            "CREATE PUBLICATION persist FOR TABLE",
        ):
            with pytest.raises(InvalidUsage) as raised:
                shop.sources.create("s", declared)
            run = raised.value.run
            assert said.format(user=user, schema=shop.schema) in run
            assert (shop.slots(), shop.publications(), shop.sources.list()) == ([], [], [])
            shop.run(run.rstrip(";"))
        declared = Postgres(url=url, table=f"{shop.schema}.t", publication="persist")
        shop.sources.create("s", declared)
        shop.catch_up()
        shop.run("INSERT INTO t VALUES (3, 'c')")
        shop.catch_up()
        assert shop.words() == {1: "a", 2: "b", 3: "c"}
        assert shop.sources.drop("s") == []
        assert (shop.slots(), shop.publications()) == ([], ["persist"])
    finally:
        shop.run("DROP PUBLICATION IF EXISTS persist", f"DROP OWNED BY {user}", f"DROP ROLE {user}")


@pytest.mark.parametrize(
    ("publication", "said"),
    [
        (None, "there is no publication"),
        ("FOR TABLE ONLY t WITH (publish = 'insert')", "leaves out some changes"),
        ("FOR TABLE ONLY t (id)", "only some rows or columns"),
        ("FOR TABLE ONLY t WHERE (id > 1)", "only some rows or columns"),
        ("", "does not name the table"),
    ],
)
def test_a_publication_that_does_not_give_all_is_refused(shop: Shop, publication: str | None, said: str) -> None:
    words(shop)
    if publication is not None:
        shop.run(f"CREATE PUBLICATION mine {publication}")
    with pytest.raises(InvalidUsage, match=said):
        shop.sources.create("s", shop.declared(publication="mine"))
    assert shop.slots() == []


def test_what_is_declared_wrong_is_refused(shop: Shop) -> None:
    words(shop)
    schema = persist.Schema(key={"id": "int32 not null"}, value={"word": "int64"})
    with pytest.raises(InvalidUsage, match="'word' is string, and int64 is declared"):
        shop.create(schema=schema)
    with pytest.raises(InvalidUsage, match="the key of"):
        shop.create(schema=persist.Schema(key={"word": "string not null"}))
    with pytest.raises(InvalidUsage, match="leave out 'not null'"):
        shop.create(schema=persist.Schema(key={"id": "int32 not null"}, value={"word": "string not null"}))
    with pytest.raises(InvalidUsage, match="envelope"):
        shop.create(meaning=Meaning(envelope="upsert"))
    with pytest.raises(InvalidUsage, match="keep_raw"):
        shop.create(meaning=Meaning(envelope="changes", keep_raw=True))
    with pytest.raises(InvalidUsage, match="password"):
        shop.sources.create("s", Postgres(url="postgresql://u:secret@h/db", table="public.t"))
    for wrong in ({"decoding": "pgoutput"}, {"meaning": 7}, {"schema": {"id": "int32"}}):
        with pytest.raises(InvalidUsage):
            shop.create(**wrong)
    for name in ("t where true", "t..", "nothing"):
        with pytest.raises((InvalidUsage, NotFound), match=name):
            shop.create(name)
    assert shop.slots() == []


def test_drop_takes_away_what_the_source_made_and_says_what_it_cannot_reach(shop: Shop) -> None:
    words(shop)
    shop.run("CREATE PUBLICATION other FOR TABLE ONLY t")
    shop.create()
    slot = shop.slot()
    assert shop.publications() == ["other", slot]
    shop.catch_up()
    assert shop.sources.drop("s") == []
    assert (shop.slots(), shop.publications(), shop.sources.list()) == ([], ["other"], [])
    away = servers.PostgresServer(servers.LOGICAL)
    with psycopg.connect(away.url) as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    shop.sources.create("s", Postgres(url=away.url, table="public.t"))
    slot = shop.slot()
    away.remove()
    with pytest.raises(Determinate, match=rf"pg_drop_replication_slot.'{slot}'"):
        shop.sources.reset("s")
    (left,) = shop.sources.drop("s")
    assert f"SELECT pg_drop_replication_slot('{slot}'); DROP PUBLICATION IF EXISTS \"{slot}\";" in left
    assert shop.sources.list() == []


def test_a_server_that_is_not_there_stalls_and_one_without_logical_decoding_is_refused(shop: Shop) -> None:
    url = servers.postgres_url()
    with psycopg.connect(url) as sql:
        sql.execute("CREATE TABLE IF NOT EXISTS public.plain (id int PRIMARY KEY)")
    with pytest.raises(InvalidUsage, match=r"wal_level is 'replica'.*ALTER SYSTEM SET wal_level"):
        shop.sources.create("s", Postgres(url=url, table="public.plain"))
    with pytest.raises(Determinate, match="could not connect"):
        shop.sources.create("s", Postgres(url=f"postgresql://127.0.0.1:{servers.free_port()}/x", table="public.t"))
