"""A promotion and handovers under load, by real processes that are killed and stopped at random.

No listener's sum is ever wrong. The table begins as one shard, which writers and listeners have open by its name.

PERSIST_HANDOVERS says how many; without it a few. At rest, only the blobs of the last rendition are left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.testing import contents_of
from tests.counted import count
from tests.torture.handovers import CONFIG, ROWS, digest
from tests.worlds import SCHEMA

HANDOVERS = int(os.environ.get("PERSIST_HANDOVERS", "1"))
EACH = 4 if "PERSIST_HANDOVERS" in os.environ else 2
ROOT = Path(__file__).resolve().parents[2]


class Crowd:
    """The processes, by name."""

    def __init__(self, url: str, folder: Path, handovers: int) -> None:
        self.url, self.folder, self.handovers = url, folder, handovers
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.born = 0

    def start(self, role: str, name: str) -> None:
        self.born += 1
        number = self.handovers if role == "control" else self.born
        log = self.folder / f"{role}-{name if role == 'control' else self.born}"
        program = (
            f"from pathlib import Path; from tests.torture import handovers as h; "
            f"h.{role}({self.url!r}, Path({str(log)!r}), {number})"
        )
        with (self.folder / "errors").open("ab") as errors:
            self.running[f"{role} {name}"] = subprocess.Popen(
                [sys.executable, "-c", program], cwd=ROOT, stdout=errors, stderr=errors
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        count("kills", kills=1)
        process.wait()

    def close(self) -> None:
        for name in [*self.running]:
            self.kill(name)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_no_listeners_sum_is_ever_wrong_while_a_table_is_promoted_and_handed_over(
    tmp_path: Path, rng: random.Random
) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url, config=CONFIG) as client:
        with client.open_writer("c", SCHEMA) as writer:
            writer.advance_upper(1)
        client.upgrade("c")
    crowd, control = Crowd(url, tmp_path, HANDOVERS), tmp_path / "control-one"
    kills = stops = 0
    try:
        for number in range(EACH):
            crowd.start("write", str(number))
            crowd.start("listen", str(number))
        wait_for_acknowledgements(tmp_path)
        crowd.start("control", "one")
        deadline, begun = time.monotonic() + 120 + 60 * HANDOVERS, 0
        while not control.exists() or control.read_text().count("\n") < HANDOVERS:
            assert time.monotonic() < deadline, (tmp_path / "errors").read_text()[-2000:]
            time.sleep(rng.uniform(0.5, 3.0))
            name = rng.choice([*crowd.running])
            done = control.read_text().count("\n") if control.exists() else 0
            if name.startswith("control") and done == begun:
                continue  # it gets through one handover in each life, also on a busy machine
            if rng.random() < 0.5:
                begun = done if name.startswith("control") else begun
                kills += 1
                role, _, who = name.partition(" ")
                crowd.kill(name)
                crowd.start(role, who)
            else:
                stops += 1
                process = crowd.running[name]
                process.send_signal(signal.SIGSTOP)
                time.sleep(rng.choice([0.2, 0.2, 4.0]))  # or beyond its leases
                process.send_signal(signal.SIGCONT)
        time.sleep(2)
    finally:
        crowd.close()
    print(f"{HANDOVERS} handovers, {kills} kills, {stops} stops: {control.read_text().split()}")
    judge(url, tmp_path)


def wait_for_acknowledgements(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while sum(log.read_text().count("ack") for log in folder.glob("write-*")) < 5:
        assert time.monotonic() < deadline, "nobody writes"
        time.sleep(0.1)


def judge(url: str, folder: Path) -> None:
    with persist.open(url, config=CONFIG) as client, client.controller() as controller:
        with controller.open_reader("c") as reader:
            upper = reader.fetch_upper().time or 0
            told = contents_of(reader.snapshot(upper - 1, diff=True).to_arrow())
            check_appends({int(data[0]) for data in told}, folder)
            assert set(told.values()) == {1}
            sums = {
                (int(line.split()[1]), line.split()[2])
                for log in folder.glob("listen-*")
                for line in log.read_text().splitlines()
                if line.startswith("sum") and len(line.split()) == 3 and len(line.split()[2]) == 24
            }
            for as_of, found in sorted(sums):
                assert found == digest(contents_of(reader.snapshot(as_of, diff=True).to_arrow())), f"as of {as_of}"
        print(f"{len(told) // ROWS} appends, {len(sums)} sums, upper {upper}")
        assert len(sums) > 5
        time.sleep(2 * CONFIG.lease_ms / 1000)
        with controller.open_writer("c") as writer:  # beyond the last handover, also if nobody was before the end
            writer.advance_upper(upper + 1)
        controller.alter("c", retention=0)
        for shard in client.shards():
            if not client.inspect(shard).state.is_finished():
                client.expire(shard)
        for _ in range(3):
            controller.tend("c")
            for shard in client.shards():
                client.maintain(shard)
        rest = controller.describe("c")
        assert len(rest.renditions) == 1
        # A tombstone keeps the one rollup that says so.
        keys = [entry.key for entry in client.blob.list("") if "/rollup/" not in entry.key]
        old = {key.partition("/")[0] for key in keys}
        left = {shard for shard in old if ".r" in shard} - {*rest.active.shards, f"{rest.id}.renditions"}
        assert not left, "blobs of old renditions"
        assert client.inspect("c").state.is_finished(), "the shard that it was goes with its last reader"
        with controller.open_reader("c") as reader:
            assert contents_of(reader.snapshot(upper, diff=True).to_arrow()) == told


def check_appends(there: set[int], folder: Path) -> None:
    for log in folder.glob("write-*"):
        lines = [line.split() for line in log.read_text().splitlines()]
        outcome = {int(number): word for word, number in (line for line in lines if len(line) == 2) if word != "error"}
        for first, word in outcome.items():
            found = sum(first + i in there for i in range(ROWS))
            assert found in {0, ROWS}, f"{first} is there in part"
            assert found or word != "ack", f"{first} was acknowledged and is lost"
            assert not found or word != "no", f"{first} was refused and is there"
