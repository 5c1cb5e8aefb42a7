"""Tables whose nested columns became wider: structs with more fields, numbers within of more bits, at every door."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

import persist_lib as persist
from persist_lib.relation.row_selection import widened
from persist_lib.testing import check_world
from tests.worlds import World

FIRST = persist.Schema(
    {"id": "int64"}, {"at": "struct<city: string, zip: int32>", "items": "list<struct<sku: string>>"}, times="ms"
)
WIDE = {
    "at": "struct<city: string, zip: int64, country: string>",
    "items": "list<struct<sku: string, count: int32, marks: map<string, float32>>>",
}
NOW = FIRST.widen(WIDE)
ROWS: list[dict[str, Any]] = [
    {"id": 1, "at": {"city": "Bern", "zip": 3000}, "items": [{"sku": "a"}, None]},
    {"id": 2, "at": {"city": None, "zip": None}, "items": []},
    {"id": 3, "at": None, "items": None},
]
THEN: list[dict[str, Any]] = [
    {
        **row,
        "at": row["at"] and {**row["at"], "country": None},
        "items": row["items"] and [one and {**one, "count": None, "marks": None} for one in row["items"]],
    }
    for row in ROWS
]
KINDS = ["shard", "shard of objects", "collection of objects", "wal", "yolo"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(world: World, kind: str) -> persist.Client:
    return world.client(persist.Config(inline_bytes=0) if "objects" in kind else None)


def made(client: persist.Client, kind: str, schema: persist.Schema = FIRST) -> persist.Table:
    """A table of the kind, with the rows."""
    if kind.startswith("collection"):
        client.controller().create("t", schema, shards=2, mode="compare_and_append")
    elif not kind.startswith("shard"):
        client.controller().tables().create("t", schema, mode=kind, shards=2)  # type: ignore[arg-type]
    table = client.table("t", schema)
    table.append(ROWS)
    return table


def compacted(client: persist.Client) -> None:
    with client.table("t") as table:
        shards, carrier = table.describe().shards, table.describe().carrier
    if carrier == "timeline":
        with client.controller().tables() as tables:
            tables.apply()
            tables.tidy()
    for shard in shards:
        client.maintain(shard)
        check_world(client, shard)


def rows(table: persist.Table, **options: Any) -> list[dict[str, Any]]:
    return sorted(table.read(**options).to_pylist(), key=lambda row: row["id"])


def test_older_rows_have_null_in_what_is_new_as_of_any_time(client: persist.Client, kind: str) -> None:
    old = made(client, kind)
    past = (old.describe().upper.time or 0) - 1
    said = tuple(f"{name} widened to {type_}" for name, type_ in WIDE.items())
    assert client.table("t").evolve(NOW, dry_run=True) == said
    assert client.table("t").evolve(NOW) == said
    assert client.table("t").evolve(NOW) == ()
    table = client.table("t", persist.Schema({"id": "int64"}, WIDE, times="ms"))
    assert rows(table) == THEN == rows(table, as_of=past)
    full = {"id": 4, "at": {"city": "Rom", "zip": 2**40, "country": "IT"}, "items": [{"sku": "b", "count": 2}]}
    table.append([full])
    whole = {**full, "items": [{"sku": "b", "count": 2, "marks": None}]}
    for _ in range(2):
        assert rows(table) == [*THEN, whole]
        assert table.read(columns=["at"], filter=pc.field("id") == 1).to_pylist() == [{"at": THEN[0]["at"]}]
        assert table.read(columns=["items", "id"], filter=pc.field("at", "country") == "IT").to_pylist() == [
            {"items": whole["items"], "id": 4}
        ]
        assert [row["id"] for row in rows(table, filter=pc.field("at", "country").is_null())] == [1, 2, 3]
        assert [row["id"] for row in rows(table, filter=pc.field("at", "zip") > 5)] == [1, 4]
        compacted(client)


def test_rows_of_before_are_taken_back_in_the_new_columns_and_in_the_old_ones(
    client: persist.Client, kind: str
) -> None:
    """What is retracted is what was there: nothing stays, compacted before or after it or never."""
    for when in ("never", "before", "after"):
        old = made(client, kind)
        client.table("t").evolve(NOW)
        table = client.table("t")
        table.upsert([{"id": 2, "at": {"city": "Ulm"}}])
        if when == "before":
            compacted(client)
        table.delete([1, 2])
        old.upsert([{"id": 3, "at": {"city": "Wien", "zip": 1}}])
        if when == "after":
            compacted(client)
        assert rows(table) == [{"id": 3, "at": {"city": "Wien", "zip": 1, "country": None}, "items": None}]
        old.delete([3])
        assert rows(table) == []
        compacted(client)
        assert rows(table, diff=True) == []
        for shard in table.describe().shards:
            assert client.inspect(shard).state.fingerprint == 0
        table.drop()


@pytest.mark.parametrize(
    "more",
    [
        {"at": {"city": "Graz", "zip": 1, "country": ""}}, {"at": {"zip": 2**40}},
        {"items": [None, {"sku": None, "marks": {}}]},
    ],
    ids=["a field", "a number", "a field of an item"],
)  # fmt: skip
def test_programs_in_the_older_columns_continue_until_a_row_has_more(
    client: persist.Client, kind: str, more: dict[str, Any]
) -> None:
    old = made(client, kind)
    client.table("t").evolve(NOW)
    table = client.table("t")
    old.append([{"id": 4, "at": {"city": "Graz", "zip": 8010}, "items": None}])
    declared = client.table("t", FIRST)
    for older in (old, declared):
        assert rows(older)[:3] == ROWS
        older.upsert([{"id": 4, "at": {"city": "Linz", "zip": 4020}, "items": None}])
    assert rows(table)[3] == {"id": 4, "at": {"city": "Linz", "zip": 4020, "country": None}, "items": None}
    table.upsert([{"id": 4, **more}])
    there = rows(table)[3]
    calls: list[Callable[[persist.Table], object]] = [
        rows, lambda older: older.read(columns=list(more)).to_pylist(),
        lambda older: older.upsert([{"id": 4, "at": None, "items": None}]), lambda older: older.delete([4]),
    ]  # fmt: skip
    for older in (old, declared):
        for call in calls:
            with pytest.raises(persist.SchemaMismatch, match="newest columns"):
                call(older)
        if kind != "wal":  # whose pending entries are read whole
            older.upsert([{"id": 2, "items": None}])
            assert rows(table)[1]["items"] is None
    assert rows(table)[3] == there


def test_changes_restores_and_further_steps_have_the_columns_of_now(client: persist.Client, kind: str) -> None:
    table = made(client, kind)
    past = (table.describe().upper.time or 0) - 1
    client.table("t").evolve(NOW)
    table = client.table("t")
    table.upsert([{"id": 1, "at": {"zip": 2**40, "country": "CH"}}, {"id": 3, "items": [{"count": 70_000}]}])
    table.delete([2])
    items = "list<struct<sku: string, count: int64, marks: map<string, float64>, note: string>>"
    wider = table.describe().schema.widen({"items": items})
    client.table("t").evolve(wider)
    table = client.table("t")
    assert rows(table)[1]["items"] == [{"sku": None, "count": 70_000, "marks": None, "note": None}]
    changes = table.changes(past).to_arrow()
    assert changes.schema.field("items").type == wider.data.field("items").type
    assert sum(changes.column("_diff").to_pylist()) == -1
    table.restore(past)
    more = [{**row, "items": row["items"] and [one and {**one, "note": None} for one in row["items"]]} for row in THEN]
    assert rows(table) == more
    compacted(client)
    assert rows(table) == more


@pytest.mark.parametrize("kind", ["shard", "shard of objects"])
def test_splits_and_engines_have_the_columns_of_now(client: persist.Client, kind: str) -> None:
    table = made(client, kind)
    client.table("t").evolve(NOW)
    table = client.table("t")
    with client.open_reader("t") as read:
        splits = [pickle.loads(pickle.dumps(split)) for split in read.snapshot().splits(2)]
    found = [row for split in splits for row in split.to_arrow(client.blob).to_pylist()]
    assert found == THEN
    assert table.read().to_polars()["at"].struct.fields == ["city", "zip", "country"]
    assert table.read().to_pandas()["at"][0] == THEN[0]["at"]


def test_a_projection_into_older_columns_cuts_nothing_off() -> None:
    """Arrow's cast to a struct with fewer fields drops the others without a word."""
    two = [pa.field("a", pa.int64()), pa.field("b", pa.string())]
    there = pa.table([pa.array([{"a": 1, "b": "x"}, None])], pa.schema([("at", pa.struct(two))]))
    narrow = pa.schema([("at", pa.struct(two[:1]))])
    with pytest.raises(persist.SchemaMismatch, match="newest columns"):
        widened(there, narrow)
    assert widened(there.slice(1), narrow).to_pylist() == [{"at": None}]


