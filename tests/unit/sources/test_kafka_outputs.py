"""Topics with columns of their own: one source, an output for each, all at the same times."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog.records import OF_TOPICS
from persist_lib.errors import Gone, InvalidName, InvalidUsage, NameTaken, NotFound
from persist_lib.sources import Decoding, Kafka, Meaning, Transactions
from persist_lib.sources.declaration_file import parse, written
from persist_lib.testing import check_location
from tests.kafka import QUICK, Topic
from tests.sourced import Sourced

ORDERS = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64"})
PEOPLE = persist.Schema(key={"name": "string not null"}, value={"id": "int32", "town": "string"})
UPSERT = Meaning(envelope="upsert")


class Shop(Sourced):
    """Two topics, and a source of both."""

    def __init__(self) -> None:
        super().__init__()
        self.orders, self.people = Topic(2), Topic(1)

    @property
    def tables(self) -> dict[str, persist.Schema]:
        return {self.orders.name: ORDERS, self.people.name: PEOPLE}

    def declared(self, *more: str) -> Kafka:
        topics = (self.orders.name, self.people.name, *more)
        return Kafka(brokers=self.orders.kafka.brokers, topics=topics, options=QUICK)

    def create(self, *topics: str, **more: Any) -> Any:
        given: dict[str, Any] = {"tables": self.tables, "meaning": UPSERT, **more}
        return self.sources.create("s", self.declared(*topics), **given)

    def order(self, id_: int, cents: int) -> None:
        self.orders.write([json.dumps({"id": id_, "cents": cents}).encode()], id_ % 2)

    def person(self, name: str, town: str) -> None:
        self.people.write([json.dumps({"name": name, "town": town, "id": len(name)}).encode()])

    def rows(self, topic: Topic, as_of: int | None = None) -> dict[Any, Any]:
        key, value = ("name", "town") if topic is self.people else ("id", "cents")
        return {row[key]: row[value] for row in self.contents(f"s/{topic.name}", as_of)}

    def uppers(self) -> set[Any]:
        return {self.controller.describe(name).upper for name in self.controller.list() if name != "s/health"}


@pytest.fixture
def shop() -> Iterator[Shop]:
    found = Shop()
    yield found
    found.close()


def test_each_topic_has_an_output_of_its_own_columns_at_the_same_times(shop: Shop) -> None:
    made = shop.create(shards=2)
    assert made.collections == {
        shop.orders.name: f"s/{shop.orders.name}", shop.people.name: f"s/{shop.people.name}", "errors": "s/errors",
        "health": "s/health",
    }  # fmt: skip
    shop.order(1, 5)
    shop.order(2, 6)
    shop.person("ann", "york")
    first = shop.catch_up()
    shop.order(1, 7)
    shop.orders.write([b"oh no"], 1)
    shop.people.write([b'{"id": 1}'])
    shop.catch_up()
    assert shop.rows(shop.orders) == {1: 7, 2: 6}
    assert shop.rows(shop.people) == {"ann": "york"}
    assert shop.rows(shop.orders, first.time - 1) == {1: 5, 2: 6}
    assert [(row["partition"], row["address"]) for row in shop.contents("s/errors")] == sorted(
        [(f"{shop.orders.name}/1", 2), (f"{shop.people.name}/0", 1)]
    )
    assert len(shop.uppers()) == 1, "all are written up to the same time"
    shown = shop.sources.show("s")
    assert {partition: mark.address for partition, mark in shown.durable.items()} == {
        f"{shop.orders.name}/0": 1, f"{shop.orders.name}/1": 3, f"{shop.people.name}/0": 2,
    }  # fmt: skip
    check_location(shop.world.client())


def test_an_earlier_release_refuses_it_and_a_later_one_reads_what_it_declares(shop: Shop) -> None:
    shop.create()
    record = shop.sources.find("s")
    assert record.v == OF_TOPICS, "an earlier release would make one output of it"
    reader, schema, terms = parse(tomllib.loads(written(shop.sources.show("s"))))
    assert (reader, schema) == (record.reader, None)
    assert set(terms["tables"]) == set(record.tables)
    shop.sources.reset("s")
    assert shop.sources.find("s").v == OF_TOPICS
    shop.order(1, 5)
    shop.catch_up()
    assert shop.rows(shop.orders) == {1: 5}
    shop.sources.drop("s")
    assert shop.controller.list() == []


def test_the_same_columns_and_a_topic_that_is_called_output(shop: Shop) -> None:
    """Roles are names of topics, and one of these is that of the one output of other sources."""
    other = Topic(name="output")
    shop.create("output", tables={**shop.tables, "output": ORDERS})
    other.write([b'{"id": 1, "cents": 1}'])
    shop.order(1, 5)
    shop.catch_up()
    assert [row["cents"] for row in shop.contents("s/output")] == [1]
    assert shop.rows(shop.orders) == {1: 5}


def test_what_goes_for_all_outputs_goes_for_each(shop: Shop) -> None:
    """Columns that are filled, other names, keys of messages, and raw messages."""
    value = {"town": "string", "at": "uint64"}
    schemas = {
        shop.orders.name: persist.Schema(key={"id": "int64 not null"}, value=value),
        shop.people.name: persist.Schema(key={"name": "string not null"}, value=value),
    }
    shop.create(
        tables=schemas, decoding=Decoding(key="json", columns={"id": "ID"}),
        meaning=Meaning(envelope="upsert", include={"at": "address"}, keep_raw=True),
    )  # fmt: skip
    shop.orders.write([b'{"town": "a"}', None], keys=[b'{"ID": 1}', b"2"])
    shop.people.write([b'{"town": "b"}', b'{"town": "c"}', None], keys=[b'"ann"', b'"bob"', b'"ann"'])
    shop.catch_up()
    orders, people = (shop.contents(f"s/{topic.name}") for topic in (shop.orders, shop.people))
    assert [(row["id"], row["town"], row["at"]) for row in orders] == [(1, "a", 0)]
    assert [(row["name"], row["town"], row["at"]) for row in people] == [("bob", "c", 1)]
    assert len(shop.contents("s/raw")) == 5
    with pytest.raises(InvalidUsage, match=f"also keeps {shop.orders.name}, {shop.people.name}"):
        shop.sources.mend("s", decoding=Decoding(key="json", extra="ignore"))
    with pytest.raises(InvalidUsage, match="PostgreSQL, and this one reads Kafka"):
        shop.sources.add_table("s", "more", ORDERS)
    with pytest.raises(NotFound, match="not being mended"):
        shop.sources.hand_over("s")


def test_a_topic_that_is_lost_ends_all_outputs_at_one_time(shop: Shop) -> None:
    shop.create()
    shop.order(1, 5)
    shop.person("ann", "york")
    shop.catch_up()
    before = shop.uppers()
    shop.order(1, 6)
    shop.people.kafka.delete(shop.people.name)
    with pytest.raises(Gone, match=f"the topic {shop.people.name} is gone"):
        shop.catch_up()
    assert shop.rows(shop.orders) == {1: 5}
    assert shop.uppers() == before


def test_what_does_not_fit_together_is_refused_before_anything_is_made(shop: Shop) -> None:
    orders, people = shop.orders.name, shop.people.name
    marks = Meaning(envelope="debezium", transactions=Transactions(topic="marks"))
    filled = Meaning(include={"at": "address"})
    wide = persist.Schema(key={"id": "int64 not null"}, value={"at": "uint64"})
    wrong: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"tables": {orders: ORDERS}}, (), f"the topic '{people}' has no columns"),
        ({"tables": {**shop.tables, "marks": ORDERS}}, (), "the source reads no topic 'marks'"),
        ({"tables": {**shop.tables, "raw": ORDERS}}, ("raw",), "NAME/raw, which each source has for itself"),
        ({"tables": {**shop.tables, "-x": ORDERS}}, ("-x",), "a collection's name must be"),
        ({"schema": ORDERS}, (), "say tables= for those of several tables or topics"),
        ({"tables": {orders: ORDERS, people: 7}}, (), "schema must be"),
        ({"tables": [orders]}, (), "tables maps"),
        ({"meaning": marks}, (), "transactions.topic is 'marks', and the source reads"),
        ({"meaning": marks, "tables": {**shop.tables, "marks": ORDERS}}, ("marks",), "topic of transactions, which"),
        ({"meaning": Meaning(transform="os.path:join")}, (), "transform makes rows of one output"),
        ({"decoding": Decoding(decoder="avro", extra="add")}, (), "gives one output the fields that come"),
        ({"meaning": filled, "tables": {orders: wide, people: PEOPLE}}, (), f"tables: {people}: include"),
        ({"decoding": Decoding(key="text")}, (), f"tables: {orders}: .*fills"),
        ({"tables": {orders: ORDERS, people: persist.Schema(key={"id": "int64"}, times="us")}}, (), "in milliseconds"),
        ({"decoded": ORDERS}, (), "drop decoded"),
    ]  # fmt: skip
    for terms, topics, says in wrong:
        with pytest.raises((InvalidUsage, InvalidName), match=says):
            shop.create(*topics, **terms)
    shop.controller.create(f"s/{people}", ORDERS)
    with pytest.raises(NameTaken, match=f"s/{people}"):
        shop.create()
    assert shop.sources.list() == []
    assert shop.controller.list() == [f"s/{people}"]


def test_what_is_no_mark_among_the_marks_of_transactions_is_bad_and_of_no_output(shop: Shop) -> None:
    marks = Topic()
    how = Transactions(topic=marks.name)
    shop.create(marks.name, meaning=Meaning(envelope="debezium", transactions=how))
    change = {"before": None, "after": {"id": 1, "cents": 5}, "op": "c"}
    lines = [b"{", json.dumps(change).encode(), json.dumps({"status": "END", "id": "x", "event_count": 2}).encode()]
    marks.write(lines)
    told = {"id": "x", "total_order": 1}
    shop.orders.write([json.dumps({**change, "transaction": told}).encode()])
    shop.catch_up()
    assert shop.rows(shop.orders) == {}, "half of the transaction is not there yet"
    person = {"after": {"name": "ann", "town": "york", "id": 3}, "op": "c", "transaction": {**told, "total_order": 2}}
    shop.people.write([json.dumps(person).encode()])
    shop.catch_up()
    assert (shop.rows(shop.orders), shop.rows(shop.people)) == ({1: 5}, {"ann": "york"})
    bad = shop.contents("s/errors")
    assert [(row["partition"], row["raw"]) for row in bad] == [(f"{marks.name}/0", line) for line in lines[:2]]
    assert all("neither begins a transaction nor ends one" in row["reason"] for row in bad)
