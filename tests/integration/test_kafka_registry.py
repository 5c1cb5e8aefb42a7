"""Topics of Avro on a real Apache Kafka, by the schemas of a registry of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate
from persist_lib.sources import Decoding, Meaning, Registry
from tests.kafka import Topic
from tests.kafka_broker import kafka_broker
from tests.kafka_registry import KafkaRegistry
from tests.sourced import Sourced
from tests.unit.sources.test_avro import datum

pytestmark = pytest.mark.slow
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "home": "json"})
HOME = {"type": "record", "name": "Home", "namespace": "shop", "fields": [{"name": "town", "type": "string"}]}
FIELDS: list[dict[str, Any]] = [
    {"name": "id", "type": "long"},
    {"name": "word", "type": ["null", "string"], "default": None},
    {"name": "home", "type": ["null", "shop.Home"], "default": None},
]
ROW: dict[str, Any] = {"type": "record", "name": "Row", "namespace": "shop", "fields": FIELDS}
LATER = {**ROW, "fields": [*FIELDS, {"name": "cents", "type": "long", "default": 0}]}
REFERENCES = {"references": [{"name": "shop.Home", "subject": "home", "version": 1}]}


class Place(Sourced):
    """A topic of Avro with keys of Avro, a source of it, and a registry."""

    def __init__(self) -> None:
        self.registry = KafkaRegistry()
        super().__init__()
        self.topic = Topic(kafka=kafka_broker())
        self.key = self.registry.register("keys", "long")
        self.registry.register("home", HOME)
        self.row = self.registry.register("rows", ROW, **REFERENCES)
        self.sources.create(
            "s", self.topic.declared(), SCHEMA, meaning=Meaning(envelope="upsert"),
            decoding=Decoding(decoder="avro", key="avro", registry=Registry(place=self.registry.url), extra="add"),
        )  # fmt: skip

    def put(self, id_: int, schema: int = 0, written: Any = None, **row: Any) -> None:
        """A message of a schema, and of that id; a tombstone without any of the row."""
        whole = {**(written or ROW), "fields": _with_home((written or ROW)["fields"])}
        value = b"\0" + (schema or self.row).to_bytes(4) + datum({"id": id_, **row}, whole) if row else None
        self.topic.write([value], keys=[b"\0" + self.key.to_bytes(4) + datum(id_, "long")])

    def rows(self) -> dict[int, tuple[Any, ...]]:
        return {row["id"]: tuple(row[name] for name in row if name not in {"id", "_diff"}) for row in self.contents()}


def _with_home(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fields with what they refer to, as a producer writes by them."""
    return [{**one, "type": ["null", HOME]} if one["name"] == "home" else one for one in fields]


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()
    found.registry.close()


def test_messages_are_read_by_the_schemas_of_a_registry_of_others(place: Place) -> None:
    """With references, a later version, one that is not there yet, one that is no Avro; and once it is gone."""
    place.put(1, word="a", home={"town": "Ulm"})
    place.put(2, word="b", home=None)
    place.catch_up()
    assert place.rows() == {1: ("a", {"town": "Ulm"}), 2: ("b", None)}
    later = place.registry.register("rows", LATER, **REFERENCES)
    place.put(2, later, LATER, word="c", home=None, cents=5)
    place.put(1)
    place.put(3, word="older", home=None)
    place.catch_up()
    assert place.rows() == {2: ("c", None, 5), 3: ("older", None, None)}

    form = {"type": "object", "properties": {"id": {"type": "integer"}}}
    other = place.registry.register("forms", form, schemaType="JSON")
    place.put(4, other, word="no Avro", home=None)
    place.catch_up()
    ((reason,),) = ((row["reason"],) for row in place.contents("s/errors"))
    assert "JSON" in reason

    place.put(5, other + 1, LATER, word="early", home=None, cents=1)
    with pytest.raises(Determinate, match="knows no such schema"):
        place.sources.open("s").step()
    newest = {**LATER, "doc": "the same fields"}
    assert place.registry.register("rows", newest, **REFERENCES) == other + 1
    place.catch_up()
    assert place.rows()[5] == ("early", None, 1)

    place.registry.close()
    place.put(6, later, LATER, word="by what is committed", home=None, cents=2)
    place.catch_up()
    assert place.rows()[6] == ("by what is committed", None, 2)
