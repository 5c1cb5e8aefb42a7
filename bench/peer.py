"""A peer in a process of its own, configured as its own users would configure it.

    with Peer("bench.bare:sqlite_transactions", path, 1500) as peer:
        peer.settings           # how it is configured, to be printed beside the figure
        peer.run(100)           # the seconds of each of 100 calls, by the clock of its own process

Nothing of ours is in that process: not our memory pools, our threads, our JVM's options. It waits for the next request
on a pipe, so that the two sides can take turns. What a peer prints itself goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from bench.figures import timed

ROOT = Path(__file__).parents[1]
END_S = 60.0


def install(folder: Path, pins: Path, *more: object) -> None:
    """Put the pinned packages into a folder that only its own process sees. Raises CalledProcessError."""
    words = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([str(word) for word in (*words, "--target", folder, *more, "-r", pins)], check=True)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a peer can do, by name, and how it is configured."""

    settings: str
    calls: Mapping[str, Callable[[], object]]


Start = Callable[..., AbstractContextManager[Ready]]
"""How a peer starts: given strings, it makes itself ready, and it tidies up at the end."""


class Peer:
    """The parent's side. `start` names a `Start` as `module:function`; it gets the words."""

    def __init__(self, start: str, *words: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peer", start, *map(str, words)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.answer: Any = None
        self.settings = ""

    def run(self, times: int = 1, call: str = "run") -> list[float]:
        """The seconds of each of so many calls. `answer` is what the last of them answered, where that is JSON."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([call, times]) + "\n")
        self._process.stdin.flush()
        seconds, self.answer = self._read()
        return list(seconds)

    def ask(self, call: str) -> Any:
        """What one call answers."""
        self.run(call=call)
        return self.answer

    def _read(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer {self._process.args!r} ended early; what it says is above")
        return json.loads(line)

    def __enter__(self) -> Self:
        try:
            self.settings = self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def own_output() -> Iterator[TextIO]:
    """The pipe to the parent. Whatever else is printed in this process, or by one that it starts, is standard error."""
    with os.fdopen(os.dup(1), "w") as pipe, redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        yield pipe


def main(start: str, *words: str) -> None:
    """The peer's side: a line of settings, then a line of seconds for each line that asks for some calls."""
    module, _, function = start.partition(":")
    begin: Start = getattr(importlib.import_module(module), function)
    with own_output() as pipe, begin(*words) as ready:
        print(json.dumps(ready.settings), file=pipe, flush=True)
        for line in sys.stdin:
            name, times = json.loads(line)
            seconds, answer = _timed(ready.calls[name], times)
            print(json.dumps([seconds, answer]), file=pipe, flush=True)


def _timed(call: Callable[[], object], times: int) -> tuple[list[float], object]:
    """The seconds of each call, with what it takes to let go of its result; and the last one's, where that is JSON."""
    answer: object = None

    def once() -> None:
        nonlocal answer
        answered = call()
        answer = answered if isinstance(answered, int | float | str) else None

    return [timed(once) for _ in range(times)], answer


if __name__ == "__main__":
    main(*sys.argv[1:])
