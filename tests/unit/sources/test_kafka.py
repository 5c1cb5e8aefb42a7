"""Topics as sources, on a real broker: the conformance suite; what retention, deletion and outages do; options."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from persist_lib.errors import Determinate, Diverged, Gone, InvalidUsage, NewerFormat, PersistError
from persist_lib.sources import Kafka, Mark
from persist_lib.sources.conformance import check_diverged, check_gone, check_many, check_reader, read_all
from persist_lib.sources.kafka import cluster
from persist_lib.sources.kafka import reader as reader_module
from persist_lib.sources.kafka.cluster import Cluster, Partition
from persist_lib.sources.kafka.kind import parse_kafka_url
from persist_lib.sources.kafka.reader import KafkaReader
from persist_lib.sources.protocol import START, VALUE
from persist_lib.testing.kafka_server import KafkaServer
from tests.kafka import QUICK, Topic

BIG = 1 << 30


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT_S", 0.1)


def bind(reader: KafkaReader, most_bytes: int = BIG) -> dict[str, Mark]:
    """All that is there."""
    bound: dict[str, Mark] = {}
    while new := dict(reader.high_watermarks(bound, most_bytes)):
        bound |= new
    return bound


def values(reader: KafkaReader, partition: str, start: Mark, end: Mark) -> list[bytes | None]:
    found: list[bytes | None] = read_all(reader, partition, start, end).column("value").to_pylist()
    return found


def test_the_conformance_suite() -> None:
    topic = Topic(6)
    for number in range(5):
        topic.write([b"%d" % n if n % 7 else None for n in range(number * 11)], number)
    topic.write([b"x" * 200_000, b"", b"\xff\0", b"end"], 0)
    check_reader(topic.declared(group="g").open, topic.values)


def test_a_message_comes_with_key_headers_and_when_it_was_written() -> None:
    topic = Topic()
    topic.write([b"v"], keys=[b"k"], headers=[("a", b"1"), ("a", b"\xff"), ("b", None)], timestamp=1_700_000_000_123)
    topic.write([None], keys=[b"k"])
    reader = topic.declared().open()
    first, second = read_all(reader, f"{topic.name}/0", START, bind(reader)[f"{topic.name}/0"]).to_pylist()
    assert (first["address"], first["key"], first["value"]) == (0, b"k", b"v")
    assert msgspec.json.decode(first["headers"]) == [["a", "1"], ["a", {"base64": "/w=="}], ["b", None]]
    assert first["timestamp"].timestamp() == 1_700_000_000.123
    assert (second["value"], second["headers"]) == (None, None)
    reader.close()
    reader.close()


def test_many_topics_are_read_at_once() -> None:
    one, other = Topic(2), Topic(1)
    one.write([b"a", b"b"], 0)
    one.write([b"c"], 1)
    other.write([b"d", b"e"])
    declared = Kafka(brokers=one.kafka.brokers, topics=(one.name, other.name), options=QUICK)
    check_reader(declared.open, {**one.values, **other.values})


@pytest.mark.parametrize("seed", range(3))
def test_random_reads_and_writes_give_each_message_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little kept of what was read ahead, and readers that are asked for what others bound."""
    monkeypatch.setattr(reader_module, "MOST_AHEAD", 2_000)
    monkeypatch.setattr(reader_module, "BATCH", 20)
    dice, topic = random.Random(seed), Topic(3)
    readers = [topic.declared().open() for _ in range(2)]
    bound: dict[str, Mark] = {}
    done: list[dict[str, Mark]] = [{}, {}]
    got: list[dict[str, list[bytes | None]]] = [{name: [] for name in topic.values} for _ in readers]
    for round_ in range(25):
        if round_ < 20:
            for number in range(3):
                fresh: list[bytes | None] = [b"%d" % dice.randrange(10**9) for _ in range(dice.randrange(30))]
                topic.write(fresh, number)
        bound |= readers[dice.randrange(2)].high_watermarks(bound, dice.choice([1, 500, 5_000, BIG]))
        who = dice.randrange(2)
        for name in sorted(bound):
            before = done[who].get(name, START)
            got[who][name] += values(readers[who], name, before, bound[name])
            done[who][name] = bound[name]
    bound |= readers[0].high_watermarks(bound, BIG)
    for who in (0, 1):
        for name, end in bound.items():
            got[who][name] += values(readers[who], name, done[who].get(name, START), end)
        assert got[who] == topic.values


