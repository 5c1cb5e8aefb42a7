"""Tables of a timeline with a WAL under a schedule that one seed decides, while columns are added to one of them.

PERSIST_COLLECTION_SEEDS of them. Two writers by statements and transactions, in the columns in which they opened the
table; a listener; a process that adds columns; two that apply, tidy and tend. Requests are lost, late and doubled,
processes pause beyond their leases and crash, also between any two requests of an evolution. Whatever is read as of a
time is what everybody reads there, for ever, and no value of a column that was acknowledged is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.frontier import at
from persist_lib.simulate import Actor, Layout, TableStory
from persist_lib.simulate.table_story import WORLD
from tests.simulation.stories import COLLECTION_SEEDS, play

BASE = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True, times="ms")
STEPS = 6000
MOST = 4
"""How many columns are added."""
Rows = frozenset[tuple[tuple[str, int], ...]]


def wider(schema: persist.Schema) -> persist.Schema:
    """One column more."""
    new = persist.Schema({f"c{len(schema.value)}": "int64"}).key
    return persist.Schema(schema.key, [*schema.value, *new], unique=True, times="ms")


def plain(rows: list[dict[str, Any]], names: list[str] | None = None) -> Rows:
    """The rows, without what is null, and without other columns than these."""
    kept = ({k: v for k, v in row.items() if v is not None and (names is None or k in names)} for row in rows)
    return frozenset(tuple(sorted(row.items())) for row in kept)


class Evolving(TableStory):
    """One simulation. `found` has what was read by time and columns; None for all that the table had then."""

    roles: Mapping[str, int] = {"writer": 2, "listener": 1, "evolver": 1, "maintainer": 2}

    def __init__(self, seed: int) -> None:
        super().__init__(seed, BASE, Layout("timeline", "wal", 2), steps=STEPS)
        self.found: dict[tuple[int, tuple[str, ...] | None], Rows] = {}
        self.wrote: dict[int, list[str]] = {}
        self.number = 0

    def begin(self, client: persist.Client) -> None:
        for name in ("t", "u"):
            client.controller().tables().create(name, BASE, shards=2, mode="wal")

    def change(self, actor: Actor, client: persist.Client, table: persist.Table) -> None:
        for _ in range(4):
            self.number += 1
            self.write(actor, client, table, self.number)
            client.heartbeat()
            actor.sleep(actor.random.random())

    def write(self, actor: Actor, client: persist.Client, table: persist.Table, number: int) -> None:
        names = [column.name for column in table.schema.value]
        rows = [{"id": number * 10 + i, **dict.fromkeys(names, number)} for i in range(3)]
        if number % 4 == 0 and self.wrote and len(names) > 1:
            earlier = actor.random.choice(sorted(self.wrote))
            with suppress(persist.SchemaMismatch):  # it has something in a column that this program does not know
                table.update({names[-1]: number}, keys=[earlier * 10])
            return
        if number % 4 == 1:
            with client.transaction() as t:
                t.insert("u", [{"id": number, "n": number}])
                actor.sleep(actor.random.random())
                t.insert("t", rows)  # the table may have more columns by now
                actor.sleep(actor.random.random())
        elif number % 4 == 2:
            table.upsert(rows)
        else:
            table.append(rows)
        self.wrote[number] = names

    def evolver(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                actor.sleep(2 * actor.random.random())
                with suppress(*WORLD):
                    table = client.table("t")
                    if len(table.describe().schema.value) <= MOST:
                        table.evolve(wider(table.describe().schema))
                        self.did["evolve"] += 1
                client.heartbeat()

    def listen(self, actor: Actor, client: persist.Client) -> None:
        tables = client.controller().tables()
        as_of = tables.read_time()
        read = tables.read("t", as_of).to_pylist()
        self.see(as_of, None, plain(read))
        with tables.listen("t", as_of) as listening:
            names = listening.schema.names
            self.see(as_of, tuple(names), plain(read, names))
            total = Counter(plain(read, names))
            for _ in range(8):
                for event in listening.poll():
                    if isinstance(event, persist.Updates):
                        for row in event.table.to_pylist():
                            (one,) = plain([row], names)
                            total[one] += row["_diff"]
                    elif event.as_of is not None:
                        assert set(total.values()) <= {0, 1}, "a row is not what was there"
                        self.see(event.as_of, tuple(names), frozenset(+total))
                client.heartbeat()
                actor.sleep(actor.random.random())

    def see(self, as_of: int, names: tuple[str, ...] | None, rows: Rows) -> None:
        assert self.found.setdefault((as_of, names), rows) == rows, f"as of {as_of} it was something else"

    def judge(self, client: persist.Client) -> None:
        self.simulation.clock.advance(1000)
        for shard in client.shards():
            client.expire(shard)
        tables = client.controller().tables()
        tables.controller.tend()
        assert not client.controller().describe("t").pending
        tables.apply()
        since = client.table("t").describe().since
        for (as_of, names), rows in self.found.items():
            if since <= at(as_of):
                read = tables.read("t", as_of).to_pylist()
                assert plain(read, None if names is None else list(names)) == rows, f"as of {as_of}"
        there = {row["id"]: row for row in tables.read("t").to_pylist()}
        booked = {row["id"] for row in tables.read("u").to_pylist()}
        for number, columns in self.wrote.items():
            for id_ in range(number * 10, number * 10 + 3):
                assert {"n": number} == {"n": there[id_]["n"]}, "an acknowledged row is lost"
                assert None not in [there[id_][name] for name in columns], "a value of a column is lost"
            assert number % 4 != 1 or number in booked, "a part of a transaction"
        for number in booked:
            assert number * 10 in there, "a part of a transaction"


ADDING = (0, 1, 3)
"""Seeds whose stories add columns; in others, who would do so is killed first each time."""


@pytest.mark.parametrize("seed", range(COLLECTION_SEEDS))
def test_no_value_of_an_added_column_is_lost_and_everybody_reads_the_same(seed: int) -> None:
    story = play(Evolving(seed))
    assert story.wrote
    assert story.did["evolve"] or seed not in ADDING, "these have some, and each day has one of them"
