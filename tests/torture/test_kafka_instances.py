"""Two processes that ingest the same topics, paused and killed at random: they make what a plain fold makes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.sources import Decoding, Kafka, Meaning
from persist_lib.testing.kafka_server import KafkaServer
from tests.counted import count
from tests.kafka import QUICK, Topic, server
from tests.kafka_broker import KafkaBroker, kafka_broker

BROKERS: dict[str, Callable[[], KafkaServer | KafkaBroker]] = {"librdkafka": server, "apache": kafka_broker}
KILLS = int(os.environ.get("PERSIST_KAFKA_KILLS", "2"))
PARTITIONS = 6
SCHEMAS = [persist.Schema(key={"id": f"{kind} not null"}, value={"word": "string"}) for kind in ("int64", "int16")]

pytestmark = [pytest.mark.torture, pytest.mark.timeout(120 + 20 * KILLS)]


class Instances:
    """Two processes; what each has noted of what it would write."""

    def __init__(self, location: str, folder: Path) -> None:
        self.location, self.folder = location, folder
        self.begun = 0
        self.processes = [self.start(), self.start()]

    def start(self) -> subprocess.Popen[bytes]:
        self.begun += 1
        program = str(Path(__file__).with_name("kafka_instance.py"))
        words = [sys.executable, program, self.location, str(self.folder / f"{self.begun}.notes")]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.Popen(words, env=environ, stderr=subprocess.PIPE)

    def wait_until_both_run(self) -> None:
        """Both have begun to look for messages."""
        for process in self.processes:
            for _ in range(600):
                if (self.folder / f"{process.pid}.running").exists():
                    break
                time.sleep(0.1)
            assert process.poll() is None, process.communicate()[1]

    def pause(self, who: int, seconds: float) -> None:
        self.processes[who].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.processes[who].send_signal(signal.SIGCONT)

    def kill(self, who: int) -> None:
        """Kill an instance, and start another one. None may have ended by itself."""
        self.end(who)
        self.processes[who] = self.start()

    def end(self, who: int) -> None:
        process = self.processes[who]
        assert process.poll() is None, process.communicate()[1]
        process.kill()
        count("kills", kills=1)
        process.communicate()

    def notes(self) -> dict[tuple[str, int], Counter[str]]:
        """What instances would have written by collection and time: each digest, and how many times."""
        found: dict[tuple[str, int], Counter[str]] = {}
        for path in self.folder.glob("*.notes"):
            lines = path.read_text().split("\n")[:-1]
            for role, at, digest in map(json.loads, lines):
                found.setdefault((role, at), Counter())[digest] += 1
        return found


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("broker", BROKERS)
def test_two_instances_make_what_a_plain_fold_makes(tmp_path: Path, broker: str, apart: bool) -> None:
    """Of one topic; or of two `apart`, which have columns of their own, and an output each. A real broker dies too."""
    seed = os.environ.get("PERSIST_SEED", "5")
    dice = random.Random(time.time_ns() if seed == "fresh" else 5)
    kafka, location = BROKERS[broker](), f"file:{tmp_path}/data"
    topics = [Topic(PARTITIONS, kafka=kafka) for _ in range(2 if apart else 1)]
    client = persist.open(location)
    sources = client.controller().sources()
    declared = Kafka(brokers=kafka.brokers, topics=tuple(one.name for one in topics), group="g", options=QUICK)
    tables = {one.name: schema for one, schema in zip(topics, SCHEMAS, strict=False)}
    columns = {"tables": tables} if apart else {"schema": SCHEMAS[0]}
    sources.create(
        "s", declared, **columns, decoding=Decoding(key="json"), shards=2,
        meaning=Meaning(envelope="upsert", keep_raw=True),
    )  # fmt: skip
    expected: dict[int, str] = {}
    bad: Counter[tuple[str, int]] = Counter()
    sent = 0
    instances = Instances(location, tmp_path)
    try:
        instances.wait_until_both_run()
        for round_ in range(KILLS):
            until = time.monotonic() + dice.uniform(1.0, 4.0)
            while time.monotonic() < until:
                id_ = dice.randrange(40)
                topic, partition, sort = topics[id_ % len(topics)], id_ % PARTITIONS, dice.random()
                if sort < 0.02:
                    bad[f"{topic.name}/{partition}", len(topic.values[f"{topic.name}/{partition}"])] += 1
                    topic.write([b"garbage"], partition, [b"%d" % id_])
                elif sort < 0.15:
                    expected.pop(id_, None)
                    topic.write([None], partition, [b"%d" % id_])
                else:
                    expected[id_] = f"{round_}-{sent}"
                    topic.write([json.dumps({"word": expected[id_]}).encode()], partition, [b"%d" % id_])
                sent += 1
                time.sleep(dice.uniform(0, 0.01))
            if dice.random() < 0.6:
                instances.pause(dice.randrange(2), dice.uniform(0.1, 1.5))
            if isinstance(kafka, KafkaBroker) and dice.random() < 0.5:
                kafka.kill()
                count("kills", kills=1)
                kafka.start()
            instances.kill(round_ % 2)
        instances.wait_until_both_run()
    finally:
        for process in instances.processes:
            process.kill()
            process.communicate()
    sources.run("s", until_idle=True)
    found: dict[int, str] = {}
    for name in [f"s/{one.name}" for one in topics] if apart else ["s"]:
        with client.controller().open_reader(name) as reader:
            found |= {row["id"]: row["word"] for row in reader.snapshot(diff=True).to_pylist()}
    assert found == expected
    with client.controller().open_reader("s/errors") as reader:
        assert Counter((row["partition"], row["address"]) for row in reader.snapshot(diff=True).to_pylist()) == bad
    with client.controller().open_reader("s/raw") as reader:
        raw: dict[str, dict[int, bytes | None]] = {}
        for row in reader.snapshot(diff=True).to_pylist():
            assert row["_diff"] == 1
            raw.setdefault(row["partition"], {})[row["address"]] = row["value"]
    assert {name: [rows[n] for n in sorted(rows)] for name, rows in raw.items()} == {
        name: values for topic in topics for name, values in topic.values.items() if values
    }
    notes = instances.notes()
    assert all(len(digests) == 1 for digests in notes.values()), "two instances would have written other bytes"
    twice = sum(digests.total() > 1 for digests in notes.values())
    print(f"{sent} messages, {instances.begun} instances; {len(notes)} times, {twice} of them made more than once")
    assert twice > 0
    client.close()