def test_a_million_messages_in_bounded_memory() -> None:
    topic = Topic()
    topic.write([b"%d" % n for n in range(1_000_000)])
    most = check_many(topic.declared().open, f"{topic.name}/0", 1_000_000)
    assert most < 4 << 20


def test_messages_that_are_much_larger_than_those_before_are_bound_by_their_bytes() -> None:
    topic = Topic()
    topic.write([b"x"] * 20_000)
    topic.write([bytes([n]) * 900_000 for n in range(60)])
    reader = topic.declared().open()
    bound: dict[str, Mark] = {}
    sizes = []
    while new := reader.high_watermarks(bound, 4 << 20):
        ((name, mark),) = new.items()
        sizes.append(read_all(reader, name, bound.get(name, START), mark).nbytes)
        bound |= new
    assert bound[f"{topic.name}/0"].address == 20_060
    assert max(sizes) < 6 << 20
    assert sum(ahead.bytes for ahead in reader._ahead.values()) == 0


def test_a_busy_partition_leaves_others_their_share() -> None:
    topic = Topic(3)
    for number, count in enumerate([3000, 2, 1000]):
        topic.write([b"x" * 100] * count, number)
    reader = topic.declared().open()
    bind(reader)
    new = reader.high_watermarks({}, 100_000)
    assert new[f"{topic.name}/1"].address == 2
    assert all(100 < new[f"{topic.name}/{number}"].address < 700 for number in (0, 2))


def test_the_ends_of_transactions_are_covered_although_they_are_no_messages() -> None:
    topic = Topic()
    producer = Producer(
        {"bootstrap.servers": topic.kafka.brokers, "transactional.id": topic.name, "log_level": 0}
    )  # fmt: skip
    producer.init_transactions()
    for round_ in range(3):
        producer.begin_transaction()
        producer.produce(topic.name, b"%d" % round_, partition=0)
        producer.flush()
        producer.commit_transaction()
    # This broker gives no checksums to its records of commits.
    declared = topic.declared(options={"check.crcs": "false"})
    reader, name = declared.open(), f"{topic.name}/0"
    end = bind(reader)[name]
    assert end.address == 6
    table = read_all(reader, name, START, end)
    assert (table.column("address").to_pylist(), table.column("value").to_pylist()) == ([0, 2, 4], [b"0", b"1", b"2"])
    assert read_all(reader, name, Mark(5, end.check), end).num_rows == 0
    for start, after in pairwise(range(7)):
        assert read_all(reader, name, Mark(start), Mark(after)).num_rows == (start % 2 == 0)


def test_a_message_belongs_only_once_it_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker says how far transactions are decided. This one gives messages beyond all the same."""
    topic = Topic()
    topic.write([b"%d" % n for n in range(10)])
    name, stable = f"{topic.name}/0", 4
    asked: list[object] = []
    offsets = Cluster._offsets

    def undecided(self: Cluster, partitions: Iterable[Partition], spec: Any, **how: Any) -> dict[Partition, int]:
        asked.append(how.get("isolation_level"))
        found = offsets(self, partitions, spec, **how)
        return {one: min(at, stable) for one, at in found.items()}

    monkeypatch.setattr(Cluster, "_offsets", undecided)
    reader = topic.declared().open()
    bound = bind(reader)
    assert bound[name].address == 4
    assert IsolationLevel.READ_COMMITTED in asked
    stable = 10
    bound |= reader.high_watermarks(bound, BIG)
    assert bound[name].address == 10
    assert values(reader, name, START, bound[name]) == topic.values[name]
    asked.clear()
    bind(topic.declared(isolation="read_uncommitted").open())
    assert IsolationLevel.READ_COMMITTED not in asked


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_consumers_are_of_the_isolation_that_was_declared(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they then do, a real broker shows (integration/test_kafka_broker.py)."""
    made: list[dict[str, str]] = []

    def noted(options: dict[str, str], **how: Any) -> Consumer:
        made.append(options)
        return Consumer(options, **how)

    monkeypatch.setattr(cluster, "Consumer", noted)
    Kafka(brokers="127.0.0.1:1", topic="t", isolation=isolation).open().close()  # type: ignore[arg-type]
    assert [(one["isolation.level"], one["auto.offset.reset"]) for one in made] == [(isolation, "error")]


