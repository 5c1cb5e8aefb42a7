"""Topics of a real Apache Kafka as sources: what only it does (librdkafka's broker is in unit/sources/test_kafka.py).

Transactions that stay open, compaction, retention, topics made again, partitions that are added, logins, and a broker
that is killed.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import persist_lib as persist
from persist_lib.errors import Determinate, Diverged, Gone, InvalidUsage, PersistError
from persist_lib.sources import Decoding, Ingestion, Kafka, Meaning, Sources
from persist_lib.sources.conformance import check_reader
from persist_lib.sources.kafka import cluster
from persist_lib.testing import check_location
from tests.kafka import QUICK, Topic
from tests.kafka_broker import LISTENERS, PASSWORD, SCRAM, USER, KafkaBroker, KafkaBrokers, kafka_broker
from tests.sourced import Sourced
from tests.tls import Authority

pytestmark = pytest.mark.slow
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
KEYED: dict[str, Any] = {"decoding": Decoding(key="json"), "meaning": Meaning(envelope="upsert", keep_raw=True)}
COMPACTED: dict[str, Any] = {
    "cleanup_policy": "compact", "segment_ms": 1, "min_cleanable_dirty_ratio": 0.0, "min_compaction_lag_ms": 0,
    "max_compaction_lag_ms": 1,
}  # fmt: skip
WAIT_S = 90.0
_numbers = itertools.count()


def until(is_so: Callable[[], object], each_time: Callable[[], object] = lambda: None) -> None:
    """Wait for what a broker does in time."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "the broker did not do it"
        each_time()
        time.sleep(0.05)


def message(id_: int, word: str | None) -> dict[str, bytes | None]:
    return {"key": b"%d" % id_, "value": None if word is None else json.dumps({"word": word}).encode()}


class Transaction:
    """A transaction of a producer of its own."""

    def __init__(self, broker: KafkaBroker, timeout_s: float = 60.0) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": broker.brokers, "transactional.id": f"transaction-{next(_numbers)}",
                "log_level": 0, "linger.ms": 0, "transaction.timeout.ms": (at_most := int(timeout_s * 1000)),
                "message.timeout.ms": at_most,
            }
        )  # fmt: skip
        self._producer.init_transactions(WAIT_S)
        self._producer.begin_transaction()

    def put(self, topic: Topic, id_: int, word: str | None, partition: int = 0) -> None:
        """Write a message, and wait until the broker has it."""
        self._producer.produce(topic.name, partition=partition, **message(id_, word))
        assert self._producer.flush(WAIT_S) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(WAIT_S)

    def abort(self) -> None:
        self._producer.abort_transaction(WAIT_S)


class Place(Sourced):
    """A world with a topic and a source of it."""

    def __init__(self, kafka: KafkaBrokers | None = None, **settings: Any) -> None:
        self.broker: Any = kafka or kafka_broker()
        super().__init__()
        self.topic = Topic(kafka=self.broker, **settings)

    def create(self, **more: Any) -> None:
        self.sources.create("s", self.topic.declared(**more), SCHEMA, **KEYED)

    def put(self, id_: int, word: str | None, partition: int = 0, **more: int) -> None:
        found = message(id_, word)
        self.topic.write([found["value"]], partition, [found["key"]], **more)

    def durable(self) -> dict[str, int]:
        return {name: mark.address for name, mark in self.sources.show("s").durable.items()}

    def raw(self) -> list[tuple[int, bytes]]:
        """What came: each message's offset and key. None may be there twice."""
        rows = self.contents("s/raw")
        assert {row["_diff"] for row in rows} <= {1}
        return sorted((row["address"], row["key"]) for row in rows)

    def another(self) -> Place:
        """A source in a location of its own that begins now, with the same topic."""
        found = Place()
        found.topic = self.topic
        found.create()
        found.catch_up()
        return found

    def close(self) -> None:
        assert self.contents("s/errors") == []
        check_location(self.world.client())
        super().close()


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT_S", 0.1)


def test_the_conformance_suite() -> None:
    topic = Topic(3, kafka=kafka_broker())
    for number in range(2):
        topic.write([b"%d" % n if n % 7 else None for n in range(8 + number)], number)
    topic.write([b"x" * 200_000, b"", b"\xff\0", b"end"], 0)
    check_reader(topic.declared(group="suite").open, topic.values)


