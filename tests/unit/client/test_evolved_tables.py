"""Tables whose columns were renamed, widened, dropped, or given defaults, by all that reads and writes them."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.schema.schema import Column, check_schema, comes_before
from persist_lib.spark.collections import unleased
from persist_lib.testing import check_world
from tests.worlds import World

FIRST = persist.Schema({"id": "int64"}, {"state": "string", "cents": "int32", "seen": "date32"}, times="ms")
NOW = FIRST.rename({"state": "status"}).widen({"cents": "int64"}).drop("seen").add({"seen": "bool"})
CHANNEL = NOW.add({"channel": "string not null"}, {"channel": "web"})
ROWS = [
    {"id": 1, "state": "new", "cents": 5, "seen": dt.date(2026, 1, 1)},
    {"id": 2, "state": "paid", "cents": None, "seen": None},
]


@pytest.fixture(params=[{}, {"inline_bytes": 0}], ids=["inline", "objects"])
def client(world: World, request: pytest.FixtureRequest) -> persist.Client:
    return world.client(persist.Config(**request.param))


@pytest.fixture
def table(client: persist.Client) -> persist.Table:
    table = client.table("orders", FIRST)
    table.append(ROWS)
    return table


def rows(table: persist.Table, **options: Any) -> list[dict[str, Any]]:
    return table.read(**options).to_pylist()


def evolved(table: persist.Table, schema: persist.Schema = NOW) -> persist.Table:
    table.evolve(schema)
    return table


def test_all_changes_at_once_are_said_and_seen_as_of_any_time(table: persist.Table) -> None:
    past = table.describe().upper.time
    said = ("state renamed to status", "cents widened to int64", "seen dropped", "seen")
    assert table.evolve(NOW, dry_run=True) == said
    assert rows(table) == ROWS
    assert table.evolve(NOW) == said
    assert table.evolve(NOW) == (), "the same thing twice"
    want = [
        {"id": 1, "status": "new", "cents": 5, "seen": None},
        {"id": 2, "status": "paid", "cents": None, "seen": None},
    ]
    assert rows(table) == want
    assert past is not None
    assert rows(table, as_of=past - 1) == want
    assert table.describe().schema.names == ["id", "status", "cents", "seen"]
    table.upsert([{"id": 2, "cents": 2**40, "seen": True}])
    assert rows(table)[1] == {"id": 2, "status": "paid", "cents": 2**40, "seen": True}


def test_programs_with_the_older_columns_read_what_these_hold_and_append(
    client: persist.Client, table: persist.Table
) -> None:
    old = client.open_reader("orders", FIRST)
    evolved(table).append([{"id": 3, "status": "new", "cents": 7, "seen": True}])
    with client.open_writer("orders", FIRST) as write:
        write.apply([{"id": 4, "state": "late", "cents": 1, "seen": None}])
    for read in (old, client.open_reader("orders", FIRST)):
        found = read.snapshot().to_pylist()
        assert found == [
            *ROWS,
            {"id": 3, "state": "new", "cents": 7, "seen": None},
            {**ROWS[1], "id": 4, "state": "late", "cents": 1},
        ]
    assert rows(table)[-1] == {"id": 4, "status": "late", "cents": 1, "seen": None}
    table.upsert([{"id": 3, "cents": 2**40}])
    with pytest.raises(persist.SchemaMismatch, match=r"'cents' that int32 does not hold.*newest columns"):
        old.snapshot().to_arrow()
    check_world(client, "orders")


def test_a_program_that_declares_what_there_is_now_opens_it(client: persist.Client, table: persist.Table) -> None:
    evolved(table)
    declared = persist.Schema(
        {"id": "int64"}, {"status": "string", "cents": "int64", "seen": "bool"}, times="ms"
    )  # fmt: skip
    assert client.open_reader("orders", declared).snapshot().to_pylist() == rows(table)
    client.table("orders", declared).append([{"id": 3, "status": "x", "cents": 1, "seen": False}])
    assert rows(table)[-1] == {"id": 3, "status": "x", "cents": 1, "seen": False}
    assert client.table("orders").evolve(declared) == ()
    other = persist.Schema({"id": "int64"}, {"status": "string", "cents": "int64", "seen": "date32"}, times="ms")
    with pytest.raises(persist.SchemaMismatch):
        client.open_reader("orders", other)


def test_rows_that_lack_a_column_have_its_default(client: persist.Client, table: persist.Table) -> None:
    evolved(table, CHANNEL)
    assert [row["channel"] for row in rows(table)] == ["web", "web"]
    table.append([{"id": 3, "status": "a", "cents": 1, "seen": None}])
    table.append(pa.table({"id": [4], "status": ["b"], "cents": [1], "seen": [True]}))
    table.append([{"id": 5, "channel": "shop"}])
    table.upsert([{"id": 1, "status": "c"}, {"id": 5, "status": "d"}, {"id": 6, "status": "e"}])
    assert {row["id"]: row["channel"] for row in rows(table)} == {
        1: "web", 2: "web", 3: "web", 4: "web", 5: "shop", 6: "web",
    }  # fmt: skip
    with pytest.raises(persist.InvalidUsage, match="not null"):
        table.append([{"id": 7, "channel": None}])
    client.maintain("orders")
    check_world(client, "orders")


def test_an_older_program_changes_rows_that_have_the_default_and_no_others(
    client: persist.Client, table: persist.Table
) -> None:
    old = client.open_writer("orders", FIRST)
    evolved(table, FIRST.add({"channel": "string"}, {"channel": "web"}))
    table.upsert([{"id": 2, "channel": "shop"}])
    old.upsert([{"id": 1, "state": "old"}])
    with pytest.raises(persist.SchemaMismatch, match=r"\['channel'\] since this program opened it"):
        old.upsert([{"id": 2, "state": "old"}])
    assert [(row["state"], row["channel"]) for row in rows(table)] == [("old", "web"), ("paid", "shop")]


def test_what_dropped_columns_hold_is_retracted_and_does_not_count(client: persist.Client) -> None:
    schema = persist.Schema({"id": "int64"}, {"a": "string", "b": "string"}, unique=True, non_negative=True, times="ms")
    table = client.table("orders", schema)
    table.append([{"id": 1, "a": "x", "b": "y"}, {"id": 2, "a": "x", "b": "z"}])
    table.evolve(schema.drop("b"))
    with client.open_writer("orders", table.describe().schema) as write:
        upper = write.fetch_upper().time or 0
        pair = [{"id": 1, "a": "x", "_diff": -1, "_time": upper}, {"id": 1, "a": "n", "_time": upper}]
        write.compare_and_append(pair, upper, upper + 1)
    table.upsert([{"id": 2, "a": "m"}])
    assert rows(table) == [{"id": 1, "a": "n"}, {"id": 2, "a": "m"}]
    with pytest.raises(persist.ConstraintViolated):
        table.append([{"id": 1, "a": "again"}])
    table.delete([1])
    assert rows(table) == [{"id": 2, "a": "m"}]
    client.maintain("orders")
    check_world(client, "orders")


def test_filters_and_projections_are_of_the_columns_that_there_are(
    client: persist.Client, table: persist.Table
) -> None:
    evolved(table, CHANNEL)
    table.upsert([{"id": 2, "channel": "shop", "cents": 2**40}])
    both = rows(table)
    for condition, want in (
        (pc.field("channel") == "web", [1]), (pc.field("channel") == "shop", [2]),
        (pc.field("cents") > 6, [2]), (pc.field("status") == "new", [1]), (pc.field("seen").is_null(), [1, 2]),
    ):  # fmt: skip
        assert [row["id"] for row in rows(table, filter=condition)] == want
    assert rows(table, columns=["channel", "id"]) == [{"id": one["id"], "channel": one["channel"]} for one in both]
    with client.open_reader("orders") as read:
        splits = [pickle.loads(pickle.dumps(split)) for split in read.snapshot().splits(2)]
    assert [row for split in splits for row in split.to_arrow(client.blob).to_pylist()] == both


def test_a_filter_does_not_go_by_the_statistics_of_a_column_that_had_the_name(client: persist.Client) -> None:
    schema = persist.Schema({"id": "int64"}, {"a": "int64", "b": "int64"}, times="ms")
    table = client.table("orders", schema)
    table.append([{"id": n, "a": 1, "b": 100} for n in range(50)])
    table.evolve(schema.rename({"a": "b", "b": "a"}))
    assert len(rows(table, filter=pc.field("a") == 100)) == 50
    table.evolve(table.describe().schema.drop("a").add({"a": "int64"}, {"a": 7}))
    assert len(rows(table, filter=pc.field("a") == 7)) == 50
    assert rows(table, filter=pc.field("a") == 100) == []


def test_changes_and_listeners_have_the_columns_of_now(client: persist.Client, table: persist.Table) -> None:
    evolved(table)
    table.upsert([{"id": 1, "cents": 9}])
    changes = table.changes(0).to_arrow()
    assert changes.column_names == ["id", "status", "cents", "seen", "_time", "_diff"]
    assert sum(changes.column("_diff").to_pylist()) == 2
    with client.open_reader("orders") as read:
        events = read.listen(0, until=table.describe().upper)
        heard = [row for event in events if isinstance(event, persist.Updates) for row in event.table.to_pylist()]
    assert {row["status"] for row in heard} == {"new", "paid"}
    assert all("state" not in row for row in heard)


def test_a_table_is_restored_to_a_time_before_its_evolution(client: persist.Client, table: persist.Table) -> None:
    past = table.describe().upper.time
    assert past is not None
    evolved(table, CHANNEL)
    before = rows(table)
    table.upsert([{"id": 1, "status": "gone", "channel": "shop"}])
    table.delete([2])
    table.restore(past - 1)
    assert rows(table) == before
    assert client.open_reader("orders", FIRST).snapshot().to_pylist() == ROWS, "with what was dropped"
    check_world(client, "orders")


def test_engines_see_the_columns_of_now(table: persist.Table) -> None:
    evolved(table, CHANNEL)
    assert table.read().to_polars().columns == ["id", "status", "cents", "seen", "channel"]
    assert table.read().to_pandas().columns.tolist() == ["id", "status", "cents", "seen", "channel"]


def test_readers_without_a_lease_do_not_show_dropped_columns(client: persist.Client) -> None:
    with client.controller() as controller:
        controller.create("c", FIRST, shards=2, mode="compare_and_append")
        client.table("c").append(ROWS)
        client.table("c").evolve(FIRST.drop("state"))
        record = controller.catalog.fetch().find("c")
        with unleased(client, record) as reader:
            assert reader.schema.names == ["id", "cents", "seen"]
            assert reader.snapshot().to_arrow().column_names == ["id", "cents", "seen"]


def test_a_promoted_shard_and_a_collection_evolve_too(client: persist.Client, table: persist.Table) -> None:
    client.upgrade("orders")
    table.promote()
    evolved(table, CHANNEL)
    table.upsert([{"id": 1, "cents": 2**40}])
    assert rows(table)[0] == {"id": 1, "status": "new", "cents": 2**40, "seen": None, "channel": "web"}
    old = client.table("orders", FIRST)
    table.promote(timeline="t", make_timeline=True)
    table = client.table("orders")
    assert table.describe().schema == CHANNEL
    table.upsert([{"id": 2, "status": "wal"}])
    table.evolve(table.describe().schema.rename({"status": "word"}))
    assert [row["word"] for row in rows(client.table("orders"))] == ["new", "wal"]
    with pytest.raises(persist.SchemaMismatch, match="does not hold"):
        rows(client.table("orders", FIRST))
    old.close()


def test_a_dry_run_refuses_what_the_call_would(client: persist.Client, table: persist.Table) -> None:
    table.publish("delta")
    for dry_run in (True, False):
        with pytest.raises(persist.SchemaMismatch, match="published as delta"):
            table.evolve(NOW, dry_run=dry_run)
    assert table.evolve(FIRST.add({"c": "string"}), dry_run=True) == ("c",)
    client.withdraw("orders", "delta")
    assert table.evolve(NOW, dry_run=True)


@pytest.mark.parametrize("mode", ["wal", "yolo"])
def test_tables_of_timelines_evolve_as_others_do(client: persist.Client, mode: Any) -> None:
    with client.controller() as controller, controller.tables() as tables:
        tables.create("orders", FIRST, mode=mode, shards=2)
        old = client.table("orders")
        old.append(ROWS)
        past = old.describe().upper.time or 0
        said = ("state renamed to status", "cents widened to int64", "seen dropped", "seen", "channel")
        table = client.table("orders")
        assert table.evolve(CHANNEL, dry_run=True) == said
        assert table.evolve(CHANNEL) == said
        want = [
            {"id": 1, "status": "new", "cents": 5, "seen": None, "channel": "web"},
            {"id": 2, "status": "paid", "cents": None, "seen": None, "channel": "web"},
        ]
        table = client.table("orders")
        assert rows(table) == want == rows(table, as_of=past - 1), "of the WAL"
        assert rows(old) == ROWS == rows(client.table("orders", FIRST))
        old.append([{"id": 3, "state": "late", "cents": 1, "seen": dt.date(2026, 1, 1)}])
        old.upsert([{"id": 2, "state": "done"}])
        want[1]["status"] = "done"
        late = {"id": 3, "status": "late", "cents": 1, "seen": None, "channel": "web"}
        assert rows(table) == [*want, late]
        assert rows(table, filter=pc.field("status") == "late", columns=["channel"]) == [{"channel": "web"}]
        assert [row["id"] for row in rows(old, filter=pc.field("state") == "done")] == [2]
        tables.apply()
        tables.tidy()
        assert rows(table) == [*want, late], "of the shards"
        table.upsert([{"id": 1, "channel": "shop"}])
        with pytest.raises(persist.SchemaMismatch, match=r"\['.*channel.*'\] since this program opened it"):
            old.upsert([{"id": 1, "state": "x"}])
        heard = old.changes(past - 1).to_arrow()
        assert heard.column_names == ["id", "state", "cents", "seen", "_time", "_diff"]
        table.upsert([{"id": 3, "cents": 2**40}])
        with pytest.raises(persist.SchemaMismatch, match=r"'cents' that int32 does not hold.*newest columns"):
            rows(old)
        tables.apply()
        table.restore(past - 1)
        assert rows(table) == [
            {"id": 1, "status": "new", "cents": 5, "seen": None, "channel": "web"},
            {"id": 2, "status": "paid", "cents": None, "seen": None, "channel": "web"},
        ]
        tables.apply()
        for name in controller.describe("orders").active.shards:
            check_world(client, name)


@pytest.mark.parametrize("mode", ["wal", "yolo"])
def test_a_program_that_declares_names_which_were_swapped_has_its_own(client: persist.Client, mode: Any) -> None:
    schema = persist.Schema({"id": "int64"}, {"a": "int64", "b": "int64"}, times="ms")
    with client.controller() as controller, controller.tables() as tables:
        tables.create("swapped", schema, mode=mode)
        old = client.table("swapped")
        old.append([{"id": 1, "a": 1, "b": 2}])
        tables.apply()
        client.table("swapped").evolve(schema.rename({"a": "b", "b": "a"}))
        assert rows(old) == [{"id": 1, "a": 1, "b": 2}]
        assert rows(client.table("swapped")) == [{"id": 1, "b": 1, "a": 2}]


def test_a_table_of_a_timeline_may_have_defaults_from_the_beginning(client: persist.Client) -> None:
    with client.controller() as controller, controller.tables() as tables:
        tables.create("orders", FIRST.add({"channel": "string"}, {"channel": "web"}), mode="wal")
        client.table("orders").append([{"id": 1}])
        assert rows(client.table("orders"))[0]["channel"] == "web"


def test_a_table_that_keeps_deleted_keys_only_gains_columns(client: persist.Client) -> None:
    with client.controller() as controller, controller.tables() as tables:
        for name in ("kept", "orders"):
            tables.create(name, FIRST, mode="wal")
        client.table("kept").set_keep_deletes("cents", "1 day")
        with pytest.raises(persist.InvalidUsage, match="keeps deleted keys"):
            client.table("kept").evolve(NOW)
        assert client.table("kept").evolve(FIRST.add({"c": "string"})) == ("c",)
        client.table("orders").evolve(NOW)
        with pytest.raises(persist.InvalidUsage, match="cannot keep deleted keys"):
            client.table("orders").set_keep_deletes("cents", "1 day")


def test_a_program_that_declares_older_columns_opens_a_collection(client: persist.Client) -> None:
    """Also one that was not running as the columns were changed, at any step of them."""
    with client.controller() as controller:
        controller.create("c", FIRST, shards=2, mode="compare_and_append")
        client.table("c").append(ROWS)
        second = FIRST.rename({"state": "status"})
        client.table("c").evolve(second)
        client.table("c").evolve(CHANNEL)
        for schema, name in ((FIRST, "state"), (second, "status")):
            with client.table("c", schema) as older:
                assert rows(older) == [
                    {"id": row["id"], name: row["state"], **dict(list(row.items())[2:])} for row in ROWS
                ]
                assert name in older.changes(None).to_arrow().column_names
        declared = persist.Schema(CHANNEL.key, {one.name: one.said for one in CHANNEL.value}, times="ms")
        with controller.open_reader("c", declared) as read:  # as it is now, by a program that knows no ids
            assert read.snapshot().to_pylist() == rows(client.table("c"))


def test_columns_that_were_widened_twice_come_from_the_first() -> None:
    """Each step says as what values are hashed by what it found, and one step would have said otherwise."""
    first = persist.Schema({"id": "int64"}, {"n": "uint8"})
    last = first.widen({"n": "uint16"}).widen({"n": "int32"})
    assert comes_before(first, last)
    assert not comes_before(last, first)


ANY: Any = FIRST
WRONG: list[tuple[Any, str]] = [
    (lambda: FIRST.drop("id"), "key column"), (lambda: FIRST.drop("stat"), "Did you mean state"),
    (lambda: ANY.drop(["state", 1]), "named by text"), (lambda: ANY.rename("state"), "old names with new ones"),
    (lambda: FIRST.rename({"state": "cents"}), "must differ"), (lambda: FIRST.rename({"state": ""}), "not be empty"),
    (lambda: FIRST.rename({"state": "_time"}), "not be _time"), (lambda: FIRST.widen({"cents": "int16"}), "not every"),
    (lambda: FIRST.widen({"cents": "string"}), "not every"), (lambda: FIRST.widen({"id": "int64"}), "key column"),
    (lambda: FIRST.widen({"seen": "timestamp[ns]"}), "not every"), (lambda: FIRST.relax("id"), "key column"),
    (lambda: FIRST.add({"state": "int64"}), "must differ"), (lambda: FIRST.add({"n": "int64"}, {"m": 1}), "not added"),
    (lambda: FIRST.add({"n": "int64"}, {"n": "x"}), "cannot be the default"),
    (lambda: FIRST.add({"n": "int8"}, {"n": 300}), "cannot be the default"),
    (lambda: FIRST.add({"n": "int8"}, {"n": 1.5}), "cannot be the default"),
    (lambda: FIRST.add({"n": "list<int8>"}, {"n": [1]}), "nested columns have no defaults"),
    (lambda: FIRST.add({"n": "binary"}, {"n": b"\xff"}), "cannot be the default"),
    (lambda: check_schema(persist.Schema([Column("id", "int64", default=1)])), "each row says its key"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_no_evolution_is_refused_in_words(number: int) -> None:
    make, said = WRONG[number]
    with pytest.raises((persist.InvalidUsage, persist.InvalidName), match=said):
        make()


def test_what_does_not_follow_is_refused_and_nothing_is_changed(client: persist.Client, table: persist.Table) -> None:
    evolved(table, FIRST.rename({"state": "status"}).widen({"cents": "int64"}))
    with_seen = table.describe().schema.rename({"seen": "day"})
    evolved(table, table.describe().schema.drop("seen"))
    seqno = client.inspect("orders").seqno
    for schema, said in (
        (FIRST.add({"x": "int64"}), "another order"), (with_seen, "was dropped"),
        (table.describe().schema.add({"x": "int64 not null"}), "must be nullable or have a default"),
        (persist.Schema({"id": "int64"}, {"cents": "int64", "status": "string"}, times="ms"), "order"),
        (persist.Schema({"id": "int32"}, {"status": "string", "cents": "int64"}, times="ms"), "the key"),
    ):  # fmt: skip
        for dry_run in (True, False):
            with pytest.raises(persist.SchemaMismatch, match=said):
                table.evolve(schema, dry_run=dry_run)
    assert client.inspect("orders").seqno == seqno


def test_values_of_each_type_stay_as_they_are_when_it_is_widened(client: persist.Client) -> None:
    narrow = {
        "i": ("int8", -128, "int64"), "u": ("uint32", 2**32 - 1, "int64"), "f": ("float32", -0.0, "float64"),
        "d": ("decimal128(5, 2)", Decimal("-999.99"), "decimal128(38, 2)"),
        "t": ("date32", dt.date(1969, 12, 31), "timestamp[us]"),
    }  # fmt: skip
    schema = persist.Schema({"id": "int64"}, {name: kind for name, (kind, _, _) in narrow.items()}, times="ms")
    table = client.table("wide", schema)
    table.append([{"id": 1, **{name: value for name, (_, value, _) in narrow.items()}}, {"id": 2}])
    before = client.inspect("wide").state.fingerprint
    table.evolve(schema.widen({name: wide for name, (_, _, wide) in narrow.items()}))
    [first, second] = rows(table)
    assert repr(first["f"]) == "-0.0"
    assert first | {"t": first["t"].date()} == {"id": 1, **{name: value for name, (_, value, _) in narrow.items()}}
    assert set(second.values()) == {2, None}
    table.append(
        [{"id": 3, "i": 2**40, "u": -1, "f": 0.1, "d": Decimal("1e30"), "t": dt.datetime.fromisoformat("9999-12-31")}]
    )
    table.delete([3])
    client.maintain("wide")
    assert client.inspect("wide").state.fingerprint == before
    check_world(client, "wide")


def test_handles_of_a_collection_stay_in_their_columns_after_a_drop(client: persist.Client) -> None:
    with client.controller() as controller:
        controller.create("c", FIRST, shards=2, mode="compare_and_append")
        first = client.table("c")
        first.append(ROWS)
        client.table("c").evolve(FIRST.drop("state"))
        second = client.table("c")
        second.append([{"id": 3, "cents": 1, "seen": None}])
        client.table("c").evolve(second.describe().schema.drop("cents"))
        assert second.schema.names == ["id", "cents", "seen"]
        assert [row["cents"] for row in rows(second)] == [5, None, 1]
        second.upsert([{"id": 3, "seen": dt.date(2026, 1, 1)}])
        assert rows(first)[:2] == ROWS
        assert rows(client.table("c"))[2] == {"id": 3, "seen": dt.date(2026, 1, 1)}