def test_partitions_that_are_added_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic(3)
    known, topics = 1, Cluster.topics

    def fewer(self: Cluster, names: Iterable[str]) -> dict[str, cluster.Topic]:
        return {name: one._replace(partitions=one.partitions[:known]) for name, one in topics(self, names).items()}

    monkeypatch.setattr(Cluster, "topics", fewer)
    reader = topic.declared().open()
    for number in range(3):
        topic.write([b"a"], number)
    bound = bind(reader)
    assert set(bound) == {f"{topic.name}/0"}
    known = 3
    assert set(reader.high_watermarks(bound, BIG)) == {f"{topic.name}/1", f"{topic.name}/2"}


@pytest.mark.parametrize("place", range(3))
def test_a_broker_that_does_not_know_of_a_partition_for_a_moment_is_asked_again(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where partitions were added, and the broker that answers has just started: nothing of it is gone."""
    topic, topics = Topic(2), Cluster.topics
    topic.write([b"a"], 1)
    reader, bound = topic.declared().open(), bind(topic.declared().open())
    topic.write([b"b"], 1)
    asked = iter(range(9))

    def late(self: Cluster, names: Iterable[str]) -> dict[str, cluster.Topic]:
        found, is_late = topics(self, names), next(asked) == place
        return {name: one._replace(partitions=one.partitions[:1]) for name, one in found.items()} if is_late else found

    monkeypatch.setattr(Cluster, "topics", late)
    end = reader.high_watermarks(bound, BIG)[f"{topic.name}/1"]
    assert values(topic.declared().open(), f"{topic.name}/1", START, end) == [b"a", b"b"]
    assert next(asked) > place


def test_what_retention_took_before_the_source_began_was_never_a_part_of_it() -> None:
    topic, name = Topic(), ""
    name = f"{topic.name}/0"
    topic.write([b"%d" % n for n in range(100)])
    topic.kafka.delete_records(topic.name, 0, 40)
    reader = topic.declared().open()
    end = bind(reader)[name]
    assert end.check.endswith("@40:100:0")
    for one in (reader, topic.declared().open()):
        assert read_all(one, name, START, end).column("address").to_pylist() == list(range(40, 100))
        assert read_all(one, name, Mark(60), end).num_rows == 40
    assert reader.lags({}) == {name: (100, reader.lags({})[name].bytes, reader.lags({})[name].read_ms)}
    topic.kafka.delete_records(topic.name, 0, 50)  # of what is bound
    for one in (topic.declared().open(), topic.declared().open()):
        check_gone(one, name, START, end)
    assert read_all(topic.declared().open(), name, Mark(50), end).num_rows == 50
    topic.write([b"more"])
    later = bind(topic.declared().open())[name]
    assert later.check.endswith("@50:101:0"), "who begins now begins later"


def test_what_retention_takes_before_it_is_bound_is_gone() -> None:
    topic = Topic()
    name = f"{topic.name}/0"
    topic.write([b"%d" % n for n in range(10)])
    reader = topic.declared().open()
    bound = bind(reader)
    reader.close()
    topic.write([b"%d" % n for n in range(10)])
    topic.kafka.delete_records(topic.name, 0, 15)
    with pytest.raises(Gone, match="from 10 to 15 are still needed") as raised:
        topic.declared().open().high_watermarks(bound, BIG)
    assert raised.value.partition == name
    topic.kafka.delete_records(topic.name, 0, 20)
    with pytest.raises(Gone, match="from 10 to 20"):
        topic.declared().open().high_watermarks(bound, BIG)


def test_what_a_broker_did_not_give_and_has_may_be_had_later() -> None:
    with KafkaServer() as kafka:
        topic = Topic(name="t", kafka=kafka)
        topic.write([b"a", b"b"])
        kafka.fail(1, *[1] * 3)  # Fetch: the offset is out of range
        with pytest.raises(Determinate, match="did not give what is at 0, and have it"):
            read_all(topic.declared().open(), "t/0", START, Mark(2))


def test_a_log_that_lost_messages_and_has_others_by_now_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a real broker's client says it that was reading at the time (integration/test_kafka_broker.py)."""
    topic = Topic()
    name = f"{topic.name}/0"
    topic.write([b"a", b"b"])
    reader = topic.declared().open()
    bound = bind(reader)
    topic.write([b"c"])
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "Partition log truncation detected at offset 2")
    event = SimpleNamespace(error=lambda: error, topic=lambda: topic.name, partition=lambda: 0, offset=lambda: None)
    monkeypatch.setattr(Cluster, "consume", lambda *_: [event])
    with pytest.raises(Diverged, match="what is there before 2 is not what was read") as raised:
        reader.high_watermarks(bound, BIG)
    assert raised.value.partition == name


