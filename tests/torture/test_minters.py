"""Clocks that are apart, step, run fast and go back: a time that was given is given once, and later ones are later.

On files the clock of a process is that of the store, too, so each process sees another one. On PostgreSQL it is the
server's, which libfaketime makes wrong.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import SinceViolation
from persist_lib.testing.servers import PostgresServer
from tests.circles import is_day
from tests.faults.shard_servers import Told, check_order
from tests.torture.minters import BOUND, CONFIG, SHARD, TABLES, Minters, Notes, prepare
from tests.torture.processes import ROOT
from tests.torture.test_clocks import CLOCKS

ROUNDS = int(os.environ.get("PERSIST_CLOCK_ROUNDS", "4"))
"""How often each process does everything; ten times as often at night."""
LIBRARIES = (
    Path(sys.prefix, "clocks/libfaketime/vendor/libfaketime/src/libfaketime.so.1"),
    Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"),
)
"""Where `make hosts` puts libfaketime, and where Debian's package faketime does."""
MIXES = {
    "hours apart": ("+3h", "-3h", "", "fast"),
    "all step, run fast and go back": ("twitching", "fast", "backwards", "twitching"),
}
SERVER = ("+0", "+40s", "-40s", "+0 x3", "+5s", "+20s x0.2", "-5s")


def faketime() -> Path:
    """The library that makes a program's clock wrong. Skips the test without it."""
    found = next((one for one in LIBRARIES if one.exists()), None)
    if found is None:
        pytest.skip("not run: no libfaketime (`make hosts` installs it; or Debian's package faketime)")
    return found


def faked(told: Path) -> dict[str, str]:
    """The environment of a program whose clock is as wrong as a file says, such as `-300`: seconds."""
    return {
        "LD_PRELOAD": str(faketime()), "FAKETIME_TIMESTAMP_FILE": str(told), "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }  # fmt: skip


@contextmanager
def wrong_server(folder: Path) -> Iterator[tuple[PostgresServer, Path]]:
    """A PostgreSQL by another clock, and the file that says how wrong it is."""
    told = folder / "clock"
    told.write_text("+0")
    folder.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        server = PostgresServer()
        server.stop()
        for name, value in faked(told).items():
            patch.setenv(name, value)
        server.start()
    try:
        yield server, told
    finally:
        server.close()


def run(url: str, consensus: str | None, clocks: tuple[str, ...], folder: Path, server_clock: Path | None) -> None:
    """Let a process for each clock have times given to it, and judge what they noted."""
    prepare(url, consensus)
    path = os.pathsep.join([str(CLOCKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [folder / f"notes-{number}" for number in range(len(clocks))]
    rounds = str(ROUNDS if is_day() else 10 * ROUNDS)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.torture.minters", str(n), url, consensus or "", rounds, str(files[n])],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PERSIST_TEST_CLOCK": clock},
        )
        for n, clock in enumerate(clocks)
    ]  # fmt: skip
    rng = random.Random(os.environ.get("PERSIST_SEED", "7"))
    while any(process.poll() is None for process in started):
        time.sleep(0.3)
        if server_clock is not None:
            server_clock.write_text(rng.choice(SERVER))
    assert [process.returncode for process in started] == [0] * len(started)
    if server_clock is not None:
        server_clock.write_text("+0")
    judge(url, consensus, [Notes(*pickle.loads(file.read_bytes())) for file in files])


def judge(url: str, consensus: str | None, notes: list[Notes]) -> None:
    """Each minter gave each time once, in an order that all saw; what was read as of a time is what is there."""
    refused = sum((one.refused for one in notes), Counter[str]())
    counts = Counter[str]()
    with persist.open(url, consensus, config=CONFIG) as client:
        minters = Minters(client, 99)
        for minter in (SHARD, *TABLES.values()):
            given = [told for one in notes for told in one.given.get(minter, [])]
            check_order(given, [told for one in notes for told in one.reads.get(minter, [])])
            counts[minter] = len(given)
        for minter, at in {key for one in notes for key in one.digests}:
            found = {digest for one in notes for digest in one.digests.get((minter, at), ())}
            try:
                found.add(minters.contents(minter, at))
            except SinceViolation:  # a clock that was ahead has ended what held it
                refused[SinceViolation.__name__] += 1
            assert len(found) == 1, f"{minter} as of {at} was read as something else"
            counts["as of"] += 1
        bound = {mark: step.time for step in minters.bindings.since(0).steps for mark in step.marks.items()}
    times = {(name, mark.address): at + 1 for (name, mark), at in bound.items()}
    told = [Told(began, ended, times[f"p{n}", at]) for n, one in enumerate(notes) for began, ended, at in one.bound]
    check_order(told, [])
    counts[BOUND] = len(told)
    print(dict(counts), dict(refused))
    assert min(counts[name] for name in (SHARD, *TABLES.values(), "as of", BOUND)) > 3, f"{counts}, {refused}"


@pytest.mark.torture
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mix", [*MIXES])
def test_times_are_given_once_and_never_go_back_whatever_the_clocks_of_processes(tmp_path: Path, mix: str) -> None:
    run(f"file:{tmp_path}/data", None, MIXES[mix], tmp_path, None)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(300)
def test_nor_whatever_the_clock_of_the_store(tmp_path: Path) -> None:
    with wrong_server(tmp_path) as (server, clock):
        run(f"file:{tmp_path}/data", server.url, ("", "+3h", "fast", "backwards"), tmp_path, clock)
