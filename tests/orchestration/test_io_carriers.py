"""Assets in tables on each carrier: stored by name, read as of a time, tried again without a change."""

from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from tests.carriers import CARRIERS
from tests.orchestration.storing import Store

pytestmark = pytest.mark.dagster
TABLE = {"persist/key": "id", "persist/table": "t"}


def row(id_: int, seq: int | None, word: str = "w") -> dict[str, Any]:
    return {"id": id_, "seq": seq, "word": word}


def version(stored: dg.AssetMaterialization) -> str:
    return (stored.tags or {})["dagster/data_version"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_asset_is_stored_in_what_carries_its_table_and_read_back(
    client: persist.Client, store: Store, carrier: str
) -> None:
    CARRIERS[carrier](client)
    table, rows, seen = client.table("t"), [row(1, 1), row(2, None)], list[Any]()

    @dg.asset(metadata=TABLE)
    def orders() -> list[dict[str, Any]]:
        return rows

    @dg.asset
    def report(orders: list[dict[str, Any]]) -> None:
        seen.append(sorted(orders, key=lambda one: one["id"]))

    first = store.run(orders, report)
    (stored,) = first.asset_materializations_for_node("orders")
    assert stored.metadata["table"].value == "t"
    assert seen == [rows]
    as_of = stored.metadata["as_of"].value
    before = table.history()
    (again,) = store.run(orders).asset_materializations_for_node("orders")
    assert again.metadata["updates"].value == 0
    assert version(again) == version(stored)
    assert table.history() == before, "the same contents change nothing"
    rows[:] = [row(2, 5), row(3, 1)]
    (moved,) = store.run(orders, report).asset_materializations_for_node("orders")
    assert moved.metadata["updates"].value == 4
    assert version(moved) != version(stored)
    store.run(orders, report, selection=[report], tags={"persist/as_of": str(as_of)})
    store.run(orders, report, selection=[report], tags={"persist/inputs_of": first.run_id})
    store.run(orders, report, selection=[report], tags={"persist/as_of": "now"})
    old = [row(1, 1), row(2, None)]
    assert seen[1:] == [rows, old, old, rows]
    late = store.failure(orders, report, selection=[report], tags={"persist/as_of": "2400-01-01"})
    assert isinstance(late, persist.NotComplete)
    rows[:] = []
    store.run(orders, report)
    assert seen[-1] == []
    assert table.carrier == client.table("t").carrier


@pytest.mark.parametrize("carrier", CARRIERS)
def test_updates_with_times_of_their_own_are_for_shards_and_collections(
    client: persist.Client, store: Store, carrier: str
) -> None:
    CARRIERS[carrier](client)

    @dg.asset(metadata=TABLE)
    def orders() -> list[dict[str, Any]]:
        return [row(1, 1) | {"_time": "2026-11-22T12:00Z"}, row(2, 1) | {"_time": "2026-11-22T13:00Z"}]

    if client.table("t").carrier.startswith("timeline"):
        error = store.failure(orders)
        assert isinstance(error, persist.InvalidUsage)
        assert "mints the times" in error.message
        assert client.table("t").count() == 0
        return
    for skipped in (0, 2):
        (stored,) = store.run(orders).asset_materializations_for_node("orders")
        figures = stored.metadata
        assert (figures["updates"].value, figures["skipped"].value if skipped else 0) == (2 - skipped, skipped)
    assert client.table("t").count("2026-11-22T12:30Z") == 1
    assert client.table("t").count() == 2


def test_a_column_that_is_new_is_added_where_the_carrier_can(client: persist.Client, store: Store) -> None:
    CARRIERS["collection of 3"](client)

    @dg.asset(metadata=TABLE)
    def orders() -> list[dict[str, Any]]:
        return [row(1, 1) | {"x": 7}]

    store.run(orders)
    store.run(orders)
    assert client.table("t").read().to_pylist() == [row(1, 1) | {"x": 7}]


def test_the_former_name_of_an_option_is_told_the_new_one(store: Store) -> None:
    @dg.asset(metadata={"persist/key": "id", "persist/shard": "t"})
    def orders() -> list[dict[str, Any]]:
        return [row(1, 1)]

    assert "persist/shard is persist/table now" in store.failure(orders).message
