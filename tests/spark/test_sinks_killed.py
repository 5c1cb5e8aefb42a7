"""Streams into a shard whose driver and whose Python workers are killed at random: the sink has each update once.

    PERSIST_KILLS=50 pytest tests/spark/test_sinks_killed.py         # as `make sink-kills` does

`make test` kills one. PERSIST_SEED repeats a run as far as the timing of processes allows.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from tests.spark.killing import CONFIG, SCHEMA, Driver, fed

KILLS = int(os.environ.get("PERSIST_KILLS", "1"))
pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200 + 150 * KILLS)]


@pytest.mark.parametrize("kind", ["shard", "files"])
def test_a_sink_has_each_update_once_however_often_its_stream_was_killed(
    kind: str, tmp_path: Path, rng: random.Random
) -> None:
    seed = rng.getrandbits(32)
    location = str(tmp_path / "data")
    asked: dict[str, Any] = {
        "write": {"location": location, "table": "sink", "key": "id", "query": f"killed {kind}"},
        "checkpoint": str(tmp_path / "checkpoint"), "drains": False,
    }  # fmt: skip
    files = tmp_path / "files" if kind == "files" else None
    if files is not None:
        asked["files"] = str(files)
    else:
        asked["read"] = {
            "location": location, "table": "source", "changes": "true", "hold": "killed",
            "max_updates": "2000",
        }  # fmt: skip
    log = tmp_path / "log"
    with persist.open(location, config=persist.Config(**CONFIG)) as client, fed([location], files, seed) as feeding:
        if kind == "shard":
            client.open_writer("source", SCHEMA)
        driver = Driver(asked, log)
        try:
            for number in range(KILLS):
                driver.wait_for_epochs(1)
                time.sleep(rng.uniform(0.0, 2.5))
                if rng.random() < 0.4 and driver.kill_a_worker(rng):
                    time.sleep(rng.uniform(0.0, 2.0))
                if number % 5 == 4:  # a second driver of the same query beside the first
                    second = Driver(asked, log)
                    second.wait_for_epochs(1, 20.0)
                    driver.kill()
                    driver = second
                else:
                    driver.kill(workers=rng.random() < 0.5)
                    driver = Driver(asked, log)
                if number % 3 == 2:
                    for shard in client.shards():
                        client.maintain(shard)
        finally:
            driver.wait_for_epochs(1)
            driver.kill()
        feeding.stop()
        if files is None:
            asked["read"]["max_updates"] = "20000"  # there may be much that is left
        last = Driver({**asked, "drains": True}, log)
        try:
            assert last.wait(300 + 10 * KILLS) == 0, log.read_text()[-4000:]
        finally:
            last.kill()
        with client.open_reader("sink") as read:
            table = read.snapshot(diff=True).to_arrow().to_pylist()
        found = Counter({(row["id"], row["word"]): row["_diff"] for row in table})
        expected = Counter({row: diff for row, diff in feeding.expected.items() if diff})
        assert expected, "nothing was fed"
        assert found == expected, f"{len(found - expected)} too many, {len(expected - found)} missing"
        client.scrub("sink")
