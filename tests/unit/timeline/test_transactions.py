"""Transactions over several tables: all or nothing, at one time, refused on conflicts; appliers, handovers, drops."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.timeline import Tables, wal_apply, wal_timeline
from tests.unit.timeline.banks import SCHEMA, UNIQUE, read, rows


@pytest.fixture
def tables(client: persist.Client) -> Tables:
    tables = client.controller().tables()
    tables.create("a", UNIQUE, mode="wal")
    tables.create("b", SCHEMA, shards=2)
    tables.insert("a", rows((1, 100), (2, 200)))
    return tables


def test_it_sees_its_own_changes_and_others_see_all_or_nothing(tables: Tables) -> None:
    with tables.transaction() as t:
        t.update("a", {"cents": pc.field("cents") - 10}, keys=[1])
        t.insert("b", rows((1, 10)))
        assert t.read("a", keys=[1], columns=["cents"]).to_pylist() == [{"cents": 90}]
        assert t.read("b").to_pylist() == [{"id": 1, "cents": 10}]
        assert (read(tables, "a"), read(tables, "b")) == ({1: 100, 2: 200}, {})
    assert t.time is not None
    assert (read(tables, "a"), read(tables, "b")) == ({1: 90, 2: 200}, {1: 10})
    assert read(tables, "a", t.time - 1) == {1: 100, 2: 200}


def test_it_reads_at_one_time_whatever_is_committed_meanwhile(tables: Tables) -> None:
    t = tables.transaction()
    tables.upsert("a", rows((1, 0)))
    tables.apply()
    tables.tidy()
    assert [row["cents"] for row in t.read("a", keys=[1]).to_pylist()] == [100]
    t.rollback()


def test_who_changes_what_another_changed_since_it_began_is_refused(tables: Tables) -> None:
    first, second, third = (tables.transaction() for _ in range(3))
    first.upsert("a", rows((1, 1)))
    second.upsert("a", rows((2, 2)))
    third.delete("a", [1])
    third.insert("b", rows((7, 7)))
    first.commit()
    second.commit()
    with pytest.raises(persist.WriteConflict, match="first") as refused:
        third.commit()
    assert refused.value.fields["keys"] == [{"id": 1}]
    assert (read(tables, "a"), read(tables, "b")) == ({1: 1, 2: 2}, {})


def test_write_skew_remains_as_the_docs_say(tables: Tables) -> None:
    first, second = tables.transaction(), tables.transaction()
    for t, other, mine in ((first, 1, 2), (second, 2, 1)):
        assert t.read("a", keys=[other]).to_pylist()[0]["cents"] > 0
        t.upsert("a", rows((mine, -50)))
    first.commit()
    second.commit()
    assert read(tables, "a") == {1: -50, 2: -50}


def test_two_inserts_of_one_key_conflict_also_through_the_constraint(tables: Tables) -> None:
    first, second = tables.transaction(), tables.transaction()
    first.insert("a", rows((3, 1)))
    second.insert("a", rows((3, 2)))
    first.commit()
    with pytest.raises(persist.WriteConflict):
        second.commit()
    with tables.transaction() as t:
        with pytest.raises(persist.ConstraintViolated):
            t.insert("a", rows((3, 2)))
        t.delete("a", [3])
        t.insert("a", rows((3, 2)))
    assert read(tables, "a")[3] == 2


def test_an_error_in_the_block_writes_nothing_and_an_ended_one_is_refused(tables: Tables) -> None:
    before = tables.read_time()
    with pytest.raises(KeyboardInterrupt), tables.transaction() as t:  # noqa: PT012 - the block is what is tested
        t.upsert("a", rows((1, 0)))
        raise KeyboardInterrupt
    assert tables.read_time() == before
    with pytest.raises(persist.InvalidUsage, match="has ended"):
        t.read("a")
    with pytest.raises(persist.InvalidUsage, match="has ended"):
        t.commit()


def test_a_timeline_in_yolo_mode_has_no_transactions(tables: Tables) -> None:
    tables.create("y", SCHEMA, timeline="other")
    with pytest.raises(persist.InvalidUsage, match="YOLO"):
        tables.transaction("other")


def test_reads_are_the_same_before_and_after_rows_are_applied_and_tidied(
    tables: Tables, client: persist.Client
) -> None:
    times = [tables.upsert(name, rows((1, i), (i, i))).time for i in range(2, 6) for name in ("a", "b")]
    before = [read(tables, name, time) for time in times for name in ("a", "b")]
    other = client.controller().tables()
    applied = other.apply()
    assert set(applied.tables) == {"a", "b"}
    assert [read(tables, name, time) for time in times for name in ("a", "b")] == before
    assert other.tidy() > 0
    assert other.apply().tables == ()
    fresh = client.controller().tables()
    for found in (tables, other, fresh):
        assert [read(found, name, time) for time in times for name in ("a", "b")] == before


def test_idle_tables_are_not_touched(tables: Tables, client: persist.Client) -> None:
    tables.insert("b", rows((1, 1)))
    tables.apply()
    shards = client.controller().describe("b").active.shards
    seqnos = [client.inspect(shard).seqno for shard in shards]
    for i in range(3):
        tables.upsert("a", rows((1, i)))
        tables.apply()
    assert read(tables, "b") == {1: 1}
    assert [client.inspect(shard).seqno for shard in shards] == seqnos


def test_the_wal_keeps_what_an_unapplied_table_has_not_got(tables: Tables, client: persist.Client) -> None:
    """A reader that comes later reads it through the WAL, whatever was tidied."""
    tables.apply()
    tables.insert("b", rows((1, 1)))
    tables.upsert("a", rows((1, 5)))
    line = tables._timelines.line("default")
    assert isinstance(line, wal_timeline.WalLine)
    wal_apply.apply_table(line, line.view("a"), client.runtime.deadline(10))
    tables.tidy()
    hold = client.inspect(line.shard).state.holds["collection"].since.time
    upper = min(
        client.inspect(shard).state.upper.time or 0 for shard in client.controller().describe("b").active.shards
    )
    assert hold is not None
    assert hold <= max(0, upper - 1)
    assert read(client.controller().tables(), "b") == {1: 1}


def test_a_table_is_copied_and_handed_over_while_transactions_go_on(tables: Tables, client: persist.Client) -> None:
    controller = client.controller()
    tables.insert("b", rows((1, 1), (2, 2)))
    listener = tables.listen("b", tables.read_time())
    made = controller.make_rendition("b", shards=3, copy=True)
    controller.copy_rendition("b", made.number)
    open_one = tables.transaction()
    open_one.upsert("b", rows((2, 0)))
    time = controller.hand_over("b", made.number)
    assert time >= tables.read_time()
    with pytest.raises(persist.WriteConflict, match="handed over"):
        open_one.commit()
    done = tables.insert("a", rows((9, 9)))  # another table goes on
    assert done.time is not None
    tables.apply()
    controller.copy_rendition("b", made.number, to_end=True)
    tables.upsert("b", rows((2, 22), (3, 3)))
    assert read(tables, "b") == {1: 1, 2: 22, 3: 3}
    tables.apply()
    assert read(client.controller().tables(), "b") == {1: 1, 2: 22, 3: 3}
    total = {1: 1, 2: 2}
    for event in listener.poll():
        if isinstance(event, persist.Updates):
            for row in sorted(event.table.to_pylist(), key=lambda row: (row["_time"], row["_diff"])):
                assert (
                    (total.pop(row["id"]) == row["cents"])
                    if row["_diff"] < 0
                    else total.setdefault(row["id"], row["cents"]) == row["cents"]
                )
    assert total == {1: 1, 2: 22, 3: 3}
    listener.close()


def test_what_was_read_stays_when_a_changed_copy_is_handed_over_to(tables: Tables, client: persist.Client) -> None:
    """The handover is beyond the WAL's upper, though the table itself lags far behind it."""
    controller = client.controller()
    tables.insert("b", rows((1, 1)))
    tables.apply()
    for i in range(5):
        tables.upsert("a", rows((1, i)))
    read_at = tables.read_time()
    before = read(tables, "b", read_at)
    made = controller.make_rendition("b", copy=True)

    def negated(table: pa.Table) -> pa.Table:
        return table.set_column(1, "cents", pc.negate(table.column("cents")))

    controller.copy_rendition("b", made.number, transform=negated)
    with pytest.raises(persist.HandoverRefused):
        controller.hand_over("b", made.number, at=read_at)
    time = controller.hand_over("b", made.number)
    assert time > read_at
    tables.apply()
    controller.copy_rendition("b", made.number, transform=negated, to_end=True)
    assert read(client.controller().tables(), "b", read_at) == before == {1: 1}
    assert read(tables, "b", time) == {1: -1}


