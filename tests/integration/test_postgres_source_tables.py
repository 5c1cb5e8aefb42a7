"""Several tables of PostgreSQL as one source: at each time all outputs show the database as of one moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from persist_lib import verify
from persist_lib.errors import Determinate, Gone, InvalidUsage, NameTaken, NotFound, Refused
from persist_lib.format.log import decode_row
from persist_lib.ids import SeqNo
from persist_lib.schema.schema import Schema
from persist_lib.sources import Decoding, Meaning, Postgres
from persist_lib.sources.postgres import snapshot
from persist_lib.sources.postgres.stream import Wire
from persist_lib.sources.running import Ingestion
from persist_lib.sources.targets import Target
from persist_lib.testing import check_location
from tests.integration.test_postgres_source import Shop
from tests.integration.test_postgres_source_copy import applied

TOTAL = 2 * 5 * 100
TRANSFER = "UPDATE {schema}.{source} SET cents = cents - {n} WHERE id = {id}"
Sums = dict[int, int]


def bank(shop: Shop, **options: Any) -> None:
    """Accounts in two tables, and a source of both."""
    for table in ("a", "b"):
        shop.run(
            f"CREATE TABLE {table} (id int PRIMARY KEY, cents int, at date)",
            f"INSERT INTO {table} SELECT n, 100, '2026-01-01' FROM generate_series(1, 5) n",
        )
    declare(shop, "a", "b", **options)


def declare(shop: Shop, *tables: str, **options: Any) -> Any:
    declared = Postgres(url=shop.server.url, tables=tuple(f"{shop.schema}.{table}" for table in tables))
    return shop.sources.create("s", declared, **options)


def output(shop: Shop, table: str) -> str:
    return f"s/{shop.schema}.{table}"


def cents(shop: Shop, table: str, as_of: int | None = None) -> dict[int, int]:
    return {row["id"]: row["cents"] for row in shop.contents(output(shop, table), as_of)}


def sums(shop: Shop, *tables: str) -> Sums:
    """What all accounts of these tables have together at each time at which something changed."""
    changes: Sums = {}
    for table in tables:
        with shop.controller.open_reader(output(shop, table)) as reader:
            for row in reader.changes(reader.since.time or None).to_pylist():  # it begins there, and is empty
                at = int(row["_time"].timestamp() * 1000)
                changes[at] = changes.get(at, 0) + row["_diff"] * row["cents"]
    found: Sums = {}
    for at in sorted(changes):
        found[at] = changes[at] + (found[max(found)] if found else 0)
    return found


def transferring(shop: Shop, seed: int, tables: str = "ab") -> None:
    """Transfers between the tables, each in a transaction, in a session of its own."""
    rng = random.Random(seed)
    with psycopg.connect(shop.server.url) as connection:
        for _ in range(30):
            names = rng.sample([*tables], 2)
            with suppress(psycopg.errors.DeadlockDetected), connection.transaction():
                for name, n in zip(names, (7, -7), strict=True):
                    text = TRANSFER.format(schema=shop.schema, source=name, n=n, id=rng.randrange(1, 6))
                    connection.execute(text.encode())


def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an instance die before each fifth append from now on."""
    append, lives = Target.append, iter(range(10**6))

    def dies(self: Target, *args: Any) -> None:
        if next(lives) % 5 == 4:
            raise KeyboardInterrupt
        append(self, *args)

    monkeypatch.setattr(Target, "append", dies)