class Terms(NamedTuple):
    """A partition with messages of three leaders: a and b of the epoch 0, c and d of 2, and e of 4."""

    topic: Topic
    name: str
    id: str

    def mark(self, address: int, *last: int) -> Mark:
        """A mark that says of the last message before it the offset after it, and the epoch."""
        return Mark(address, ":".join([f"{self.id}@0", *map(str, last)]))

    def stale(self, epoch: int) -> KafkaReader:
        """A reader that had read other messages, before brokers lost them."""
        reader = self.topic.declared().open()
        bind(reader)
        ahead = reader._ahead[self.topic.name, 0]
        for place, chunk in enumerate(ahead.chunks):
            others = chunk.table.set_column(1, VALUE, pa.array([b"other"] * chunk.table.num_rows, pa.binary()))
            ahead.chunks[place] = chunk._replace(table=others, epochs=chunk.epochs * 0 + epoch)
        return reader


@pytest.fixture(scope="module")
def terms() -> Terms:
    topic = Topic(2)
    for some in ([b"a", b"b"], [b"c", b"d"], [b"e"]):
        topic.write(some)
        topic.kafka.elect(topic.name, 0)
    check = bind(topic.declared().open())[f"{topic.name}/0"].check
    return Terms(topic, f"{topic.name}/0", check.partition("@")[0])


def test_a_mark_says_which_leader_wrote_the_last_message(terms: Terms) -> None:
    reader, found = terms.topic.declared().open(), []
    bound: dict[str, Mark] = {}
    while new := dict(reader.high_watermarks(bound, 1)):
        bound |= new
        found.append(bound[terms.name])
        read_all(reader, terms.name, START, bound[terms.name])
    assert found == [terms.mark(at + 1, at + 1, epoch) for at, epoch in enumerate([0, 0, 2, 2, 4])]


def test_messages_that_come_at_once_may_be_of_several_leaders_or_of_none_that_is_known() -> None:
    def message(partition: int, offset: int, epoch: int | None) -> Any:
        said = {
            "topic": "t", "partition": partition, "offset": offset, "leader_epoch": epoch, "key": None, "value": b"v",
            "headers": None, "timestamp": (1, 0),
        }  # fmt: skip
        return SimpleNamespace(**{name: partial(lambda value: value, value) for name, value in said.items()})

    some = [
        message(0, 5, 0),
        message(1, 1, 3),
        message(0, 6, 2),
        message(1, 2, 3),
        message(0, 7, 2),
        message(2, 0, None),
    ]
    found = {number: chunk.epochs.tolist() for _, number, chunk in cluster.chunks_of(some, {"t": 0})}
    assert found == {0: [0, 2, 2], 1: [3, 3], 2: [cluster.NO_EPOCH]}


def test_a_mark_of_an_earlier_release_says_no_epoch_and_one_of_a_later_release_is_refused(terms: Terms) -> None:
    reader = terms.topic.declared().open()
    new = reader.high_watermarks({terms.name: terms.mark(3)}, BIG)
    assert new == {terms.name: terms.mark(5, 5, 4)}
    assert values(reader, terms.name, terms.mark(3), new[terms.name]) == [b"d", b"e"]
    assert values(reader, terms.name, Mark(2, ""), terms.mark(4)) == [b"c", b"d"]
    with pytest.raises(NewerFormat, match="does not know"):
        reader.high_watermarks({terms.name: terms.mark(3, 3, 2, 1)}, BIG)


