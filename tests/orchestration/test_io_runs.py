"""Runs over assets in shards: data versions, earlier times, partitions of all kinds, rivals, and taken names."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

import persist_lib as persist
from orchestration.io import loading
from orchestration.io_manager import PersistIOManager
from orchestration.resources import Persist
from persist_lib.errors import InvalidUsage, NotFound, SinceViolation
from tests.orchestration.storing import Store, contents, resources
from tests.spark.collections import SMALL

pytestmark = pytest.mark.dagster
KEY = {"persist/key": ["id"]}
Rows = list[dict[str, Any]]


def changing(rows: Rows, name: str = "orders", **options: Any) -> dg.AssetsDefinition:
    """An asset whose contents are what the list holds when it runs."""

    @dg.asset(name=name, metadata=KEY, **options)
    def asset():
        return list(rows)

    return asset


def consumer_of(seen: list[Any], name: str = "orders", **asset_in: Any) -> dg.AssetsDefinition:
    @dg.asset(name="total", ins={"orders": dg.AssetIn(key=name, **asset_in)}, metadata={"persist/key": ["rows"]})
    def total(orders: list[dict[str, Any]]):
        seen.append(orders)
        return [{"rows": len(orders)}]

    return total


def status(instance: dg.DagsterInstance, assets: list[Any], name: str) -> StaleStatus:
    graph = dg.Definitions(assets=assets).resolve_asset_graph()
    return CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance)).get_status(dg.AssetKey(name))


def version_of(result: dg.ExecuteInProcessResult, name: str = "orders") -> str:
    (event,) = result.asset_materializations_for_node(name)
    return (event.tags or {})["dagster/data_version"]


def test_an_unchanged_rerun_keeps_the_data_version_so_that_what_is_downstream_stays_fresh(store: Store) -> None:
    rows = [{"id": 1}]
    orders, total = changing(rows), consumer_of([])
    first = version_of(store.run(orders, total))
    assert first.startswith("orders@0-")
    assert status(store.instance, [orders, total], "total") == StaleStatus.FRESH
    assert version_of(store.run(orders)) == first
    assert status(store.instance, [orders, total], "total") == StaleStatus.FRESH
    rows.append({"id": 2})
    assert version_of(store.run(orders)) != first
    assert status(store.instance, [orders, total], "total") == StaleStatus.STALE
    store.run(orders, total)
    assert status(store.instance, [orders, total], "total") == StaleStatus.FRESH


def test_a_location_that_was_made_anew_has_other_data_versions_for_other_contents(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    one = version_of(Store(tmp_path / "one", instance).run(changing([{"id": 1}])))
    other = version_of(Store(tmp_path / "other", instance).run(changing([{"id": 2}])))
    same = version_of(Store(tmp_path / "third", instance).run(changing([{"id": 1}])))
    assert one != other
    assert one == same


def observations(instance: dg.DagsterInstance, run_id: str) -> list[dict[str, Any]]:
    entries = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    found = [entry.asset_observation for entry in entries]
    return [{name: value.value for name, value in event.metadata.items()} for event in found if event is not None]


def test_each_load_records_its_as_of_and_a_rerun_with_it_reads_the_same(client: persist.Client, store: Store) -> None:
    rows, seen = [{"id": 1}], list[Any]()
    orders, total = changing(rows), consumer_of(seen)
    yesterday = store.run(orders, total)
    (read,) = observations(store.instance, yesterday.run_id)
    assert read["as_of"] == 0
    assert read["table"] == "orders"
    assert read["rows"] == 1
    assert 0 < read["seqno"] <= client.inspect("orders").seqno
    assert read["read"] == {"orders": 0}
    rows.append({"id": 2})
    store.run(orders, total)
    assert seen == [[{"id": 1}], [{"id": 1}, {"id": 2}]]
    for tags in (
        {"persist/as_of": "0"}, {"persist/as_of": '{"orders": 0, "another": 3}'},
        {"persist/inputs_of": yesterday.run_id},
    ):  # fmt: skip
        again = store.run(orders, total, selection=[total], tags=tags)
        assert seen.pop() == [{"id": 1}], tags
        assert observations(store.instance, again.run_id)[0]["as_of"] == 0
        assert status(store.instance, [orders, total], "total") == StaleStatus.STALE, (
            "it was made of what is not the newest"
        )
    store.run(orders, total, selection=[total])
    assert seen.pop() == [{"id": 1}, {"id": 2}]
    assert status(store.instance, [orders, total], "total") == StaleStatus.FRESH


def test_an_input_can_ask_for_its_own_earlier_time(store: Store) -> None:
    rows, seen = [{"id": 1}], list[Any]()
    orders = changing(rows)
    store.run(orders)
    rows.append({"id": 2})
    store.run(orders)
    total = consumer_of(seen, metadata={"persist/as_of": 0})
    store.run(orders, total, selection=[total], tags={"persist/as_of": "1"})
    assert seen == [[{"id": 1}]], "the input's own comes first"


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({"persist/as_of": "7"}, "upper has to pass 7, and upper is [1]"),
        ({"persist/as_of": "some day"}, "persist/as_of is a time, like 17"),
        ({"persist/as_of": "yesterday"}, "The times of this shard are plain integers"),
        ({"persist/as_of": "-1"}, "persist/as_of is a time, like 17"),
        ({"persist/as_of": '{"orders": "x"}'}, "persist/as_of is a time, like 17"),
        ({"persist/inputs_of": "no-such-run"}, "this instance has no such run"),
    ],
)
def test_a_time_that_cannot_be_is_refused_in_words(tags: dict[str, str], words: str, store: Store) -> None:
    orders, total = changing([{"id": 1}]), consumer_of([])
    store.run(orders)
    error = store.failure(orders, total, selection=[total], tags=tags)
    assert words in error.message


def test_a_time_before_since_is_refused_with_what_to_do(client: persist.Client, store: Store) -> None:
    rows = [{"id": 1}]
    orders, total = changing(rows), consumer_of([])
    for number in range(2, 5):
        store.run(orders)
        rows.append({"id": number})
    with client.open_reader("orders") as reader:
        reader.downgrade_since(2)
    error = store.failure(orders, total, selection=[total], tags={"persist/as_of": "1"})
    assert isinstance(error, SinceViolation)
    assert "keeps its history only since time 2" in error.message
    assert "set_retention" in error.message


def test_an_asset_that_was_never_stored_is_named(store: Store) -> None:
    orders, total = changing([{"id": 1}]), consumer_of([])
    error = store.failure(orders, total, selection=[total])
    assert isinstance(error, NotFound)
    assert "asset orders has nothing stored" in error.message
    assert "Materialize it first" in error.message


@contextmanager
def rival(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], times: int) -> Iterator[None]:
    """Let `act` happen between the difference and its append, the first `times` times."""
    whole, done = persist.WriteHandle.compare_and_append, list[int]()

    def slow(self: persist.WriteHandle, *args: Any, **options: Any) -> persist.Appended:
        if len(done) < times:
            done.append(1)
            act()
        return whole(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(persist.WriteHandle, "compare_and_append", slow)
        yield
    assert len(done) == times


def test_a_run_that_was_overtaken_makes_its_difference_anew_against_what_the_other_one_stored(
    client: persist.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.run(changing([{"id": 1}, {"id": 2}]))
    numbers = iter(range(100, 200))

    def overtake() -> None:
        with client.open_writer("orders", persist.Schema({"id": "int64"})) as write:
            upper = write.fetch_upper().time or 0
            write.append([{"id": next(numbers), "_time": upper}, {"id": 3, "_time": upper}], upper, upper + 1)

    with rival(monkeypatch, overtake, 3):
        result = store.run(changing([{"id": 2}, {"id": 3}]))
    assert contents(client, "orders") == [{"id": 2}, {"id": 3}]
    metadata = result.asset_materializations_for_node("orders")[0].metadata
    assert metadata["attempts"].value == 4


def test_two_runs_at_once_leave_the_contents_of_one_of_them(client: persist.Client, store: Store) -> None:
    store.run(changing([{"id": 0}]))
    errors: list[Exception] = []
    sets = [[{"id": 10 * worker + number} for number in range(1, 6)] for worker in range(4)]

    def work(rows: Rows) -> None:
        try:
            with dg.DagsterInstance.ephemeral() as own:
                Store(store.folder, own).run(changing(rows))
        except Exception as error:  # noqa: BLE001 - for the test to show
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert contents(client, "orders") in sets
    for as_of in range(1, client.inspect("orders").state.upper.time or 0):
        assert contents(client, "orders", as_of) in sets, "at no time a mixture"


PARTITIONS: dict[str, dg.PartitionsDefinition[str]] = {
    "hourly": dg.HourlyPartitionsDefinition("2026-10-22-00:00", end_date="2026-10-22-03:00"),
    "multi": dg.MultiPartitionsDefinition(
        {
            "region": dg.StaticPartitionsDefinition(["a", "b"]),
            "day": dg.DailyPartitionsDefinition("2026-10-22", end_date="2026-10-24"),
        }
    ),
    "odd": dg.StaticPartitionsDefinition(["a/b", "a b", "a_-2fb", "münchen", "x" * 150, "x" * 149 + "y", "."]),
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_partitions_of_all_kinds_have_a_shard_each_and_are_loaded_by_partition_and_all_together(
    kind: str, client: persist.Client, store: Store
) -> None:
    definition = PARTITIONS[kind]
    seen: list[Any] = []

    @dg.asset(partitions_def=definition, metadata=KEY)
    def orders(context: dg.AssetExecutionContext):
        return [{"id": str(context.partition_key)}]

    @dg.asset(partitions_def=definition)
    def each(context: dg.AssetExecutionContext, orders: pa.Table) -> None:
        assert orders.to_pylist() == [{"id": str(context.partition_key)}]

    @dg.asset
    def everything(orders: pa.Table) -> None:
        seen.append(sorted(orders["id"].to_pylist()))

    keys = definition.get_partition_keys()
    assert len(keys) >= 3
    for key in keys:
        result = store.run(orders, each, partition_key=key)
        (event,) = result.asset_materializations_for_node("orders")
        assert event.metadata["table"].value in client.shards()
    assert len(client.shards()) == len(keys)
    result = store.run(orders, everything, selection=[everything])
    assert seen == [sorted(map(str, keys))]
    (read,) = observations(store.instance, result.run_id)
    assert read["partitions"] == len(keys)
    assert set(read["read"].values()) == {0}
    assert len(read["read"]) == len(keys)


def test_partitions_that_are_missing_are_named_or_left_out_if_that_is_asked_for(store: Store) -> None:
    definition = dg.StaticPartitionsDefinition([f"p{number:02}" for number in range(30)])
    orders = changing([{"id": 1}], partitions_def=definition)
    store.run(orders, partition_key="p03")
    seen: list[Any] = []
    total = consumer_of(seen)
    error = store.failure(orders, total, selection=[total])
    assert "nothing is stored for 29 of the partitions" in error.message
    assert "'p00', 'p01', 'p02', 'p04'" in error.message
    assert "and 9 more" in error.message
    lenient = consumer_of(seen, metadata={"allow_missing_partitions": True})
    result = store.run(orders, lenient, selection=[lenient])
    assert seen == [[{"id": 1}]]
    assert observations(store.instance, result.run_id)[0]["missing"] == 29


def test_a_run_over_several_partitions_returns_a_dict_of_them(client: persist.Client, store: Store) -> None:
    definition = dg.StaticPartitionsDefinition(["a", "b", "c"])
    given: dict[str, Any] = {}

    @dg.asset(partitions_def=definition, metadata=KEY, backfill_policy=dg.BackfillPolicy.single_run())
    def orders():
        return given.get("whole", given)

    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    for wrong in ([{"id": 1}], {"a": [{"id": 1}]}, {"a": [{"id": 1}], "b": [{"id": 2}], "c": []}):
        given["whole"] = wrong
        error = store.failure(orders, tags=tags)
        assert "partition" in error.message
        assert client.shards() == []
    given["whole"] = {"a": [{"id": 1}], "b": [{"id": 2}]}
    result = store.run(orders, tags=tags)
    assert contents(client, "orders.b") == [{"id": 2}]
    events = {event.partition: event for event in result.asset_materializations_for_node("orders")}
    assert events["b"].metadata["table"].value == "orders.b"
    assert events["a"].metadata["table"].value == "orders.a"
    assert version_like(events["a"]) == version_like(events["b"]), "Dagster gives an output one version"


def version_like(event: dg.AssetMaterialization) -> str:
    return (event.tags or {})["dagster/data_version"]


def test_a_shard_that_belongs_to_another_asset_is_neither_written_nor_read(
    client: persist.Client, store: Store
) -> None:
    orders = changing([{"id": 1}], partitions_def=dg.StaticPartitionsDefinition(["eu"]))
    store.run(orders, partition_key="eu")
    taken = changing([{"id": 2}], "eu", key_prefix="orders")
    error = store.failure(taken)
    assert error.message.startswith("asset orders/eu has the table name orders.eu, and that table belongs to partition")
    assert "persist/table" in error.message
    reads = consumer_of([], name=["orders", "eu"])  # type: ignore[arg-type]
    assert "belongs to partition 'eu' of asset orders" in store.failure(taken, reads, selection=[reads]).message
    assert contents(client, "orders.eu") == [{"id": 1}]
    assert client.inspect("orders.eu").state.upper == persist.at(1)


def test_keys_whose_components_have_dots_do_not_collide_and_a_shard_of_an_earlier_release_is_not_left_silently(
    client: persist.Client, store: Store
) -> None:
    def asset(*path: str, metadata: dict[str, Any] | None = None) -> dg.AssetsDefinition:
        @dg.asset(key=list(path), metadata={**KEY, **(metadata or {})})
        def some():
            return [{"id": "/".join(path)}]

        return some

    store.run(asset("a", "b.c"), asset("a.b", "c"))
    assert contents(client, "a.b_-2ec") == [{"id": "a/b.c"}]
    assert contents(client, "a_-2eb.c") == [{"id": "a.b/c"}]
    with client.open_writer("x.y.z", persist.Schema({"id": "string"})) as write:
        write.compare_and_append([{"id": "x/y.z"}], 0, 1)
    error = store.failure(asset("x", "y.z"))
    assert "was in shard x.y.z with earlier releases" in error.message
    assert "{'persist/table': 'x.y.z'}" in error.message
    store.run(asset("x", "y.z", metadata={"persist/table": "x.y.z"}))
    assert client.inspect("x.y.z").state.upper == persist.at(1), "the same contents"
    assert "x.y_-2ez" not in client.shards()


def test_the_records_of_owners_are_no_orphans(client: persist.Client, store: Store) -> None:
    store.run(changing([{"id": 1}]))
    audited = client.audit_orphans("orders")
    assert audited.orphans == ()
    assert client.blob.get("-assets/orders.json") == b'{"asset":["orders"],"partition":null,"version":1}'


def test_an_op_is_told_that_a_shard_is_an_assets(folder: Path) -> None:
    @dg.op
    def one() -> int:
        return 1

    @dg.job(resource_defs=resources(folder))
    def job() -> None:
        one()

    with pytest.raises(InvalidUsage, match="a shard is an asset's"):
        job.execute_in_process()


def test_large_contents_change_by_little_in_windows(client: persist.Client, store: Store) -> None:
    count = 200_000
    table = pa.table({"id": range(count), "name": [f"name {number % 1000}" for number in range(count)]})
    holder = [table]

    @dg.asset(metadata=KEY)
    def big():
        return holder[0]

    store.run(big)
    names = table["name"].to_pylist()
    names[77] = "changed"
    holder[0] = table.set_column(1, "name", pa.array(names))
    result = store.run(big)
    assert result.asset_materializations_for_node("big")[0].metadata["updates"].value == 2
    with client.open_reader("big") as reader:
        assert reader.snapshot(key=[77], diff=True).to_pylist() == [{"id": 77, "name": "changed", "_diff": 1}]


def test_a_partition_read_as_of_an_earlier_time_makes_what_is_downstream_stale_and_a_newest_one_fresh(
    store: Store,
) -> None:
    definition = dg.StaticPartitionsDefinition(["eu", "us"])
    rows, seen = [{"id": 1}], list[Any]()
    orders = changing(rows, partitions_def=definition)

    @dg.asset(partitions_def=definition)
    def each(orders: list[dict[str, Any]]):
        seen.append(orders)

    def fresh() -> bool:
        graph = dg.Definitions(assets=[orders, each]).resolve_asset_graph()
        resolver = CachingStaleStatusResolver(store.instance, graph, LoadingContextForTest(store.instance))
        return resolver.get_status(dg.AssetKey("each"), "eu") == StaleStatus.FRESH

    store.run(orders, each, partition_key="eu")
    assert fresh()
    store.run(orders, partition_key="eu")
    assert fresh(), "nothing has changed"
    rows.append({"id": 2})
    store.run(orders, partition_key="us")
    assert fresh(), "that is another partition"
    store.run(orders, partition_key="eu")
    assert not fresh()
    tags = {"persist/as_of": '{"orders": {"eu": 0}}'}
    store.run(orders, each, selection=[each], partition_key="eu", tags=tags)
    assert seen.pop() == [{"id": 1}]
    assert not fresh(), "it was made of what is not the newest"
    store.run(orders, each, selection=[each], partition_key="eu")
    assert seen.pop() == [{"id": 1}, {"id": 2}]
    assert fresh()


def test_all_partitions_can_be_read_again_as_an_earlier_run_read_them(store: Store) -> None:
    rows, seen = [{"id": 1}], list[Any]()
    orders, total = changing(rows, partitions_def=dg.StaticPartitionsDefinition(["eu", "us"])), consumer_of(seen)
    for key in ("eu", "us"):
        store.run(orders, partition_key=key)
    yesterday = store.run(orders, total, selection=[total])
    rows.append({"id": 2})
    store.run(orders, partition_key="us")
    store.run(orders, total, selection=[total])
    store.run(orders, total, selection=[total], tags={"persist/inputs_of": yesterday.run_id})
    assert [len(found) for found in seen] == [2, 3, 2]
    other = consumer_of([], name="others")
    others = changing(rows, name="others")
    tags = {"persist/inputs_of": yesterday.run_id}
    error = store.failure(others, other, tags=tags)
    assert "did not read asset others" in error.message


def test_a_shard_that_an_ingestion_job_writes_is_read_as_an_external_asset_and_keeps_its_observed_version(
    client: persist.Client, store: Store
) -> None:
    with client.open_writer("orders", persist.Schema({"id": "int64"})) as write:
        write.compare_and_append([{"id": 1}], 0, 1)

    @dg.observable_source_asset
    def orders():
        return dg.DataVersion("by hand")

    seen: list[Any] = []
    total = consumer_of(seen)
    with dg.DagsterInstance.ephemeral() as own:
        dg.materialize([orders, total], instance=own, resources=resources(store.folder), selection=[orders])
        result = dg.materialize([orders, total], instance=own, resources=resources(store.folder), selection=[total])
        assert seen == [[{"id": 1}]]
        assert observations(own, result.run_id)[0]["as_of"] == 0
        record = own.get_latest_data_version_record(dg.AssetKey("orders"), is_source=True)
        assert record is not None
        assert record.event_log_entry.asset_observation is not None
        assert (record.event_log_entry.asset_observation.tags or {})["dagster/data_version"] == "by hand"
    assert client.blob.get("-assets/orders.json") is None, "reading does not make it anybody's"


@pytest.mark.parametrize(
    ("stored", "upper"),
    [([{"id": 1}], 1), (pa.table({"id": [1, 2], "_time": pa.array([0, 1], pa.uint64())}), 2)],
)
def test_a_step_that_is_tried_again_after_its_append_stores_nothing_twice(
    client: persist.Client, store: Store, monkeypatch: pytest.MonkeyPatch,
    stored: Any, upper: int,
) -> None:  # fmt: skip
    whole, attempts = PersistIOManager.handle_output, list[int]()

    def dies_after_the_append(self: PersistIOManager, context: dg.OutputContext, obj: Any) -> None:
        whole(self, context, obj)
        attempts.append(client.inspect("orders").state.upper.time or 0)
        if len(attempts) == 1:
            raise OSError("the process is gone after its append")

    monkeypatch.setattr(PersistIOManager, "handle_output", dies_after_the_append)

    @dg.asset(metadata=KEY, retry_policy=dg.RetryPolicy(max_retries=1))
    def orders():
        return stored

    assert store.run(orders).success
    assert attempts == [upper, upper]
    with client.open_reader("orders") as reader:
        assert [row["_diff"] for row in reader.snapshot(diff=True).to_pylist()] == [1] * upper


def test_three_hundred_partitions_are_read_with_a_bounded_number_of_requests_each(
    client: persist.Client, store: Store
) -> None:
    keys = [f"p{number:03}" for number in range(300)]
    for key in keys:
        with client.open_writer(f"orders.{key}", persist.Schema({"id": "int64"})) as write:
            write.compare_and_append([{"id": 1}], 0, 1)
    orders = changing([], partitions_def=dg.StaticPartitionsDefinition(keys))
    counts: list[dict[str, int]] = []

    class Counted(Persist):
        def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
            counts.append({name: count.calls for name, count in self.client.metrics().operations.items()})
            super().teardown_after_execution(context)

    @dg.asset
    def streamed(orders: pa.RecordBatchReader) -> None:
        assert sum(batch.num_rows for batch in orders) == 300

    manager = PersistIOManager(persist=Counted(location=f"file:{store.folder}", config=SMALL), times="none")
    assets: list[Any] = [orders, streamed]
    dg.materialize(assets, instance=store.instance, resources={"io_manager": manager}, selection=[streamed])
    (count,) = counts
    assert count["list_keys"] == 1
    assert count["compare_and_set"] <= 2 * 300, "a lease taken and given back"
    assert sum(count.values()) <= 12 * 300, count


@pytest.mark.parametrize("small_bytes", [0, 1 << 30], ids=["streamed", "read ahead"])
def test_partitions_from_before_a_column_was_added_have_null_in_it(
    small_bytes: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SMALL_BYTES", small_bytes)
    keys = [f"p{number:02}" for number in range(20)]
    seen: list[Any] = []

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(keys), metadata=KEY)
    def orders(context: dg.AssetExecutionContext):
        row = {"id": context.partition_key, "name": "n"}
        return [row, row] if context.partition_key < "p10" else [{**row, "cents": 5}]

    total = consumer_of(seen)
    for key in keys:
        store.run(orders, partition_key=key)
    store.run(orders, total, selection=[total])
    wanted = [{"id": key, "name": "n", "cents": None} for key in keys[:10] for _ in range(2)]
    assert seen == [wanted + [{"id": key, "name": "n", "cents": 5} for key in keys[10:]]]


def test_partitions_whose_columns_differ_in_type_are_not_put_together(client: persist.Client, store: Store) -> None:
    for key, kind in (("a", "int64"), ("b", "string")):
        with client.open_writer(f"orders.{key}", persist.Schema({"id": kind})) as write:
            write.advance_upper(1)
    orders, total = changing([], partitions_def=dg.StaticPartitionsDefinition(["a", "b"])), consumer_of([])
    error = store.failure(orders, total, selection=[total])
    assert (
        "partition 'b' of asset orders and partition 'a' of asset orders cannot be read as one table" in error.message
    )
    assert "orders.b has the schema (id: string) -> ()" in error.message


def test_a_shard_that_the_metadata_names_is_loaded_in_the_run_and_in_later_runs(
    client: persist.Client, store: Store
) -> None:
    seen: list[Any] = []

    @dg.asset(metadata={**KEY, "persist/table": "other.name"})
    def orders():
        return [{"id": 1}]

    total = consumer_of(seen)
    store.run(orders, total)
    store.run(orders, total, selection=[total])
    assert seen == [[{"id": 1}]] * 2
    assert "other.name" in client.shards()
    assert "orders" not in client.shards()


def test_an_asset_can_be_loaded_outside_of_any_run(store: Store) -> None:
    orders = changing([{"id": 1}], partitions_def=dg.StaticPartitionsDefinition(["eu", "us"]))
    store.run(orders, partition_key="eu")
    definitions = dg.Definitions(assets=[orders], resources=resources(store.folder))
    found = definitions.load_asset_value("orders", python_type=list, partition_key="eu", instance=store.instance)
    assert found == [{"id": 1}]
    table: Any = definitions.load_asset_value("orders", partition_key="eu")
    assert table.to_pylist() == [{"id": 1}]
