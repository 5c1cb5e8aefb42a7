"""The processes of the torture: writers that keep a log of what was acknowledged, maintainers, readers that compare.

python -m tests.torture.roles URL DIRECTORY

Reads lines `role name seed`, forks a process for each (the imports are done once), and answers its pid. A process runs
until it is killed. What a reader finds wrong goes to the file `failures`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import persist_lib as persist
from persist_lib.errors import Determinate, LeaseExpired, NotSent, SinceViolation, UpperMismatch
from persist_lib.location import open_location
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.testing import ManualClock, contents_of, updates_of

T = TypeVar("T")
Role = Callable[[str, Path, str, int], None]
SHARD = "s"
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
LEASE_MS = 60_000
"""Long enough that no renewing process is started at once: whoever wants leases to end has a clock that is ahead."""
NOT_THERE = (UpperMismatch, LeaseExpired, Determinate, NotSent)
EAGER = persist.Policy(weight=1e9, advance=0.01)


def config(rng: random.Random) -> persist.Config:
    return persist.Config(
        lease_ms=LEASE_MS, inline_bytes=rng.choice([0, 600, 16 * 1024]), part_bytes=64 * 1024, task_bytes=64 * 1024,
        rollup_every=rng.choice([5, 20]), timeout_s=30, poll_s=0.002,
    )  # fmt: skip


class Ahead(AroundConsensus):
    """A Consensus whose clock is ahead."""

    def __init__(self, inner: Consensus, ahead_s: float) -> None:
        super().__init__(inner)
        self._ahead_ms = int(ahead_s * 1000)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return call()

    def now(self) -> int:
        return self.inner.now() + self._ahead_ms


def open_ahead(url: str, rng: random.Random, ahead_s: float) -> persist.Client:
    """A client whose location's clock is ahead. `url`: that of the blobs, and behind a space that of Consensus."""
    location = open_location(*url.split(" "))
    location = replace(location, consensus=Ahead(location.consensus, ahead_s))
    return persist.open(location, config=config(rng))


class Log:
    """Lines that survive a kill: on disk when `say` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())
        os.fsync(self._file)


def ids_of(number: int, rows: int) -> list[int]:
    return [number * 100 + i for i in range(rows)]


def write(url: str, directory: Path, name: str, seed: int) -> None:
    """Append for ever, one at a time or several without waiting.

    The log has `try number lower upper rows` before each append, and `ack` or `no` after it.
    """
    rng, log = random.Random(f"{name} {seed}"), Log(directory / f"log-{name}")
    batching = rng.choice([None, persist.Batching(bytes=10**6, age_s=0.02)])
    with persist.open(*url.split(" "), config=config(rng)) as client:
        handle = client.open_writer(SHARD, SCHEMA, batching=batching)
        numbers = count(int.from_bytes(name.encode()) % 1000 * 10**9 + seed * 1000)
        while True:
            upper, under_way = handle.fetch_upper().time or 0, []
            for _ in range(rng.choice([1, 1, 1, 2, 8])):
                number, lower = next(numbers), upper
                upper, rows = lower + rng.randrange(1, 4), rng.choice([0, 1, 5, 60])
                word = rng.choice(["a", "word", "x" * 300])
                updates = [
                    {"id": i, "word": word, "_time": rng.randrange(lower, upper), "_diff": 1}
                    for i in ids_of(number, rows)
                ]
                log.say("try", number, lower, upper, rows)
                try:
                    if rng.random() < 0.2:
                        handle.compare_and_append(updates, lower, upper)
                        log.say("ack", number)
                    else:
                        under_way.append((number, handle.append_async(updates, lower, upper)))
                except NOT_THERE:
                    log.say("no", number)
                    break
            for number, future in under_way:
                try:
                    future.result()
                    log.say("ack", number)
                except NOT_THERE:
                    log.say("no", number)


def maintain(url: str, directory: Path, name: str, seed: int) -> None:
    """All duties in random order for ever, now and then with a clock by which everybody's lease has ended."""
    rng = random.Random(f"{name} {seed}")
    duties: list[Callable[[persist.Client], Any]] = [
        lambda client: client.maintain(SHARD, policy=EAGER),
        lambda client: client.maintain(SHARD),
        lambda client: client.compact(SHARD, policy=EAGER),
        lambda client: client.roll_up(SHARD, force=True),
        lambda client: client.collect(SHARD),
        lambda client: client.audit_orphans(SHARD),
        lambda client: client.expire(SHARD),
    ]
    while True:
        with open_ahead(url, rng, rng.choice([0, 0, 0, 120])) as client:
            for _ in range(8):
                try:
                    rng.choice(duties)(client)
                except LeaseExpired:
                    continue
                time.sleep(0.01 * rng.random())