def test_a_table_is_dropped_with_rows_that_were_not_applied(tables: Tables, client: persist.Client) -> None:
    tables.insert("b", rows((1, 1)))
    t = tables.transaction()
    t.upsert("a", rows((1, 5)))
    t.upsert("b", rows((1, 5)))
    client.controller().drop("b")
    with pytest.raises((persist.NotFound, persist.WriteConflict)):
        t.commit()
    assert read(tables, "a")[1] == 100
    assert tables.apply().tables == ("a",)
    assert tables.tidy() > 0
    tables.create("b", SCHEMA)
    assert read(tables, "b") == {}


def test_a_million_rows_are_one_transaction(tables: Tables) -> None:
    ids = np.arange(1_000_000)
    with tables.transaction() as t:
        t.insert("b", pa.table({"id": ids, "cents": ids % 7}))
        t.upsert("a", rows((1, 1)))
    assert tables.read("b", columns=["cents"]).to_arrow().num_rows == 1_000_000
    assert tables.read("b", columns=["cents"], diff=True).to_arrow().num_rows == 7
    tables.apply()
    assert tables.read("b").to_arrow().num_rows == 1_000_000
    assert read(tables, "a")[1] == 1


def test_a_read_of_ten_tables_asks_once_for_all_uppers(client: persist.Client) -> None:
    tables = client.controller().tables()
    for i in range(10):
        tables.create(f"t{i}", SCHEMA, mode="wal", timeline="ten")
    with tables.transaction("ten") as t:
        for i in range(10):
            t.insert(f"t{i}", rows((1, i)))

    def read_all() -> None:
        with tables.transaction("ten") as t:
            for i in range(10):
                assert t.read(f"t{i}").to_arrow().num_rows == 1

    read_all()
    with persist.Spending() as spent:
        read_all()
    assert (spent.cost.requests, spent.cost.commits) == (1, 0)
    with persist.Spending() as spent, tables.transaction("ten") as t:
        for i in range(10):
            t.upsert(f"t{i}", rows((1, i + 1)))
    assert (spent.cost.requests, spent.cost.commits) == (2, 1)


def test_a_hundred_tables_are_on_one_timeline(client: persist.Client) -> None:
    tables = client.controller().tables()
    for i in range(100):
        tables.create(f"t{i}", SCHEMA, mode="wal", timeline="many")
    for _ in range(2):
        with tables.transaction("many") as t:
            for i in range(0, 100, 7):
                t.upsert(f"t{i}", rows((1, i)))
    applied = tables.apply("many")
    assert len(applied.tables) == 15
    assert read(tables, "t98") == {1: 98}
    assert read(tables, "t1") == {}


def test_a_listener_goes_on_where_nothing_was_ever_applied(client: persist.Client, tables: Tables) -> None:
    """It lets go of the table as far as that has come, and not as far as the WAL has."""
    with tables.listen("a", 0) as listener:
        for number in range(3):
            tables.upsert("a", rows((1, number)))
            events = listener.poll()
            assert sum(isinstance(event, persist.Updates) for event in events) == 1
            client.heartbeat()
        tables.apply()
        client.heartbeat()
        tables.upsert("a", rows((1, 9)))
        updates = [event.table for event in listener.poll() if isinstance(event, persist.Updates)]
        assert [cents for table in updates for cents in table["cents"].to_pylist()] == [2, 9]
