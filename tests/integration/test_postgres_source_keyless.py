"""Tables of PostgreSQL without a primary key: rows are whole, and equal ones counted. Or an index is key."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from persist_lib.catalog.records import OF_INDEXES
from persist_lib.errors import InvalidUsage, SchemaChanged
from persist_lib.schema.schema import Schema
from persist_lib.sources import Decoding, Meaning
from persist_lib.sources.postgres import snapshot
from persist_lib.sources.running import Ingestion
from tests.integration.test_postgres_source import Shop
from tests.integration.test_postgres_source_copy import applied
from tests.integration.test_postgres_source_tables import declare, output

ONE = "(SELECT ctid FROM t WHERE word = '{}' LIMIT 1)"
FULL = "ALTER TABLE t REPLICA IDENTITY FULL"


def made(shop: Shop, **options: Any) -> None:
    shop.run("CREATE TABLE t (word text, n int)", FULL)
    shop.run("INSERT INTO t VALUES ('a', 1), ('a', 1), ('a', 1), ('b', NULL), (NULL, NULL), (NULL, NULL)")
    shop.follow(**options)


def rows(shop: Shop, name: str = "s", as_of: int | None = None) -> Counter[tuple[Any, ...]]:
    """The rows of a collection, and how often each is there."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in shop.contents(name, as_of):
        found[tuple(value for column, value in row.items() if not column.startswith("_"))] += row["_diff"]
    return found


def table(shop: Shop, query: str = "SELECT * FROM t") -> Counter[tuple[Any, ...]]:
    return Counter(shop.rows(query))


def test_equal_rows_are_counted_and_one_of_them_goes_at_a_time(shop: Shop) -> None:
    made(shop)
    assert str(shop.sources.find("s").schema) == "(word: string, n: int32) -> (), times=ms"
    assert rows(shop) == table(shop)
    assert rows(shop)["a", 1] == 3
    first = shop.catch_up()
    for statements in (
        (f"DELETE FROM t WHERE ctid = {ONE.format('a')}",),
        (f"UPDATE t SET n = 2 WHERE ctid = {ONE.format('a')}", "INSERT INTO t VALUES ('a', 2)"),
        ("UPDATE t SET word = 'c'",),
        ("BEGIN", "INSERT INTO t VALUES ('d', 4)", "DELETE FROM t WHERE word = 'd'", "COMMIT"),
        ("INSERT INTO t SELECT * FROM t", "TRUNCATE t", "INSERT INTO t VALUES ('a', 1), ('a', 1)"),
    ):  # fmt: skip
        shop.run(*statements)
        shop.catch_up()
        assert rows(shop) == table(shop), statements
    assert rows(shop, as_of=first.time - 1)["a", 1] == 3
    shop.run("INSERT INTO t VALUES ('a', 1)", "TRUNCATE t", "INSERT INTO t VALUES ('z', 1)")
    shop.catch_up()
    assert rows(shop) == {("z", 1): 1}