class Key(BaseModel):
    id: int


class Item(BaseModel):
    sku: str


class Basket(BaseModel):
    items: list[Item]
    by_name: dict[str, Item] | None = None


class NewItem(Item):
    note: str | None = None


class NewBasket(BaseModel):
    items: list[NewItem]
    by_name: dict[str, NewItem] | None = None


def test_a_model_within_a_model_gets_a_field(world: World) -> None:
    first = persist.Schema(key=Key, value=Basket, times="ms")
    newer = persist.Schema(key=Key, value=NewBasket, times="ms")
    client = world.client()
    client.table("t", first).append([(Key(id=1), Basket(items=[Item(sku="a")]))])
    assert len(client.table("t").evolve(newer)) == 2
    client.table("t", newer).upsert([(Key(id=2), NewBasket(items=[], by_name={"x": NewItem(sku="b", note="n")}))])
    assert client.table("t", newer).read().to_pylist() == [
        {"id": 1, "items": [{"sku": "a", "note": None}], "by_name": None},
        {"id": 2, "items": [], "by_name": {"x": {"sku": "b", "note": "n"}}},
    ]


@pytest.mark.parametrize("inline_bytes", [0, 4096])
def test_seconds_within_become_finer_beside_seconds_that_stay(world: World, inline_bytes: int) -> None:
    """Parquet stores seconds as milliseconds, so that a part is at the same time finer and coarser than its reader."""
    client = world.client(persist.Config(inline_bytes=inline_bytes))
    first = persist.Schema({"id": "int64"}, {"s": "struct<t: timestamp[s], u: timestamp[s]>"}, times="ms")
    new_year = dt.datetime.fromisoformat("2026-01-01")
    client.table("t", first).append([{"id": 1, "s": {"t": new_year, "u": new_year}}])
    client.table("t").evolve(first.widen({"s": "struct<t: timestamp[us], u: timestamp[s], v: int8>"}))
    table = client.table("t")
    late = new_year.replace(microsecond=5)
    table.upsert([{"id": 2, "s": {"t": late, "u": new_year}}])
    for _ in range(2):
        assert rows(table) == [
            {"id": 1, "s": {"t": new_year, "u": new_year, "v": None}},
            {"id": 2, "s": {"t": late, "u": new_year, "v": None}},
        ]
        compacted(client)
    table.delete([1, 2])
    compacted(client)
    assert client.inspect("t").state.fingerprint == 0