def test_no_time_shows_half_of_a_transfer_whoever_dies(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance dies between the appends to both outputs, again and again, while sessions transfer."""
    bank(shop)
    dying(monkeypatch)
    sessions = [threading.Thread(target=transferring, args=(shop, seed)) for seed in range(3)]
    for session in sessions:
        session.start()
    deaths = 0
    while any(session.is_alive() for session in sessions) or deaths < 3:
        try:
            shop.catch_up()
        except KeyboardInterrupt:
            deaths += 1
        if deaths < 3:
            transferring(shop, 9)
    for session in sessions:
        session.join()
    monkeypatch.undo()
    shop.catch_up()
    check_location(shop.world.client())
    found = sums(shop, "a", "b")
    assert set(found.values()) == {TOTAL}
    assert len(found) > 3
    assert len(set(sums(shop, "a").values())) > 1, "money moved"
    assert {table: cents(shop, table) for table in "ab"} == {
        table: dict(shop.rows(f"SELECT id, cents FROM {table}")) for table in "ab"
    }


def test_a_large_copy_of_several_tables_is_one_moment_and_decoded_in_pieces(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers continue while the tables are copied, one after the other."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(Ingestion, "window_bytes", 4096)
    for table in ("a", "b"):
        shop.run(
            f"CREATE TABLE {table} (id int PRIMARY KEY, cents int, at date)",
            f"INSERT INTO {table} SELECT n, 100, CASE n % 50 WHEN 0 THEN 'infinity' ELSE '2026-01-01' END::date "
            "FROM generate_series(1, 600) n",
        )
    declare(shop, "a", "b", shards=2)
    sizes, copied, moves = applied(monkeypatch), snapshot.copied, []

    def moving(*args: Any) -> Iterator[bytes]:
        for part in copied(*args):
            shop.run("BEGIN", "UPDATE a SET cents = cents - 7 WHERE id = 1")
            shop.run("UPDATE b SET cents = cents + 7 WHERE id = 1", "COMMIT")
            moves.append(part)
            yield part

    monkeypatch.setattr(snapshot, "copied", moving)
    shop.catch_up()
    assert max(sizes) < 300
    assert sum(sizes) == 1200 + 2 * len(moves)
    shop.catch_up()
    found = sums(shop, "a", "b")
    assert set(found.values()) == {2 * 588 * 100}
    assert len(found) > 1
    assert [len(cents(shop, table)) for table in "ab"] == [588, 588]
    errors = [row["partition"] for row in shop.contents("s/errors")]
    assert errors == sorted([f"{shop.schema}.a", f"{shop.schema}.b"] * 12)


@pytest.mark.parametrize("table", ["a", "b"])
def test_no_table_is_copied_if_one_was_emptied_as_the_snapshot_began(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    bank(shop)
    ask, statements = Wire.ask, [f"TRUNCATE {table}"]

    def between(self: Wire, command: str) -> Any:
        if command.startswith("LOCK TABLE") and statements:
            shop.run(statements.pop())
        return ask(self, command)

    monkeypatch.setattr(Wire, "ask", between)
    with pytest.raises(Determinate, match="copied again"):
        shop.sources.open("s").step()
    shop.catch_up()
    other = "b" if table == "a" else "a"
    assert (cents(shop, table), len(cents(shop, other))) == ({}, 5)


def test_while_tables_are_copied_none_of_them_can_be_emptied(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What empties a table, waits: a snapshot would not see the rows of one that is copied later."""
    bank(shop)
    copy = Wire.copy

    def empties(self: Wire, command: str) -> Iterator[bytes]:
        shop.run("SET lock_timeout = 100")
        for table in ("a", "b"):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                shop.run(f"TRUNCATE {table}")
        return copy(self, command)

    monkeypatch.setattr(Wire, "copy", empties)
    shop.catch_up()
    assert [len(cents(shop, table)) for table in "ab"] == [5, 5]


def test_one_statement_empties_several_tables(shop: Shop) -> None:
    bank(shop)
    first = shop.catch_up()
    shop.run("TRUNCATE b, a", "INSERT INTO a VALUES (9, 1)")
    shop.catch_up()
    assert (cents(shop, "a"), cents(shop, "b")) == ({9: 1}, {})
    assert len(cents(shop, "a", first.time - 1)) == len(cents(shop, "b", first.time - 1)) == 5


def test_bindings_that_are_older_than_an_output_are_found(shop: Shop) -> None:
    bank(shop)
    shop.catch_up()
    client = shop.world.client()
    bindings = shop.sources.find("s").bindings
    rows = client.consensus.scan(bindings, SeqNo(0), 100)
    first = next(one for one in rows if decode_row(one.data, "").command == "CompareAndAppend")
    client.consensus.rewind(bindings, SeqNo(first.seqno - 1), rows[-1].newest)
    says = [finding.says for _, finding in verify.check(shop.world.client()).findings]
    assert any("data of source s was made" in one for one in says)


def test_bad_rows_are_named_by_their_table_and_counted_together(shop: Shop) -> None:
    bank(shop, meaning=Meaning(envelope="changes", most_errors=2))
    shop.catch_up()
    shop.run(
        "BEGIN", "UPDATE a SET at = 'infinity' WHERE id = 1", "UPDATE b SET at = 'infinity' WHERE id = 2", "COMMIT"
    )
    shop.catch_up()
    errors = shop.contents("s/errors")
    assert [row["partition"] for row in errors] == [f"{shop.schema}.{table}" for table in "ab"]
    assert errors[0]["address"] == errors[1]["address"], "one transaction"
    assert (sorted(cents(shop, "a")), sorted(cents(shop, "b"))) == ([2, 3, 4, 5], [1, 3, 4, 5])
    shop.run("UPDATE b SET at = 'infinity' WHERE id = 3")
    with pytest.raises(Refused, match="most_errors is 2"):
        shop.catch_up()


def test_each_table_gets_columns_of_its_own(shop: Shop) -> None:
    bank(shop, decoding=Decoding(decoder="pgoutput", extra="add"))
    first = shop.catch_up()
    shop.run("ALTER TABLE b ADD n int DEFAULT 7", "UPDATE b SET n = 8 WHERE id = 1")
    shop.run(
        "ALTER TABLE a ADD n text, ADD m int DEFAULT 1", "UPDATE a SET n = 'x' WHERE id = 2", "INSERT INTO b VALUES (6)"
    )
    shop.catch_up()
    found = {
        table: {row["id"]: (row["n"], row.get("m")) for row in shop.contents(output(shop, table))} for table in "ab"
    }
    assert found["a"] == {n: ("x" if n == 2 else None, 1) for n in range(1, 6)}
    assert found["b"] == {n: (8 if n == 1 else 7, None) for n in range(1, 7)}
    assert [row["n"] for row in shop.contents(output(shop, "b"), first.time - 1)] == [7] * 5
    record = shop.sources.find("s")
    assert [sorted(record.known[f"{shop.schema}.{table}"].added) for table in "ab"] == [["m", "n"], ["n"]]
    assert not record.decoding.added
    shop.sources.reset("s")
    shop.catch_up()
    assert len(shop.contents(output(shop, "b"))) == 6


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DROP TABLE b", r"the table \S+\.b was dropped"),
        (
            "ALTER PUBLICATION {slot} DROP TABLE b;ALTER PUBLICATION {slot} ADD TABLE ONLY b",
            r"the table \S+\.b was taken",
        ),
        ("SELECT pg_drop_replication_slot('{slot}')", "is not there"),
    ],
)
def test_what_one_table_lost_ends_the_source_before_anything_of_another_is_written(
    shop: Shop, statement: str, said: str
) -> None:
    bank(shop)
    shop.catch_up()
    shop.run("UPDATE a SET cents = 0", *statement.format(slot=shop.slot()).split(";"))
    with pytest.raises(Gone, match=said):
        shop.catch_up()
    assert set(cents(shop, "a").values()) == {100}


