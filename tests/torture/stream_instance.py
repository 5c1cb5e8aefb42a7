"""A process that writes or reads the stream `s`: `stream_instance.py write|read LOCATION CONSENSUS NOTES`.

It notes each call before it makes it, and how it ended, by a clock that all processes of this machine share. A writer
ends with status 3 when it was fenced off.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import persist_lib as persist
from persist_lib import streams

SCHEMA = persist.Schema(key={"id": "int64 not null"})
ID = "same"
FENCED = 3


class Notes:
    """A file of lines of JSON, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, *values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def contents(read: streams.StreamReader) -> list[Any]:
    with read.contents() as found:
        sealed = [] if found.sealed is None else found.sealed.to_arrow().column("id").to_pylist()
        return [found.upper.time, sealed, found.unsealed.column("id").to_pylist()]


def note_read(notes: Notes, read: streams.StreamReader, what: str = "read") -> None:
    began = time.monotonic_ns()
    found = contents(read)
    notes.add(what, began, time.monotonic_ns(), *found)


def write(url: str, consensus: str, notes: Notes) -> None:
    dice = random.Random(os.getpid())
    with streams.open(url, consensus, reentrance_id=ID, config=persist.Config(timeout_s=30)) as runtime:
        writer, read = runtime.create_or_load("s", SCHEMA)
        note_read(notes, read, f"epoch {runtime.epoch}")
        lock, numbers = threading.Lock(), itertools.count(1)
        upper, stopped = writer.upper.time or 0, threading.Event()

        def call() -> None:
            nonlocal upper
            with lock:
                n = next(numbers)
                if dice.random() < 0.2:
                    upper += dice.randrange(8)
                    notes.add("call", n, 0, upper, time.monotonic_ns())
                    future = writer.seal(upper)
                else:
                    id_, at = runtime.epoch * 1_000_000 + n, upper + dice.randrange(20)
                    notes.add("call", n, id_, at, time.monotonic_ns())
                    future = writer.write([{"id": id_, "_time": at}])
            future.add_done_callback(lambda done: notes.add("end", n, time.monotonic_ns(), _how(done)))

        def work(act: Any, pause_s: float) -> None:
            try:
                while not stopped.is_set():
                    act()
                    time.sleep(dice.random() * pause_s)
            except persist.PersistError as error:
                notes.add("stopped", type(error).__name__, str(error))
                stopped.set()

        threads = [threading.Thread(target=work, args=(call, 0.02)) for _ in range(2)]
        threads.append(threading.Thread(target=work, args=(lambda: note_read(notes, read), 0.1)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _how(done: Any) -> str:
    error = done.exception()
    return "" if error is None else type(error).__name__


def main(role: str, url: str, consensus: str, notes: Notes) -> int:
    if role == "read":
        with streams.open(url, consensus, mode="read") as runtime:
            read = runtime.load("s")
            while True:
                note_read(notes, read)
                time.sleep(0.05)
    with suppress(persist.Fenced):
        write(url, consensus, notes)
    return FENCED


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2], sys.argv[3], Notes(Path(sys.argv[4]))))
