"""Fields that messages of Avro get later become columns, before a message that has one is decoded; or they do not."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, InvalidUsage, SchemaChanged
from persist_lib.sources import Decoding, Files, Meaning, Registry, Sources
from persist_lib.sources.decoding import NewFields
from persist_lib.sources.loading import unloadable
from persist_lib.sources.pipeline import Pipeline
from persist_lib.sources.running import Ingestion
from persist_lib.sources.schema_registry import Written
from tests.registry import Registered
from tests.sourced import Sourced
from tests.unit.sources.messages import applied, messages
from tests.unit.sources.test_avro import ROW, SCHEMA, datum, packed

KEY = "long"
NOTE = {"name": "note", "type": ["null", "string"], "default": None}
COUNT = {"name": "count", "type": "int", "default": 0}


def record(*more: Any) -> dict[str, Any]:
    return {**ROW, "fields": [*ROW["fields"], *more]}


class Place(Registered):
    """A topic of Avro whose schemas grow, and a source of it."""

    def __init__(self, extra: Any = "add", envelope: str = "upsert", **meaning: Any) -> None:
        super().__init__()
        self.schemas: dict[int, Any] = {1: record(), 2: record(NOTE), 3: record(NOTE, COUNT), 9: KEY}
        for id_, schema in self.schemas.items():
            self.server.add(id_, json.dumps(schema))
        self.sources.create(
            "s", self.topic.declared(), SCHEMA, meaning=Meaning(envelope=envelope, **meaning),
            decoding=Decoding(
                decoder="avro", key=None if envelope == "debezium" else "avro", extra=extra,
                registry=Registry(place=self.server.url),
            ),
        )  # fmt: skip

    def put(self, schema: int, id_: int, **row: Any) -> None:
        whole = {"id": id_, "word": None, **row}
        value = b"\0" + schema.to_bytes(4) + datum(whole, self.schemas[schema])
        self.topic.write([value], keys=[b"\0" + (9).to_bytes(4) + datum(id_, KEY)])

    def instance(self) -> Ingestion:
        return Sources(self.world.client().controller()).open("s")

    def rows(self) -> list[dict[str, Any]]:
        found = self.contents()
        assert all(row.pop("_diff") == 1 for row in found)
        return sorted(found, key=lambda row: row["id"])


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


def test_a_field_becomes_a_column_that_older_rows_have_null_in(place: Place) -> None:
    place.put(1, 1, word="a")
    assert place.step().errors == 0
    place.put(2, 2, note="n")
    place.put(3, 3, count=7)
    place.put(1, 4)
    assert place.step().errors == 0
    assert place.rows() == [
        {"id": 1, "word": "a", "note": None, "count": None}, {"id": 2, "word": None, "note": "n", "count": None},
        {"id": 3, "word": None, "note": None, "count": 7}, {"id": 4, "word": None, "note": None, "count": None},
    ]  # fmt: skip
    declared = place.sources.find("s").schema
    assert [str(one) for one in declared.value] == ["word: string", "note: string", "count: int64"]
    assert place.contents("s/errors") == []


def test_an_instance_that_knows_no_field_takes_back_rows_with_what_they_have_in_it(place: Place) -> None:
    """A producer of the older schema writes the same key again, and another instance reads it than took the field."""
    first, second = place.instance(), place.instance()
    place.put(1, 1, word="a")
    place.step(second)
    place.put(2, 1, note="of a newer schema")
    place.step(first)
    place.put(1, 1, word="b")
    place.step(second)
    assert place.rows() == [{"id": 1, "word": "b", "note": None}]
    place.put(3, 1, count=1)
    place.step(second)
    place.put(1, 2)
    place.step(first)
    assert [row["count"] for row in place.rows()] == [1, None]
    first.close()
    second.close()


def test_two_instances_take_a_field_at_once(place: Place) -> None:
    first, second = place.instance(), place.instance()
    takes = first._grows
    assert takes is not None

    def late(known: Any, growth: Any, deadline: Any) -> Any:
        if growth is not None:
            place.step(second, mints=False)
        return takes(known, growth, deadline)

    first._grows = late
    place.put(1, 1)
    place.put(3, 1, note="n", count=2)
    place.step(first)
    assert place.rows() == [{"id": 1, "word": None, "note": "n", "count": 2}]
    first.close()
    second.close()


def test_one_that_dies_between_the_output_and_what_is_declared_is_followed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put(2, 1, note="n")
    with monkeypatch.context() as patched:
        patched.setattr("persist_lib.sources.kinds.Declared.update", _dies)
        with pytest.raises(KeyboardInterrupt):
            place.step()
    assert place.sources.find("s").schema.names == ["id", "word"]
    assert place.controller.describe("s").schema.names == ["id", "word", "note"]
    assert place.step().errors == 0
    assert place.rows() == [{"id": 1, "word": None, "note": "n"}]


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_one_that_takes_nothing_by_itself_decodes_nothing_with_a_field(place: Place) -> None:
    instance = place.instance()
    instance._grows = None
    place.put(2, 1, note="n")
    with pytest.raises(Determinate, match="new fields: 'note'"):
        place.step(instance)
    assert place.rows() == []
    place.step()
    instance.close()
    assert [row["note"] for row in place.rows()] == ["n"]


def test_the_first_message_with_a_field_says_its_type(place: Place) -> None:
    place.schemas |= {4: record(COUNT), 5: record({"name": "count", "type": "string"})}
    for id_ in (4, 5):
        place.server.add(id_, json.dumps(place.schemas[id_]))
    place.put(4, 1, count=7)
    place.put(5, 2, count="seven")
    assert place.step().errors == 1
    assert place.rows() == [{"id": 1, "word": None, "count": 7}]
    assert "count" in place.contents("s/errors")[0]["reason"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [(["null", "string", "long"], "one of several types"), ("null", "always null"), (["null"], "always null")],
)
def test_a_field_that_no_column_holds_ends_the_source(place: Place, kind: Any, why: str) -> None:
    place.schemas[4] = record({"name": "odd", "type": kind})
    place.server.add(4, json.dumps(place.schemas[4]))
    place.put(1, 1)
    place.step()
    place.put(4, 2, odd=None)
    for _ in range(2):
        with pytest.raises(SchemaChanged, match=f"'odd', and no column takes it: it is {why}"):
            place.step()
    assert [row["id"] for row in place.rows()] == [1]


@pytest.mark.parametrize("name", ["_time", "line"])
def test_a_field_whose_name_is_taken_ends_the_source(name: str) -> None:
    schema = persist.Schema({"id": "int64 not null"}, {"word": "string", "line": "uint64"})
    place = Place(include={"word": "partition"})
    try:
        place.sources.drop("s")
        place.sources.create(
            "s", place.topic.declared(), schema, meaning=Meaning(include={"line": "address"}),
            decoding=Decoding(decoder="avro", extra="add", registry=Registry(place=place.server.url)),
        )  # fmt: skip
        place.schemas[4] = record({"name": name, "type": "long"})
        place.server.add(4, json.dumps(place.schemas[4]))
        place.put(4, 1, **{name: 1})
        with pytest.raises(SchemaChanged, match=f"the new column '{name}' of its messages cannot be taken"):
            place.step()
        assert place.contents() == []
    finally:
        place.close()


@pytest.mark.parametrize(("extra", "errors"), [("refuse", 1), ("ignore", 0)])
def test_a_field_that_is_not_taken_makes_a_message_bad_unless_it_is_declared_otherwise(extra: str, errors: int) -> None:
    place = Place(extra)
    try:
        place.put(1, 1)
        place.put(2, 2, note="n")
        assert place.step().errors == errors
        assert [set(row) for row in place.rows()] == [{"id", "word"}] * (2 - errors)
        found = place.contents("s/errors")
        assert [("note" in row["reason"], row["address"]) for row in found] == [(True, 1)] * errors
    finally:
        place.close()


def test_changes_of_debezium_have_their_fields_in_the_row() -> None:
    place = Place(envelope="debezium")
    try:
        for id_, row in ((1, record()), (2, record(NOTE, COUNT))):
            place.schemas[id_] = {
                "type": "record", "name": "Envelope", "fields": [
                    {"name": "before", "type": ["null", {**row, "name": "Value"}], "default": None},
                    {"name": "after", "type": ["null", "Value"], "default": None},
                    {"name": "op", "type": "string"}, {"name": "ts_ms", "type": ["null", "long"], "default": None},
                ],
            }  # fmt: skip
            place.server.add(id_, json.dumps(place.schemas[id_]))
        rows = [{"id": 1, "word": "a"}, {"id": 1, "word": "b", "note": "n", "count": 3}]
        for id_, op, before, after in ((1, "c", None, rows[0]), (2, "u", None, rows[1])):
            change = {"before": before, "after": after, "op": op}
            place.topic.write([b"\0" + id_.to_bytes(4) + datum(change, place.schemas[id_])])
        assert place.step().errors == 0
        assert place.rows() == [{"id": 1, "word": "b", "note": "n", "count": 3}]
        assert place.sources.find("s").schema.names == ["id", "word", "note", "count"]
    finally:
        place.close()


ID = UUID(int=7)
MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 6000, dt.UTC)
TYPES: list[tuple[Any, str, Any, Any]] = [
    ("boolean", "bool", True, True), ("int", "int64", -1, -1), ("long", "int64", 2**62, 2**62),
    ("float", "float64", 1.5, 1.5), ("double", "float64", 0.1, 0.1), ("string", "string", "ä", "ä"),
    ("bytes", "binary", b"\xff", b"\xff"), ({"type": "fixed", "name": "F", "size": 2}, "binary", b"ab", b"ab"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "string", "B", "B"),
    ({"type": "array", "items": "long"}, "json", [1, 2], [1, 2]),
    ({"type": "map", "values": "double"}, "json", {"b": 1.0, "a": 2.5}, {"a": 2.5, "b": 1.0}),
    ({"type": "record", "name": "In", "fields": [{"name": "x", "type": "int"}]}, "json", {"x": 1}, {"x": 1}),
    ({"type": "int", "logicalType": "date"}, "date32", dt.date(2026, 1, 2), dt.date(2026, 1, 2)),
    ({"type": "int", "logicalType": "time-millis"}, "time64[us]", dt.time(1, 2), dt.time(1, 2)),
    ({"type": "long", "logicalType": "time-micros"}, "time64[us]", dt.time(1, 2, 3, 4), dt.time(1, 2, 3, 4)),
    ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp[ms, UTC]", MOMENT, MOMENT),
    ({"type": "long", "logicalType": "timestamp-micros"}, "timestamp[us, UTC]", MOMENT, MOMENT),
    (
        {"type": "long", "logicalType": "local-timestamp-micros"}, "timestamp[us]",
        MOMENT.replace(tzinfo=None), MOMENT.replace(tzinfo=None),
    ),
    ({"type": "string", "logicalType": "uuid"}, "uuid", ID, ID),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 2}, "decimal256(40, 2)",
        Decimal("1.50"), Decimal("1.50"),
    ),
    ({"type": "long", "logicalType": "of our own"}, "int64", 5, 5),
    ({"type": "string"}, "string", "x", "x"), (["string", "null"], "string", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "column", "value", "found"), TYPES)
def test_each_type_has_a_column_that_holds_its_values(kind: Any, column: str, value: Any, found: Any) -> None:
    schema = record({"name": "more", "type": kind})
    decoding = Decoding(decoder="avro", extra="add", registry=Registry(place="http://no.where"))
    given = messages([1], [b"\0\0\0\0\5" + datum({"id": 1, "word": None, "more": value}, schema)])
    schemas = {5: Written(json.dumps(schema))}
    with pytest.raises(NewFields) as new:
        applied(Pipeline(decoding, Meaning(), SCHEMA), given, lambda _: SCHEMA.contents.empty_table(), schemas)
    assert new.value.columns == {"more": column}
    wider = SCHEMA.add(new.value.columns)
    made = applied(Pipeline(decoding, Meaning(), wider), given, lambda _: wider.contents.empty_table(), schemas)
    assert made.errors.num_rows == 0
    assert [row["more"] for row in persist.decode_rows(wider, made.output)] == [found]


def test_files_of_avro_have_their_schemas_with_them(tmp_path: Path) -> None:
    place = Sourced()
    try:
        place.sources.create(
            "s", Files(place=str(tmp_path), format="avro"), SCHEMA, decoding=Decoding(decoder="avro", extra="add")
        )
        (tmp_path / "a.avro").write_bytes(packed([{"id": 1, "word": "a"}]))
        place.catch_up()
        (tmp_path / "b.avro").write_bytes(packed([{"id": 2, "word": "b", "note": "n"}], schema=record(NOTE)))
        place.catch_up()
        assert [(row["id"], row["note"]) for row in place.contents()] == [(1, None), (2, "n")]
        assert unloadable(place.sources.find("s"))
    finally:
        place.close()


@pytest.mark.parametrize(
    ("decoding", "meaning", "why"),
    [
        ({"decoder": "json", "extra": "add"}, {}, "PostgreSQL and for Avro"),
        ({"decoder": "avro", "extra": "add", "avro": json.dumps(ROW)}, {}, "drop one"),
        ({"decoder": "avro", "extra": "add"}, {"keep_raw": True}, "leave one out"),
        ({"decoder": "avro", "extra": "add"}, {"transform": "json:dumps"}, "leave one out"),
    ],
)
def test_what_does_not_go_with_it_is_refused(decoding: Any, meaning: Any, why: str) -> None:
    with pytest.raises(InvalidUsage, match=why):
        Pipeline(Decoding(**decoding), Meaning(**meaning), SCHEMA)


@pytest.mark.parametrize("seed", range(6))
def test_any_instances_and_producers_come_to_what_the_messages_say(seed: int) -> None:
    draw, place = random.Random(seed), Place()
    try:
        instances = [place.instance() for _ in range(3)]
        model: dict[int, dict[str, Any]] = {}
        seen: dict[str, None] = dict.fromkeys(["id", "word"])
        for number in range(25):
            schema, id_ = draw.choice([1, 1, 2, 3] if number > 8 else [1]), draw.randrange(4)
            row = {"word": f"w{number}", "note": draw.choice([None, f"n{number}"]), "count": number}
            names = [one["name"] for one in place.schemas[schema]["fields"]]
            row = {name: row[name] for name in names if name != "id"}
            place.put(schema, id_, **row)
            model[id_] = {"id": id_, **row}
            seen |= dict.fromkeys(names)
            if draw.random() < 0.6:
                place.step(draw.choice(instances))
            if draw.random() < 0.1:
                instances.append(place.instance())
        place.step(instances[0])
        assert place.rows() == [{**dict.fromkeys(seen), **model[id_]} for id_ in sorted(model)]
        for instance in instances:
            place.step(instance)
            instance.close()
    finally:
        place.close()
