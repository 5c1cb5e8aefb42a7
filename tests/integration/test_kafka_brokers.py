"""Topics of three brokers as sources: leaders that move, too few of them in sync, an election that loses messages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from persist_lib.errors import Determinate, Diverged
from persist_lib.sources.kafka import cluster
from tests.integration.test_kafka_broker import Place, check_two_instances, message, until
from tests.kafka import Topic
from tests.kafka_broker import KafkaBrokers, kafka_brokers

pytestmark = pytest.mark.slow


@pytest.fixture
def brokers() -> Iterator[KafkaBrokers]:
    """Those that a test killed are started again after it."""
    found = kafka_brokers()
    yield found
    for node in found.nodes.values():
        if node.has_ended:
            node.start()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT_S", 0.1)


def test_two_instances_make_a_plain_fold_while_leaders_move(
    brokers: KafkaBrokers, tmp_path: Path, rng: random.Random
) -> None:
    """The leader of a partition is killed, another one is elected, and the first one leads it again."""
    topic = Topic(2, kafka=brokers, placed=[[2, 3, 1], [3, 1, 2]])
    until(lambda: brokers.leader(topic.name) == (2, {1, 2, 3}))

    def is_led(number: int) -> bool:
        return brokers.leader(topic.name) == (number, {1, 2, 3})

    def move() -> None:
        until(lambda: brokers.leader(topic.name)[0] in {1, 3})

    def come_back() -> None:
        brokers.nodes[2].start()
        until(lambda: is_led(1) or is_led(3))

    def lead_again() -> None:
        until(lambda: is_led(2), lambda: brokers.prefer(topic.name))

    acts = brokers.nodes[2].kill, move, come_back, lead_again
    check_two_instances(topic, topic.declared(), tmp_path, rng, *acts)
    assert brokers.offsets(topic.name)[2] >= 2


def test_the_broker_that_answers_questions_is_killed(brokers: KafkaBrokers) -> None:
    """Its clients ask another one as soon as it is taken for gone. Alone they would ask it on for minutes."""
    topic = Topic(1, kafka=brokers, placed=[[3, 1]])
    readers = [topic.declared().open() for _ in range(9)]  # which one a client asks it chooses by itself
    for reader in readers:
        reader.look()
    brokers.nodes[2].kill()
    begun = time.monotonic()
    for reader in readers:
        reader.look()
        reader.close()
    assert time.monotonic() - begun < cluster.ANSWER_S


def test_what_too_few_brokers_have_is_not_there_until_enough_have_it(brokers: KafkaBrokers) -> None:
    """A producer that asks for no more than the leader learns nothing of that."""
    place = Place(brokers, placed=[[2, 3]], min_insync_replicas=2)
    name = place.topic.name
    until(lambda: brokers.leader(name) == (2, {2, 3}))
    place.create()
    place.put(1, "a")
    place.catch_up()
    brokers.nodes[3].kill()
    until(lambda: brokers.leader(name) == (2, {2}))
    told: list[KafkaError | None] = []
    for acks, timeout_ms in ((-1, 1500), (1, 60_000)):
        producer = Producer(
            {"bootstrap.servers": brokers.brokers, "acks": acks, "message.timeout.ms": timeout_ms, "log_level": 0}
        )
        producer.produce(name, partition=0, **message(2, "b"), on_delivery=lambda error, _: told.append(error))
        assert producer.flush(30) == 0
    assert [error is None for error in told] == [False, True]
    for _ in range(2):
        assert place.catch_up().is_idle
    assert place.words() == {1: "a"}
    brokers.nodes[3].start()
    until(lambda: place.catch_up() and place.words() == {1: "a", 2: "b"})
    assert [key for _, key in place.raw()] == [b"1", b"2"]
    place.close()


def test_an_election_that_loses_messages_has_diverged(brokers: KafkaBrokers) -> None:
    """For all instances, as long as the log is shorter and afterwards; and still once the former leader is back."""
    place = Place(brokers, placed=[[2, 3]], unclean_leader_election_enable="true")
    name = place.topic.name
    until(lambda: brokers.leader(name) == (2, {2, 3}))
    place.create()
    for id_ in range(3):
        place.put(id_, "a")
    place.catch_up()
    brokers.nodes[3].kill()
    until(lambda: brokers.leader(name) == (2, {2}))
    instances = [place.sources.open("s") for _ in range(2)]
    for id_ in range(3, 6):
        place.put(id_, "lost")
    for one in instances:  # the first one is who reads
        place.world.clock.advance(1)
        one.step()
    brokers.nodes[2].kill()
    until(lambda: brokers.leader(name)[0] == -1)
    with pytest.raises(Determinate):
        instances[1].step()
    brokers.nodes[3].start()
    until(lambda: brokers.leader(name) == (3, {3}))
    until(partial(_says, place.catch_up, "ends at 3, and was read up to 6"))
    for id_ in range(10, 18):
        place.put(id_, "b")
    for act in (instances[0].step, instances[1].step, place.catch_up):
        until(partial(_says, act, "what is there before 6 is not what was read"))
    brokers.nodes[2].start()
    until(lambda: brokers.leader(name) == (3, {2, 3}))
    until(partial(_says, place.catch_up, "what is there before 6 is not what was read"))
    assert place.words() == {**dict.fromkeys(range(3), "a"), **dict.fromkeys(range(3, 6), "lost")}
    for one in instances:
        one.close()
    place.sources.reset("s")
    place.catch_up()
    assert place.words() == {**dict.fromkeys(range(3), "a"), **dict.fromkeys(range(10, 18), "b")}
    place.close()


def _says(act: Callable[[], object], what: str) -> bool:
    """Whether an act says that the log is another one. While clients do not know the leaders yet it may fail."""
    try:
        act()
    except Determinate:
        return False
    except Diverged as error:
        return what in str(error)
    raise AssertionError("other messages were read on")
