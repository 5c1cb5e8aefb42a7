"""Ctrl-C and SIGTERM in the programs: they say what is unfinished, and end within seconds with status 130 or 143."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from persist_lib.cli.json_values import exit_code
from persist_lib.errors import PersistError
from persist_lib.telemetry import configure, flush, span

INTERRUPTED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """This process got SIGTERM. It is raised in the main thread, as KeyboardInterrupt is for SIGINT."""


class Unfinished:
    """The shards that a program still has to do."""

    def __init__(self) -> None:
        self.shards: dict[str, None] = {}

    def begin(self, shards: Collection[str]) -> None:
        """These are to be done."""
        self.shards = dict.fromkeys(shards)

    def done(self, shard: str) -> None:
        """This one is done, or failed."""
        self.shards.pop(shard, None)

    def __str__(self) -> str:
        names = sorted(self.shards)
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"{', '.join(names[:MOST_NAMES])}{more}" if names else "nothing"


MOST_NAMES = 20


def run(program: Callable[[Unfinished], int]) -> int:
    """Run a program, and return its status. After SIGINT or SIGTERM, say what is unfinished."""
    unfinished = Unfinished()
    is_main = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    try:
        configure(os.environ)
        with span("run", Path(sys.argv[0]).stem):
            return program(unfinished)
    except PersistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt as stopped:
        status = TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
        how = "by SIGTERM" if status == TERMINATED else "by Ctrl-C"
        kept = "Every shard is correct, and what was committed is kept; run it again for the rest"
        print(f"stopped {how}; unfinished: {unfinished}. {kept}", file=sys.stderr)
        return status
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, former)


def end(status: int) -> NoReturn:
    """End this process. After a signal, threads that are stuck in a store or in Spark are not waited for."""
    if status in (INTERRUPTED, TERMINATED):
        flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated
