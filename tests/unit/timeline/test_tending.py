"""Tending applies what is in a WAL alone and gives up what is in its tables, says so first, and then rests."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.catalog.describe import Tended
from persist_lib.catalog.wal import wal_shard
from persist_lib.core.state import State
from persist_lib.testing import Rival
from persist_lib.timeline import Tables
from tests.unit.timeline.banks import SCHEMA, UNIQUE, read, rows
from tests.worlds import World


@pytest.fixture
def tables(client: persist.Client) -> Tables:
    tables = client.controller().tables()
    tables.create("a", UNIQUE, mode="wal")
    tables.create("b", SCHEMA, shards=2)
    tables.create("idle", UNIQUE)
    tables.insert("a", rows((1, 100), (2, 200)))
    with tables.transaction() as t:
        t.upsert("a", rows((1, 50)))
        t.insert("b", rows((1, 50)))
    return tables


def wal(tables: Tables) -> State:
    (timeline,) = tables.controller.catalog.fetch().timelines.values()
    return tables.client.inspect(wal_shard(timeline.id)).state


def of_tables(tended: Tended) -> list[tuple[str, str, str]]:
    return [(s.collection, s.action, s.subject.split(" up to")[0]) for s in tended.steps if s.action in WAL_STEPS]


WAL_STEPS = ("apply", "tidy", "wait")
EXPECTED = [("a", "apply", "2 commits"), ("b", "apply", "1 commit"), ("timeline default", "tidy", "3 rows of its WAL")]


def test_a_dry_run_says_what_is_done_then_and_a_second_pass_finds_nothing(tables: Tables) -> None:
    controller = tables.controller
    before = {name: tables.client.inspect(name).seqno for name in tables.client.shards()}
    assert of_tables(controller.tend(dry_run=True)) == EXPECTED
    assert {name: tables.client.inspect(name).seqno for name in tables.client.shards()} == before, "nothing is changed"
    assert of_tables(controller.tend()) == EXPECTED
    assert controller.describe("a").upper == controller.describe("b").upper
    with controller.open_reader("b") as reader:
        assert reader.snapshot(diff=True).to_pylist() == [{"id": 1, "cents": 50, "_diff": 1}]
    assert controller.tend().steps == ()
    assert controller.tend(dry_run=True).steps == ()
    assert (read(tables, "a"), read(tables, "b")) == ({1: 50, 2: 200}, {1: 50})


def test_a_wal_that_was_tended_is_empty_and_keeps_no_history(tables: Tables) -> None:
    tables.controller.tend()
    state = wal(tables)
    assert state.holds["collection"].since == persist.at((state.upper.time or 0) - 1)
    tables.close()
    assert of_tables(tables.controller.tend()) == [("timeline default", "tidy", "history of its WAL")]
    assert tables.controller.tend().steps == ()
    tables.client.compact(wal_name(tables))
    assert sum(batch.count for batch in wal(tables).trace) == 0


def wal_name(tables: Tables) -> str:
    (timeline,) = tables.controller.catalog.fetch().timelines.values()
    return wal_shard(timeline.id)


def test_one_table_is_applied_without_the_others(tables: Tables) -> None:
    assert of_tables(tables.controller.tend("b")) == [("b", "apply", "1 commit")]
    assert [(one.table, one.commits) for one in tables.lag().tables] == [("a", 2)]


def test_lag_tells_how_much_and_since_when(tables: Tables) -> None:
    lag = tables.lag()
    assert [(one.table, one.commits, one.is_ready) for one in lag.tables] == [("a", 2, True), ("b", 1, True)]
    assert lag.first is not None
    assert read(tables, "a", lag.first - 1) == {}
    assert read(tables, "a", lag.first) == {1: 100, 2: 200}
    assert 0 < lag.tables[1].size < lag.tables[0].size < lag.unapplied == lag.size
    assert (lag.rows, lag.done, lag.upper) == (3, 0, tables.read_time() + 1)
    tables.apply()
    lag = tables.lag()
    assert (lag.tables, lag.first, lag.unapplied, lag.rows, lag.done) == ((), None, 0, 3, 3)
    tables.tidy()
    lag = tables.lag()
    assert (lag.rows, lag.done, lag.is_due()) == (0, 0, False)


def test_a_yolo_timeline_has_no_lag_and_a_wrong_one_is_named(tables: Tables) -> None:
    tables.create("y", UNIQUE, timeline="yolo")
    tables.insert("y", rows((1, 1)))
    assert (tables.lag("yolo").tables, tables.lag("yolo").is_due()) == ((), False)
    with pytest.raises(persist.InvalidUsage, match="there is no timeline 'nowhere'"):
        tables.lag("nowhere")


def test_a_table_whose_copy_is_not_complete_waits(tables: Tables) -> None:
    controller = tables.controller
    made = controller.make_rendition("b", shards=3, copy=True)
    controller.hand_over("b", made.number)
    tables.insert("b", rows((3, 3)))  # it looks at nothing, so it does not wait for the copy
    found = of_tables(controller.tend())
    assert [step for step in found if step[0] == "b"] == [("b", "apply", "1 commit"), ("b", "wait", "its WAL")]
    controller.copy_rendition("b", made.number, to_end=True)
    controller.tend()
    controller.tend()  # holds follow once the copy is beyond the handover: never further than what is there
    assert controller.tend().steps == ()
    assert read(tables, "b") == {1: 50, 3: 3}


def test_a_handover_without_new_rows_is_completed_by_tending(tables: Tables) -> None:
    controller = tables.controller
    controller.tend()
    made = controller.make_rendition("idle", shards=3, copy=True)
    controller.copy_rendition("idle", made.number)
    controller.hand_over("idle", made.number)
    tables.close()
    assert ("idle", "apply", "nothing") in of_tables(controller.tend())
    controller.copy_rendition("idle", made.number, to_end=True)
    controller.tend()
    controller.tend()  # holds follow once the copy is beyond the handover: never further than what is there
    assert controller.tend().steps == ()
    with persist.open(tables.client.url, read_only=True) as client:
        assert read(client.controller().tables(), "idle") == {}


def test_a_listener_begins_before_what_the_wal_keeps(tables: Tables) -> None:
    """What the WAL has given up is in the table."""
    start = tables.read_time()
    tables.upsert("a", rows((1, 60)))
    tables.controller.tend()
    tables.read_time()
    tables.client.heartbeat()
    tables.controller.tend()
    tables.upsert("b", rows((7, 7)))  # the WAL goes on
    assert wal(tables).since > persist.at(start + 1)
    with persist.open(tables.client.url) as client, client.controller().tables() as others:
        found = others.changes("a", start).to_arrow()
        assert sorted(zip(found["cents"].to_pylist(), found["_diff"].to_pylist(), strict=True)) == [(50, -1), (60, 1)]
        assert others.changes("b", start).to_arrow()["cents"].to_pylist() == [7]


def test_a_client_that_only_reads_goes_on_where_the_wal_was_tidied_meanwhile(tables: Tables) -> None:
    with persist.open(tables.client.url, read_only=True) as client:
        reading = client.controller().tables()
        assert read(reading, "a") == {1: 50, 2: 200}
        for number in range(3):
            tables.upsert("a", rows((1, number)))
            tables.controller.tend()
            tables.read_time()
            tables.client.heartbeat()  # nobody holds the WAL's history any more
        assert wal(tables).since > persist.at(tables.lag().first or 1)
        assert read(reading, "a") == {1: 2, 2: 200}
        tables.drop("a")
        tables.controller.tend()
        with pytest.raises(persist.NotFound):
            reading.read("a")
        assert read(reading, "b") == {1: 50}


def test_a_dropped_table_is_in_nobodys_way(tables: Tables) -> None:
    tables.drop("a")
    tables.close()  # it reads the table's shards
    assert of_tables(tables.controller.tend()) == [EXPECTED[1], ("timeline default", "tidy", "4 rows of its WAL")]
    assert tables.controller.tend().steps == ()


def test_tidying_goes_on_where_others_commit_meanwhile() -> None:
    """What it retracts is there also later; so a busy WAL does not starve it."""
    world = World()
    others = world.client().controller().tables()
    others.create("a", UNIQUE, mode="wal")
    others.insert("a", rows((1, 1)))
    rival = Rival(world.inner.consensus)
    tables = world.client(rival=rival).controller().tables()
    tables.upsert("a", rows((2, 2)))
    tables.apply()
    for number in range(5):
        rival.before_next(lambda number=number: others.upsert("a", rows((3, number))))  # type: ignore[misc]
    assert tables.tidy() == 2
    assert rival.waiting == 0
    assert read(others, "a") == read(tables, "a") == {1: 1, 2: 2, 3: 4}
    assert [(one.table, one.commits) for one in others.lag().tables] == [("a", 5)]
