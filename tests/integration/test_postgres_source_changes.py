"""What loses nothing does not end a source of a table; columns that exchange their names do."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from persist_lib.errors import Gone, PersistError, SchemaChanged
from persist_lib.sources.postgres import reader as reading
from persist_lib.sources.postgres.stream import Stream
from tests.integration.test_postgres_publications import BACK, OUT, PART, WRITES, run
from tests.integration.test_postgres_source import Shop, followed, words

KEEPS = (
    "ALTER TABLE t REPLICA IDENTITY FULL", *WRITES, "ALTER TABLE t REPLICA IDENTITY DEFAULT",
    "CREATE TABLE u ()", "ALTER PUBLICATION {slot} ADD TABLE ONLY u", "UPDATE t SET word = 'C' WHERE id = 2",
    "ANALYZE t", "GRANT SELECT ON t TO PUBLIC", "VACUUM FREEZE pg_publication", "VACUUM FULL pg_publication_rel",
    "VACUUM FULL t", "BEGIN", OUT, "ROLLBACK", "BEGIN", PART, "ROLLBACK", "INSERT INTO t VALUES (10, 'x')",
    "ALTER TABLE t RENAME TO away", "INSERT INTO away VALUES (11, 'y')", "ALTER TABLE away RENAME TO t",
)  # fmt: skip
SWAP = ("ALTER TABLE t RENAME word TO x", "ALTER TABLE t RENAME other TO word", "ALTER TABLE t RENAME x TO other")


def test_what_loses_nothing_does_not_stop_it_and_what_does_ends_it_until_a_reset(shop: Shop) -> None:
    followed(shop)
    run(shop, *KEEPS)
    shop.catch_up()
    kept = {2: "C", 9: "new", 10: "x", 11: "y"}
    assert shop.words() == kept
    run(shop, OUT, "DELETE FROM t WHERE id = 9", BACK)
    with pytest.raises(Gone):
        shop.catch_up()
    (row,) = (one for one in shop.contents("s/health") if one["state"] == "failed")
    assert "was changed since the source was made" in row["why"]
    assert shop.words() == kept, "nothing was written"
    shop.sources.reset("s")
    shop.catch_up()
    assert shop.words() == {2: "C", 10: "x", 11: "y"}


@pytest.mark.parametrize(
    "statements",
    [
        (*SWAP, "INSERT INTO t VALUES (9, 'x', 'y')"),
        (*SWAP,),
        ("ALTER TABLE t DROP word", "ALTER TABLE t ADD word text"),
    ],
)
def test_columns_that_exchanged_their_names_are_not_taken_for_each_other(
    shop: Shop, statements: tuple[str, ...]
) -> None:
    shop.run("CREATE TABLE t (id int PRIMARY KEY, gone text, word text, other text)", "ALTER TABLE t DROP gone")
    shop.run("INSERT INTO t VALUES (1, 'a', 'b')")
    shop.follow()
    shop.run(*statements)
    with pytest.raises(SchemaChanged, match=r"its column '(word|other)' is another one than before"):
        shop.catch_up()
    assert [(one["word"], one["other"]) for one in shop.contents()] == [("a", "b")]


def test_rows_that_were_written_under_exchanged_names_are_known_although_these_are_back(shop: Shop) -> None:
    shop.run("CREATE TABLE t (id int PRIMARY KEY, word text, other text)")
    shop.follow()
    shop.run(*SWAP, *SWAP, "INSERT INTO t VALUES (1, 'a', 'b')")
    shop.catch_up()
    assert shop.words() == {1: "a"}, "no row was written in between"
    shop.run(*SWAP, "INSERT INTO t VALUES (2, 'x', 'y')", *SWAP)
    with pytest.raises(SchemaChanged, match="other and word have exchanged their names"):
        shop.catch_up()
    assert shop.words() == {1: "a"}


def test_a_source_of_an_earlier_release_learns_what_its_publication_is_when_it_is_opened(shop: Shop) -> None:
    words(shop)
    shop.create()
    record, deadline = shop.sources.find("s"), shop.sources.client.runtime.deadline(60)
    assert record.table is not None
    assert list(record.table.columns) == ["id", "word"]
    shop.sources.declared.change(lambda found: {"s": msgspec.structs.replace(found["s"], table=None)}, deadline)
    shop.catch_up()
    assert shop.sources.find("s").table == record.table
    run(shop, OUT, BACK)
    with pytest.raises(PersistError, match="was changed"):
        shop.catch_up()


def test_a_server_that_sends_nothing_of_what_it_has_is_not_one_without_news(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too busy, say. An instance says so, and one that runs until it is idle does not end."""
    shop.run("CREATE TABLE t (id int PRIMARY KEY, word text)", "INSERT INTO t VALUES (1, 'a')")
    shop.follow()
    shop.run("UPDATE t SET word = 'b'")
    receive, asked = Stream.receive, itertools.count()

    def silent(self: Stream, wait_s: float, *, asks: bool = False) -> Any:
        return iter(()) if next(asked) <= reading.FEW_WAITS else receive(self, wait_s, asks=asks)

    monkeypatch.setattr(Stream, "receive", silent)
    shop.catch_up()
    assert next(asked) > reading.FEW_WAITS
    assert shop.words() == {1: "b"}