@pytest.mark.parametrize("knows", [False, True], ids=["it begins", "it knows the leader"])
def test_other_messages_in_the_places_of_those_that_were_read_have_diverged_for_who_comes_later(
    terms: Terms, knows: bool
) -> None:
    """As if the first leader had written a third message, which its followers never had."""
    third = terms.mark(3, 3, 0)
    for call in (
        lambda reader: reader.high_watermarks({terms.name: third}, BIG),
        lambda reader: read_all(reader, terms.name, third, terms.mark(5, 5, 4)),
    ):
        reader = terms.topic.declared().open()
        if knows:
            bind(reader)
            reader._ahead[terms.topic.name, 0].forget(5)
        with pytest.raises(Diverged, match="what is there before 3 is not what was read") as raised:
            call(reader)
        assert raised.value.partition == terms.name


def test_offsets_without_a_message_may_be_of_a_later_leader(terms: Terms) -> None:
    """As the end of a transaction is that another leader decided: the second one ended where c is."""
    reader = terms.topic.declared().open()
    after = terms.mark(3, 2, 0)
    new = reader.high_watermarks({terms.name: after}, BIG)
    assert values(reader, terms.name, after, new[terms.name]) == [b"d", b"e"]
    assert values(terms.topic.declared().open(), terms.name, after, new[terms.name]) == [b"d", b"e"]


@pytest.mark.parametrize("last", [(4, 0), (5, 0)], ids=["its own", "one that is not there any more"])
def test_what_is_bound_and_is_now_of_a_later_leader_has_diverged(terms: Terms, last: tuple[int, int]) -> None:
    end = terms.mark(4, *last)
    check_diverged(terms.topic.declared().open(), terms.name, START, end)
    assert values(terms.topic.declared().open(), terms.name, START, terms.mark(4, 5, 4)) == [b"a", b"b", b"c", b"d"]


def test_what_an_instance_had_read_and_brokers_have_lost_is_read_again(terms: Terms) -> None:
    """Where another one bound what is there now. The first one has not heard from its client that it is lost."""
    before, at, end = terms.mark(2, 2, 0), terms.mark(4, 4, 2), terms.mark(5, 5, 4)
    reader = terms.stale(1)
    assert reader.high_watermarks({terms.name: at}, BIG) == {terms.name: end}
    assert values(reader, terms.name, at, end) == [b"e"]
    reader = terms.stale(1)
    assert values(reader, terms.name, at, end) == [b"e"]
    reader = terms.stale(0)
    with pytest.raises(Determinate, match="It reads again"):
        values(reader, terms.name, before, at)


def test_a_broker_that_has_not_heard_of_a_leader_yet_may_do_so_later(terms: Terms) -> None:
    with pytest.raises(Determinate, match="before 3: has it not heard of that one yet"):
        terms.topic.declared().open().high_watermarks({terms.name: terms.mark(3, 3, 9)}, BIG)


