"""Peers to try `bench.peer` with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from bench.peer import Ready


@contextmanager
def talkative(word: str) -> Iterator[Ready]:
    """Prints while it starts and while it works, itself and by a program that it starts."""
    print("getting ready")

    def run() -> int:
        print("working")
        subprocess.run(["echo", "a program of its own"], check=True)
        return 7

    def fail() -> None:
        raise OSError("as asked")

    yield Ready(f"says {word}", {"run": run, "pid": os.getpid, "fail": fail})
