"""An instance of a source of tables that dies before any one of its requests, or after: the next one continues.

One of the two tables has no primary key, and each row that comes to one comes to the other one with it.

It dies while it makes the first snapshot, agrees on it, makes it durable, and continues from there; or a command does.

An instance that dies at any request while transactions wait: no time ever shows half of one; the end is right.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.sources import Files, Ingestion, Meaning, Postgres, Sources, Transactions
from tests import servers
from tests.bank import MARKS, Bank, Told, by_time, sums
from tests.faults.test_collection_commands import Died, Dying
from tests.ingests import CONFIG, step_on
from tests.worlds import World

STEP = 1 if os.environ.get("PERSIST_FAULTS") == "all" else 29
NUMBERS = count()


@pytest.fixture(scope="module")
def sql() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(servers.logical_server().url, autocommit=True) as connection:
        yield connection


class Story:
    """Two tables of its own, with a source of both; or with the second one to be added (`adds`)."""

    def __init__(self, sql: psycopg.Connection[Any], *, adds: bool = False) -> None:
        self.sql, self.world, self.table = sql, World(), f"public.deaths{next(NUMBERS)}"
        self.run("CREATE TABLE {t} (id int PRIMARY KEY, word text)", "INSERT INTO {t} VALUES (1, 'one'), (2, 'two')")
        self.run("CREATE TABLE {t}b (id int)", "ALTER TABLE {t}b REPLICA IDENTITY FULL")
        self.tables = (self.table, f"{self.table}b")
        self.adds = adds
        self.declared = Postgres(url=servers.logical_server().url, tables=self.tables[: 2 - adds])
        self.sources = Sources(self.world.client(CONFIG).controller())
        self.known: dict[int, Any] = {}

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.sql.execute(statement.format(t=self.table).encode())

    def catch_up(self) -> None:
        self.world.clock.advance(10)
        instance = self.sources.open("s")
        try:
            for _ in range(3):
                with suppress(PersistError):
                    instance.step()
            instance.step()
        finally:
            instance.close()

    def begin(self) -> None:
        self.sources.create("s", self.declared, retention=0)
        for _ in range(2 * self.adds):  # it uses its first snapshot up
            self.catch_up()

    def has_joined(self) -> bool:
        marks = self.sources.show("s").durable
        return not self.adds or self.tables[1] in marks

    def learn(self) -> None:
        """What was read once is so for ever, and has all of each transaction."""
        controller = self.sources.controller
        if not self.has_joined():
            return
        with ExitStack() as opened:
            rows, others = (opened.enter_context(controller.open_reader(f"s/{table}")) for table in self.tables)
            upper = min(reader.fetch_upper().time or 0 for reader in (rows, others))
            since = max((rows.since.time or 0), (others.since.time or 0) + self.adds)
            for as_of in {*self.known, upper - 1}:
                if as_of >= since:
                    found = sorted((one["id"], one["word"]) for one in rows.snapshot(as_of).to_pylist())
                    assert self.known.setdefault(as_of, found) == found
                    both = [one["id"] for one in others.snapshot(as_of).to_pylist()]
                    assert sorted(both) == [id_ for id_, _ in found if id_ >= 5], f"half of a transaction at {as_of}"

    def check(self) -> None:
        self.catch_up()
        self.learn()
        rows = self.sql.execute(f"SELECT id, word FROM {self.table} ORDER BY id".encode()).fetchall()
        assert self.known[max(self.known)] == rows

    def close(self, dying: Dying) -> None:
        dying.k = None
        for name in self.sources.list():
            self.sources.drop(name)
        mine = self.sql.execute("SELECT count(*) FROM pg_replication_slots WHERE NOT temporary").fetchone()
        published = self.sql.execute("SELECT count(*) FROM pg_publication").fetchone()
        self.world.close()
        self.run("DROP TABLE {t}, {t}b")
        assert mine == published == (0,), "something was left behind"


@contextmanager
def dropping(instance: Ingestion) -> Iterator[Ingestion]:
    """The connections of who dies end."""
    try:
        yield instance
    finally:
        if instance._reader is not None:
            instance._reader.close()


def ingesting(sql: psycopg.Connection[Any], dying: Dying, *, adds: bool) -> int:
    story = Story(sql, adds=adds)
    try:
        story.begin()
        theirs = Sources(story.world.client(CONFIG, plan=dying).controller())
        with suppress(Died), ExitStack() as opened:
            if adds:
                theirs.add_table("s", story.tables[1])
            other = opened.enter_context(dropping(theirs.open("s")))
            for n in range(3 + 3 * adds):
                other.step()
                story.world.clock.advance(10)
                story.run(
                    "BEGIN",
                    f"INSERT INTO {{t}} VALUES ({n + 5}, 'x')",
                    f"INSERT INTO {{t}}b VALUES ({n + 5})",
                    "COMMIT",
                )
                story.run("UPDATE {t} SET id = -id WHERE id = 1")
        if adds:
            story.sources.add_table("s", story.tables[1])
        if story.sources.show("s").time:
            story.learn()
        story.run("UPDATE {t} SET word = 'later'")
        story.check()
        return dying.seen
    finally:
        story.close(dying)


@pytest.mark.parametrize(("happens", "adds"), [(True, False), (False, False), (True, True)])
def test_the_next_instance_goes_on_where_one_died(sql: psycopg.Connection[Any], happens: bool, adds: bool) -> None:
    total = ingesting(sql, Dying(None, happens=True), adds=adds)
    assert total > 50
    for k in range(1 + happens, total + 1, STEP * (1 + adds) if STEP > 1 else 1):
        ingesting(sql, Dying(k, happens=happens or (adds and k % 2 == 0)), adds=adds)


def commanding(sql: psycopg.Connection[Any], what: str, dying: Dying) -> int:
    story = Story(sql)
    try:
        theirs = Sources(story.world.client(CONFIG, plan=dying).controller())
        if what != "create":
            story.sources.create("s", story.declared)
            story.catch_up()
        with suppress(Died):
            if what == "create":
                theirs.create("s", story.declared, command="one")
            else:
                (theirs.drop if what == "drop" else theirs.reset)("s")
        if what == "create":
            story.sources.create("s", story.declared, command="one")
        elif what == "reset":
            story.sources.reset("s")
        else:
            with suppress(PersistError):
                story.sources.drop("s")
            story.sources.create("s", story.declared, command="two")
        story.check()
        return dying.seen
    finally:
        story.close(dying)


@pytest.mark.parametrize("what", ["create", "drop", "reset"])
def test_what_a_command_left_the_next_one_finishes(sql: psycopg.Connection[Any], what: str) -> None:
    total = commanding(sql, what, Dying(None, happens=True))
    for k in range(1, total + 1, 2 * STEP if STEP > 1 else 1):
        commanding(sql, what, Dying(k, happens=k % 2 == 0))


ALL = os.environ.get("PERSIST_FAULTS") == "all"
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64 not null"})
STAGES = 5


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_another_instance_goes_on_where_one_died(tmp_path: Path, happens: bool, in_order: bool) -> None:
    total = story(tmp_path / "whole", Dying(None, happens=True), in_order=in_order)
    assert total > 20
    for k in range(1, total + 1) if ALL else range(1 + happens + 2 * in_order, total + 1, 23):
        story(tmp_path / f"{k}", Dying(k, happens=happens), in_order=in_order)


def story(folder: Path, dying: Dying, *, in_order: bool) -> int:
    """Two instances; the second one dies so. Answers its requests."""
    folder.mkdir()
    world, dice = World(), random.Random(3)
    bank = Bank(dice)
    for _ in range(8):
        bank.transfer()
    try:
        sources = Sources(world.client(CONFIG).controller())
        how = Transactions(topic=f"{MARKS}.jsonl", in_order=in_order)
        meaning = Meaning(envelope="debezium", transactions=how)
        sources.create("s", Files(place=str(folder), format="jsonl"), SCHEMA, meaning=meaning, shards=2)
        first, client = sources.open("s"), world.client(CONFIG, plan=dying)
        seen: dict[Any, dict[int, int]] = {}
        told = bank.with_repeats()
        for stage in range(STAGES):
            grow(folder, told, dice, stage)
            if 0 < stage < 4:
                world.clock.advance(2)
                with suppress(Died, PersistError):
                    Sources(client.controller()).open("s").step()
            look(sources, seen)
            if stage != 1:
                step_on(world, first)
                look(sources, seen)
        for _ in range(3):
            step_on(world, first)
        assert look(sources, seen) == bank.balances
        with sources.controller.open_reader("s/waiting") as reader:
            assert {row["what"] for row in reader.snapshot().to_pylist()} == {"done"}
        return dying.seen
    finally:
        dying.k = None
        world.close()


def grow(folder: Path, told: list[Told], dice: random.Random, stage: int) -> None:
    """More of each topic is there, of each as much as chance has it; at last all of it."""
    for topic in {one.topic for one in told}:
        lines = [one.value + b"\n" for one in told if one.topic == topic]
        path = folder / f"{topic}.jsonl"
        known = path.read_bytes().count(b"\n") if path.exists() else 0
        upto = len(lines) if stage == STAGES - 1 else dice.randrange(known, len(lines) + 1)
        with path.open("ab") as file:
            file.writelines(lines[known:upto])


def look(sources: Sources, seen: dict[Any, dict[int, int]]) -> dict[int, int]:
    """What is there at each time: whole transfers, and the same as ever before. Answers the newest."""
    with sources.controller.open_reader("s") as reader:
        if not reader.fetch_upper().time:
            return {}
        found = by_time(reader.changes(None).to_pylist())
    for time, contents in found.items():
        assert sums(contents)
        assert seen.setdefault(time, contents) == contents
    assert set(seen) == set(found)
    return found[max(found)] if found else {}