def test_values_go_as_they_came_whatever_they_are(shop: Shop) -> None:
    """Also large ones that did not change, which are in the row that goes, and not in the one that comes."""
    shop.run("CREATE TABLE t (id int, big text, f float8, d date, raw bytea, x numeric)", FULL)
    shop.run("ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    add = "INSERT INTO t VALUES (1, repeat('x', 100000), {}, '2026-01-01', '\\x00ff', 'NaN')"
    for value in ("'NaN'", "'-0'", "0", "'-Infinity'", "0.1", "NULL"):
        shop.run(add.format(value), add.format(value))
    shop.follow()
    assert sum(rows(shop).values()) == 12
    shop.run("UPDATE t SET id = 2", "UPDATE t SET d = 'infinity' WHERE f = 0.1")
    shop.catch_up()
    found = shop.contents()
    assert {(row["id"], len(row["big"])) for row in found} == {(2, 100000)}
    assert sum(row["_diff"] for row in found) == 10
    assert len(shop.contents("s/errors")) == 1, "equal ones are one row, twice"
    shop.run("UPDATE t SET d = '2026-01-01' WHERE f = 0.1")
    shop.catch_up()
    assert sum(rows(shop).values()) == 12
    shop.run("DELETE FROM t")
    shop.catch_up()
    assert shop.contents() == []


@pytest.mark.parametrize("shards", [1, 3])
def test_a_large_copy_counts_equal_rows_that_are_in_different_pieces(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(Ingestion, "window_bytes", 4096)
    sizes = applied(monkeypatch)
    shop.run("CREATE TABLE t (word text, n int)", FULL)
    shop.run("INSERT INTO t SELECT repeat('x', n % 7), n % 3 FROM generate_series(1, 2000) n")
    shop.follow(shards=shards)
    assert len(sizes) > 3
    assert rows(shop) == table(shop)
    assert len(rows(shop)) == 21
    shop.run("DELETE FROM t WHERE n = 0 AND word = 'x'")
    shop.catch_up()
    assert rows(shop) == table(shop)


def test_added_columns_are_counted_with_the_rest(shop: Shop) -> None:
    made(shop, decoding=Decoding(decoder="pgoutput", extra="add"))
    shop.run(f"DELETE FROM t WHERE ctid = {ONE.format('a')}", "INSERT INTO t VALUES ('b', NULL)")
    shop.run("ALTER TABLE t ADD m int DEFAULT 7", f"UPDATE t SET m = 8 WHERE ctid = {ONE.format('a')}")
    shop.run(f"DELETE FROM t WHERE ctid = {ONE.format('b')}", "INSERT INTO t VALUES ('b', NULL, NULL)")
    shop.catch_up()
    assert rows(shop) == table(shop)
    assert rows(shop)["a", 1, 7] == rows(shop)["a", 1, 8] == rows(shop)["b", None, None] == 1
    shop.run("TRUNCATE t")
    shop.catch_up()
    assert shop.contents() == []


def test_beside_a_table_with_a_key_and_with_a_declared_key(shop: Shop) -> None:
    shop.run("CREATE TABLE t (word text, n int)", FULL, "CREATE TABLE u (id int PRIMARY KEY, n int)")
    by_number = Schema({"n": "int32"}, {"word": "string"})
    declare(shop, "t", "u", tables={f"{shop.schema}.t": by_number})
    shop.catch_up()
    shop.run("INSERT INTO t VALUES ('a', 1), ('a', 1), ('b', 1)", "INSERT INTO u VALUES (1, 1), (2, 1)")
    shop.catch_up()
    shop.run(
        "DELETE FROM t WHERE word = 'b'",
        "UPDATE u SET n = 2 WHERE id = 2",
        "TRUNCATE t, u",
        "INSERT INTO t VALUES ('a', 2)",
    )
    shop.run("INSERT INTO u VALUES (3, 3)")
    shop.catch_up()
    assert rows(shop, output(shop, "t")) == {(2, "a"): 1}
    assert rows(shop, output(shop, "u")) == {(3, 3): 1}


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (("ALTER TABLE t REPLICA IDENTITY DEFAULT", "INSERT INTO t VALUES ('a', 1)"), "told apart by"),
        (("ALTER TABLE t ADD id serial PRIMARY KEY", "INSERT INTO t VALUES ('e', 5)"), ""),
        (
            ("ALTER TABLE t ADD id serial PRIMARY KEY, REPLICA IDENTITY DEFAULT", "INSERT INTO t VALUES ('e', 5)"),
            "told apart by",
        ),
    ],
)
def test_a_log_that_has_not_whole_rows_any_more_ends_the_source(
    shop: Shop, statements: tuple[str, ...], said: str
) -> None:
    made(shop)
    before = rows(shop)
    shop.run(*statements)
    if not said:
        shop.catch_up()
        assert rows(shop) == table(shop, "SELECT word, n FROM t")
        return
    with pytest.raises(SchemaChanged, match=said):
        shop.catch_up()
    assert rows(shop) == before


def test_a_table_that_has_lost_its_key_ends_its_source_also_if_the_log_has_whole_rows(shop: Shop) -> None:
    shop.run("CREATE TABLE t (id int PRIMARY KEY, word text)", FULL, "INSERT INTO t VALUES (1, 'a')")
    shop.follow()
    shop.run("UPDATE t SET word = 'b'", "ALTER TABLE t DROP CONSTRAINT t_pkey", "INSERT INTO t VALUES (1, 'c')")
    with pytest.raises(SchemaChanged, match="it has no primary key any more"):
        shop.catch_up()
    assert shop.words() == {1: "a"}


def test_what_does_not_fit_rows_without_a_key_is_refused(shop: Shop) -> None:
    shop.run("CREATE TABLE t (word text, n int)", FULL)
    whole = {"word": "string", "n": "int32"}
    with pytest.raises(InvalidUsage, match=r"include: .* has no primary key"):
        shop.create(
            schema=Schema(whole, {"lsn": "uint64"}), meaning=Meaning(envelope="changes", include={"lsn": "address"})
        )
    with pytest.raises(InvalidUsage, match="'n' of a table may become null: leave out 'not null'"):
        shop.create(schema=Schema({**whole, "n": "int32 not null"}))
    assert (shop.slots(), shop.sources.list()) == ([], [])


