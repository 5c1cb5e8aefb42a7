"""Streams into a shard that are killed: their drivers, the processes of Spark, and what feeds them meanwhile."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import persist_lib as persist
from tests.counted import count
from tests.spark.places import environment

PROGRAM = Path(__file__).parent / "sink_program.py"
ROOT = Path(__file__).parent.parent.parent
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
CONFIG: dict[str, Any] = {"inline_bytes": 512, "part_bytes": 64 * 1024}
LOCAL = {"PERSIST_SPARK_MASTER": "local[2,4]", "PERSIST_SPARK_DRIVER_MEMORY": "512m"}
Row = tuple[int, str]


class Driver:
    """One run of the program, in a process group of its own. `place` is the environment that says where Spark runs."""

    def __init__(self, asked: dict[str, Any], log: Path, place: Mapping[str, str] = LOCAL) -> None:
        env = environment(PYTHONPATH=str(ROOT), PERSIST_CONFIG=json.dumps(CONFIG), **place)
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
        """End the driver and its JVM at once; Python workers, of which one may be committing, too or not.

        Does nothing the second time.
        """
        if self._log.closed:
            return
        found = list(_session(self._process.pid)) if workers else []
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
            count("kills", kills=1)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def kill_a_worker(self, rng: random.Random) -> bool:
        """End one Python worker of Spark, so that its task fails and runs again."""
        return kill_one([pid for pid in _session(self._process.pid) if is_python_worker(pid)], rng)

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def _close(self) -> None:
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def kill_one(pids: Sequence[int], rng: random.Random) -> bool:
    """End one of them. Whether there was one."""
    if not pids:
        return False
    with suppress(ProcessLookupError):
        os.kill(rng.choice(pids), signal.SIGKILL)
    return True


def is_python_worker(pid: int) -> bool:
    """Whether it is a Python worker of Spark's, or the daemon that forks them."""
    command = _command(pid)
    return b"pyspark" in command and b"daemon" in command


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
    """Adds to the source until it is told to stop: updates to a shard at `urls`, or files of rows in a folder."""

    def __init__(self, urls: Sequence[str], files: Path | None, seed: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self._urls, self._folder, self._rng = urls, files, random.Random(seed)
        self._stopping, self._every_s = threading.Event(), every_s
        self.expected: Counter[Row] = Counter()

    def run(self) -> None:
        if self._folder is not None:
            self._files(self._folder)
            return
        with persist.open(*self._urls, config=persist.Config(**CONFIG)) as client:
            write = client.open_writer("source", SCHEMA)
            while not self._stopping.wait(self._every_s):
                changes = [self._row() for _ in range(self._rng.choice([1, 20, 800]))]
                diffs = [self._rng.choice([1, 1, 1, 2, -1]) for _ in changes]
                write.append_now(
                    [{"id": id_, "word": word, "_diff": diff} for (id_, word), diff in zip(changes, diffs, strict=True)]
                )
                for row, diff in zip(changes, diffs, strict=True):
                    self.expected[row] += diff

    def _files(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        number = 0
        while not self._stopping.wait(self._every_s):
            number += 1
            found = [self._row() for _ in range(self._rng.choice([1, 20, 800]))]
            text = "\n".join(json.dumps({"id": id_, "word": word}) for id_, word in found)
            hidden = folder.parent / f"{number}.part"
            hidden.write_text(text)
            hidden.rename(folder / f"{number:06}.json")
            self.expected.update(found)

    def _row(self) -> Row:
        return self._rng.randrange(500), self._rng.choice(["a", "b", "c" * 40])

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)
        assert not self.is_alive()


@contextmanager
def fed(urls: Sequence[str], files: Path | None, seed: int, every_s: float = 0.2) -> Iterator[Feeding]:
    """What feeds the source during the block."""
    feeding = Feeding(urls, files, seed, every_s)
    feeding.start()
    try:
        yield feeding
    finally:
        feeding.stop()