@pytest.mark.parametrize("how", ["committed", "aborted", "left"])
def test_an_open_transaction_holds_back_itself_and_what_came_after_it(place: Place, how: str) -> None:
    """Until it is decided; also by the broker, where its producer leaves it."""
    place.create()
    place.put(1, "before")
    place.catch_up()
    one = Transaction(place.broker, 1.5 if how == "left" else 60.0)
    one.put(place.topic, 1, "within")
    one.put(place.topic, 2, "within")
    place.put(3, "after")
    other = Transaction(place.broker)
    other.put(place.topic, 4, "other")
    other.commit()
    name = f"{place.topic.name}/0"
    if how != "left":
        for _ in range(2):
            assert place.catch_up().is_idle
        assert (place.words(), place.durable()) == ({1: "before"}, {name: 1})
    match how:
        case "committed":
            one.commit()
        case "aborted":
            one.abort()
        case _:
            pass
    until(lambda: place.catch_up() and place.durable() == {name: 7})  # with the two ends of transactions
    within = {1: "within", 2: "within"} if how == "committed" else {1: "before"}
    assert place.words() == {**within, 3: "after", 4: "other"}
    raw = [(0, b"1"), *([(1, b"1"), (2, b"2")] if how == "committed" else []), (3, b"3"), (4, b"4")]
    assert place.raw() == raw
    another = place.another()
    assert (another.words(), another.raw(), another.durable()) == (place.words(), raw, {name: 7})
    another.close()


def test_who_reads_what_is_not_committed_has_it_at_once_and_keeps_what_is_aborted(place: Place) -> None:
    place.create(isolation="read_uncommitted")
    one = Transaction(place.broker)
    one.put(place.topic, 1, "within")
    place.put(2, "after")
    place.catch_up()
    assert place.words() == {1: "within", 2: "after"}
    one.abort()
    place.put(3, "later")
    place.catch_up()
    assert place.words() == {1: "within", 2: "after", 3: "later"}
    assert [key for _, key in place.raw()] == [b"1", b"2", b"3"]


def test_a_transaction_over_topics_with_an_output_each(place: Place) -> None:
    """None of it is in any output before it is decided; then each has its part. The group gets offsets."""
    other = Topic(kafka=place.broker)
    names = place.topic.name, other.name
    declared = Kafka(brokers=place.broker.brokers, topics=names, group=f"g-{other.name}", options=QUICK)
    place.sources.create("s", declared, tables=dict.fromkeys(names, SCHEMA), **KEYED)
    outputs = [f"s/{name}" for name in names]

    def words() -> list[dict[int, str]]:
        return [{row["id"]: row["word"] for row in place.contents(name)} for name in outputs]

    expected: dict[int, str] = {}
    for round_, decide in enumerate((Transaction.commit, Transaction.abort, Transaction.commit)):
        one = Transaction(place.broker)
        for topic in (place.topic, other, place.topic):
            one.put(topic, round_, f"{round_}")
        place.catch_up()
        assert words() == [expected, expected]
        decide(one)
        if decide is Transaction.commit:
            expected[round_] = f"{round_}"
        until(lambda: place.catch_up() and words() == [expected, expected])
    until(lambda: place.catch_up() and place.durable() == {f"{names[0]}/0": 9, f"{names[1]}/0": 6})
    assert len({place.controller.describe(name).upper for name in outputs}) == 1
    consumer = Consumer({"bootstrap.servers": place.broker.brokers, "group.id": declared.group, "log_level": 0})
    told = consumer.committed([TopicPartition(name, 0) for name in names], timeout=WAIT_S)
    consumer.close()
    assert 0 < told[0].offset <= 9
    assert 0 < told[1].offset <= 6


def kept(topic: Topic) -> list[int]:
    """The offsets at which a partition has a message still, as a plain consumer sees it."""
    begin, end, _ = topic.kafka.offsets(topic.name)
    consumer = Consumer(
        {
            "bootstrap.servers": topic.kafka.brokers, "group.id": "looks", "log_level": 0,
            "enable.auto.commit": False, "enable.partition.eof": True, **QUICK,
        }
    )  # fmt: skip
    try:
        consumer.assign([TopicPartition(topic.name, 0, begin)])
        found: list[int] = []
        while (one := consumer.poll(WAIT_S)) is not None and one.error() is None and one.offset() < end:
            found.append(one.offset())
        return found
    finally:
        consumer.close()


