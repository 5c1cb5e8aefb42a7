"""Apache Kafka for tests: one broker of one process (KRaft), on the loopback interface, with its data in a folder.

    broker = kafka_broker()     # one for this process; skips the test where the jars or a Java are missing
    topic = Topic(kafka=broker)

    brokers = kafka_brokers()   # three, of which the first one is also the only controller
    topic = Topic(kafka=brokers, placed=[[2, 3, 1]])

It listens plainly, with TLS, with passwords, with both, and with TLS where clients have certificates, too. It can be
killed and started again, and is then the one it was. `scripts/kafka-broker` puts its jars where this looks for them.
"""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from confluent_kafka import ElectionType, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from jobs.java import JavaNotFound, find_java_home
from persist_lib.testing.servers import _Server, free_port
from tests.jvms import SMALL
from tests.tls import Authority

JARS = Path(sys.prefix) / "kafka"
USER, PASSWORD = "ann", "the-broker-s-own-password"
ANSWER_S = 20.0
LISTENERS = {
    "PLAINTEXT": "PLAINTEXT", "SSL": "SSL", "SASL_PLAINTEXT": "SASL_PLAINTEXT", "SASL_SSL": "SASL_SSL",
    "MUTUAL": "SSL", "CONTROLLER": "PLAINTEXT",
}  # fmt: skip
"""Where it listens, and how that is protected. Each but the last one, which is for itself, is for clients."""
CLIENTS = (*LISTENERS,)[:-1]
SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
SETTINGS = {
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in LISTENERS.items()),
    "sasl.enabled.mechanisms": ",".join(["PLAIN", *SCRAM]),
    "ssl.keystore.type": "PEM",
    "listener.name.mutual.ssl.client.auth": "required",
    "listener.name.mutual.ssl.truststore.type": "PEM",
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

    def __init__(self, node: int = 1, controller: KafkaBroker | None = None) -> None:
        super().__init__()
        self.node, self._leads = node, controller or self
        ports = dict.fromkeys(LISTENERS, 0)
        while len(set(ports.values())) < len(ports):
            ports = {name: free_port() for name in LISTENERS}
        self._places = {name: f"{self.address}:{port}" for name, port in ports.items()}
        self.brokers = self._places["PLAINTEXT"]
        self.bundle = self._certify()
        self._file = self.root / "server.properties"
        self._file.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        self._tool("kafka.tools.StorageTool", "format", "-t", "A" * 21 + "Q", "-c", self._file)
        self.admin = self.client()
        self.start()

    def client(self) -> AdminClient:
        """A client that asks this broker first, and later on others, too."""
        quiet: dict[str, Any] = {"log_level": 0, "reconnect.backoff.max.ms": 100}
        return AdminClient({"bootstrap.servers": self.brokers, **quiet}, logger=_Silent())

    def _certify(self) -> Path:
        """Certificates of our own for this broker and for a client. Answers what names who signed them."""
        authority = Authority(self.root, "authority")
        chain, secret = authority.certificate(self.address)
        (self.root / "broker.pem").write_text(secret.read_text() + chain.read_text())
        self.certificate = authority.certificate("client")
        return authority.bundle

    def _settings(self) -> dict[str, str]:
        def told(names: Iterable[str]) -> str:
            return ",".join(f"{name}://{self._places[name]}" for name in names)

        listens = LISTENERS if self._leads is self else CLIENTS
        login = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        return SETTINGS | {
            "process.roles": "broker,controller" if self._leads is self else "broker", "node.id": str(self.node),
            "controller.quorum.voters": f"{self._leads.node}@{self._leads.at('CONTROLLER')}",
            "listeners": told(listens), "advertised.listeners": told(CLIENTS),
            "log.dirs": str(self.root / "data"), "ssl.keystore.location": str(self.root / "broker.pem"),
            "listener.name.mutual.ssl.truststore.location": str(self.bundle),
            **{f"listener.name.{name}.plain.sasl.jaas.config": login for name in ("sasl_plaintext", "sasl_ssl")},
            **{
                f"listener.name.{name}.{mechanism.lower()}.sasl.jaas.config": scram
                for name in ("sasl_plaintext", "sasl_ssl") for mechanism in SCRAM
            },
        }  # fmt: skip

    def _command(self, *words: str | Path) -> list[str | Path]:
        return [_java(), "-Xmx192m", *SMALL.split(), "-cp", f"{JARS}/*", *words]

    def _tool(self, *words: str | Path) -> None:
        done = subprocess.run(self._command(*words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{words[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")

    def at(self, protocol: str) -> str:
        """Where it listens for a protocol, such as "SASL_SSL"."""
        return self._places[protocol]

    def start(self) -> None:
        """Start it, and wait until it answers. It has what it had before."""
        failures = (KafkaException, OSError)
        self._run(self._command("kafka.Kafka", self._file), None, self._asked, failures)  # type: ignore[arg-type]

    def _asked(self) -> socket.socket:
        self.admin.list_topics(timeout=1)  # which another broker may answer
        return socket.create_connection((self.address, int(self.brokers.rpartition(":")[2])), ANSWER_S)

    def let_in(self, user: str, password: str, mechanism: str) -> None:
        """Let a user log in with a password by one of `SCRAM`."""
        how = ScramCredentialInfo(ScramMechanism[mechanism.replace("-", "_")], 4096)
        self._do(self.admin.alter_user_scram_credentials([UserScramCredentialUpsertion(user, how, password.encode())]))

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._end(SIGKILL)

    def create(
        self, topic: str, partitions: int, placed: Sequence[Sequence[int]] = (), **settings: object
    ) -> None:  # fmt: skip
        """Make a topic. Its settings are named with `_` for `.`; `placed` are the brokers of each partition."""
        named = {name.replace("_", "."): str(value) for name, value in settings.items()}
        how: dict[str, Any] = {"replica_assignment": placed} if placed else {"replication_factor": 1}
        self._do(self.admin.create_topics([NewTopic(topic, partitions, config=named, **how)]))
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


class KafkaBrokers:
    """Three brokers of one cluster, by their numbers. The first one is also its controller: do not kill that one."""

    def __init__(self) -> None:
        first = KafkaBroker()
        self.nodes = {1: first, **{number: KafkaBroker(number, first) for number in (2, 3)}}
        self.brokers = ",".join(node.brokers for node in self.nodes.values())
        self.offsets, self.admin = first.offsets, first.admin

    def create(self, topic: str, partitions: int, **settings: Any) -> None:
        """Make a topic, as a broker does, of which all of them know then."""
        self.nodes[1].create(topic, partitions, **settings)
        for node in self.nodes.values():
            while topic not in node.client().list_topics(timeout=ANSWER_S).topics:
                time.sleep(0.05)

    def leader(self, topic: str, partition: int = 0) -> tuple[int, set[int]]:
        """The number of the broker that leads a partition, -1 for none; and those that have all its messages."""
        found = self.admin.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions[partition]
        return found.leader, set(found.isrs)

    def prefer(self, topic: str) -> None:
        """Ask that the first one of those that have a partition lead it, once it can."""
        asked = self.admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, 0)])
        with suppress(KafkaException):
            asked.result(ANSWER_S)


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


@functools.cache
def _three() -> KafkaBrokers:
    return KafkaBrokers()


def kafka_broker() -> KafkaBroker:
    """One for this process; who kills it starts it again. Skips the test where there can be none."""
    _skip_without()
    return _shared()


def kafka_brokers() -> KafkaBrokers:
    """Three for this process, in the same way."""
    _skip_without()
    return _three()


def _skip_without() -> None:
    if why := KafkaBroker.why_not():
        pytest.skip(f"not run: no broker ({why})")
