"""What the catalog in Java asks, without a JVM: the answers, and what is made of the predicates that it sends."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast
from zipfile import ZipFile

import pyarrow as pa
import pytest
from pyspark.sql import types as t

import persist_lib as persist
import persist_lib.spark
from persist_lib.schema.schema import Schema
from persist_lib.spark.filters import is_exact, pushed_down
from persist_lib.spark.source import PersistSource
from persist_lib.spark.sql_catalog.predicates import parse_predicates
from persist_lib.spark.types import spark_schema
from tests.carriers import CARRIERS

NUMBERS = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1.5, -2.25, None]
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b, "<>": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
DOUBLES = persist.Schema({"k": "int64"}, {"x": "float64", "y": "float32"})


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(tmp_path / "data") as opened:
        yield opened


def asked(client: persist.Client, verb: str, **options: str) -> t.StructField:
    given = {"catalog": verb, "location": client.url, "consensus": client.consensus_url, **options}
    [found] = PersistSource(given).schema()
    return found


def ordered(number: float) -> tuple[bool, float]:
    """Spark's order of doubles: NaN equals itself, and is the greatest."""
    return (True, 0.0) if math.isnan(number) else (False, number)


def kept(schema: Schema, table: pa.Table, predicate: Any) -> list[int]:
    """The places of the rows that a predicate keeps."""
    filters = [one for one in parsed(schema, predicate) if one is not None]
    where = pushed_down(filters, schema).where
    numbered = table.append_column("k", pa.array(range(table.num_rows)))
    return list((numbered if where is None else where.kept(numbered))["k"].to_pylist())


def parsed(schema: Schema, predicate: Any) -> list[Any]:
    return parse_predicates(json.dumps([predicate]), spark_schema(schema.data, schema.times))


def column(name: str) -> dict[str, str]:
    return {"column": name}


def value(text: str | None, kind: str = "double") -> dict[str, str | None]:
    return {"value": text, "type": kind}


def shown_by_java(number: float) -> str:
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number, "NaN" if math.isnan(number) else str(number))


@pytest.mark.parametrize(("name", "kind"), [("x", "double"), ("y", "float")])
def test_floats_are_compared_as_spark_does(name: str, kind: str) -> None:
    field = DOUBLES.data.field(name)
    table = pa.table({name: pa.array(NUMBERS, field.type)})
    for op, number in itertools.product(COMPARE, [one for one in NUMBERS if one is not None]):
        says = [
            place for place, one in enumerate(NUMBERS) if one is not None and COMPARE[op](ordered(one), ordered(number))
        ]
        text = value(shown_by_java(number), kind)
        for predicate in ([op, column(name), text], [FLIPPED.get(op, op), text, column(name)]):
            assert kept(DOUBLES, table, predicate) == says, predicate
        nots = [place for place, one in enumerate(NUMBERS) if one is not None and place not in says]
        negated = ["NOT", [op, column(name), text]]
        assert kept(DOUBLES, table, negated) == (list(range(len(NUMBERS))) if op == "<>" else nots), negated
    chosen = ["IN", column(name), value("NaN", kind), value("0.0", kind)]
    assert kept(DOUBLES, table, chosen) == [0, 3, 4]
    assert kept(DOUBLES, table, ["NOT", chosen]) == [1, 2, 5, 6]


def test_what_is_not_understood_keeps_rows_and_is_not_exact() -> None:
    schema = persist.Schema({"k": "int64"}, {"s": "string", "l": "list<int64>"})
    table = pa.table({"s": ["a", "b", None]})
    known, unknown = ["=", column("s"), value("a", "string")], ["CHAR_LENGTH", column("s")]
    odd = [
        unknown, ["=", unknown, value("1", "int")], ["=", value("1", "int"), unknown], ["=", column("no"), value("1")],
        ["=", column("s"), value("1", "int")], ["=", column("s"), value("a", "string collate UNICODE_CI")], ["?"], "?",
        ["NOT", ["AND", known, known]], ["=", column("s"), column("s")], ["IN", column("s"), unknown],
        ["=", column("l"), value("[1]", "array<bigint>")], ["NOT", unknown],
        ["STARTS_WITH", column("k"), value("1", "bigint")],
    ]  # fmt: skip
    for one in odd:
        assert kept(schema, table, one) == [0, 1, 2], one
        assert not any(found is not None and is_exact(found, schema) for found in parsed(schema, one)), one
        assert kept(schema, table, ["AND", known, one]) == [0], one
        assert kept(schema, table, ["OR", known, one]) == [0, 1, 2], one
    assert kept(schema, table, ["OR", known, ["IS_NULL", column("s")]]) == [0, 2]
    assert kept(schema, table, ["=", column("s"), value(None, "string")]) == [0, 1, 2]
    assert parsed(schema, ["ALWAYS_TRUE"]) == []


def column_of(batch: Any, name: str) -> list[Any]:
    return list(batch.column(name).to_pylist())


