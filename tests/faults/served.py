"""A shard server as a process, with its HTTP pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path


class Served:
    """`persist serve` of a location. `files` is the limit of its open files; its standard error is in `log`."""

    def __init__(self, url: str, consensus: str | None, log: Path, *options: str, files: int | None = None) -> None:
        where = ["--location", url, *(["--consensus", consensus] if consensus else [])]
        command = [sys.executable, "-m", "persist_lib.cli", *where, "--json", "serve", "--listen", "127.0.0.1:0"]
        command += ["--http", "127.0.0.1:0", *options]
        if files is not None:
            command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command]
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.port, self.http = (int(told[name].rpartition(":")[2]) for name in ("listening", "http"))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def figure(self, name: str) -> float:
        found = re.findall(rf"^persist_server_{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return sum(map(float, found))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 60) -> int:
        """Wait until it has ended, and return its exit code."""
        return self.process.wait(seconds)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        """Tell it to end, and return its exit code."""
        assert self.process.stdout is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def until(what: Callable[[], bool]) -> None:
    """Wait for something, which comes."""
    ends = time.monotonic() + 60
    while not what():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.02)
