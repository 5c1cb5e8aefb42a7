"""A table that is added to a running source: it joins at one place of the log, and all outputs show one moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from persist_lib.catalog.records import OF_JOINED
from persist_lib.errors import Determinate, InvalidUsage, NameTaken, NotFound, ShardFinished, SinceViolation
from persist_lib.schema.schema import Schema
from persist_lib.sources import Sources
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.postgres import snapshot
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.running import Ingestion
from persist_lib.sources.targets import Target
from persist_lib.testing import check_location
from tests.integration.test_postgres_source import Shop
from tests.integration.test_postgres_source_tables import bank, cents, dying, output, sums, transferring

ALL = 3 * 5 * 100


def third(shop: Shop) -> None:
    """A source of two tables that is beyond its first snapshot, and a third table."""
    bank(shop)
    shop.run("CREATE TABLE c (id int PRIMARY KEY, cents int, at date)")
    shop.run("INSERT INTO c SELECT n, 100, '2026-01-01' FROM generate_series(1, 5) n")
    begun(shop)


def begun(shop: Shop) -> None:
    for _ in range(3):
        shop.catch_up()
        shop.world.clock.advance(10)


def add(shop: Shop, table: str = "c", **options: Any) -> Any:
    return shop.sources.add_table("s", f"{shop.schema}.{table}", **options)


def joined(shop: Shop, table: str = "c") -> int:
    """The time at which a table joined; it cannot be read as of times before, but for the one just before."""
    with shop.controller.open_reader(output(shop, table)) as reader:
        since = reader.since.time
        assert since
        with pytest.raises(SinceViolation):
            reader.snapshot(since - 1)
        assert reader.snapshot(since).to_pylist() == []
    return since + 1


def check(shop: Shop, total: int = ALL, tables: str = "abc") -> None:
    """All money is there at each time from the one on at which the last table joined, and each table is as it is."""
    check_location(shop.world.client())
    when = joined(shop)
    found = {at: sum_ for at, sum_ in sums(shop, *tables).items() if at >= when}
    assert when in found
    assert set(found.values()) == {total}
    for table in tables:
        assert cents(shop, table) == dict(shop.rows(f"SELECT id, cents FROM {table}"))


def move(shop: Shop, source: str, target: str, n: int = 7) -> None:
    shop.run(
        "BEGIN", f"UPDATE {source} SET cents = cents - {n} WHERE id = 1",
        f"UPDATE {target} SET cents = cents + {n} WHERE id = 1", "COMMIT",
    )  # fmt: skip


def test_a_table_joins_while_money_moves_whoever_dies(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    third(shop)
    sessions = [threading.Thread(target=transferring, args=(shop, seed, "abc")) for seed in range(3)]
    for session in sessions:
        session.start()
    add(shop)
    dying(monkeypatch)
    deaths = 0
    while any(session.is_alive() for session in sessions) or deaths < 3:
        try:
            shop.catch_up()
        except KeyboardInterrupt:
            deaths += 1
        if deaths < 3:
            transferring(shop, 9, "abc")
    for session in sessions:
        session.join()
    monkeypatch.undo()
    shop.catch_up()
    check(shop)
    assert add(shop).time, "again it changes nothing"
    begun(shop)
    shop.run("TRUNCATE a, c", "INSERT INTO c VALUES (9, 9)")
    shop.catch_up()
    assert (cents(shop, "a"), cents(shop, "c")) == ({}, {9: 9})
    record = shop.sources.find("s")
    assert record.v == OF_JOINED, "an earlier release would leave the table out"
    with pytest.raises(ShardFinished):
        Choices(shop.world.client(), record.choices_of(f"{shop.schema}.c")).find()
    shop.sources.reset("s")
    shop.catch_up()
    assert (cents(shop, "a"), cents(shop, "c")) == ({}, {9: 9})
    assert shop.sources.drop("s") == []
    assert (shop.slots(), shop.publications()) == ([], [])


@pytest.mark.parametrize("times", [1, 2])
def test_what_others_bound_beyond_the_snapshot_lets_it_be_copied_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """An instance that does not know of the table yet takes a step while another one copies it."""
    third(shop)
    other = Sources(shop.world.client().controller()).open("s")
    other.step()
    add(shop)
    copied, copies = snapshot.copied, []

    def rivalled(*args: Any) -> Iterator[bytes]:
        yield from copied(*args)
        copies.append(args)
        if len(copies) <= times:
            move(shop, "a", "c")
            shop.world.clock.advance(1)
            other.step()

    monkeypatch.setattr(snapshot, "copied", rivalled)
    shop.catch_up()
    assert len(copies) == times + 1
    move(shop, "c", "b")
    shop.catch_up()
    check(shop)
    with pytest.raises(Determinate, match=r"the table \S+\.c was added to the source"):
        other.step()
    other.close()
    assert set(sums(shop, "a", "b").values()) != {2 * 500}


def test_an_instance_that_does_not_know_the_table_gives_up_nothing_that_it_needs(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one died once all outputs but one were written, so that the others are further than the table."""
    third(shop)
    other = shop.sources.open("s")
    other.step()
    add(shop)
    begun(shop)
    late, append = shop.sources.find("s").collections[f"{shop.schema}.c"], Target.append

    def dies(self: Target, *args: Any) -> None:
        if self.id == late:
            raise KeyboardInterrupt
        append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "append", dies)
        for _ in range(2):
            move(shop, "a", "c")
            shop.world.clock.advance(10)
            with closing(shop.sources.open("s")) as dying, pytest.raises(KeyboardInterrupt):
                dying.step()
    shop.world.clock.advance(10)
    with closing(other), pytest.raises(Determinate, match="was added to the source"):
        other.step(mints=False)  # it has looked before
    with closing(shop.sources.open("s")) as instance:
        instance.step()
    check(shop)