def test_columns_may_be_declared_of_some_tables(shop: Shop) -> None:
    shop.run("CREATE TABLE a (id int PRIMARY KEY, at date)", 'CREATE TABLE "B" (id int PRIMARY KEY, cents int)')
    shop.run("INSERT INTO a VALUES (1, 'infinity')", 'INSERT INTO "B" VALUES (1, 5)')
    texts = Schema({"id": "int64 not null"}, {"at": "string"})
    found = declare(shop, "a", '"B"', tables={f"{shop.schema}.a": texts})
    assert found.collections.keys() == {f"{shop.schema}.a", f'{shop.schema}."B"', "errors", "health"}
    shop.catch_up()
    assert [row["at"] for row in shop.contents(output(shop, "a"))] == ["infinity"]
    assert cents(shop, "B") == {1: 5}
    assert [str(schema) for schema in shop.sources.show("s").tables.values()] == [
        "(id: int32 not null) -> (cents: int32), times=ms", "(id: int64 not null) -> (at: string), times=ms",
    ]  # fmt: skip
    assert shop.sources.drop("s") == []
    assert (shop.slots(), shop.publications()) == ([], [])


def test_what_is_declared_wrong_of_several_tables_is_refused_before_anything_is_made(shop: Shop) -> None:
    shop.run("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)", "CREATE VIEW v AS SELECT 1")
    one = Schema({"id": "int32 not null"})
    for tables, error, said in (
        (("a", "A"), InvalidUsage, "are one table: name it once"), (("a", "none"), NotFound, "has no table"),
        (("a", "v"), InvalidUsage, "no plain table"), (("a", '"b c"'), InvalidUsage, "a collection's name must be"),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            declare(shop, *tables)
    for options, said in (
        ({"schema": one}, "say tables= for those of several"), ({"tables": {"x": one}}, "the source has no table 'x'"),
        ({"tables": {f"{shop.schema}.a": Schema({"id": "string not null", "x": "int8 not null"})}}, "the key of"),
        ({"meaning": Meaning(envelope="changes", include={"x": "address"})}, "for a source of one table"),
    ):  # fmt: skip
        with pytest.raises(InvalidUsage, match=said):
            declare(shop, "a", "b", **options)
    with pytest.raises(InvalidUsage, match="it has one output"):
        shop.create("a", tables={"x": one})
    shop.controller.create(output(shop, "b"), one)
    with pytest.raises(NameTaken, match=r"there is a collection 's/\S+\.b' already"):
        declare(shop, "a", "b")
    assert (shop.slots(), shop.publications(), shop.sources.list()) == ([], [], [])


def test_a_source_of_other_tables_is_another_source(shop: Shop) -> None:
    bank(shop)
    shop.run("CREATE TABLE c (id int PRIMARY KEY)")
    with pytest.raises(NameTaken, match=r"its tables are others\. Add one to it with `persist source add-table`"):
        declare(shop, "a", "b", "c")
    shop.sources.drop("s")
    declare(shop, "a", "b", "c")
    shop.catch_up()
    assert [len(shop.contents(output(shop, table))) for table in "abc"] == [5, 5, 0]
