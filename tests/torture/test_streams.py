"""Processes that write a stream one after the other, paused, continued and killed; the recorded history is checked."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import streams
from tests.counted import count
from tests.gated import wait_for
from tests.servers import postgres_at
from tests.torture.stream_history import FIRST, Call, Contents, Read, Runtime, problems
from tests.torture.stream_instance import FENCED, contents

ROUNDS = int(os.environ.get("PERSIST_STREAM_TAKEOVERS", "2"))
SEED = os.environ.get("PERSIST_SEED", "5")
pytestmark = [pytest.mark.torture, pytest.mark.timeout(120 + 20 * ROUNDS)]


class Instances:
    """Processes on one location, and what they have noted."""

    def __init__(self, url: str, consensus: str, folder: Path) -> None:
        self.url, self.consensus, self.folder = url, consensus, folder
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, role: str) -> subprocess.Popen[bytes]:
        notes = self.folder / f"{len(self.all)}.{role}"
        program = str(Path(__file__).with_name("stream_instance.py"))
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        words = [sys.executable, program, role, self.url, self.consensus, str(notes)]
        with notes.with_suffix(".stderr").open("wb") as stderr:
            process = subprocess.Popen(words, env=environ, stderr=stderr)
        self.all.append(process)

        def has_begun() -> bool:
            assert process.poll() is None, self.said()
            return notes.exists() and notes.read_bytes().count(b"\n") > 3

        wait_for(has_begun, 120.0)
        return process

    def close(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()

    def said(self) -> str:
        """What the processes wrote to standard error."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.stderr")))

    def notes(self, role: str) -> list[list[list[Any]]]:
        files = sorted(self.folder.glob(f"*.{role}"))
        return [[json.loads(line) for line in path.read_text().split("\n")[:-1]] for path in files]


def read_of(line: list[Any]) -> Read:
    _, began, ended, upper, sealed, unsealed = line
    assert (len(set(sealed)), len(set(unsealed))) == (len(sealed), len(unsealed))
    return Read(began, ended, (upper, frozenset(sealed), frozenset(unsealed)))


def runtime_of(notes: list[list[Any]]) -> tuple[Runtime, list[Read]]:
    ended = [line for line in notes if line[0] == "end"]
    ends = {n: (-1 if error else at) for _, n, at, error in ended if error != "Indeterminate"}
    calls = [Call(id_, at, made, ends.get(n)) for _, n, id_, at, made in (x for x in notes if x[0] == "call")]
    (first,) = [line for line in notes if line[0].startswith("epoch")]
    reads = [read_of(line) for line in notes if line[0] == "read"]
    return Runtime(int(first[0].split()[1]), read_of(first), calls), reads


def check(instances: Instances, last: Contents) -> int:
    """The history is linearizable. Returns how many calls were acknowledged."""
    found = [runtime_of(notes) for notes in instances.notes("write")]
    reads = [read for _, own in found for read in own]
    reads += [read_of(line) for notes in instances.notes("read") for line in notes]
    assert len(reads) > ROUNDS
    assert problems([runtime for runtime, _ in found], reads, last) == []
    return sum(1 for runtime, _ in found for call in runtime.calls if call.ended and call.ended > 0)


def test_writers_that_are_paused_replaced_and_continued_lose_nothing_and_commit_nothing_more(tmp_path: Path) -> None:
    dice = random.Random(time.time_ns() if SEED == "fresh" else 5)
    url, consensus = f"file:{tmp_path}/data", postgres_at(persist_schema=f"takeovers_{os.getpid()}")
    instances = Instances(url, consensus, tmp_path)
    try:
        writer = instances.start("write")
        instances.start("read")
        for number in range(ROUNDS):
            time.sleep(0.5 + dice.random())
            if number % 2 == 1:
                writer.kill()
                count("kills", kills=1)
                writer = instances.start("write")
                continue
            with pytest.raises(persist.Locked):
                streams.open(url, consensus)
            writer.send_signal(signal.SIGSTOP)
            paused, writer = writer, instances.start("write")
            time.sleep(0.3)
            paused.send_signal(signal.SIGCONT)
            assert paused.wait(60) == FENCED, instances.said()
        time.sleep(0.5)
        writer.kill()
        writer.wait()
        with streams.open(url, consensus, reentrance_id="same") as runtime:
            _, read = runtime.create_or_load("s", persist.Schema(key={"id": "int64 not null"}))
            upper, sealed, unsealed = contents(read)
        instances.close()
        assert check(instances, (upper, frozenset(sealed), frozenset(unsealed))) > 10 * ROUNDS
    finally:
        instances.close()


WRITE, OTHER, SEAL = Call(1, 5, 10, 20), Call(2, 9, 30, 40), Call(0, 6, 50, 60)
HISTORY = [Runtime(1, Read(0, 1, FIRST), [WRITE, OTHER, SEAL])]
END: Contents = (6, frozenset({1}), frozenset({2}))


@pytest.mark.parametrize(
    ("read", "is_right"),
    [
        (Read(21, 29, (0, frozenset(), frozenset({1}))), True),
        (Read(31, 39, (0, frozenset(), frozenset({1}))), True),
        (Read(31, 39, (0, frozenset(), frozenset({1, 2}))), True),
        (Read(61, 70, END), True),
        (Read(21, 29, FIRST), False),  # it misses what was acknowledged
        (Read(21, 29, (0, frozenset(), frozenset({1, 2}))), False),  # it shows what was not made yet
        (Read(31, 70, (6, frozenset({1}), frozenset())), False),  # a later call without an earlier one
        (Read(31, 70, (6, frozenset(), frozenset({2}))), False),  # lost between unsealed and sealed
        (Read(31, 70, (6, frozenset({1}), frozenset({1, 2}))), False),  # there twice
    ],
)
def test_the_check_of_histories_finds_what_is_wrong(read: Read, is_right: bool) -> None:
    assert (problems(HISTORY, [read], END) == []) == is_right


def test_the_check_of_histories_finds_reads_that_go_back_and_calls_that_are_lost() -> None:
    both = [Read(31, 35, (0, frozenset(), frozenset({1, 2}))), Read(36, 39, (0, frozenset(), frozenset({1})))]
    assert problems(HISTORY, both, END)
    assert problems(HISTORY, [], (6, frozenset({1}), frozenset()))
    late = [Runtime(1, Read(0, 1, FIRST), [WRITE, OTHER._replace(ended=-1), SEAL._replace(ended=-1)])]
    assert problems(late, [], END)
    assert not problems(late, [], (0, frozenset(), frozenset({1})))