def test_messages_do_not_count_before_their_leader_was_asked(terms: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot ask before it has begun to read, which may take long: then messages of it may come before."""
    monkeypatch.setattr(cluster, "STARTS", 1)
    reader = terms.topic.declared().open()
    asked = iter(range(9))

    class Slow:
        """A consumer that begins late."""

        def __init__(self, consumer: Consumer) -> None:
            self.consumer = consumer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.consumer, name)

        def seek(self, place: TopicPartition) -> None:
            if next(asked) < 3:
                raise KafkaException(KafkaError(KafkaError._STATE))
            self.consumer.seek(place)

    reader._cluster._consumer = Slow(reader._cluster._consumer)
    after = terms.mark(3, 3, 2)
    new = reader.high_watermarks({terms.name: after}, BIG)
    assert values(reader, terms.name, after, new[terms.name]) == [b"d", b"e"]
    assert next(asked) == 4
    asked = iter(range(9))
    with pytest.raises(Diverged):
        reader.high_watermarks({terms.name: terms.mark(3, 3, 0)}, BIG)


def test_who_continues_after_offsets_without_a_message_may_find_the_last_message_gone() -> None:
    topic = Topic()
    topic.write([b"a", b"b", b"c"])
    topic.kafka.elect(topic.name, 0)
    topic.write([b"d"])
    name = f"{topic.name}/0"
    mark = bind(topic.declared().open())[name]
    after = Mark(3, mark.check.partition(":")[0] + ":2:0")
    topic.kafka.delete_records(topic.name, 0, 3)
    reader = topic.declared().open()
    assert reader.high_watermarks({name: after}, BIG) == {name: mark}
    assert values(reader, name, after, mark) == [b"d"]


def test_a_topic_that_is_made_again_has_diverged_and_one_that_is_deleted_is_gone() -> None:
    topic = Topic(2)
    name = f"{topic.name}/0"
    topic.write([b"%d" % n for n in range(10)])
    reader, fresh = topic.declared().open(), topic.declared().open()
    bound = bind(reader)
    end = bound[name]
    assert values(fresh, name, START, end) == topic.values[name]
    topic.kafka.delete(topic.name)
    check_gone(topic.declared().open(), name, START, end)
    with pytest.raises(Gone):
        topic.declared().open().high_watermarks(bound, BIG)
    with pytest.raises(Determinate, match="there is no topic"):
        topic.declared().open().high_watermarks({}, BIG)
    topic.kafka.create(topic.name, 2)
    topic.write([b"other"] * 10)
    assert values(reader, name, START, end) == [b"%d" % n for n in range(10)], "it had read these before"
    for one in (reader, topic.declared().open()):
        check_diverged(one, name, START, end)
        with pytest.raises(Diverged, match="deleted and made again"):
            one.high_watermarks(bound, BIG)
    check_diverged(fresh, name, START, end)  # it knew of the former one, and reads on by the name


def test_a_topic_that_ends_before_what_was_read_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As brokers tell no id of a topic that are older than ids."""
    topics = Cluster.topics
    monkeypatch.setattr(
        Cluster, "topics", lambda self, names: {n: one._replace(id="") for n, one in topics(self, names).items()}
    )
    topic = Topic()
    name = f"{topic.name}/0"
    topic.write([b"%d" % n for n in range(10)])
    end = bind(topic.declared().open())[name]
    assert end.check == "@0:10:0"
    topic.kafka.delete(topic.name)
    topic.kafka.create(topic.name, 1)
    topic.write([b"1"] * 5)
    check_diverged(topic.declared().open(), name, Mark(7), end)
    with pytest.raises(Diverged, match="ends at 5, and was read up to 10"):
        topic.declared().open().high_watermarks({name: end}, BIG)


def test_brokers_that_do_not_answer_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with KafkaServer() as kafka:
        topic = Topic(name="t", kafka=kafka)
        topic.write([b"a", b"b"])
        reader = topic.declared().open()
        bound = dict(reader.high_watermarks({}, 1))
        monkeypatch.setattr(cluster, "ANSWER_S", 1.0)  # only now: on a busy machine the first answer takes longer
        monkeypatch.setattr(reader_module, "PATIENCE", 5)
        kafka.set_up(is_up=False)
        for call in (
            lambda: reader.high_watermarks(bound, BIG),
            lambda: read_all(topic.declared().open(), "t/0", START, Mark(2)),
            lambda: topic.declared().open().look(),
        ):
            with pytest.raises(Determinate, match=kafka.brokers):
                call()
        kafka.set_up(is_up=True)
        monkeypatch.undo()
        for _ in range(50):
            try:
                bound = bind(reader)
                break
            except Determinate:
                continue
        assert values(reader, "t/0", START, bound["t/0"]) == topic.values["t/0"]
        reader.look()
        assert str(reader._cluster.failed("no")) == f"Kafka at {kafka.brokers}: no", "what was wrong before is not said"


@pytest.mark.parametrize("vague", [OffsetSpec.earliest(), OffsetSpec.latest()], ids=["begins", "ends"])
def test_a_broker_that_does_not_say_where_a_partition_begins_or_ends_may_do_so_later(vague: OffsetSpec) -> None:
    """As one answers that has just started again (see integration/test_kafka_broker.py): without an error."""
    topic = Topic()
    topic.write([b"a"])
    reader = topic.declared().open()
    bound = bind(reader)
    topic.write([b"b"])

    class Vague:
        """Asks as usual, but for one thing."""

        def __init__(self, admin: AdminClient) -> None:
            self.admin = admin

        def __getattr__(self, name: str) -> Any:
            return getattr(self.admin, name)

        def list_offsets(self, wanted: dict[TopicPartition, OffsetSpec], **how: Any) -> dict[TopicPartition, Any]:
            asked: dict[TopicPartition, Any] = self.admin.list_offsets(wanted, **how)
            for one, spec in wanted.items():
                if type(spec) is type(vague):
                    asked[one] = Future()
                    asked[one].set_result(SimpleNamespace(offset=-1001))
            return asked

    one = reader._cluster
    one._admin, admin = Vague(one._admin), one._admin
    says = f"{topic.name}/0: the broker does not say yet"
    with pytest.raises(Determinate, match=says):
        reader.high_watermarks({}, BIG)
    if type(vague) is type(OffsetSpec.latest()):
        with pytest.raises(Determinate, match=says):
            reader.high_watermarks(bound, BIG)
    one._admin = admin
    assert values(reader, f"{topic.name}/0", START, bind(reader)[f"{topic.name}/0"]) == [b"a", b"b"]


def test_why_brokers_do_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients say it to who asks them: here that the broker ends a connection which begins with TLS."""
    monkeypatch.setattr(cluster, "ANSWER_S", 2.0)
    reader = Topic().declared(options={"security.protocol": "SSL"}).open()
    with pytest.raises(Determinate, match="in state SSL_HANDSHAKE"):
        reader.look()
    reader._cluster._note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert "SSL_HANDSHAKE" in str(reader._cluster.failed("no")), "that all are down says less"


def test_who_waits_for_an_answer_asks_which_brokers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits on for one that was killed, and turns to another one as soon as it has heard of it."""
    for name, value in (("LOOK_S", 0.001), ("RENEW_S", 0.01), ("ANSWER_S", 0.1)):
        monkeypatch.setattr(cluster, name, value)
    found, answer = Kafka(brokers="127.0.0.1:1", topic="t").open()._cluster, Future[str]()
    asked: list[str | None] = []

    def list_topics(topic: str | None = None, timeout: float = 0) -> None:
        asked.append(topic)
        if len(asked) < 3:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        answer.set_result("hello")

    found._admin = SimpleNamespace(poll=lambda _: 0, list_topics=list_topics)
    assert found._answer(answer) == "hello"
    assert asked == [None] * 3, "to ask for a topic by its name may create it"


REFUSED, DOWN = KafkaError(KafkaError._AUTHENTICATION, "no"), KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1")
AWAY, UNTRUSTED = KafkaError(KafkaError._TRANSPORT, "Connection refused"), KafkaError(KafkaError._SSL, "not verified")
TURNED_AWAY = KafkaError(KafkaError._TRANSPORT, "Receive failed: ssl/tls alert bad certificate: SSL alert number 42")


@pytest.mark.parametrize(
    ("said", "mechanism", "is_for_good"),
    [
        ([REFUSED, DOWN], "PLAIN", True),
        ([REFUSED], "SCRAM-SHA-512", True),
        ([UNTRUSTED], "", True),
        ([TURNED_AWAY], "", True),
        ([REFUSED, AWAY], "PLAIN", False),
        ([AWAY], "PLAIN", False),
        ([REFUSED], "OAUTHBEARER", False),
        ([], "PLAIN", False),
    ],
)
def test_who_is_refused_by_all_brokers_that_can_be_reached_is_refused_for_good(
    said: list[KafkaError], mechanism: str, is_for_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not who was refused before, nor where another broker is away, nor where a token cannot be had now."""
    for name, value in (("LOOK_S", 0.001), ("REFUSED_S", 0.005), ("ANSWER_S", 0.02)):
        monkeypatch.setattr(cluster, name, value)
    monkeypatch.setenv("SOME_PASSWORD", "secret")
    options = {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism, "sasl.username": "me"}
    options["sasl.password"] = "env:SOME_PASSWORD"
    found = Kafka(brokers="127.0.0.1:1", topic="t", options=options if mechanism else {}).open()._cluster
    polled: list[float] = []

    def poll(timeout: float) -> int:
        before, polled[:] = not polled, [*polled, timeout]
        for error in [REFUSED] * 9 if before else said:
            found._note(error)
        return len(said)

    found._admin = SimpleNamespace(poll=poll, list_topics=lambda **_: None)
    with pytest.raises(InvalidUsage if is_for_good else TimeoutError) as raised:
        found._answer(Future())
    assert ("does not let this client in" in str(raised.value)) is is_for_good
    assert (len(polled) < 10) is is_for_good
    answer: Future[str] = Future()
    answer.set_result("hello")
    assert found._answer(answer) == "hello"


def test_a_group_is_told_what_is_durable_and_no_other() -> None:
    topic = Topic(2)
    topic.write([b"a", b"b"], 0)
    reader = topic.declared(group="them").open()
    bound = bind(reader)
    reader.tell({f"{topic.name}/0": Mark(1, bound[f"{topic.name}/0"].check)})
    assert committed(topic, "them") == [1, None]
    topic.declared().open().tell(bound)
    assert committed(topic, "them") == [1, None]
    topic.kafka.fail(8, 30)  # OffsetCommit: the group is not ours
    with pytest.raises(Determinate, match="roup"):
        reader.tell(bound)


def committed(topic: Topic, group: str) -> list[int | None]:
    consumer = Consumer({"bootstrap.servers": topic.kafka.brokers, "group.id": group, "log_level": 0})
    try:
        asked = [TopicPartition(topic.name, number) for number in range(len(topic.values))]
        return [one.offset if one.offset >= 0 else None for one in consumer.committed(asked, timeout=10)]
    finally:
        consumer.close()


@pytest.fixture
def password() -> Iterator[str]:
    os.environ["SOME_PASSWORD"] = "hunter2hunter2"
    yield os.environ["SOME_PASSWORD"]
    del os.environ["SOME_PASSWORD"]


def test_secrets_come_from_the_environment_and_are_shown_nowhere(password: str) -> None:
    topic = Topic()
    options = {"sasl.password": "env:SOME_PASSWORD", "sasl.username": "me"}
    declared = topic.declared(options=options)
    declared.open().look()
    assert password not in repr(declared)
    assert password not in msgspec.json.encode(declared).decode()
    wrong = topic.declared(options={"security.protocol": "env:SOME_PASSWORD"})
    with pytest.raises(InvalidUsage) as raised:
        wrong.open()
    assert password not in str(raised.value)
    assert raised.value.__cause__ is None
    for name in ("sasl.password", "ssl.key.password", "sasl.oauthbearer.client.secret", "ssl.key.pem"):
        with pytest.raises(InvalidUsage, match="env:NAME") as raised:
            topic.declared(options={name: password})
        assert password not in str(raised.value)
    with pytest.raises(InvalidUsage, match="NOT_THERE, which is not set"):
        topic.declared(options={"sasl.password": "env:NOT_THERE"}).open()


def test_an_option_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidUsage, match=r"no\.such\.option"):
        Kafka(brokers="host:9092", topic="t", options={"no.such.option": "1"}).open()


def test_a_url_names_brokers_topics_and_options() -> None:
    found = parse_kafka_url("kafka://a:1,b:2/orders,bills?group=g&security.protocol=SSL&sasl.password=env:X")
    assert found == Kafka(
        brokers="a:1,b:2", topics=("orders", "bills"), group="g",
        options={"security.protocol": "SSL", "sasl.password": "env:X"},
    )  # fmt: skip
    for wrong in (
        "kafka://",
        "kafka://a:1",
        "kafka:///t",
        "kafka://u:p@a:1/t",
        "kafka://a:1/t?x=1&x=2",
        "http://a:1/t",
    ):
        with pytest.raises(PersistError) as raised:
            parse_kafka_url(wrong)
        assert isinstance(raised.value, InvalidUsage)
        assert ":p@" not in str(raised.value)
