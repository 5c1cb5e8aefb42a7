"""Assets in shards whose times are a clock: stored as of now, read as of any moment, and shown as moments."""

import datetime as dt
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.definitions.data_version import StaleStatus

import persist_lib as persist
from orchestration.io_manager import PersistIOManager
from orchestration.run import run_maintenance
from persist_lib.errors import InvalidUsage, SchemaMismatch, SinceViolation
from tests.orchestration.storing import Store, resources
from tests.orchestration.test_io_runs import Rows, changing, consumer_of, observations, status

pytestmark = pytest.mark.dagster
CLOCK = {"persist/key": ["id"], "persist/times": "ms"}
NOON = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)


def stored(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    (event,) = result.asset_materializations_for_node(name)
    return {key: value.value for key, value in event.metadata.items()}


def snapshots(rows: Rows, **metadata: Any) -> dg.AssetsDefinition:
    @dg.asset(name="orders", metadata={**CLOCK, **metadata})
    def orders():
        return list(rows)

    return orders


def updates(table: Any, **metadata: Any) -> dg.AssetsDefinition:
    @dg.asset(name="orders", metadata={**CLOCK, **metadata})
    def orders():
        return table

    return orders


MOVES = pa.table({
    "id": [1, 2, 1, 1], "state": ["new", "new", "new", "paid"], "_diff": [1, 1, -1, 1],
    "_time": pa.array([NOON + dt.timedelta(hours=hour) for hour in (0, 1, 2, 2)]),
})  # fmt: skip


def test_contents_are_stored_as_of_now_and_an_unchanged_rerun_appends_nothing(
    client: persist.Client, store: Store
) -> None:
    rows: Rows = [{"id": 1}]
    orders, total = snapshots(rows), consumer_of([])
    before = dt.datetime.now(dt.UTC)
    found = stored(store.run(orders, total), "orders")
    after = dt.datetime.now(dt.UTC)
    with client.open_reader("orders") as reader:
        moment = reader.schema.moment(found["as_of"])
        assert reader.schema.times == "ms"
        assert moment is not None
        assert before - dt.timedelta(milliseconds=1) <= moment <= after
        assert found["as_of_time"] == reader.schema.show(found["as_of"])
        assert found["upper"] == reader.schema.show(found["as_of"] + 1)
    again = stored(store.run(orders, total), "orders")
    assert (again["as_of"], again["updates"]) == (found["as_of"], 0)
    assert status(store.instance, [orders, total], "total") == StaleStatus.FRESH
    rows.append({"id": 2})
    later = stored(store.run(orders), "orders")
    assert later["as_of"] > found["as_of"]
    assert status(store.instance, [orders, total], "total") == StaleStatus.STALE


@pytest.mark.parametrize(
    "as_of",
    [
        "2026-11-22T13:00Z", "2026-11-22T14:00:00+01:00", "2026-11-22T13:59:59.9999Z", 1_795_352_400_000,
        dg.MetadataValue.timestamp(NOON + dt.timedelta(hours=1)),
    ],
    ids=repr,
)  # fmt: skip
def test_an_input_is_read_as_of_a_moment_however_it_is_written(as_of: Any, store: Store) -> None:
    seen: list[Any] = []
    orders, total = updates(MOVES), consumer_of(seen, metadata={"persist/as_of": as_of})
    store.run(orders)
    done = store.run(orders, total, selection=[total])
    assert seen == [[{"id": 1, "state": "new"}, {"id": 2, "state": "new"}]]
    (read,) = observations(store.instance, done.run_id)
    assert read["as_of_time"].startswith("2026-11-22T13:")
    assert read["read"] == {"orders": read["as_of"]}
    assert status(store.instance, [orders, total], "total") == StaleStatus.STALE, (
        "it was made of what is not the newest"
    )


@pytest.mark.parametrize(
    "tag", ["2026-11-22T12:30Z", '"2026-11-22T12:30Z"', '{"orders": "2026-11-22 13:30+01:00"}', "1795350600000"]
)
def test_a_run_reads_as_of_the_moment_of_its_tag_and_a_later_run_the_same_again(tag: str, store: Store) -> None:
    seen: list[Any] = []
    orders, total = updates(MOVES), consumer_of(seen)
    store.run(orders)
    done = store.run(orders, total, selection=[total], tags={"persist/as_of": tag})
    store.run(orders, total, selection=[total], tags={"persist/inputs_of": done.run_id})
    assert seen == [[{"id": 1, "state": "new"}]] * 2


def test_ago_is_reckoned_from_when_the_run_was_created_for_all_its_inputs(store: Store) -> None:
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    table = pa.table({"id": [1, 2, 3], "_time": [now - dt.timedelta(hours=2), now - dt.timedelta(minutes=30), now]})
    seen: list[Any] = []
    orders, first = updates(table), consumer_of(seen)

    @dg.asset(ins={"orders": dg.AssetIn(key="orders")}, metadata={"persist/key": ["rows"]})
    def other(orders: list[dict[str, Any]]):
        seen.append(orders)
        return [{"rows": len(orders)}]

    store.run(orders)
    done = store.run(orders, first, other, selection=[first, other], tags={"persist/as_of": "1 hour ago"})
    assert seen == [[{"id": 1}]] * 2
    assert len({read["as_of"] for read in observations(store.instance, done.run_id)}) == 1


@pytest.mark.parametrize(
    ("tag", "kind", "words"),
    [
        ("2026-11-22T12:30", InvalidUsage, "has no zone"),
        ("2026-11-23", persist.NotComplete, "upper is [2026-11-22T14:00:00.001Z]"),
        ("1969-07-20", InvalidUsage, "clock starts at 1970"),
        ("some day", InvalidUsage, "persist/as_of is a time, like 17"),
        ("true", InvalidUsage, "persist/as_of is a time, like 17"),
        ("1.5", InvalidUsage, "persist/as_of is a time, like 17"),
        ("2026-11-22T12:30Z", SinceViolation, "keeps its history only since time 2026-11-22T13:00:00Z"),
    ],
)  # fmt: skip
def test_a_moment_that_cannot_be_read_is_refused_in_words(
    tag: str, kind: type[Exception], words: str, client: persist.Client, store: Store
) -> None:
    orders, total = updates(MOVES), consumer_of([])
    store.run(orders)
    if kind is SinceViolation:
        with client.open_reader("orders") as reader:
            reader.downgrade_since(NOON + dt.timedelta(hours=1))
    error = store.failure(orders, total, selection=[total], tags={"persist/as_of": tag})
    assert type(error) is kind
    assert words in error.message


def test_partitions_are_read_each_as_of_its_own_moment(store: Store) -> None:
    parts = dg.StaticPartitionsDefinition(["eu", "us"])

    @dg.asset(name="orders", metadata=CLOCK, partitions_def=parts)
    def orders():
        return MOVES

    seen: list[Any] = []
    for key in parts.get_partition_keys():
        store.run(orders, partition_key=key)
    total = consumer_of(seen)
    tags = {"persist/as_of": '{"orders": {"eu": "2026-11-22T12:00Z", "us": "2026-11-22T13:00Z"}}'}
    store.run(orders, total, selection=[total], tags=tags)
    assert [row["id"] for row in seen[0]] == [1, 1, 2]


def test_what_times_are_is_said_in_the_schema_or_beside_it_and_kept_when_columns_are_added(
    client: persist.Client, store: Store
) -> None:
    schema = persist.Schema({"id": "int64"}, {"state": "string"}, times="us")
    store.run(updates(MOVES, **{"persist/times": None, "persist/schema": schema}))
    assert client.inspect("orders").state.schemas == (schema,)
    wider = MOVES.append_column("note", pa.array(["x"] * 4)).set_column(
        3, "_time", pa.array([NOON + dt.timedelta(days=1)] * 4)
    )
    store.run(updates(wider, **{"persist/times": None}))
    assert client.inspect("orders").state.times == "us"
    error = store.failure(updates(wider))
    assert isinstance(error, SchemaMismatch)
    assert "a clock in ms" in error.message
    assert "times=us" in error.message


def test_a_clock_that_an_older_shard_does_not_have_is_refused(store: Store) -> None:
    store.run(changing([{"id": 1}]))
    assert "never changes" in store.failure(snapshots([{"id": 1}])).message
    assert "persist/times in the asset's metadata" in store.failure(snapshots([], **{"persist/times": "s"})).message
    plain = updates(MOVES, **{"persist/times": None, "persist/table": "other"})
    assert "plain integers, not a clock" in store.failure(plain).message


def test_the_duties_report_moments_beside_the_integers_that_are_drawn(client: persist.Client, folder: Path) -> None:
    schema = persist.Schema({"id": "int64"}, {"state": "string"}, times="ms")
    write = client.open_writer("orders", schema)
    for hour in range(12):
        rows = [{"id": hour, "state": "new", "_time": NOON + dt.timedelta(hours=hour)}]
        write.compare_and_append(rows, write.upper, NOON + dt.timedelta(hours=hour, milliseconds=1))
    client.set_retention("orders", "4 hours")
    report = run_maintenance(f"file:{folder}")
    assert report.success, report.failure
    figures = report.figures["orders"]
    assert figures["retention"]["since_after_time"] == "2026-11-22T19:00:00Z"
    assert figures["retention"]["distance_time"] == "4 h"
    assert figures["census"]["upper_time"] == "2026-11-22T23:00:00.001Z"
    assert figures["census"]["upper"] == 1_795_388_400_001
    says = [verdict.says for verdict in report.verdicts if verdict.check == "reads_identical"]
    assert says
    assert all("2026-11-22T" in text and "17953" not in text for text in says)


def test_the_times_of_a_new_table_are_those_of_the_manager_where_nothing_else_says_them(store: Store) -> None:
    """By default milliseconds, as in a table that `db.table` makes."""
    assert PersistIOManager.model_fields["times"].default == "ms"

    def rows(name: str, *columns: str, **metadata: Any) -> dg.AssetsDefinition:
        @dg.asset(name=name, metadata={"persist/key": ["id"], **metadata})
        def made() -> list[dict[str, int]]:
            return [{"id": 1, **dict.fromkeys(columns, 5)}]

        return made

    assets = [
        rows("new"), rows("plain", **{"persist/times": "none"}), rows("fine", **{"persist/times": "us"}),
        rows("brought", "_time"),
        rows("told", **{"persist/schema": persist.Schema({"id": "int64"}, times="us")}),
    ]  # fmt: skip
    for _ in range(2):
        dg.materialize(assets, instance=store.instance, resources=resources(store.folder, "ms"))
    with persist.open(f"file:{store.folder}", read_only=True) as client:
        found = {name: client.table(name).schema.times for name in ("new", "plain", "fine", "brought", "told")}
        assert client.table("new").read().to_pylist() == [{"id": 1}]
    assert found == {"new": "ms", "plain": None, "fine": "us", "brought": None, "told": "us"}
    dg.materialize(
        [rows("new")], instance=store.instance, resources=resources(store.folder, "none")
    )  # it is there, and stays
    with pytest.raises(InvalidUsage, match="times"):
        dg.materialize([rows("more")], instance=store.instance, resources=resources(store.folder, "s"))
