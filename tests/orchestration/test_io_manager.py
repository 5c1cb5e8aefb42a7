"""Assets of users in shards: stored, read, changed, and tried again without being stored twice."""

from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pytest

import persist_lib as persist
from orchestration.io_manager import PersistIOManager
from orchestration.resources import Persist
from tests.spark.collections import SMALL

pytestmark = pytest.mark.dagster
CUSTOMERS = {"persist/key": ["id"]}


def materialize(
    folder: Path, instance: dg.DagsterInstance, *assets: dg.AssetsDefinition, **options: Any
) -> dg.ExecuteInProcessResult:
    resource = Persist(location=f"file:{folder}", config=SMALL, create=True)
    manager = PersistIOManager(persist=resource, times="none")
    return dg.materialize(list(assets), instance=instance, resources={"io_manager": manager}, **options)


def contents(client: persist.Client, name: str, as_of: int | None = None) -> list[dict[str, Any]]:
    with client.open_reader(name) as reader:
        return reader.snapshot(as_of, diff=True).to_pylist()


def test_an_asset_moves_its_shard_by_what_changed_and_the_past_stays_readable(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    rows = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

    @dg.asset(metadata=CUSTOMERS)
    def customers() -> list[dict[str, Any]]:
        return rows

    materialize(folder, instance, customers)
    rows[1] = {"id": 2, "name": "B"}
    result = materialize(folder, instance, customers)
    assert result.asset_materializations_for_node("customers")[0].metadata["updates"].value == 2
    assert contents(client, "customers", 0) == [{"id": 1, "name": "a", "_diff": 1}, {"id": 2, "name": "b", "_diff": 1}]
    assert contents(client, "customers", 1) == [{"id": 1, "name": "a", "_diff": 1}, {"id": 2, "name": "B", "_diff": 1}]
    before = client.inspect("customers").state.upper
    materialize(folder, instance, customers)
    assert client.inspect("customers").state.upper == before, "the same contents change nothing"


def test_a_downstream_asset_reads_what_an_upstream_one_stored_as_it_asks_for_it(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    seen: dict[str, Any] = {}

    @dg.asset(metadata=CUSTOMERS)
    def customers() -> pd.DataFrame:
        return pd.DataFrame({"id": [2, 1, 1], "name": ["b", "a", "a"]})

    @dg.asset
    def as_frame(customers: pd.DataFrame) -> None:
        seen["frame"] = customers

    @dg.asset
    def as_arrow(customers: pa.Table) -> None:
        seen["arrow"] = customers

    materialize(folder, instance, customers, as_frame, as_arrow)
    assert seen["frame"].to_dict("list") == {"id": [1, 1, 2], "name": ["a", "a", "b"]}
    assert seen["arrow"].to_pylist() == seen["frame"].to_dict("records")


def test_a_step_that_is_tried_again_after_its_append_stores_nothing_twice(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    @dg.asset(metadata={"persist/key": ["id"]}, retry_policy=dg.RetryPolicy(max_retries=1))
    def updates() -> pa.Table:
        attempts.append(1)
        return pa.table({"id": [1, 2], "_time": pa.array([0, 1], pa.uint64()), "_diff": [1, 1]})

    whole = PersistIOManager.handle_output

    def dies_after_the_append(self: PersistIOManager, context: dg.OutputContext, obj: Any) -> None:
        whole(self, context, obj)
        if len(attempts) == 1:
            raise OSError("the process is gone after its append")

    monkeypatch.setattr(PersistIOManager, "handle_output", dies_after_the_append)
    result = materialize(folder, instance, updates)
    assert result.success
    assert len(attempts) == 2
    assert contents(client, "updates", 1) == [{"id": 1, "_diff": 1}, {"id": 2, "_diff": 1}]


def test_each_partition_of_an_asset_has_a_shard_of_its_own(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    @dg.asset(metadata=CUSTOMERS, partitions_def=dg.StaticPartitionsDefinition(["eu", "us"]))
    def customers(context: dg.AssetExecutionContext) -> list[dict[str, Any]]:
        return [{"id": 1, "name": context.partition_key}]

    for key in ("eu", "us"):
        materialize(folder, instance, customers, partition_key=key)
    assert client.shards() == ["customers.eu", "customers.us"]
    assert contents(client, "customers.us") == [{"id": 1, "name": "us", "_diff": 1}]