def test_a_compacted_topic_makes_the_same_for_who_was_there_and_who_begins_now(place: Place) -> None:
    """One continues across what the cleaner took, before and after where it was; tombstones are kept for a day."""
    place.topic = topic = Topic(kafka=place.broker, **COMPACTED, delete_retention_ms=86_400_000)
    place.create()
    sent: list[tuple[int, str | None]] = [(1, "a"), (2, "a"), (3, "a"), (1, "b")]
    for id_, word in sent:
        place.put(id_, word)
    place.catch_up()
    assert place.words() == {1: "b", 2: "a", 3: "a"}
    sent = [(1, "c"), (2, "c"), (1, None), (4, "d"), (4, None), (2, "e")]
    for id_, word in sent:
        place.put(id_, word)
    until(lambda: set(kept(topic)).isdisjoint({0, 1, 3, 4, 5, 7}), lambda: place.put(9, "more"))
    assert {2, 6, 8, 9} <= set(kept(topic)), "tombstones are there"
    place.catch_up()
    assert place.words() == {2: "e", 3: "a", 9: "more"}
    assert set(kept(topic)) <= {address for address, _ in place.raw()}
    another = place.another()
    assert another.words() == place.words()
    assert another.durable() == place.durable()
    assert [address for address, _ in another.raw()] == kept(topic)
    another.close()


def test_a_tombstone_that_the_cleaner_took_before_it_was_read_takes_no_row_away(place: Place) -> None:
    """As documented: no broker says that there was one. Who begins now has no such row; a reset begins now."""
    place.topic = topic = Topic(kafka=place.broker, **COMPACTED, delete_retention_ms=0)
    place.create()
    place.put(1, "a")
    place.put(2, "a")
    place.catch_up()
    place.put(1, None)
    until(lambda: set(kept(topic)).isdisjoint({0, 2}), lambda: place.put(9, "more"))
    place.catch_up()
    assert place.words() == {1: "a", 2: "a", 9: "more"}
    place.sources.reset("s")
    place.catch_up()
    assert place.words() == {2: "a", 9: "more"}


