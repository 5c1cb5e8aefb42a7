"""A source that takes the columns which its table gets later: what older rows have there, and what cannot be told."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from persist_lib.errors import Determinate, InvalidUsage, SchemaChanged
from persist_lib.schema.schema import Schema
from persist_lib.sources import Decoding, Meaning
from persist_lib.sources.kinds import Declared
from tests.integration.test_postgres_source import Shop, words

ADDS = Decoding(decoder="pgoutput", extra="add")


def made(shop: Shop) -> None:
    words(shop)
    shop.follow(decoding=ADDS)


def contents(shop: Shop) -> list[dict[str, Any]]:
    return sorted(
        ({name: value for name, value in row.items() if not name.startswith("_")} for row in shop.contents()),
        key=lambda row: row["id"],
    )


def table(shop: Shop) -> list[dict[str, Any]]:
    """The table itself."""
    found = shop.sql.execute(b"SELECT * FROM t ORDER BY id")
    names = [one.name for one in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE t ADD n int",),
        ("ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (3, 'c', NULL), (4, 'd', 1), (5, NULL, 5)"),
        (
            "INSERT INTO t VALUES (3)", "ALTER TABLE t ADD n int DEFAULT 7", "ALTER TABLE t ALTER n SET DEFAULT 8",
            "INSERT INTO t VALUES (4)",
        ),
        ("ALTER TABLE t ADD n int DEFAULT 7", "ALTER TABLE t ALTER n DROP DEFAULT", "INSERT INTO t VALUES (4)"),
        (
            "BEGIN", "INSERT INTO t VALUES (3)", "ALTER TABLE t ADD n int DEFAULT 7",
            "UPDATE t SET n = id WHERE id > 1", "INSERT INTO t VALUES (4, 'd', 4)", "COMMIT",
        ),
        (
            "ALTER TABLE t ADD n int NOT NULL DEFAULT 7, ADD m text DEFAULT 'it''s {\"a\",\\b}'",
            "DELETE FROM t WHERE id = 1", "UPDATE t SET id = 9 WHERE id = 2",
        ),
        (
            "VACUUM FULL t", "look", "ALTER TABLE t ADD n int DEFAULT 7", "look", "TRUNCATE t", "look",
            "INSERT INTO t VALUES (1, 'x', 2)", "ALTER TABLE t ADD m bool DEFAULT true",
        ),
        (
            "ALTER TABLE t ADD a timestamptz DEFAULT '2026-01-02 03:04:05.678901+00', ADD c numeric(10, 2) DEFAULT 1.5",
            "ALTER TABLE t ADD d date DEFAULT '2026-01-02', ADD e float8 DEFAULT 0.1, ADD f bool DEFAULT false",
            "ALTER TABLE t ADD h timestamp DEFAULT '2026-01-02 03:04:05'", "INSERT INTO t VALUES (3)",
        ),
    ],
)  # fmt: skip
def test_the_collection_has_what_the_table_has(shop: Shop, statements: tuple[str, ...]) -> None:
    made(shop)
    for statement in statements:
        if statement == "look":
            shop.catch_up()
        else:
            shop.run(statement)
    shop.catch_up()
    assert contents(shop) == table(shop)
    assert shop.contents("s/errors") == []
    assert shop.sources.find("s").decoding.added.keys() == {*table(shop)[0]} - {"id", "word"}


def test_a_quiet_table_grows_too_and_so_does_one_that_was_not_looked_at_for_a_while(shop: Shop) -> None:
    made(shop)
    shop.run(
        "INSERT INTO t VALUES (3, 'c')", "ALTER TABLE t ADD n int DEFAULT 7", "UPDATE t SET word = 'B' WHERE id = 2"
    )
    shop.run("ALTER TABLE t ADD m int", "UPDATE t SET m = 1 WHERE id = 3", "INSERT INTO t VALUES (4, 'd', 4, 4)")
    shop.catch_up()
    assert [(row["word"], row["n"], row["m"]) for row in contents(shop)] == [
        ("a", 7, None), ("B", 7, None), ("c", 7, 1), ("d", 4, 4),
    ]  # fmt: skip
    assert str(shop.sources.show("s").schema.columns[-2]) == "n: int32 default '7'"


def test_an_instance_that_does_not_know_the_column_decodes_no_row_that_has_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(shop)
    late, other = shop.sources.open("s"), shop.sources.open("s")
    late.step()
    shop.run("ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (3, 'c', 3)")
    other.step()
    other.close()
    shop.run("INSERT INTO t VALUES (4, 'd', 4)")
    record = late.record
    monkeypatch.setattr(late, "_grow", lambda deadline: None)  # as if it had looked just before
    with pytest.raises(Determinate, match="the table has new columns: 'n'"):
        late.step()
    assert [row["n"] for row in contents(shop)] == [7, 7, 3]
    monkeypatch.undo()
    late.step()
    assert late.record != record
    late.close()
    assert [row["n"] for row in contents(shop)] == [7, 7, 3, 4]


def test_one_that_dies_between_the_output_and_the_record_is_followed_by_the_next(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(shop)
    shop.run("ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (3, 'c', 3)")

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Declared, "update", dies)
        with pytest.raises(KeyboardInterrupt):
            shop.catch_up()
    assert not shop.sources.find("s").decoding.added
    assert [row["n"] for row in contents(shop)] == [7, 7], "the output has it, and no row of it yet"
    shop.catch_up()
    assert [row["n"] for row in contents(shop)] == [7, 7, 3]


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (("ALTER TABLE t ADD n float8 DEFAULT random()",), "all its rows were written again"),
        (("ALTER TABLE t ADD n int DEFAULT 7", "VACUUM FULL t"), "all its rows were written again"),
        (("ALTER TABLE t ADD n int DEFAULT 7", "TRUNCATE t"), "all its rows were written again"),
        (("ALTER TABLE t ADD n bytea DEFAULT '\\xff'",), "the new column 'n' of its table cannot be taken"),
        (("ALTER TABLE t ADD g int GENERATED ALWAYS AS (id) STORED", "ALTER TABLE t ADD n int"), "written again"),
        (("ALTER TABLE t ADD n int GENERATED ALWAYS AS IDENTITY",), "all its rows were written again"),
        (("ALTER TABLE t RENAME word TO text",), "its column 'word' is called 'text'"),
        (("ALTER TABLE t ADD _time int",), "the new column '_time' of its table cannot be taken"),
        (("ALTER TABLE t ADD n date DEFAULT 'infinity'",), "older rows have a default that cannot be kept"),
        (("ALTER TABLE t DROP word", "ALTER TABLE t ADD word text"), "its column 'word' is another one"),
    ],
)  # fmt: skip
def test_what_the_log_does_not_tell_ends_the_source(shop: Shop, statements: tuple[str, ...], said: str) -> None:
    made(shop)
    shop.run(*statements)
    for _ in range(2):
        with pytest.raises(SchemaChanged, match=said):
            shop.catch_up()
    assert contents(shop) == [{"id": 1, "word": "a"}, {"id": 2, "word": "b"}], "nothing was written"


def test_a_column_that_came_and_goes_ends_the_source_at_the_first_row_without_it(shop: Shop) -> None:
    made(shop)
    shop.run("INSERT INTO t VALUES (3)", "ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (4, 'd', 4)")
    shop.catch_up()
    shop.run("UPDATE t SET n = 5 WHERE id = 4")
    shop.catch_up()
    assert [row["n"] for row in contents(shop)] == [7, 7, 7, 5]
    shop.run("ALTER TABLE t DROP n", "UPDATE t SET word = 'D' WHERE id = 4")
    with pytest.raises(SchemaChanged, match="it has no column 'n' any more"):
        shop.catch_up()
    assert [row["n"] for row in contents(shop)] == [7, 7, 7, 5]
    shop.sources.reset("s")
    assert not shop.sources.find("s").decoding.added


def test_a_column_that_a_transaction_is_taking_away_is_not_taken_until_that_is_decided(shop: Shop) -> None:
    made(shop)
    shop.run("ALTER TABLE t ADD n int DEFAULT 7", "BEGIN", "ALTER TABLE t DROP n")
    with closing(shop.sources.open("s")) as late:
        with pytest.raises(Determinate, match="the column 'n' is being changed, by a transaction that is open"):
            late.step()
        shop.run("ROLLBACK")
        late.step()
    assert [row["n"] for row in contents(shop)] == [7, 7]


def test_an_output_that_has_the_column_by_hand_is_taken_if_it_is_the_same(shop: Shop) -> None:
    made(shop)
    controller = shop.sources.controller
    schema = controller.describe("s").schema
    controller.evolve("s", schema.add({"n": "int32", "m": "int32"}, {"n": 7, "m": 7}))
    shop.run("ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (3, 'c', 3)")
    shop.catch_up()
    assert [row["n"] for row in contents(shop)] == [7, 7, 3]
    shop.run("ALTER TABLE t ADD m int DEFAULT 8")
    with pytest.raises(SchemaChanged, match="the output has another one of that name: m: int32 default '7'"):
        shop.catch_up()


def test_while_the_output_is_copied_it_waits_and_says_why(shop: Shop) -> None:
    made(shop)
    controller = shop.sources.controller
    controller.make_rendition("s", copy=True)
    shop.run("ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (3, 'c', 3)")
    with closing(shop.sources.open("s")) as late, pytest.raises(Determinate, match="the output cannot get them now"):
        late.step()


def test_what_does_not_fit_is_refused(shop: Shop) -> None:
    words(shop)
    with pytest.raises(InvalidUsage, match=r"takes all columns of .*, and the schema leaves out \['word'\]"):
        shop.create(schema=Schema({"id": "int32 not null"}), decoding=ADDS)
    with pytest.raises(InvalidUsage, match="leave out transform"):
        shop.create(
            schema=Schema({"id": "int32 not null"}), decoded=Schema({"id": "int32 not null"}), decoding=ADDS,
            meaning=Meaning(envelope="changes", transform="tests.integration.test_postgres_source_growth:made"),
        )  # fmt: skip
    with pytest.raises(InvalidUsage, match="is for tables of PostgreSQL and for Avro"):
        Decoding(extra="add")
    assert shop.sources.list() == []
