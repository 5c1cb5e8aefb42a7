"""Kafka for tests: one broker a process, topics of a test's own, and messages as plain lists."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

from confluent_kafka import Producer

from persist_lib.sources import Kafka
from persist_lib.testing.kafka_server import KafkaServer

QUICK = {"fetch.wait.max.ms": "5"}
"""A consumer that begins again at another offset waits for the answer to its last request."""
_numbers = itertools.count()


@cache
def server() -> KafkaServer:
    """The broker of this process."""
    found = KafkaServer()
    atexit.register(found.close)
    return found


class Topic:
    """A topic with what was written to it: a list of values, with None at offsets that are no messages.

    `kafka` is another broker than that of this process, also a `tests.kafka_broker`; `settings` are the topic's there.
    """

    def __init__(self, partitions: int = 1, name: str = "", kafka: Any = None, **settings: Any) -> None:
        self.kafka: Any = kafka or server()
        self.name = name or f"t{next(_numbers)}"
        self.kafka.create(self.name, partitions, **settings)
        options: dict[str, Any] = {"bootstrap.servers": self.kafka.brokers, "linger.ms": 1, "log_level": 0}
        self.producer = Producer({**options, "compression.type": "zstd", "queue.buffering.max.messages": 2_000_000})
        self.values: dict[str, list[bytes | None]] = {f"{self.name}/{number}": [] for number in range(partitions)}

    def write(
        self,
        values: Sequence[bytes | None],
        partition: int = 0,
        keys: Sequence[bytes | None] | None = None,
        **more: Any,
    ) -> None:
        """Write messages, and wait until the broker has them."""
        for number, value in enumerate(values):
            key = None if keys is None else keys[number]
            self.producer.produce(self.name, value, key=key, partition=partition, **more)
            if number % 10_000 == 9_999:
                self.producer.poll(0)
        assert self.producer.flush(60) == 0
        self.values[f"{self.name}/{partition}"] += values

    def declared(self, **more: Any) -> Kafka:
        return Kafka(brokers=self.kafka.brokers, topic=self.name, options={**QUICK, **more.pop("options", {})}, **more)
