"""What a statement asks for: as much with thousands of other shards beside its timeline as with none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

import persist_lib as persist
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.timeline import Tables
from tests.unit.timeline.banks import SCHEMA, UNIQUE, rows

T = TypeVar("T")
OTHERS = 60


class Counting(AroundConsensus):
    """Counts requests by kind, and the heads that were asked for and answered."""

    def __init__(self, inner: object) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.kinds: list[str] = []
        self.answered: list[int] = []

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        self.kinds.append(operation.kind)
        return call()

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        found = super().heads(keys)
        self.answered.append(len(found))
        return found


@pytest.fixture
def counting() -> Iterator[tuple[persist.Client, Counting]]:
    location = open_location("memory:", create=True)
    counted = Counting(location.consensus)
    with persist.open(replace(location, consensus=counted), runtime=persist.Runtime(background=False)) as client:
        yield client, counted


def asked(counted: Counting, call: Callable[[], object]) -> tuple[list[str], list[int]]:
    counted.kinds.clear()
    counted.answered.clear()
    call()
    return list(counted.kinds), list(counted.answered)


@pytest.mark.parametrize("mode", ["yolo", "wal"])
def test_a_statement_asks_for_the_heads_of_its_timeline_alone(
    counting: tuple[persist.Client, Counting], mode: str
) -> None:
    client, counted = counting
    tables = client.controller().tables()
    tables.create("a", UNIQUE, mode=mode)  # type: ignore[arg-type]
    tables.create("b", SCHEMA, shards=2)
    for name in ("a", "b"):
        tables.insert(name, rows((1, 1)))

    def steps(tables: Tables) -> list[tuple[list[str], list[int]]]:
        verbs: list[Callable[[], object]] = [
            lambda: tables.upsert("a", rows((1, 2))),
            lambda: tables.upsert("a", rows((1, 1))),
            lambda: tables.read("a", key=[1]).to_pylist(),
            tables.read_time,
        ]
        for verb in verbs:
            verb()
        return [asked(counted, verb) for verb in verbs]

    alone = steps(tables)
    for n in range(OTHERS):
        client.open_writer(f"other{n}", SCHEMA).close()
    beside = steps(tables)
    assert beside == alone
    assert all(kinds.count("heads") for kinds, _ in alone)
    assert max(number for _, answered in alone for number in answered) <= 7, "catalog, WAL, renditions and shards"


def test_what_others_make_hand_over_and_commit_is_seen_by_the_next_statement(
    counting: tuple[persist.Client, Counting],
) -> None:
    client, _ = counting
    mine, theirs = client.controller().tables(), persist.open(client.location).controller().tables()
    mine.create("a", UNIQUE)
    mine.insert("a", rows((1, 1)))
    for turn in range(3):
        theirs.create(f"b{turn}", UNIQUE)
        done = theirs.insert(f"b{turn}", rows((turn, turn)))
        assert mine.read_time() >= (done.time or 0)
        assert mine.read(f"b{turn}").to_pylist() == [{"id": turn, "cents": turn}]
        assert (mine.upsert("a", rows((1, turn + 10))).time or 0) > (done.time or 0)
        assert theirs.read("a").to_pylist() == [{"id": 1, "cents": turn + 10}]
