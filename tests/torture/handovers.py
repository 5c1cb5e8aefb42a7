"""The processes around a table that is promoted, and handed over again and again: writers, listeners, a controller.

Each writes a line to its log before and after what matters, so that a test can judge what it was told.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import persist_lib as persist
from persist_lib.errors import HandoverRefused, PersistError
from persist_lib.testing import contents_of, updates_of
from persist_lib.testing.model import summed

CONFIG = persist.Config(lease_ms=3_000, timeout_s=20)
SHARDS = (8, 3, 1)
ROWS = 3


def digest(total: Counter[Any]) -> str:
    """A short text that tells two contents apart."""
    return hashlib.sha256(repr(sorted(summed(total.items()).items())).encode()).hexdigest()[:24]


def write(url: str, log: Path, seed: int) -> None:
    """Append rows of its own, with ids that say who and which, until the end."""
    number = 0
    with log.open("a", buffering=1) as out:
        while True:
            try:
                with persist.open(url, config=CONFIG) as client, client.table("c").writer() as writer:
                    while True:
                        number += 1
                        at = writer.fetch_upper().time or 0
                        ids = [seed * 1_000_000 + number * 10 + i for i in range(ROWS)]
                        out.write(f"try {ids[0]}\n")
                        try:
                            writer.compare_and_append([{"id": i, "word": "w", "_time": at} for i in ids], at, at + 1)
                        except persist.UpperMismatch:
                            out.write(f"no {ids[0]}\n")
                        else:
                            out.write(f"ack {ids[0]}\n")
                        time.sleep(random.uniform(0, 0.05))
            except PersistError as error:
                out.write(f"error {type(error).__name__}\n")


def listen(url: str, log: Path, _seed: int) -> None:
    """Add up what comes, and say what it is at each progress; again after each error."""
    with log.open("a", buffering=1) as out:
        while True:
            try:
                with persist.open(url, config=CONFIG) as client, client.table("c") as table:
                    found = table.describe()
                    upper = found.upper.time or 0
                    as_of = random.randint(max(found.since.time or 0, upper - 20), max(0, upper - 1))
                    total = contents_of(table.read(as_of, diff=True).to_arrow())
                    with table.listen(as_of) as events:
                        for event in events:
                            if isinstance(event, persist.Updates):
                                for data, _, diff in updates_of(event.table):
                                    total[data] += diff
                            else:
                                out.write(f"sum {(event.frontier.time or 1) - 1} {digest(total)}\n")
            except PersistError as error:
                out.write(f"error {type(error).__name__}\n")


def control(url: str, log: Path, handovers: int) -> None:
    """Promote, then copy and hand over so many times. After a kill it continues by its commands' ids."""
    done = log.read_text().count("\n") if log.exists() else 0
    with log.open("a", buffering=1) as out, persist.open(url, config=CONFIG) as client:
        controller = client.controller()
        while not done:
            try:
                client.table("c").promote()
            except PersistError:
                continue
            break
        for step in range(done, handovers):
            shards = SHARDS[step % len(SHARDS)]
            while True:
                try:
                    made = controller.make_rendition("c", shards=shards, copy=True, command=f"make-{step}").number
                    controller.copy_rendition("c", made)
                    start = controller.hand_over("c", made, command=f"hand-{step}")
                    controller.copy_rendition("c", made, to_end=True)
                except HandoverRefused:
                    raise
                except PersistError:
                    continue
                break
            out.write(f"{made} {shards} {start}\n")
