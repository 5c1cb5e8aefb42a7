"""Kafka messages into an upsert collection, beside a bare consumer of the same topic.

The broker is librdkafka's, in a process of its own. The bare consumer takes batches of messages and counts them. The
source also makes bindings, parses JSON, looks for the old rows of keys, and appends durably.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from confluent_kafka import Consumer, Producer, TopicPartition

import persist_lib as persist
from bench.figures import Figure, in_turn
from persist_lib.sources import Decoding, Kafka, Meaning
from persist_lib.testing.kafka_server import KafkaServer

FULL, QUICK = 1_000_000, 100_000
KEYS = 50_000
PARTITIONS = 6
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "cents": "int64"})


def kafka(quick: bool) -> list[Figure]:
    """Messages per second."""
    count = QUICK if quick else FULL
    with KafkaServer() as server, TemporaryDirectory(prefix="persist-kafka-") as folder:
        fill(server, count)
        ours, bare = in_turn(ingesting(server, Path(folder), count), consuming(server, count), 1 if quick else 3)
    note = f"{count:,} messages of {KEYS:,} keys in {PARTITIONS} partitions"
    return [Figure("kafka-upsert", count / ours / 1e6, count / bare / 1e6, "M/s", "bare confluent-kafka", note=note)]


def fill(server: KafkaServer, count: int) -> None:
    """Write the topic."""
    server.create("orders", PARTITIONS)
    producer = Producer(
        {
            "bootstrap.servers": server.brokers, "compression.type": "zstd", "linger.ms": 50,
            "batch.num.messages": 100_000, "log_level": 0,
        }
    )  # fmt: skip
    for n in range(count):
        key = n * 7919 % KEYS
        value = b'{"word": "w%d", "cents": %d}' % (n % 9973, n)
        producer.produce("orders", value, b"%d" % key, partition=key % PARTITIONS)
        if n % 10_000 == 9_999:
            producer.flush()
    producer.flush()


def ingesting(server: KafkaServer, folder: Path, count: int) -> Callable[[], None]:
    """All messages become durable, and the group is told."""
    turns = itertools.count()

    def once() -> None:
        with persist.open(f"file:{folder}/{next(turns)}") as client, client.controller() as controller:
            sources = controller.sources()
            declared = Kafka(brokers=server.brokers, topic="orders", group="ours")
            sources.create(
                "orders", declared, SCHEMA, decoding=Decoding(key="json"), meaning=Meaning(envelope="upsert")
            )  # fmt: skip
            seen = 0
            with_steps = sources.open("orders")
            while seen < count:
                step = with_steps.step()
                seen += step.messages
            with_steps.close()
            with controller.open_reader("orders") as reader:
                assert reader.snapshot().to_arrow().num_rows == min(KEYS, count)

    return once


def consuming(server: KafkaServer, count: int) -> Callable[[], None]:
    """A consumer that counts messages."""

    def once() -> None:
        consumer = Consumer({"bootstrap.servers": server.brokers, "group.id": "bare", "log_level": 0})
        consumer.assign([TopicPartition("orders", number, 0) for number in range(PARTITIONS)])
        seen = 0
        while seen < count:
            seen += sum(message.error() is None for message in consumer.consume(10_000, 0.1))
        consumer.close()

    return once