def test_an_instance_that_runs_takes_the_table_and_others_are_copied_after_it(shop: Shop) -> None:
    third(shop)
    shop.run("CREATE TABLE d (id int NOT NULL, cents int)", "ALTER TABLE d REPLICA IDENTITY FULL")
    shop.run("INSERT INTO d VALUES (1, 5), (1, 5)")
    steps: list[Any] = []

    def told(progress: Any) -> None:
        steps.append(progress)
        shop.world.clock.advance(1)
        if len(steps) == 1:
            add(shop)
            add(shop, "d")
        move(shop, "a", "c")

    shop.sources.run("s", told=told, stop=lambda: len(steps) > 9, interval_s=0.01)
    shop.catch_up()
    check(shop)
    assert [row["_diff"] for row in shop.contents(output(shop, "d"))] == [2]
    assert joined(shop, "d") > joined(shop)
    assert [*shop.sources.find("s").joined] == [f"{shop.schema}.c", f"{shop.schema}.d"]


def test_a_large_table_joins_in_pieces_and_what_is_bad_of_it_is_named(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4096)
    third(shop)
    shop.run("INSERT INTO c SELECT n, 100, CASE n % 50 WHEN 0 THEN 'infinity' END::date FROM generate_series(6, 600) n")
    add(shop)
    shop.run("UPDATE c SET at = 'infinity' WHERE id = 2")  # in the log and in the snapshot
    monkeypatch.setattr(Ingestion, "window_bytes", 4096)
    copied = snapshot.copied

    def moving(*args: Any) -> Iterator[bytes]:
        for part in copied(*args):
            move(shop, "a", "c")
            yield part

    monkeypatch.setattr(snapshot, "copied", moving)
    shop.catch_up()
    shop.catch_up()
    when = joined(shop)
    assert {sum_ for at, sum_ in sums(shop, *"abc").items() if at >= when} == {(10 + 587) * 100}
    assert {row["partition"] for row in shop.contents("s/errors")} == {f"{shop.schema}.c"}
    assert len(shop.contents("s/errors")) == 13


def test_a_transaction_that_wrote_to_the_table_before_it_was_added_is_in_it_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    third(shop)
    with psycopg.connect(shop.server.url) as other:
        other.execute(f"UPDATE {shop.schema}.c SET cents = 107 WHERE id = 1".encode())
        other.execute(f"UPDATE {shop.schema}.a SET cents = 93 WHERE id = 1".encode())
        add(shop)
        copied = snapshot.copied

        def ends(*args: Any) -> Iterator[bytes]:
            other.commit()
            yield from copied(*args)

        monkeypatch.setattr(snapshot, "copied", ends)
        shop.catch_up()
    move(shop, "c", "b")
    shop.catch_up()
    check(shop)


