"""Sources of topics: what is in their collections, what the group gets, and what retention does to them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Gone
from persist_lib.sources import Decoding, Kafka, Meaning, Sources, Transactions
from tests.bank import MARKS, TOPICS, Bank, by_time, sums
from tests.kafka import QUICK, Topic
from tests.sourced import Sourced
from tests.worlds import World

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
KEYED = {"decoding": Decoding(key="json"), "meaning": Meaning(envelope="upsert", keep_raw=True)}


class Place(Sourced):
    """A world with a topic and a source of it."""

    def __init__(self) -> None:
        super().__init__()
        self.topic = Topic(3)

    def create(self, **more: Any) -> None:
        self.sources.create("s", self.topic.declared(group=f"g-{self.topic.name}"), SCHEMA, **{**KEYED, **more})

    def put(self, id_: int, word: str | None, partition: int | None = None) -> None:
        value = None if word is None else b'{"word": "%s"}' % word.encode()
        self.topic.write([value], id_ % 3 if partition is None else partition, [b"%d" % id_])


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.world.close()


def test_messages_become_rows_and_tombstones_take_them_away(place: Place) -> None:
    place.create()
    for id_ in range(6):
        place.put(id_, "a")
    first = place.catch_up()
    place.put(1, None)
    place.put(2, "b")
    place.put(7, None)
    second = place.catch_up()
    assert place.words() == {0: "a", 2: "b", 3: "a", 4: "a", 5: "a"}
    assert place.words(first.time - 1) == dict.fromkeys(range(6), "a")
    assert second.behind == second.lag == {}
    raw = place.contents("s/raw")
    assert sorted((row["key"], row["value"]) for row in raw if row["value"] is None) == [(b"1", None), (b"7", None)]
    name = place.topic.name
    assert {partition: mark.address for partition, mark in place.sources.show("s").durable.items()} == {
        f"{name}/0": 2, f"{name}/1": 4, f"{name}/2": 3,
    }  # fmt: skip


def test_what_is_left_is_told_by_partition(place: Place) -> None:
    place.create()
    for _ in range(5):
        place.put(0, "x" * 100)
    instance = place.sources.open("s")
    place.world.clock.advance(1)
    instance.step()
    for _ in range(3):
        place.put(0, "y" * 100)
    reader = instance._opened()
    reader.high_watermarks({}, 1)
    place.world.clock.advance(1)
    step = instance.step(mints=False)
    ((partition, behind),) = step.behind.items()
    assert (partition, behind.messages) == (f"{place.topic.name}/0", 3)
    assert behind.bytes is not None
    assert 300 < behind.bytes < 1000
    assert behind.seconds is not None
    assert step.lag == {partition: 3}


def test_retention_that_goes_too_far_ends_the_source_and_a_reset_begins_with_what_is_left(place: Place) -> None:
    place.create()
    for id_ in (0, 3, 6):
        place.put(id_, "a")
    place.catch_up()
    for id_ in (9, 12):
        place.put(id_, "b")
    place.topic.kafka.delete_records(place.topic.name, 0, 4)
    with pytest.raises(Gone, match="from 3 to 4"):
        place.catch_up()
    assert place.words() == {0: "a", 3: "a", 6: "a"}
    place.sources.reset("s")
    place.catch_up()
    assert place.words() == {12: "b"}


def test_a_topic_that_is_not_there_is_refused_when_the_source_is_created(place: Place) -> None:
    with pytest.raises(Determinate, match="there is no topic 'nope'"):
        place.sources.create("s", Kafka(brokers=place.topic.kafka.brokers, topic="nope"), SCHEMA)
    assert place.sources.list() == []


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_no_time_shows_half_of_a_transaction_of_several_topics(in_order: bool, apart: bool) -> None:
    """Debezium's topics, one with three partitions, written bit by bit and with repeats; two instances take turns.

    With columns of their own these have an output each: then no time shows half of one in all of these together.
    """
    world, dice = World(), random.Random(in_order)
    try:
        bank, topics = Bank(dice), {name: Topic(1 if name == MARKS else 3) for name in (*TOPICS, MARKS)}
        for _ in range(25):
            bank.transfer()
        declared = Kafka(
            brokers=topics[MARKS].kafka.brokers, topics=tuple(topic.name for topic in topics.values()), options=QUICK
        )
        how = Transactions(topic=topics[MARKS].name, in_order=in_order)
        sources = [Sources(world.client().controller()) for _ in range(2)]
        schemas = [
            persist.Schema(key={"id": "int64 not null"}, value={"cents": kind}) for kind in ("int64 not null", "int32")
        ]
        names = [topics[name].name for name in TOPICS]
        columns = {"tables": dict(zip(names, schemas, strict=True))} if apart else {"schema": schemas[0]}
        meaning = Meaning(envelope="debezium", transactions=how)
        sources[0].create("bank", declared, **columns, meaning=meaning)
        instances = [one.open("bank") for one in sources]
        left = {name: [one for one in bank.with_repeats() if one.topic == name] for name in topics}
        while any(left.values()):
            for name, topic in topics.items():
                for _ in range(dice.randrange(15)):
                    if left[name]:
                        one = left[name].pop(0)
                        partition = 0 if name == MARKS else int(one.key) % 3
                        topic.producer.produce(topic.name, one.value, one.key, partition=partition)
                topic.producer.flush(10)
            world.clock.advance(1)
            instances[dice.randrange(2)].step()
        for instance in instances * 2:
            world.clock.advance(1)
            instance.step()
        changes = []
        for name in [f"bank/{name}" for name in names] if apart else ["bank"]:
            with sources[0].controller.open_reader(name) as reader:
                changes += reader.changes(None).to_pylist()
        found = by_time(changes)
        assert all(sums(contents) for contents in found.values())
        assert found[max(found)] == bank.balances
        assert len(found) > 3
    finally:
        world.close()
