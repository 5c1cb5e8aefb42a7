"""Processes killed at random points of append, compaction, collection and reading, on files and on servers.

Two write, one maintains, one reads and listens; all share one shard. PERSIST_TORTURE_KILLS says how many are killed.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

import persist_lib as persist
from tests import servers
from tests.torture.processes import ENOUGH, ROLES, Processes, acknowledged, attempts, failures, judge
from tests.torture.roles import SCHEMA, SHARD

KILLS = int(os.environ.get("PERSIST_TORTURE_KILLS", "30"))
KILLS_ON_SERVERS = -(-KILLS // 5)
PER_SHARD = 50
"""Kills on one shard before it is judged and another one is begun."""

PATIENCE_S = 240.0


@pytest.mark.torture
@pytest.mark.parametrize("round_", range(-(-KILLS // PER_SHARD)))
@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_or_doubled_and_nothing_else_is_left(
    tmp_path: Path, round_: int, rng: random.Random
) -> None:
    torture(f"file:{tmp_path}/data", tmp_path, min(PER_SHARD, KILLS - round_ * PER_SHARD), rng)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize("round_", range(-(-KILLS_ON_SERVERS // PER_SHARD)))
@pytest.mark.parametrize("scheme", [*servers.STORES])
@pytest.mark.timeout(600)
def test_nor_is_it_on_a_store_and_postgresql(tmp_path: Path, round_: int, scheme: str, rng: random.Random) -> None:
    servers.use_test_credentials()
    name = f"t{os.urandom(8).hex()}"
    url = f"{servers.store_url(scheme)} {servers.postgres_at(persist_schema=name)}"
    torture(url, tmp_path, min(PER_SHARD, KILLS_ON_SERVERS - round_ * PER_SHARD), rng)


def torture(url: str, tmp_path: Path, kills: int, rng: random.Random) -> None:
    """Kill so many of them, one after the other, and judge what is left."""
    with persist.open(*url.split(" ")) as client:
        client.open_writer(SHARD, SCHEMA)
    processes = Processes(url, tmp_path, rng)
    try:
        for name in ROLES:
            processes.start(name)
        time.sleep(0.5)
        for _ in range(kills):
            time.sleep(rng.choice([0.02, 0.1, 0.3, 0.5]) * rng.random())
            name = rng.choice(["ada", "ada", "bob", "mia", "mia", "mia", "rex"])
            assert failures(tmp_path) == ""
            processes.kill(name)
            processes.start(name)
        time.sleep(0.3)
        deadline = time.monotonic() + PATIENCE_S
        while acknowledged(tmp_path) <= ENOUGH:
            assert failures(tmp_path) == ""
            assert time.monotonic() < deadline, f"too little happened: {processes.stacks()}"
            time.sleep(0.2)  # on a busy machine, processes are killed before they have begun
    finally:
        processes.close()
    assert failures(tmp_path) == ""
    judge(url, attempts(tmp_path), rng)