def test_what_the_cleaner_took_of_what_is_half_written_is_not_made_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance dies between two appends, and the next one finds less of what is bound: it cannot make it again."""
    place.topic = topic = Topic(kafka=place.broker, **COMPACTED)
    place.create()
    instance = place.sources.open("s")
    for word in ("a", "b"):
        place.put(1, word)
        place.world.clock.advance(1)
        instance._mint(place.world.client().runtime.deadline(10))

    def die(self: Ingestion, made: Mapping[str, Any], window: Any, deadline: Any) -> None:
        self._begun()["output"].append(made["output"], window.start, window.end, deadline)
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Ingestion, "_write", die)
        with pytest.raises(SystemExit):
            instance.step(mints=False)
    instance.close()
    until(lambda: 0 not in kept(topic), lambda: place.put(9, "more"))
    with pytest.raises(Diverged):
        place.catch_up()
    assert place.words() == {1: "b"}
    place.sources.reset("s")
    place.catch_up()


def test_a_topic_that_is_deleted_is_gone_and_made_again_has_diverged(place: Place) -> None:
    """Also if the new one is longer than the old one; also for an instance that has its consumer from before."""
    place.create()
    for id_ in range(3):
        place.put(id_, "old")
    place.catch_up()
    instances = [place.sources.open("s") for _ in range(2)]
    for one in instances:
        one.step()
    place.broker.delete(place.topic.name)
    with pytest.raises(Gone, match=f"the topic {place.topic.name} is gone") as raised:
        instances[0].step()
    assert raised.value.fields["partition"] == f"{place.topic.name}/0"
    place.broker.create(place.topic.name, 1)
    for id_ in range(2, 9):
        place.put(id_, "new")
    for one in instances:
        with pytest.raises(Diverged, match="deleted and made again"):
            one.step()
        one.close()
    with pytest.raises(Diverged, match="deleted and made again"):
        place.catch_up()
    assert place.words() == dict.fromkeys(range(3), "old")
    place.sources.reset("s")
    place.catch_up()
    assert place.words() == dict.fromkeys(range(2, 9), "new")


def test_partitions_that_are_added_are_found_by_instances_at_work(place: Place) -> None:
    place.create()
    place.put(1, "a")
    instances = [place.sources.open("s"), Sources(place.world.client().controller()).open("s")]
    for one in instances:
        place.world.clock.advance(1)
        one.step()
    place.broker.add_partitions(place.topic.name, 3)
    place.topic.values |= {f"{place.topic.name}/{number}": [] for number in (1, 2)}
    name, producer = place.topic.name, place.topic.producer
    until(lambda: len(producer.list_topics(name).topics[name].partitions) == 3)
    for number in range(3):
        place.put(10 + number, "b", number)
    for round_ in range(3):
        for one in instances:
            place.world.clock.advance(1)
            until(partial(_may_pass, one.step))
        place.put(20 + round_, "c", round_)
    place.catch_up()
    assert place.words() == {1: "a", 10: "b", 11: "b", 12: "b", 20: "c", 21: "c", 22: "c"}
    assert place.durable() == {f"{name}/0": 3, f"{name}/1": 2, f"{name}/2": 2}
    for one in instances:
        one.close()


def _may_pass(step: Callable[[], object]) -> bool:
    try:
        step()
    except Determinate:
        return False
    return True


@pytest.mark.parametrize("how", ["a user", "retention"])
def test_what_is_deleted_before_it_was_read_is_said_and_not_passed_over(place: Place, how: str) -> None:
    place.create()
    for id_ in range(3):
        place.put(id_, "a")
    place.catch_up()
    instance = place.sources.open("s")
    instance.step()
    for id_ in range(3, 7):
        place.put(id_, "b")
    if how == "a user":
        place.broker.delete_records(place.topic.name, 0, 5)
    else:
        place.broker.change(place.topic.name, retention_ms=1, segment_ms=1)
    until(lambda: place.broker.offsets(place.topic.name)[0] > 3)
    place.broker.change(place.topic.name, retention_ms=-1)
    place.put(8, "c", timestamp=int((time.time() + 600) * 1000))  # not old yet while the broker learns of the change
    for act in (instance.step, place.catch_up):
        place.world.clock.advance(1)
        with pytest.raises(Gone, match=r"messages from 3 to [5-8] are still needed, and are gone") as raised:
            act()
        assert raised.value.fields["partition"] == f"{place.topic.name}/0"
    instance.close()
    assert place.words() == dict.fromkeys(range(3), "a")
    begin = place.broker.offsets(place.topic.name)[0]
    place.sources.reset("s")
    place.catch_up()
    assert place.words() == {**dict.fromkeys(range(begin, 7), "b"), 8: "c"}


def test_a_broker_that_lost_its_log_has_diverged(place: Place) -> None:
    """It is the same topic for it, and begins at 0 again. It is known also once it is as long again: by the leader."""
    place.create()
    for id_ in range(3):
        place.put(id_, "a")
    instances = [place.sources.open("s") for _ in range(2)]
    for one in instances:  # the first one is who reads
        place.world.clock.advance(1)
        one.step()
    place.broker.kill()
    shutil.rmtree(place.broker.root / "data" / f"{place.topic.name}-0")
    place.broker.start()
    place.put(7, "b")
    with pytest.raises(Diverged, match="ends at 1, and was read up to 3"):
        instances[1].step()
    with pytest.raises(Diverged, match="ends at 1, and was read up to 3"):
        place.catch_up()
    for id_ in range(8, 14):
        place.put(id_, "b")
    for act in (instances[0].step, instances[1].step, place.catch_up):
        with pytest.raises(Diverged, match="what is there before 3 is not what was read"):
            act()
    assert place.words() == dict.fromkeys(range(3), "a")
    for one in instances:
        one.close()


def test_what_a_killed_instance_had_bound_and_the_broker_lost_has_diverged(place: Place) -> None:
    """It was bound and not durable: who comes next finds other messages there, as many."""
    place.create()
    place.put(0, "a")
    place.catch_up()
    with closing(place.sources.open("s")) as instance:
        for id_ in range(1, 4):
            place.put(id_, "b")
        place.world.clock.advance(1)
        instance._mint(place.world.client().runtime.deadline(10))
    place.broker.kill()
    shutil.rmtree(place.broker.root / "data" / f"{place.topic.name}-0")
    place.broker.start()
    place.topic.write([b"c"] * 9)
    for _ in range(2):
        with pytest.raises(Diverged, match="is not what was read"):
            place.catch_up()
    assert place.words() == {0: "a"}


def test_a_transaction_that_ends_under_another_leader_is_continued_after(place: Place) -> None:
    """Its end is no message, and of a later epoch than the last message: whoever continues there has lost nothing."""
    place.create()
    place.put(1, "before")
    one = Transaction(place.broker)
    one.put(place.topic, 1, "within")
    epoch = place.broker.offsets(place.topic.name)[2]
    place.broker.kill()
    place.broker.start()
    one.commit()
    until(lambda: place.broker.offsets(place.topic.name)[:2] == (0, 3))
    assert place.broker.offsets(place.topic.name)[2] > epoch
    until(lambda: place.catch_up() and place.durable() == {f"{place.topic.name}/0": 3})
    place.put(2, "after")
    place.catch_up()
    place.broker.delete_records(place.topic.name, 0, 4)  # all that there is, and what its leaders were
    place.put(3, "later")
    place.catch_up()
    assert place.words() == {1: "within", 2: "after", 3: "later"}


def check_two_instances(
    topic: Topic, source: Kafka, folder: Path, dice: random.Random, *acts: Callable[[], object]
) -> None:
    """Two of a source of two partitions make a plain fold of what is written before, between and after acts."""
    expected: dict[int, str] = {}
    written: dict[str, list[bytes | None]] = {name: [] for name in topic.values}
    options: dict[str, Any] = {"bootstrap.servers": topic.kafka.brokers, "enable.idempotence": True, "linger.ms": 1}
    producer, done = Producer({**options, "log_level": 0}), threading.Event()
    failed: list[BaseException] = []

    def ingest() -> None:
        try:
            with persist.open(f"file:{folder}/data") as client:
                client.controller().sources().run("s", stop=done.is_set, interval_s=0.1)
        except BaseException as error:
            failed.append(error)
            raise

    def write() -> None:
        for _ in range(100):
            id_, word = dice.randrange(30), f"{next(_numbers)}"
            gone = dice.random() < 0.1
            found = message(id_, None if gone else word)
            producer.produce(topic.name, partition=id_ % 2, **found)
            written[f"{topic.name}/{id_ % 2}"].append(found["value"])
            expected.pop(id_, None) if gone else expected.update({id_: word})
            producer.poll(dice.uniform(0, 0.01))

    with persist.open(f"file:{folder}/data") as client:
        sources = client.controller().sources()
        sources.create("s", source, SCHEMA, shards=2, **KEYED)
        threads = [threading.Thread(target=ingest) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            write()
            for act in acts:
                act()
                write()
            assert producer.flush(60) == 0
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert failed == []
        sources.run("s", until_idle=True)
        with client.controller().open_reader("s") as reader:
            found = {row["id"]: row["word"] for row in reader.snapshot(diff=True).to_pylist()}
        assert found == expected
        with client.controller().open_reader("s/raw") as reader:
            rows = reader.snapshot(diff=True).to_pylist()
        assert all(row["_diff"] == 1 for row in rows)
        raw = {name: {row["address"]: row["value"] for row in rows if row["partition"] == name} for name in written}
        assert {name: [raw[name][at] for at in sorted(raw[name])] for name in raw} == written
        assert len(rows) == sum(map(len, written.values()))
        with client.controller().open_reader("s/errors") as reader:
            assert reader.snapshot().to_pylist() == []


def test_two_instances_make_a_plain_fold_while_the_broker_is_killed(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while messages are written, and started again, under a new epoch of its leader. It asks for a password."""
    monkeypatch.setenv("BROKER_PASSWORD", PASSWORD)
    broker = kafka_broker()
    topic = Topic(2, kafka=broker)
    epoch = broker.offsets(topic.name)[2]
    source = declared(topic, "SASL_SSL", login(topic, SCRAM[0]))
    check_two_instances(topic, source, tmp_path, rng, lambda: None, broker.kill, broker.start)
    assert broker.offsets(topic.name)[2] > epoch


