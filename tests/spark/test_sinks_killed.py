"""Streams into a shard whose driver and whose Python workers are killed at random: the sink has each update once.

    PERSIST_KILLS=50 pytest tests/spark/test_sinks_killed.py         # as `make sink-kills` does

`make test` kills a few. A fresh seed is printed; PERSIST_SEED repeats a run as far as the timing of processes allows.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from tests.spark.places import environment

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600)]
PROGRAM = Path(__file__).parent / "sink_program.py"
ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("PERSIST_KILLS", "2"))
SEED = os.environ.get("PERSIST_SEED", "0")
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
CONFIG: dict[str, Any] = {"inline_bytes": 512, "part_bytes": 64 * 1024}
Row = tuple[int, str]


class Driver:
    """One run of the program, in a process group of its own."""

    def __init__(self, asked: dict[str, Any], log: Path) -> None:
        env = environment(
            PYTHONPATH=str(ROOT), PERSIST_CONFIG=json.dumps(CONFIG), PERSIST_SPARK_MASTER="local[2,4]",
            PERSIST_SPARK_DRIVER_MEMORY="512m",
        )  # fmt: skip
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT,
            env=env, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.close()
        self.epochs = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.epochs += line.startswith("EPOCH")
            with suppress(ValueError):
                self._log.write(line.encode())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_for_epochs(self, epochs: int, patience_s: float = 90.0) -> None:
        deadline = time.monotonic() + patience_s
        while self.epochs < epochs and self.is_alive and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self, workers: bool = True) -> None:
        """End the driver and its JVM at once; Python workers, of which one may be committing, too or not."""
        found = list(_session(self._process.pid)) if workers else []
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def kill_a_worker(self, rng: random.Random) -> bool:
        """End one Python worker of Spark, so that its task fails and runs again."""
        found = [
            pid for pid in _session(self._process.pid) if b"pyspark" in _command(pid) and b"daemon" in _command(pid)
        ]
        if not found:
            return False
        with suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)
        return True

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def _close(self) -> None:
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def _session(leader: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Feeding(threading.Thread):
    """Adds to the source until it is told to stop: updates to a shard, or files of rows."""

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._kind, self._rng = folder, kind, random.Random(seed)
        self._stopping = threading.Event()
        self.expected: Counter[Row] = Counter()

    def run(self) -> None:
        if self._kind == "files":
            self._files()
            return
        with persist.open(self._folder / "data", config=persist.Config(**CONFIG)) as client:
            write = client.open_writer("source", SCHEMA)
            while not self._stopping.wait(0.15):
                changes = [self._row() for _ in range(self._rng.choice([1, 20, 800]))]
                diffs = [self._rng.choice([1, 1, 1, 2, -1]) for _ in changes]
                write.append_now(
                    [{"id": id_, "word": word, "_diff": diff} for (id_, word), diff in zip(changes, diffs, strict=True)]
                )
                for row, diff in zip(changes, diffs, strict=True):
                    self.expected[row] += diff

    def _files(self) -> None:
        (self._folder / "files").mkdir(exist_ok=True)
        number = 0
        while not self._stopping.wait(0.2):
            number += 1
            found = [self._row() for _ in range(self._rng.choice([1, 20, 800]))]
            text = "\n".join(json.dumps({"id": id_, "word": word}) for id_, word in found)
            hidden = self._folder / f"{number}.part"
            hidden.write_text(text)
            hidden.rename(self._folder / "files" / f"{number:06}.json")
            self.expected.update(found)

    def _row(self) -> Row:
        return self._rng.randrange(500), self._rng.choice(["a", "b", "c" * 40])

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)
        assert not self.is_alive()


@contextmanager
def fed(folder: Path, kind: str, seed: int) -> Iterator[Feeding]:
    feeding = Feeding(folder, kind, seed)
    feeding.start()
    try:
        yield feeding
    finally:
        feeding.stop()


@pytest.mark.parametrize("kind", ["shard", "files"])
def test_a_sink_has_each_update_once_however_often_its_stream_was_killed(kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if SEED == "fresh" else int(SEED)
    print(f"PERSIST_SEED={seed}")
    rng = random.Random(seed)
    location = str(tmp_path / "data")
    asked: dict[str, Any] = {
        "write": {"location": location, "shard": "sink", "key": "id", "query": f"killed {kind}"},
        "checkpoint": str(tmp_path / "checkpoint"), "drains": False,
    }  # fmt: skip
    if kind == "files":
        asked["files"] = str(tmp_path / "files")
    else:
        asked["read"] = {
            "location": location, "shard": "source", "changes": "true", "hold": "killed",
            "max_updates": "2000",
        }  # fmt: skip
    log = tmp_path / "log"
    with persist.open(location, config=persist.Config(**CONFIG)) as client, fed(tmp_path, kind, seed) as feeding:
        if kind == "shard":
            client.open_writer("source", SCHEMA)
        driver = Driver(asked, log)
        try:
            for number in range(KILLS):
                driver.wait_for_epochs(1)
                time.sleep(rng.uniform(0.0, 2.5))
                if rng.random() < 0.4 and driver.kill_a_worker(rng):
                    time.sleep(rng.uniform(0.0, 2.0))
                if number % 5 == 4:  # a second driver of the same query beside the first
                    second = Driver(asked, log)
                    second.wait_for_epochs(1, 20.0)
                    driver.kill()
                    driver = second
                else:
                    driver.kill(workers=rng.random() < 0.5)
                    driver = Driver(asked, log)
                if number % 3 == 2:
                    for shard in client.shards():
                        client.maintain(shard)
        finally:
            driver.wait_for_epochs(1)
            driver.kill()
        feeding.stop()
        last = Driver({**asked, "drains": True}, log)
        try:
            assert last.wait(300) == 0, log.read_text()[-4000:]
        finally:
            last.kill()
        with client.open_reader("sink") as read:
            table = read.snapshot().to_arrow().to_pylist()
        found = Counter({(row["id"], row["word"]): row["_diff"] for row in table})
        expected = Counter({row: diff for row, diff in feeding.expected.items() if diff})
        assert expected, "nothing was fed"
        assert found == expected, (
            f"PERSIST_SEED={seed}: {len(found - expected)} too many, {len(expected - found)} missing"
        )
        client.scrub("sink")
