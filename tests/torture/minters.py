"""A process that is given times by each minter, and notes which, when, and what it reads as of them.

    python -m tests.torture.minters NUMBER URL CONSENSUS ROUNDS NOTES

Minters are a shard whose times are a clock, a table of each kind of timeline, and the bindings of a source. The notes
are the values of `Notes`, pickled.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, NotFound, SinceViolation
from persist_lib.sources.bindings import SCHEMA as BINDINGS
from persist_lib.sources.bindings import Bindings
from persist_lib.sources.protocol import Mark
from persist_lib.testing import contents_of
from tests.faults.shard_servers import Told

SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string"}, times="ms")
SHARD, BOUND = "s", "b.bindings"
TABLES = {"yolo": "t", "wal": "w"}
CONFIG = persist.Config(timeout_s=30, lease_ms=20_000)


class Notes(NamedTuple):
    """By minter: the times that it gave, and the uppers that were read; the digests of what was read, by minter and
    time; how often which error was raised; and when which address was bound.
    """

    given: dict[str, list[Told]]
    reads: dict[str, list[Told]]
    digests: dict[tuple[str, int], set[str]]
    refused: Counter[str]
    bound: list[tuple[float, float, int]]


def prepare(url: str, consensus: str | None) -> None:
    """What the processes share."""
    with persist.open(url, consensus, config=CONFIG) as client:
        client.open_writer(SHARD, SCHEMA).close()
        client.open_writer(BOUND, BINDINGS).close()
        for mode, name in TABLES.items():
            client.controller().tables().create(name, SCHEMA, mode=mode, timeline=mode)  # type: ignore[arg-type]


def digest(rows: Any) -> str:
    found = sorted(contents_of(rows).items(), key=repr)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


class Minters:
    """All of them, as one process uses them."""

    def __init__(self, client: persist.Client, number: int) -> None:
        self.client, self.number = client, number
        self.tables = client.controller().tables()
        self.write, self.read = client.open_shard(SHARD, SCHEMA)
        self.bindings = Bindings(client, BOUND)
        self.notes = Notes({}, {}, {}, Counter(), [])
        self.ids = iter(range(number * 1_000_000, (number + 1) * 1_000_000))

    def append(self, minter: str) -> None:
        """Let it give a time to a row."""
        rows, began = [{"id": next(self.ids), "word": "x"}], time.monotonic()
        if minter == SHARD:
            upper = self.write.append_now(rows).upper.time or 0
        else:
            upper = (self.tables.insert(minter, rows).time or 0) + 1
        self.notes.given.setdefault(minter, []).append(Told(began, time.monotonic(), upper))

    def bind(self) -> None:
        """Bind the next address of a partition of this process."""
        address, began = len(self.notes.bound) + 1, time.monotonic()
        marks = {f"p{self.number}": Mark(address)}
        self.bindings.mint(lambda _: marks, self.client.runtime.deadline(30))
        self.notes.bound.append((began, time.monotonic(), address))

    def look(self, minter: str, dice: random.Random) -> None:
        """Read what is newest, and as of some time that it gave."""
        began = time.monotonic()
        if minter == SHARD:
            upper = self.read.fetch_upper().time or 0
        else:
            with self.tables.read(minter) as rows:
                upper = rows.as_of + 1
        self.notes.reads.setdefault(minter, []).append(Told(began, time.monotonic(), upper))
        if given := self.notes.given.get(minter):
            at = dice.choice(given).upper - 1
            found = self.contents(minter, at)
            self.notes.digests.setdefault((minter, at), set()).add(found)

    def contents(self, minter: str, at: int) -> str:
        if minter == SHARD:
            return digest(self.read.snapshot(at, diff=True).to_arrow())
        with self.tables.read(minter, at, diff=True) as found:
            return digest(found.to_arrow())

    def run(self, rounds: int, dice: random.Random) -> None:
        """Do everything in another order, again and again."""
        acts: list[Callable[[], object]] = [self.bind, self.bind, lambda: self.client.maintain(SHARD)]
        for minter in (SHARD, *TABLES.values()):
            acts += 3 * [partial(self.append, minter)]
            acts.append(partial(self.look, minter, dice))
        for _ in range(rounds):
            for act in dice.sample(acts, len(acts)):
                self.try_(act)

    def try_(self, act: Callable[[], object]) -> None:
        """Do it, and count it where a clock is wrong, or the outcome is in doubt.

        By a clock that is hours ahead leases have ended, and with them goes the history that they held.
        """
        try:
            act()
        except LeaseExpired:
            self.write, self.read = self.client.open_shard(SHARD, SCHEMA)
        except (Determinate, Indeterminate, NotFound, SinceViolation) as error:
            self.notes.refused[type(error).__name__] += 1


def main(number: str, url: str, consensus: str, rounds: str, notes: str) -> None:
    with persist.open(url, consensus or None, config=CONFIG) as client:
        minters = Minters(client, int(number))
        minters.run(int(rounds), random.Random(int(number)))
        Path(notes).write_bytes(pickle.dumps(tuple(minters.notes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