def declared(topic: Topic, at: str, options: Mapping[str, str], protocol: str = "") -> Kafka:
    """A topic where its broker listens for a kind of clients."""
    protocol = protocol or LISTENERS[at]
    trust = {"ssl.ca.location": str(topic.kafka.bundle)} if "SSL" in protocol else {}
    given = {**QUICK, "security.protocol": protocol, **trust, **options}
    return Kafka(brokers=topic.kafka.at(at), topic=topic.name, group=f"g-{topic.name}", options=given)


def login(topic: Topic, mechanism: str, user: str = USER) -> dict[str, str]:
    """The options of someone who is let in with the password."""
    if mechanism in SCRAM:
        topic.kafka.let_in(USER, PASSWORD, mechanism)
    return {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": "env:BROKER_PASSWORD"}


def certificate(chain: Path, secret: Path) -> dict[str, str]:
    return {"ssl.certificate.location": str(chain), "ssl.key.location": str(secret)}


@pytest.mark.parametrize(
    ("at", "mechanism"),
    [
        ("SSL", ""), ("MUTUAL", ""), ("SASL_PLAINTEXT", "PLAIN"), ("SASL_SSL", "PLAIN"),
        ("SASL_PLAINTEXT", SCRAM[1]), ("SASL_SSL", SCRAM[0]),
    ],
)  # fmt: skip
def test_a_source_through_tls_and_with_a_password(
    place: Place, at: str, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", PASSWORD)
    options = login(place.topic, mechanism) if mechanism else {}
    options |= certificate(*place.broker.certificate) if at == "MUTUAL" else {}
    place.sources.create("s", declared(place.topic, at, options), SCHEMA, **KEYED)
    place.put(1, "a")
    place.catch_up()
    assert place.words() == {1: "a"}
    assert PASSWORD not in repr(place.sources.show("s"))


def refused(place: Place, source: Kafka, kind: type[PersistError]) -> str:
    """Why a source cannot be made."""
    with pytest.raises(PersistError) as raised:
        place.sources.create("s", source, SCHEMA, **KEYED)
    place.create()
    assert type(raised.value) is kind
    assert PASSWORD not in str(raised.value)
    assert "not-this-one" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("at", "mechanism", "user", "says"),
    [
        ("SASL_PLAINTEXT", "PLAIN", USER, "Invalid username or password"),
        ("SASL_SSL", "PLAIN", USER, "Invalid username or password"),
        ("SASL_PLAINTEXT", SCRAM[0], USER, "invalid credentials"),
        ("SASL_SSL", SCRAM[1], "bob", "invalid credentials"),
    ],
)
def test_who_has_another_password_is_refused_at_once(
    place: Place, at: str, mechanism: str, user: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", "not-this-one")
    source, begun = declared(place.topic, at, login(place.topic, mechanism, user)), time.monotonic()
    assert says in refused(place, source, InvalidUsage)
    assert time.monotonic() - begun < cluster.ANSWER_S / 2


def test_an_instance_whose_password_is_right_no_more_ends_and_the_next_one_continues(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", PASSWORD)
    place.sources.create("s", declared(place.topic, "SASL_SSL", login(place.topic, SCRAM[0])), SCHEMA, **KEYED)
    place.catch_up()
    place.put(1, "a")
    monkeypatch.setenv("BROKER_PASSWORD", "not-this-one")
    with pytest.raises(InvalidUsage, match="does not let this client in"):
        place.catch_up()
    assert "failed" in {one["state"] for one in place.sources.show("s").instances}
    monkeypatch.setenv("BROKER_PASSWORD", PASSWORD)
    place.catch_up()
    assert place.words() == {1: "a"}


@pytest.mark.parametrize("how", ["no certificate", "a certificate of others", "a broker of others", "no such login"])
def test_who_is_not_trusted_or_trusts_no_broker_is_refused_at_once(
    place: Place, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", PASSWORD)
    others = Authority(tmp_path, "others")
    source, says = {
        "no certificate": (declared(place.topic, "MUTUAL", {}), "bad certificate"),
        "a certificate of others": (
            declared(place.topic, "MUTUAL", certificate(*others.certificate("client"))), "bad certificate",
        ),
        "a broker of others": (
            declared(place.topic, "SSL", {"ssl.ca.location": str(others.bundle)}), "certificate verify failed",
        ),
        "no such login": (
            declared(place.topic, "PLAINTEXT", login(place.topic, "PLAIN"), "SASL_PLAINTEXT"), "handshake failed",
        ),
    }[how]  # fmt: skip
    assert says in refused(place, source, InvalidUsage)


@pytest.mark.parametrize(
    ("protocol", "at", "says"),
    [("SSL", "PLAINTEXT", "SSL"), ("PLAINTEXT", "SSL", ""), ("PLAINTEXT", "SASL_PLAINTEXT", "")],
)
def test_who_speaks_another_protocol_may_be_let_in_later(
    place: Place, protocol: str, at: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_S", 1.5)
    assert says in refused(place, declared(place.topic, at, {}, protocol), Determinate)
