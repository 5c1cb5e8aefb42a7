"""What may be changed at a table or its publication between two looks: then the source is right, or it says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from persist_lib.errors import Determinate, Gone, InvalidUsage
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.reader import TableReader
from persist_lib.sources.protocol import Mark
from tests.integration.test_postgres_source import Shop, words

WRITES = ("INSERT INTO t VALUES (9, 'new')", "UPDATE t SET word = 'B' WHERE id = 2", "DELETE FROM t WHERE id = 1")
OUT = "ALTER PUBLICATION {slot} DROP TABLE t"
BACK = "ALTER PUBLICATION {slot} SET TABLE ONLY t"
PART = "ALTER PUBLICATION {slot} SET (publish = 'insert')"
ALL = "ALTER PUBLICATION {slot} SET (publish = 'insert, update, delete, truncate')"
LOSES = {
    "inserts only": (PART, *WRITES, ALL),
    "no truncate": ("ALTER PUBLICATION {slot} SET (publish = 'insert, update, delete')", "TRUNCATE t", ALL),
    "a row filter": ("ALTER PUBLICATION {slot} SET TABLE ONLY t WHERE (id > 5)", *WRITES, BACK),
    "a column list": ("ALTER PUBLICATION {slot} SET TABLE ONLY t (id)", *WRITES, BACK),
    "out for a while": (OUT, *WRITES, BACK),
    "dropped and made again": ("DROP PUBLICATION {slot}", *WRITES, "CREATE PUBLICATION {slot} FOR TABLE ONLY t"),
    "another one for a while": (
        "ALTER PUBLICATION {slot} RENAME TO was", "CREATE PUBLICATION {slot}", *WRITES, "DROP PUBLICATION {slot}",
        "ALTER PUBLICATION was RENAME TO {slot}",
    ),
    "by the root": (
        "ALTER PUBLICATION {slot} SET (publish_via_partition_root)", *WRITES,
        "ALTER PUBLICATION {slot} SET (publish_via_partition_root = false)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Shop]:
    """A source. Each test opens a reader that knows the publication as it is then."""
    found = Shop()
    words(found)
    found.create()
    yield found
    found.close()


def run(shop: Shop, *statements: str) -> None:
    shop.run(*(one.format(slot=shop.slot()) for one in statements))


def opened(shop: Shop) -> tuple[TableReader, dict[str, Mark]]:
    """A reader, and where the log is now."""
    record = shop.sources.find("s")
    assert isinstance(record.reader, Postgres)
    choices = Choices(shop.sources.client, record.choices)
    reader = TableReader(record.reader, record.id, choices, record.reader.look(record))
    ((partition, mark),) = reader.high_watermarks({}, 1).items()
    shop.run("DELETE FROM t", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    while new := reader.high_watermarks({partition: mark}, 1 << 20):
        mark = new[partition]
    return reader, {partition: mark}


@pytest.mark.parametrize("how", LOSES)
def test_what_a_publication_left_out_for_a_while_is_said(place: Shop, how: str) -> None:
    reader, bound = opened(place)
    with closing(reader):
        run(place, *LOSES[how])
        with pytest.raises(Gone, match=r"publication .* was changed.*persist source reset"):
            reader.high_watermarks(bound, 1 << 20)


@pytest.mark.parametrize("how", ["committed since the look", "still open at the look"])
def test_nothing_is_bound_that_is_behind_a_change_which_the_look_did_not_show(
    place: Shop, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    reader, bound = opened(place)
    with closing(reader):
        if how == "still open at the look":
            with psycopg.connect(place.server.url) as other:
                other.execute(PART.format(slot=place.slot()).encode())
                with pytest.raises(Determinate, match="is being changed"):
                    reader.high_watermarks(bound, 1 << 20)
                other.rollback()
            assert not reader.high_watermarks(bound, 1 << 20)
            return
        receive = TableReader._receive

        def rival(self: TableReader, *given: Any) -> None:
            run(place, PART, *WRITES, ALL)
            receive(self, *given)
            while not self._held:
                self._fetch(self._opened(given[0]), asks=True)

        monkeypatch.setattr(TableReader, "_receive", rival)
        assert not reader.high_watermarks(bound, 1 << 20)
        with pytest.raises(Gone, match="was changed"):
            reader.high_watermarks(bound, 1 << 20)


def test_a_look_asks_the_catalog_once(place: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, bound = opened(place)
    execute, asked = psycopg.Cursor.execute, []

    def counted(self: Any, query: Any, *given: Any, **more: Any) -> Any:
        asked.append(str(query))
        return execute(self, query, *given, **more)

    with closing(reader), monkeypatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", counted)
        reader._check_unchanged(bound[next(iter(bound))])
    assert len([query for query in asked if "FROM pg_class" in query or "FROM pg_attribute" in query]) == 1, asked


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("FOR ALL TABLES", "does not name the table"),
        ("FOR TABLES IN SCHEMA {schema}", "does not name the table"),
        ("FOR TABLE ONLY t WITH (publish_via_partition_root)", "leaves out some changes"),
    ],
)
def test_a_publication_of_which_nothing_can_be_proven_is_refused(place: Shop, made: str, said: str) -> None:
    place.run(f"CREATE PUBLICATION mine {made.format(schema=place.schema)}")
    try:
        with pytest.raises(InvalidUsage, match=said):
            place.sources.create("other", place.declared(publication="mine"))
    finally:
        place.run("DROP PUBLICATION mine")
