"""Processes that put, absorb and read a pending area, paused and killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import persist_lib as persist
from examples.gateways import SCHEMA
from persist_lib import pending_area
from persist_lib.testing import check_swept
from tests.counted import count
from tests.gated import wait_for
from tests.servers import postgres_at
from tests.torture.pending_instance import CONFIG, MINUTES, NAME, contents, counted, put_all
from tests.torture.roles import open_ahead
from tests.unit.maintain.test_maintain import settle

KILLS = int(os.environ.get("PERSIST_PENDING_KILLS", "2"))
SEED = os.environ.get("PERSIST_SEED", "5")
START_S = 120.0
"""How long a process may take to do something first: seven start at once, beside whatever else the machine does."""
ROLES = {
    "edge-1": "put",
    "edge-2": "put",
    "edge-3": "put",
    "a-1": "absorb",
    "a-2": "absorb",
    "r-1": "read",
    "r-2": "read",
}
pytestmark = [pytest.mark.torture, pytest.mark.timeout(300 + 5 * KILLS)]


class Fleet:
    """A process for each name, which is started again when it was killed."""

    def __init__(self, location: str, consensus: str, folder: Path) -> None:
        self._urls, self._folder = (location, consensus), folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.lives: Counter[str] = Counter()

    def start(self, name: str) -> None:
        self.lives[name] += 1
        program = str(Path(__file__).with_name("pending_instance.py"))
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        words = [sys.executable, program, ROLES[name], *self._urls, name]
        with self._notes(name).open("wb") as out, self._notes(name).with_suffix(".stderr").open("wb") as err:
            self.running[name] = subprocess.Popen(words, env=environ, stdout=out, stderr=err)

    def has_done_something(self, name: str) -> bool:
        self.check()
        return self._notes(name).stat().st_size > 0

    def check(self) -> None:
        """Nobody ended by himself."""
        for name, process in self.running.items():
            assert process.poll() is None, self._notes(name).with_suffix(".stderr").read_text()

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        count("kills", kills=1)
        process.wait()

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def _notes(self, name: str) -> Path:
        return self._folder / f"{name}.{self.lives[name]}"


def test_a_collection_of_processes_that_die_is_what_its_writers_said(tmp_path: Path) -> None:
    dice = random.Random(SEED if SEED != "fresh" else None)
    location, consensus = f"file:{tmp_path}/data", postgres_at(persist_schema=f"t{os.urandom(8).hex()}")
    with persist.open(location, consensus, config=CONFIG) as client:
        pending_area.create(client, NAME, SCHEMA).close()
        fleet = Fleet(location, consensus, tmp_path)
        try:
            for name in ROLES:
                fleet.start(name)
            put_all(location, "edge-0", MINUTES // 4)  # so that nobody stands at a gap
            for name in ROLES:
                wait_for(lambda name=name: fleet.has_done_something(name), START_S)  # type: ignore[misc]
            killed: Counter[str] = Counter()
            for _ in range(KILLS):
                name = dice.choice([*ROLES])
                time.sleep(dice.uniform(0, 0.5))
                fleet.check()
                if dice.random() < 0.3:
                    paused = fleet.running[name]
                    paused.send_signal(signal.SIGSTOP)
                    time.sleep(dice.uniform(0, 6))  # also beyond its lease
                    paused.send_signal(signal.SIGCONT)
                else:
                    fleet.kill(name)
                    killed[ROLES[name]] += 1
                    fleet.start(name)
                    wait_for(lambda name=name: fleet.has_done_something(name), START_S)  # type: ignore[misc]
            fleet.check()
        finally:
            fleet.close()
        print(f"killed {dict(killed)}")
        put_all(location, "edge-0", MINUTES)
        assert pending_area.absorb(client, NAME).upper == persist.at(MINUTES)
    with open_ahead(f"{location} {consensus}", dice, 3600) as later:
        while (done := pending_area.absorb(later, NAME)).discarded or done.batches:
            pass
        settle(later, NAME)
        check_swept(later, NAME)
        assert list(pending_area.pending_collections(later)) == []
        with later.open_reader(NAME) as read:
            found = counted(read.snapshot(MINUTES - 1, diff=True).to_arrow())
    assert found == contents(MINUTES)
