"""Apache Kafka for tests: one broker of one process (KRaft), on the loopback interface, with its data in a folder.

    broker = kafka_broker()     # one for this process; skips the test where the jars or a Java are missing
    topic = Topic(kafka=broker)

It listens four times: plainly, with TLS, with passwords, and with both. It can be killed and started again, and is then
the one it was. `scripts/kafka-broker` puts its jars where this looks for them.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

from jobs.java import JavaNotFound, find_java_home
from persist_lib.testing.servers import _Server, free_port
from tests.jvms import SMALL
from tests.tls import Authority

JARS = Path(sys.prefix) / "kafka"
USER, PASSWORD = "ann", "the-broker-s-own-password"
ANSWER_S = 20.0
LISTENERS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL", "CONTROLLER")
"""Where it listens, by the protocol; the last one is for itself."""
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": ",".join(
        f"{name}:{'PLAINTEXT' if name == 'CONTROLLER' else name}" for name in LISTENERS
    ),
    "sasl.enabled.mechanisms": "PLAIN",
    "ssl.keystore.type": "PEM",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    # Whoever is killed is taken for gone, and may be there again, after this time.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "300",
    "num.network.threads": "1",
    "num.io.threads": "2",
    # One of everything, as there is one broker.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    # What it does from time to time it does at once.
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "0",
    "log.cleaner.backoff.ms": "100",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
}


class KafkaBroker(_Server):
    """A broker. It can be killed and started again."""

    name, at_death = "Apache Kafka", SIGKILL

    @staticmethod
    def why_not() -> str:
        """Why there can be none here: empty if there can."""
        if not (JARS / "installed").exists():  # written last, once all of them are as they are pinned
            return "there are no jars: scripts/kafka-broker puts them into .venv"
        try:
            _java()
        except JavaNotFound:
            return "there is no Java"
        return ""

    def __init__(self) -> None:
        super().__init__()
        ports = dict.fromkeys(LISTENERS, 0)
        while len(set(ports.values())) < len(ports):
            ports = {name: free_port() for name in LISTENERS}
        self._places = {name: f"{self.address}:{port}" for name, port in ports.items()}
        self.brokers = self._places["PLAINTEXT"]
        self.bundle = self._certify()
        self._file = self.root / "server.properties"
        self._file.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        self._tool("kafka.tools.StorageTool", "format", "-t", "A" * 21 + "Q", "-c", self._file)
        quiet: dict[str, Any] = {"log_level": 0, "reconnect.backoff.max.ms": 100}
        self.admin = AdminClient({"bootstrap.servers": self.brokers, **quiet}, logger=_Silent())
        self.start()

    def _certify(self) -> Path:
        """A certificate of our own for this broker. Answers what who trusts it names."""
        authority = Authority(self.root, "authority")
        chain, secret = authority.certificate(self.address)
        (self.root / "broker.pem").write_text(secret.read_text() + chain.read_text())
        return authority.bundle

    def _settings(self) -> dict[str, str]:
        def told(names: Iterable[str]) -> str:
            return ",".join(f"{name}://{self._places[name]}" for name in names)

        login = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        return SETTINGS | {
            "controller.quorum.voters": f"1@{self._places['CONTROLLER']}",
            "listeners": told(LISTENERS), "advertised.listeners": told(LISTENERS[:-1]),
            "log.dirs": str(self.root / "data"), "ssl.keystore.location": str(self.root / "broker.pem"),
            **{f"listener.name.{name}.plain.sasl.jaas.config": login for name in ("sasl_plaintext", "sasl_ssl")},
        }  # fmt: skip

    def _command(self, *words: str | Path) -> list[str | Path]:
        return [_java(), "-Xmx256m", *SMALL.split(), "-cp", f"{JARS}/*", *words]

    def _tool(self, *words: str | Path) -> None:
        done = subprocess.run(self._command(*words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{words[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")

    def at(self, protocol: str) -> str:
        """Where it listens for a protocol, such as "SASL_SSL"."""
        return self._places[protocol]

    def start(self) -> None:
        """Start it, and wait until it answers. It has what it had before."""
        self._run(self._command("kafka.Kafka", self._file), None, self._asked, KafkaException)

    def _asked(self) -> ExitStack:
        self.admin.list_topics(timeout=1)
        return ExitStack()

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._running.end(SIGKILL)

    def create(self, topic: str, partitions: int, **settings: object) -> None:
        """Make a topic. Its settings are named with `_` for `.`."""
        named = {name.replace("_", "."): str(value) for name, value in settings.items()}
        self._do(self.admin.create_topics([NewTopic(topic, partitions, 1, config=named)]))
        self._wait(topic, partitions)

    def change(self, topic: str, **settings: object) -> None:
        """Change settings of a topic."""
        entries = [
            ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        self._do(self.admin.incremental_alter_configs([resource]))

    def delete(self, topic: str) -> None:
        self._do(self.admin.delete_topics([topic]))
        self._wait(topic, 0)

    def add_partitions(self, topic: str, in_all: int) -> None:
        self._do(self.admin.create_partitions([NewPartitions(topic, in_all)]))
        self._wait(topic, in_all)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the messages before an offset, as retention does."""
        self._do(self.admin.delete_records([TopicPartition(topic, partition, before)]))

    def offsets(self, topic: str, partition: int = 0) -> tuple[int, int, int]:
        """The first offset that a partition has, the one after its last message, and the epoch of its leader."""
        one = TopicPartition(topic, partition)
        found = [
            self.admin.list_offsets({one: spec})[one].result(ANSWER_S)
            for spec in (OffsetSpec.earliest(), OffsetSpec.latest())
        ]
        return found[0].offset, found[1].offset, found[1].leader_epoch

    def _wait(self, topic: str, partitions: int) -> None:
        """Wait until the broker knows that a topic has so many partitions: it hears of that after it was decided."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            found = self.admin.list_topics(timeout=ANSWER_S).topics.get(topic)
            if (0 if found is None else len(found.partitions)) == partitions:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the broker does not know that {topic} has {partitions} partitions")
            time.sleep(0.01)

    def _do(self, asked: dict[Any, Any]) -> None:
        for answer in asked.values():
            answer.result(ANSWER_S)


class _Silent:
    """Takes what a client logs."""

    def log(self, *_: object) -> None:
        """Nothing."""


@functools.cache
def _java() -> Path:
    return Path(find_java_home()) / "bin" / "java"


@functools.cache
def _shared() -> KafkaBroker:
    return KafkaBroker()


def kafka_broker() -> KafkaBroker:
    """One for this process; who kills it starts it again. Skips the test where there can be none."""
    if why := KafkaBroker.why_not():
        pytest.skip(f"not run: no broker ({why})")
    return _shared()