def read(url: str, directory: Path, name: str, seed: int) -> None:
    """Read the same times again and again, and listen beside: everybody always gets the same."""
    rng = random.Random(f"{name} {seed}")
    known: dict[int, Any] = {}
    with persist.open(*url.split(" "), config=config(rng)) as client:
        while True:
            try:
                with client.open_reader(SHARD) as handle:
                    read_for_a_while(handle, rng, known)
            except (LeaseExpired, SinceViolation):
                continue


def read_for_a_while(handle: persist.ReadHandle, rng: random.Random, known: dict[int, Any]) -> None:
    first = handle.since.time or 0
    heard: dict[Any, int] = {}
    if handle.fetch_upper().time in {None, 0} or not handle.fetch_upper().has_passed(first):
        return
    base, listener = contents_of(handle.snapshot(first, diff=True).to_arrow()), handle.listen(first)
    for _ in range(6):
        before = listener.frontier
        for event in listener.poll():
            if isinstance(event, persist.Updates):
                for row, moment, diff in updates_of(event.table):
                    assert before.is_before(moment), f"{row} at {moment} came after progress to {before}"
                    assert (row, moment) not in heard, f"{row} at {moment} came twice"
                    heard[row, moment] = diff
            else:
                before = event.frontier
        newest = (listener.frontier.time or 0) - 1
        if newest < first:
            continue
        as_of = rng.randint(first, newest)
        expected = base + Counter({row: diff for (row, moment), diff in heard.items() if moment <= as_of})
        found = contents_of(handle.snapshot(as_of, diff=True).to_arrow())
        assert found == expected, f"as of {as_of} the snapshot is not what was heard"
        assert known.setdefault(as_of, found) == found, f"as of {as_of} it was something else before"
        if rng.random() < 0.5:
            handle.downgrade_since(max(first, newest - 10))


def run(work: Role, url: str, directory: Path, name: str, seed: int) -> None:
    """Be one process until killed. Whatever ends it otherwise is a failure."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, (directory / f"stacks-{name}").open("w"))
    logging.disable(logging.WARNING)  # what fails in the background is told there, and is no failure
    try:
        work(url, directory, name, seed)
    except BaseException:  # noqa: BLE001 - told to whoever started us
        Log(directory / "failures").say(work.__name__, name, seed, traceback.format_exc())
    os._exit(1)


def warm_up() -> None:
    """Have everything imported and looked up that the first calls need, without a thread or a connection to fork."""
    for module in ("postgres.consensus", "objects.consensus", "s3.objects", "gcs.objects", "azure.objects"):
        import_module(f"persist_lib.location.{module}")
    clock = ManualClock()
    location = open_location("memory:", create=True, clock=clock)
    with persist.open(location, config=persist.Config(inline_bytes=0), runtime=clock.runtime()) as client:
        handle, reader = client.open_shard(SHARD, SCHEMA)
        for moment in range(3):
            handle.compare_and_append([{"id": 1, "word": "x"}], moment, moment + 1)
        contents_of(reader.snapshot(2, diff=True).to_arrow())
        reader.listen(0).poll()
        client.maintain(SHARD, policy=EAGER)


def serve(roles: Mapping[str, Role], url: str, directory: Path) -> None:
    """Fork as asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, name, seed = line.split()
        pid = os.fork()
        if pid == 0:
            run(roles[role], url, directory, name, int(seed))
        print(pid, flush=True)


if __name__ == "__main__":
    warm_up()
    serve({"write": write, "maintain": maintain, "read": read}, sys.argv[1], Path(sys.argv[2]))
