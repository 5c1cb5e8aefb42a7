"""Writes from Spark into collections, without a JVM: all shards in one transaction, across handovers, once."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as t

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.location.wrap.spending import Spending
from persist_lib.spark import sink
from persist_lib.spark.sink import BatchWriter, StreamWriter
from persist_lib.testing import contents_of
from tests.renditions import Told, handed
from tests.unit.spark.test_writes import FRAME, SCHEMA, WRONG, Driver, _fresh, rows

__all__ = ["_fresh"]
WIDER = persist.Schema(key=SCHEMA.key, value={"word": "string", "more": "int64"})


class CollectionDriver(Driver):
    def __init__(self, folder: Path, **options: str) -> None:
        super().__init__(folder, table="c", shards="3", **options)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return CollectionDriver(tmp_path / "data")


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with persist.open(tmp_path / "data") as client, client.controller() as controller:
        yield controller


def contents(controller: Controller, as_of: int | None = None) -> Counter[Any]:
    with controller.open_reader("c") as reader:
        return contents_of(reader.snapshot(as_of, diff=True).to_arrow())


@pytest.mark.parametrize("count", [3, 9_000], ids=["inline", "objects"])
def test_a_step_that_commits_again_writes_once(driver: Driver, controller: Controller, count: int) -> None:
    driver.batch([rows(*((id_, "a") for id_ in range(1, count))), rows((count, "a"))], commits=3)
    assert contents(controller) == Counter({(id_, "a"): 1 for id_ in range(1, count + 1)})


def upper(controller: Controller) -> persist.Antichain:
    return controller.describe("c").upper


def test_a_batch_creates_the_collection_and_is_one_time_of_all_shards(driver: Driver, controller: Controller) -> None:
    driver.batch([rows(*((i, "a") for i in range(20))), [], rows((1, "a"))], times=2)
    assert contents(controller) == Counter({(i, "a"): 1 + (i == 1) for i in range(20)})
    found = controller.describe("c")
    assert (found.schema, found.upper, len(found.active.shards)) == (SCHEMA, persist.at(1), 3)
    for name in found.active.shards:
        state = controller.client.machine(name).fetch().state
        assert (state.upper, dict(state.writers)) == (persist.at(1), {})
        assert state.count, "each has some"


def test_changes_and_times(driver: Driver, controller: Controller) -> None:
    driver.batch([rows((3, "c")), rows((9, "z"))])
    before = upper(controller)
    timed = t.StructType(
        [*FRAME, t.StructField("_diff", t.LongType(), False), t.StructField("_time", t.LongType(), False)]
    )
    changes = [{"id": 9, "word": "z", "_diff": -1, "_time": 5}, {"id": 2, "word": "b", "_diff": 2, "_time": 8}]
    driver.batch([changes[:1], changes[1:]], timed, lower=str(before.time), upper="10")
    assert [contents(controller, at)[(9, "z")] for at in (4, 5, 9)] == [1, 0, 0]
    assert contents(controller)[(2, "b")] == 2
    driver.batch([rows((7, "at"))], at="20")
    assert upper(controller) == persist.at(21)


@pytest.mark.parametrize(
    ("options", "frame", "overwrite", "message"),
    [one for one in WRONG if "table" not in one[0] and "location" not in one[0]],
)
def test_what_is_wrong_is_refused_where_it_is_planned(
    driver: Driver, controller: Controller, options: dict[str, str], frame: t.StructType, overwrite: bool, message: str
) -> None:
    driver.batch([rows((1, "a"))])
    with pytest.raises(persist.PersistError, match=message):
        BatchWriter({**driver.options, **options}, frame, overwrite)
    assert upper(controller) == persist.at(1)


def test_what_collections_cannot_take_is_said(driver: Driver, controller: Controller, tmp_path: Path) -> None:
    with pytest.raises(persist.NotFound, match=r"no table 'c' .*key"):
        BatchWriter({name: value for name, value in driver.options.items() if name != "key"}, FRAME, False)
    controller.create("c", SCHEMA, shards=3, mode="append")
    with pytest.raises(persist.InvalidUsage, match="identical data"):
        driver.batch([rows((1, "a"))])
    with pytest.raises(persist.InvalidUsage, match="shards"):
        BatchWriter({**driver.options, "shards": "many"}, FRAME, False)
    controller.tables().create("t", persist.Schema(key=SCHEMA.key, value=SCHEMA.value))
    with pytest.raises(persist.InvalidUsage, match="takes no option shards"):
        BatchWriter({**driver.options, "table": "t", "times": "ms"}, FRAME, False)
    with pytest.raises(persist.InvalidUsage, match="shards"):
        BatchWriter({**driver.options, "table": "new", "shards": "none"}, FRAME, False)
    assert sorted(controller.list()) == ["c", "t"]


def test_epochs_are_written_once_and_handovers_do_not_matter(driver: Driver, controller: Controller) -> None:
    driver.epoch(0, [rows((0, "a"))])
    driver.epoch(0, [rows((0, "a"))], commits=2)
    given = {"checkpointLocation": "/checkpoints/s", **driver.options}
    writer = pickle.loads(pickle.dumps(StreamWriter(given, FRAME, False)))
    answers = [driver.run(writer, rows(*((i, "b") for i in range(10))), FRAME)]
    handed(controller, Told(), shards=5)
    for _ in range(2):
        StreamWriter(given, FRAME, False).commit(answers, 1)
    driver.epoch(1, [rows((5, "not again"))])
    driver.epoch(2, [rows((11, "c"))])
    expected = Counter({(0, "a"): 1, (11, "c"): 1, **{(i, "b"): 1 for i in range(10)}})
    assert contents(controller) == expected
    [stage] = sink._stages.values()
    assert stage.ticket.rendition.number == 2, "later epochs write for the new rendition"  # type: ignore[union-attr]
    driver.query = "another-checkpoint"
    with pytest.raises(persist.InvalidUsage, match=r"forget_producer\('c.*renditions'") as raised:
        driver.epoch(0, [rows((0, "a"))])
    assert contents(controller) == expected
    fields: dict[str, Any] = dict(raised.value.fields)
    controller.client.forget_producer(fields["shard"], fields["producer"], expected=fields["last"])
    driver.epoch(0, [rows((12, "d"))])
    assert contents(controller) == expected + Counter({(12, "d"): 1})


def test_a_collection_that_was_dropped_and_made_again_is_another_one(driver: Driver, controller: Controller) -> None:
    driver.epoch(0, [rows((0, "a"))])
    controller.drop("c")
    driver.epoch(1, [rows((1, "b"))])
    assert contents(controller) == Counter({(1, "b"): 1})


def test_an_epoch_asks_the_location_little(driver: Driver) -> None:
    costs = []
    for number in range(4):
        with Spending() as spent:
            driver.epoch(number, [rows((number, "a"), (number + 10, "b"))])
        costs.append((spent.cost.commits, spent.cost.queries))
    assert costs[2] == costs[3] <= (4, 20), "one transaction over three shards and the promise"


def test_a_batch_with_a_query_and_an_epoch_is_written_once(driver: Driver, controller: Controller) -> None:
    for _ in range(3):
        driver.batch([rows((1, "a"))], query="load", epoch="4")
    driver.batch([rows((9, "late"))], query="load", epoch="3")
    assert contents(controller) == Counter({(1, "a"): 1})


def test_columns_that_were_added_meanwhile(driver: Driver, controller: Controller) -> None:
    driver.batch([rows((1, "a"))])

    def planned(**options: str) -> Any:
        return pickle.loads(pickle.dumps(BatchWriter({**driver.options, **options}, FRAME, False)))

    append, upsert = planned(), planned(upsert="true")
    answers = [driver.run(append, rows((2, "b")), FRAME)], [driver.run(upsert, rows((1, "lost")), FRAME)]
    controller.evolve("c", WIDER)
    append.commit(answers[0])
    with pytest.raises(persist.SchemaMismatch, match="Nothing was written"):
        upsert.commit(answers[1])
    upsert.abort(answers[1])
    driver.options.pop("key")
    driver.batch([rows((3, "c"))])
    assert contents(controller) == Counter({(i, word, None): 1 for i, word in ((1, "a"), (2, "b"), (3, "c"))})