def test_what_cannot_be_added_is_refused_with_what_to_do(shop: Shop) -> None:
    bank(shop)
    shop.run("CREATE TABLE c (id int PRIMARY KEY, cents int)", "CREATE VIEW v AS SELECT 1")
    with pytest.raises(Determinate, match=r"has not used its own first snapshot yet.*run an instance"):
        add(shop)
    begun(shop)
    for table, error, said in (
        ("none", NotFound, "has no table"), ("v", InvalidUsage, "no plain table"),
        ("A", InvalidUsage, "are one table: name it once"),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            add(shop, table)
    with pytest.raises(InvalidUsage, match="the key of"):
        add(shop, schema=Schema({"cents": "int32 not null"}))
    shop.controller.create(output(shop, "c"), Schema({"id": "int64"}))
    with pytest.raises(NameTaken, match=r"there is a collection 's/\S+\.c' already"):
        add(shop)
    shop.controller.drop(output(shop, "c"))
    with pytest.raises(NotFound, match="no source"):
        shop.sources.add_table("none", "public.c")
    assert not shop.sources.find("s").joined
    assert shop.rows("SELECT count(*) FROM pg_publication_rel") == [(2,)]
    add(shop, schema=Schema({"id": "int64 not null"}))
    add(shop, schema=Schema({"id": "int64 not null"}))
    with pytest.raises(NameTaken, match=r"has the table \S+\.c already, with other columns: \(id: int64 not null\)"):
        add(shop, schema=Schema({"id": "int32 not null"}))
    shop.catch_up()
    assert [*shop.sources.show("s").collections].count(f"{shop.schema}.c") == 1
    shop.sources.drop("s")
    shop.create("a")
    with pytest.raises(InvalidUsage, match="has one output: declare a second source"):
        add(shop)


def test_a_publication_of_the_users_gets_the_table_by_them(shop: Shop) -> None:
    third(shop)
    shop.sources.drop("s")
    shop.run("CREATE PUBLICATION mine FOR TABLE ONLY a, ONLY b")
    declared = Postgres(url=shop.server.url, tables=(f"{shop.schema}.a", f"{shop.schema}.b"), publication="mine")
    shop.sources.create("s", declared)
    begun(shop)
    with pytest.raises(InvalidUsage, match=r'ALTER PUBLICATION "mine" ADD TABLE ONLY "\S+"."c";') as raised:
        add(shop)
    shop.run(str(raised.value.fields["run"]))
    add(shop)
    shop.catch_up()
    move(shop, "a", "c")
    shop.catch_up()
    check(shop)


@pytest.mark.parametrize("theirs", ["d", "cd"])
def test_calls_at_once_add_each_table_once(shop: Shop, monkeypatch: pytest.MonkeyPatch, theirs: str) -> None:
    third(shop)
    shop.run("CREATE TABLE d (id int PRIMARY KEY)")
    join = Postgres.join

    def rivalled(self: Postgres, *args: Any) -> Any:
        found = join(self, *args)
        monkeypatch.undo()
        others = Sources(shop.world.client().controller())
        for table in theirs:
            others.add_table("s", f"{shop.schema}.{table}")
        others.close()
        return found

    monkeypatch.setattr(Postgres, "join", rivalled)
    add(shop)
    found = shop.sources.find("s")
    assert isinstance(found.reader, Postgres)
    assert sorted(found.reader.tables) == [f"{shop.schema}.{table}" for table in "abcd"]
    assert found.joined == found.reader.tables[2:]
    shop.catch_up()
    check(shop)


def test_a_call_that_is_cut_off_is_finished_by_the_next_one(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    third(shop)
    with monkeypatch.context() as patch:
        patch.setattr(shop.sources.declared, "update", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add(shop)
    shop.catch_up()
    move(shop, "a", "c")
    with closing(Sources(shop.world.client().controller())) as others:
        others.add_table("s", f"{shop.schema}.c")
    add(shop)
    shop.catch_up()
    check(shop)