def read_of(client: persist.Client, of: t.StructField, about: dict[str, Any]) -> list[int]:
    """The ids that a scan of the catalog reads: Spark says the columns, and asks for no schema."""
    place = {"location": client.url, "consensus": client.consensus_url}
    reader = PersistSource({**place, **json.loads(about["read"])}).reader(cast(t.StructType, of.dataType))
    return [id_ for part in reader.partitions() for batch in reader.read(part) for id_ in column_of(batch, "id")]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_table_is_of_the_time_at_which_it_was_loaded(carrier: str, client: persist.Client) -> None:
    CARRIERS[carrier](client)
    table = client.table("t")
    empty = asked(client, "load", table="t").metadata
    assert (empty["as_of"], empty["rows"]) == ("-1", 0)
    table.append([{"id": 1, "seq": 1, "word": "w"}])
    assert read_of(client, asked(client, "load", table="t"), empty) == [], "what came later is not read"
    found = asked(client, "load", table="t")
    assert found.metadata["writable"]
    assert found.metadata["cheap"] in {"id", "seq"}
    assert isinstance(found.dataType, t.StructType)
    table.append([{"id": 2, "seq": 1, "word": "w"}])
    assert read_of(client, found, found.metadata) == [1]
    beyond = asked(client, "load", table="t", micros=str(2**57)).metadata
    assert not beyond["writable"]
    assert int(beyond["as_of"]) >= int(found.metadata["as_of"])


def test_spark_finds_the_source_by_a_package_of_its_own() -> None:
    found = [one.name for one in iter_modules([str(Path(persist.__file__).parents[1])]) if one.name[:8] == "pyspark_"]
    assert [import_module(name).DefaultSource for name in found] == [PersistSource]


def test_a_catalog_that_may_only_read_makes_nothing(client: persist.Client) -> None:
    client.table("t", persist.Schema({"id": "int64"}))
    assert not asked(client, "load", table="t", read_only="true").metadata["writable"]
    frame = t.StructType([t.StructField("id", t.LongType(), False)]).json()
    made = {"schema": frame, "properties": '{"key": "id"}', "table": "new"}
    assert asked(client, "create", **made, read_only="true").metadata["error"]
    assert asked(client, "delete", table="t", pushed="[]", read_only="true").metadata["error"]
    assert client.tables() == ["t"]


def test_errors_are_answers(client: persist.Client) -> None:
    client.table("t", persist.Schema({"id": "int64"}))
    for verb, options, error in (
        ("load", {"table": "no"}, "NotFound"), ("load", {"table": "no/history"}, "NotFound"),
        ("load", {"table": "t", "as_of": "5"}, "NotComplete"), ("load", {"table": "t", "nosuch": "x"}, "InvalidUsage"),
        ("load", {"table": "t", "micros": str(2**62)}, "InvalidUsage"),
        ("rename", {"table": "t", "to": "x"}, "InvalidUsage"),
        ("tables", {"namespace": "", "nosuch": "x"}, "InvalidUsage"),
        ("drop", {"table": "no"}, "NotFound"), ("rename", {"table": "no", "to": "x"}, "NotFound"),
    ):  # fmt: skip
        found = asked(client, verb, **options).metadata
        assert found["error"] == error, found
        assert found["message"]


def test_names_are_listed_by_namespace(client: persist.Client) -> None:
    for name in ("a", "sales/b", "sales/eu/c"):
        if "/" in name:
            client.controller().create(name, persist.Schema({"id": "int64"}))
        else:
            client.table(name, persist.Schema({"id": "int64"}))
    said = {
        (verb, namespace): asked(client, verb, namespace=namespace).metadata["names"]
        for verb in ("tables", "namespaces") for namespace in ("", "sales", "sales/eu", "other")
    }  # fmt: skip
    assert said == {
        ("tables", ""): "a", ("tables", "sales"): "b", ("tables", "sales/eu"): "c", ("tables", "other"): "",
        ("namespaces", ""): "sales", ("namespaces", "sales"): "sales/eu", ("namespaces", "sales/eu"): "",
        ("namespaces", "other"): "",
    }  # fmt: skip


def test_the_jar_of_the_catalog_is_where_spark_is_told() -> None:
    with ZipFile(persist_lib.spark.catalog_jar()) as jar:
        assert "io/persist/spark/PersistCatalog.class" in jar.namelist()
    assert persist_lib.spark.catalog_conf("memory:", "lake")["spark.jars"] == persist_lib.spark.catalog_jar()


@pytest.mark.parametrize("what", ["history", "batches"])
def test_metadata_tables_take_what_spark_pushes_down(client: persist.Client, what: str) -> None:
    """Spark filters and limits their few rows itself."""
    table = client.table("t", DOUBLES)
    for x in range(3):
        table.append([{"k": x, "x": 1.0, "y": 1.0}])
    load = asked(client, "load", table=f"t/{what}")
    given = {"location": client.url, "table": "t", **json.loads(load.metadata["read"])}
    for pushed in ({}, {"pushed": "[]"}, {"limit": "1"}):
        reader: Any = PersistSource({**given, **pushed}).reader(cast("t.StructType", load.dataType))
        found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
        assert len(found) == 3 if what == "history" else found