BY_ID = "CREATE UNIQUE INDEX by_id ON t (id) INCLUDE (n)"
INDEXED = (
    "CREATE TABLE t (id int NOT NULL, word text NOT NULL, n int)", BY_ID,
    "CREATE UNIQUE INDEX by_word ON t (word)", "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id",
    "INSERT INTO t VALUES (1, 'a', NULL), (2, 'b', 5)",
)  # fmt: skip


def test_the_columns_of_the_index_of_the_replica_identity_are_the_key(shop: Shop) -> None:
    shop.run(*INDEXED, "DROP INDEX by_word", "ALTER TABLE t ALTER word SET STORAGE EXTERNAL")
    shop.create()
    record = shop.sources.find("s")
    assert str(record.schema) == "(id: int32 not null) -> (word: string, n: int32), times=ms"
    assert record.v == OF_INDEXES, "an earlier release would miss the primary key"
    shop.catch_up()
    shop.run("UPDATE t SET word = repeat('x', 100000) WHERE id = 1", "UPDATE t SET id = 3, n = 7 WHERE id = 1")
    shop.run("DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (4, 'd', 4)")
    shop.catch_up()
    assert {row["id"]: (row["word"][:1], row["n"]) for row in shop.contents()} == {3: ("x", 7), 4: ("d", 4)}
    shop.run("TRUNCATE t", "INSERT INTO t VALUES (1, 'a', 1)")
    shop.catch_up()
    assert shop.words() == {1: "a"}


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ((FULL, "DROP INDEX by_id", "INSERT INTO t VALUES (1, 'x', 1)"), "its replica identity is FULL, and no index"),
        ((FULL, "DELETE FROM t WHERE id = 1", "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id"), "identity is FULL"),
        (("ALTER TABLE t REPLICA IDENTITY NOTHING",), r"told apart by \[\], and \['id'\] is declared"),
        (("ALTER TABLE t REPLICA IDENTITY DEFAULT",), r"told apart by \[\], and \['id'\] is declared"),
        (("ALTER TABLE t REPLICA IDENTITY USING INDEX by_word",), r"told apart by \['word'\], and \['id'\]"),
        (("DROP INDEX by_id",), r"told apart by \[\], and \['id'\] is declared"),
        (("DROP INDEX by_id", BY_ID, "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id"), ""),
        (("ALTER TABLE t ADD PRIMARY KEY (id), REPLICA IDENTITY DEFAULT",), ""),
    ],
)
def test_what_tells_rows_apart_no_longer_ends_the_source_at_the_first_row(
    shop: Shop, statements: tuple[str, ...], said: str
) -> None:
    shop.run(*INDEXED)
    shop.follow()
    shop.run(*statements, "INSERT INTO t VALUES (9, 'z', 1)")
    if not said:
        shop.catch_up()
        assert shop.words() == {1: "a", 2: "b", 9: "z"}
        return
    with pytest.raises(SchemaChanged, match=f"{said}.*Declare a source of the table under another name"):
        shop.catch_up()
    assert shop.words() == {1: "a", 2: "b"}


def test_columns_that_an_index_only_includes_are_no_key(shop: Shop) -> None:
    shop.run("CREATE TABLE t (id int, word text, PRIMARY KEY (id) INCLUDE (word))", "INSERT INTO t VALUES (1, NULL)")
    shop.follow()
    shop.run("UPDATE t SET word = 'a'")
    shop.catch_up()
    assert shop.words() == {1: "a"}


@pytest.mark.parametrize(
    ("made", "said", "mended"),
    [
        ("ALTER TABLE t REPLICA IDENTITY USING INDEX by_id;DROP INDEX by_id", "was dropped", "IDENTITY DEFAULT"),
        (
            "ALTER TABLE t ADD g int GENERATED ALWAYS AS (n) STORED, ADD PRIMARY KEY (id, g)",
            "has a generated column", "USING INDEX",
        ),
    ],
)  # fmt: skip
def test_a_key_that_the_log_does_not_have_is_refused(shop: Shop, made: str, said: str, mended: str) -> None:
    shop.run("CREATE TABLE t (id int NOT NULL, n int NOT NULL)", BY_ID, *made.split(";"))
    with pytest.raises(InvalidUsage, match=f"{said}.*{mended}"):
        shop.create()
    assert (shop.slots(), shop.publications(), shop.sources.list()) == ([], [], [])
