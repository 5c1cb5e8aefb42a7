"""Loading much of a source on Spark: the program, killed and run again, makes what an instance makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from jobs.engine import SparkEngine
from jobs.loading import OnSpark
from persist_lib.errors import Refused
from persist_lib.sources import Meaning
from persist_lib.sources.loading import Loading, Loads
from tests.loading import Place
from tests.spark.places import environment

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.sources.close()
    found.client.close()


def loading_of(place: Place, spark: SparkSession, said: list[tuple[str, int, int]]) -> Loading:
    engine = OnSpark(SparkEngine(place.client, lambda: spark), lambda *what: said.append(what))
    found = place.sources.open("s", loads=Loads(engine, task_bytes=20_000))
    assert isinstance(found, Loading)
    found.step_bytes = 8_000
    return found


@pytest.mark.parametrize("meaning", [Meaning(keep_raw=True), Meaning(envelope="upsert", keep_raw=True)])
def test_spark_makes_what_an_instance_makes(place: Place, spark: SparkSession, meaning: Meaning) -> None:
    place.create(meaning=meaning, shards=2)
    rng, said = np.random.default_rng(5), list[tuple[str, int, int]]()
    place.write_many(rng, 3, 1_000, 200)
    loading = loading_of(place, spark, said)
    first = loading.step()
    assert first.messages == 3_000
    assert first.errors == len(place.updates("s/errors")) > 0
    what, done, of = said[-1]
    assert what.startswith("s: loading ")
    assert done == of > 4
    place.write_many(rng, 5, 500, 200)
    assert loading.step().messages == 2_500
    loading.close()
    place.check_same()


def test_a_permanent_error_of_a_task_ends_it_and_nothing_is_written(place: Place, spark: SparkSession) -> None:
    place.create(meaning=Meaning(envelope="upsert", most_errors=0))
    place.write_many(np.random.default_rng(5), 3, 1_000, 200)
    loading = loading_of(place, spark, [])
    with pytest.raises(Refused, match="messages are bad, and most_errors is 0"):
        loading.step()
    loading.close()
    assert place.sources.show("s").time == 0


def test_the_program_is_killed_and_run_again_and_an_instance_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.create(meaning=Meaning(envelope="upsert"))
    for name in "abcd":  # together they are several tasks
        word = name * 300
        lines = (f'{{"id": {number % 70_000}, "word": "{number}{word}"}}\n' for number in range(60_000))
        (place.folder / f"{name}.jsonl").write_text("".join(lines))
    program = [sys.executable, "-m", "jobs.load", "--location", place.client.url, "--source", "s"]
    env = environment(PYTHONPATH=str(ROOT), PERSIST_SPARK_MASTER="local[2]")
    looked = subprocess.run([*program, "--dry-run"], cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    assert " bytes in 4 files are left" in looked.stdout
    assert place.sources.show("s").bound == {}
    killed = subprocess.Popen(program, cwd=ROOT, env=env, start_new_session=True)
    while not place.sources.show("s").bound:  # it is at work
        assert killed.poll() is None
        time.sleep(0.1)
    time.sleep(np.random.default_rng().uniform(0, 10))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    was_done = place.sources.show("s").time > 0
    done = subprocess.run(program, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert was_done or ("s  messages=240,000  errors=0  tasks=" in done.stdout and "tasks=0" not in done.stdout)
    shown = place.sources.show("s")
    assert {name: mark.address for name, mark in shown.durable.items()} == {
        path.name: path.stat().st_size for path in place.folder.iterdir()
    }
    place.check_same()
    place.write("a.jsonl", {"id": -1, "word": "last"})
    place.sources.run("s", until_idle=True)
    assert {row["id"]: row["word"] for row in place.rows()} == place.folded()
    place.sources.close()
    place.client.close()
