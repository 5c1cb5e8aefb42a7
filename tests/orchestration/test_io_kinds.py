"""What assets may return and load: tables of many kinds, empty ones, nulls, models; and schemas that grow."""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

import persist_lib as persist
from orchestration.io import loading
from orchestration.io.names import place_of
from tests.orchestration.storing import Store, contents

pytestmark = pytest.mark.dagster
KEY = {"persist/key": ["id"]}
ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]


class Customer(BaseModel):
    id: int
    name: str | None = None


@dataclass
class Plain:
    id: int
    name: str | None


def asset_of(value: Callable[[], Any], metadata: dict[str, Any] | None = None, **options: Any) -> dg.AssetsDefinition:
    @dg.asset(name="customers", metadata=KEY if metadata is None else metadata, **options)
    def customers():
        return value()

    return customers


def rows(client: persist.Client, as_of: int | None = None) -> list[dict[str, Any]]:
    return contents(client, "customers", as_of)


TABLE = pa.table({"id": [1, 2], "name": ["a", None]})
KINDS: dict[str, Callable[[], Any]] = {
    "arrow table": lambda: TABLE,
    "record batch": lambda: TABLE.to_batches()[0],
    "reader": lambda: pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches()),
    "pandas": lambda: pd.DataFrame(ROWS),
    "polars": lambda: pl.DataFrame(ROWS),
    "lazy polars": lambda: pl.LazyFrame(ROWS),
    "dicts": lambda: ROWS,
    "sparse dicts": lambda: [{"id": 1, "name": "a"}, {"id": 2}],
    "sparse dicts, first one short": lambda: [{"id": 2}, {"id": 1, "name": "a"}],
    "models": lambda: [Customer(id=1, name="a"), Customer(id=2)],
    "dataclasses": lambda: [Plain(1, "a"), Plain(2, None)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_asset_may_return(kind: str, client: persist.Client, store: Store) -> None:
    store.run(asset_of(KINDS[kind]))
    assert rows(client) == ROWS
    schema = client.inspect("customers").state.schemas[-1]
    assert [(column.name, column.type) for column in schema.columns] == [("id", "int64"), ("name", "string")]
    before = client.inspect("customers").state.upper
    store.run(asset_of(KINDS[kind]))
    assert client.inspect("customers").state.upper == before, "the same contents change nothing"


LOADS: dict[Any, Callable[[Any], Any]] = {
    pa.Table: lambda found: found.to_pylist(),
    pa.RecordBatchReader: lambda found: found.read_all().to_pylist(),
    pd.DataFrame: lambda found: [
        {"id": row["id"], "name": None if pd.isna(row["name"]) else row["name"]} for row in found.to_dict("records")
    ],
    pl.DataFrame: lambda found: found.to_dicts(),
    pl.LazyFrame: lambda found: found.collect().to_dicts(),
    list: lambda found: found,
    list[dict]: lambda found: found,  # type: ignore[type-arg]
    list[dict[str, Any]]: lambda found: found,
    list[Customer]: lambda found: [row.model_dump() for row in found],
    Any: lambda found: found.to_pylist(),
}


@pytest.mark.parametrize("wanted", LOADS, ids=str)
def test_a_consumer_gets_the_type_that_it_is_annotated_with(wanted: Any, store: Store) -> None:
    seen: list[Any] = []

    def consumer(customers):
        assert wanted is Any or not isinstance(wanted, type) or isinstance(customers, wanted)
        seen.append(LOADS[wanted](customers))

    consumer.__annotations__ = {"customers": wanted, "return": None}
    store.run(asset_of(lambda: TABLE), dg.asset(consumer))
    assert seen == [ROWS]


@pytest.mark.parametrize("wanted", [dict, int, set, list[int], pl.Series, dict[str, int]], ids=str)
def test_a_type_that_cannot_be_had_is_refused_with_those_that_can(wanted: Any, store: Store) -> None:
    def consumer(customers):
        raise AssertionError("it must not run")

    consumer.__annotations__ = {"customers": wanted, "return": None}
    error = store.failure(asset_of(lambda: TABLE), dg.asset(consumer))
    assert "pd.DataFrame, pl.DataFrame, pl.LazyFrame, list, list[dict]" in error.message


def empty_pandas() -> pd.DataFrame:
    return pd.DataFrame({"id": pd.Series([], dtype="int64"), "name": pd.Series([], dtype="object")})


EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "arrow": lambda: TABLE.slice(0, 0),
    "pandas": empty_pandas,
    "pandas without columns": pd.DataFrame,
    "polars": lambda: pl.DataFrame(ROWS).clear(),
    "polars without columns": pl.DataFrame,
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_table_takes_everything_away(kind: str, client: persist.Client, store: Store) -> None:
    store.run(asset_of(lambda: TABLE))
    result = store.run(asset_of(EMPTY[kind]))
    assert result.asset_materializations_for_node("customers")[0].metadata["updates"].value == 2
    assert rows(client) == []
    assert rows(client, as_of=0) == ROWS


UNTYPED = pa.table({"id": pa.array([1], pa.int64()), "tags": pa.array([None], pa.null())})


@pytest.mark.parametrize(
    ("value", "key", "words"),
    [
        *[
            (value, ["id"], "a list of dicts, pydantic models or dataclasses")
            for value in (7, "text", {"id": [1]}, [1, 2], [(1, "a")], object())
        ],
        *[
            (EMPTY[kind](), ["id"], words) for words in ("persist/schema", "list[Customer]")
            for kind in ("list", "pandas", "pandas without columns", "polars without columns")
        ],
        *[(ROWS, key, "persist/key names the key columns") for key in (7, [], [1], {"id": 1}.items())],
        (ROWS, "di", "persist/key names the columns ['di']"),
        ([{"id": 1, "name": "a"}, {"id": 2, "name": 3}], ["id"], "column 'name' has values of different kinds"),
        (UNTYPED, ["id"], "column 'tags'"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_with_what_may_be(
    value: Any, key: Any, words: str, client: persist.Client, store: Store
) -> None:
    assert words in store.failure(asset_of(lambda: value, {"persist/key": key})).message
    assert client.shards() == []


@pytest.mark.parametrize(
    "schema",
    [
        {"id": "int64", "name": "string"}, persist.Schema({"id": "int64"}, {"name": "string"}), TABLE.schema, Customer,
    ],
    ids=["mapping", "schema", "arrow", "model"],
)  # fmt: skip
def test_an_empty_list_with_a_declared_schema_is_stored(schema: Any, client: persist.Client, store: Store) -> None:
    metadata = {**KEY, "persist/schema": schema}
    result = store.run(asset_of(list, metadata))
    assert result.asset_materializations_for_node("customers")[0].metadata["rows"].value == 0
    assert rows(client) == []
    store.run(asset_of(lambda: ROWS, metadata))
    assert rows(client) == ROWS
    assert client.inspect("customers").state.schemas[-1].key_names == ["id"]


def test_an_annotated_model_is_the_schema(client: persist.Client, store: Store) -> None:
    @dg.asset(metadata=KEY)
    def customers() -> list[Customer]:
        return []

    store.run(customers)
    assert str(client.inspect("customers").state.schemas[-1]) == "(id: int64 not null) -> (name: string)"


def test_none_stores_nothing_and_says_so(client: persist.Client, store: Store) -> None:
    store.run(asset_of(lambda: TABLE))
    result = store.run(asset_of(lambda: None))
    metadata = result.asset_materializations_for_node("customers")[0].metadata
    assert metadata["stored"].value == "nothing, as the asset returned None"
    assert rows(client) == ROWS


def test_a_column_without_any_value_keeps_its_type_and_is_refused_where_it_has_none(
    client: persist.Client, store: Store
) -> None:
    error = store.failure(asset_of(lambda: [{"id": 1, "name": None}]))
    assert "column 'name' has no value in any row" in error.message
    store.run(asset_of(lambda: [{"id": 1, "name": "a", "cents": 7}]))
    store.run(asset_of(lambda: [{"id": 1, "name": None, "cents": None}]))
    assert rows(client) == [{"id": 1, "name": None, "cents": None}]
    store.run(asset_of(lambda: pd.DataFrame({"id": [1, 2], "name": [None, None], "cents": [None, 5]})))
    assert rows(client)[1] == {"id": 2, "name": None, "cents": 5}, "pandas made a float of it"
    assert len(client.inspect("customers").state.schemas) == 1


def test_added_columns_keep_the_constraints_of_a_schema(client: persist.Client, store: Store) -> None:
    stored = persist.Schema({"id": "int64"}, {"name": "string"}, unique=True, non_negative=True)
    client.open_writer("customers", stored)
    store.run(asset_of(lambda: [{"id": 1, "name": "a"}]))
    store.run(asset_of(lambda: [{"id": 1, "name": "a", "vip": True}]))
    schema = client.inspect("customers").state.schemas[-1]
    assert str(schema) == "(id: int64) -> (name: string, vip: bool), unique, non_negative"
    assert rows(client) == [{"id": 1, "name": "a", "vip": True}]


def test_constraints_that_the_shard_cannot_get_any_more_are_refused(client: persist.Client, store: Store) -> None:
    plain = persist.Schema({"id": "int64"}, {"name": "string"})
    store.run(asset_of(lambda: [{"id": 1, "name": "a"}], {"persist/schema": plain}))
    before = client.inspect("customers").seqno
    strict = persist.Schema({"id": "int64"}, {"name": "string"}, unique=True)
    error = store.failure(asset_of(lambda: [{"id": 2, "name": "b"}], {"persist/schema": strict}))
    assert "says that its shard is unique (persist/schema), and the shard has the schema" in error.message
    assert client.inspect("customers").seqno == before
    assert rows(client) == [{"id": 1, "name": "a"}]


def test_contents_that_break_a_constraint_are_refused_and_nothing_is_stored(
    client: persist.Client, store: Store
) -> None:
    strict = persist.Schema({"id": "int64"}, {"name": "string"}, times="ms", unique=True)
    store.run(asset_of(lambda: [{"id": 1, "name": "a"}], {"persist/schema": strict}))
    twice = [{"id": 1, "name": "b"}, {"id": 2, "name": "c"}, {"id": 2, "name": "d"}]
    error = store.failure(asset_of(lambda: twice, {"persist/schema": strict}))
    assert "the schema says unique" in error.message
    assert rows(client) == [{"id": 1, "name": "a"}]
    store.run(asset_of(lambda: [{"id": 1, "name": "b"}, {"id": 2, "name": "c"}]))
    assert rows(client) == [{"id": 1, "name": "b"}, {"id": 2, "name": "c"}], "a schema without them leaves them"


def test_added_columns_evolve_the_schema_and_old_rows_have_null_in_them(client: persist.Client, store: Store) -> None:
    store.run(asset_of(lambda: ROWS))
    day = dt.date(2026, 11, 22)
    wider: list[dict[str, Any]] = [
        {"id": 1, "since": day, "name": "a", "vip": True},
        {"id": 2, "since": None, "name": None, "vip": None},
    ]
    result = store.run(asset_of(lambda: wider))
    assert result.asset_materializations_for_node("customers")[0].metadata["updates"].value == 2, "only the first"
    assert rows(client) == [
        {"id": row["id"], "name": row["name"], "since": row["since"], "vip": row["vip"]} for row in wider
    ]
    assert rows(client, as_of=0)[0] == {"id": 1, "name": "a", "since": None, "vip": None}
    schema = client.inspect("customers").state.schemas[-1]
    assert str(schema) == "(id: int64) -> (name: string, since: date32, vip: bool)"


@pytest.mark.parametrize(
    ("value", "metadata", "words"),
    [
        ([{"id": 1}], KEY, "column 'name' is gone"),
        ([{"id": "x", "name": "a"}], KEY, "column 'id' is int64 and takes no str"),
        ([{"id": 1.5, "name": "a"}], KEY, "column 'id' is int64, which cannot hold 1.5"),
        (pa.table({"id": [1], "name": [3]}), KEY, "column 'name' is string and takes no int64"),
        (ROWS, {"persist/key": ["name"]}, "the key is ['name'] and was ['id']"),
        (ROWS, {"persist/schema": {"id": "int64", "name": "binary"}, **KEY}, "column 'name' is binary and was string"),
    ],
)
def test_a_removed_or_changed_column_is_refused_in_words(
    value: Any, metadata: dict[str, Any], words: str, client: persist.Client, store: Store
) -> None:
    store.run(asset_of(lambda: ROWS))
    before = client.inspect("customers").state.upper
    error = store.failure(asset_of(lambda: value, metadata))
    assert words in error.message
    assert client.inspect("customers").state.upper == before
    assert rows(client) == ROWS


def test_one_key_column_may_be_named_without_a_list(client: persist.Client, store: Store) -> None:
    store.run(asset_of(lambda: ROWS, {"persist/key": "id"}))
    assert client.inspect("customers").state.schemas[-1].key_names == ["id"]


def test_a_column_of_lists_is_stored(client: persist.Client, store: Store) -> None:
    store.run(asset_of(lambda: [{"id": 1, "tags": ["a", None]}]))
    assert rows(client) == [{"id": 1, "tags": ["a", None]}]


def test_late_updates_are_counted_as_skipped_and_none_at_all_complete_no_time(
    client: persist.Client, store: Store
) -> None:
    def updates(*times: int) -> pa.Table:
        count = len(times)
        return pa.table({"id": pa.array(range(count), pa.int64()), "_time": pa.array(times, pa.uint64())})

    store.run(asset_of(updates))
    result = store.run(asset_of(lambda: updates(0, 1)))
    assert result.asset_materializations_for_node("customers")[0].metadata["updates"].value == 2, (
        "time 0 was still open"
    )
    result = store.run(asset_of(lambda: updates(1, 2)))
    metadata = result.asset_materializations_for_node("customers")[0].metadata
    assert (metadata["updates"].value, metadata["skipped"].value) == (1, 1)


def test_rows_that_were_taken_away_more_often_than_they_were_there_are_not_left_out(client: persist.Client) -> None:
    schema = persist.Schema(key={"id": "int64"})
    with client.open_writer("bare", schema) as write:
        write.compare_and_append([{"id": 1, "_diff": 2}, {"id": 2, "_diff": -1}], 0, 1)
        write.compare_and_append([{"id": 2}], 1, 2)
    place = place_of(["bare"], None, {})
    with pytest.raises(persist.InvalidUsage, match="-1 times"):
        loading.read(client, [loading.Source(place, 0, 1, schema)], loading.builder(pa.Table))
    found = loading.read(client, [loading.Source(place, 1, 1, schema)], loading.builder(pa.Table))
    assert found.column("id").to_pylist() == [1, 1]
