"""A shard that nobody maintained for thousands of appends comes to rest in one run, through whichever door.

`make left-alone` does it with 20,000 appends, on files and on S3 with PostgreSQL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.config import MIB
from persist_lib.ids import SeqNo
from persist_lib.testing import check_swept, check_world
from tests import servers
from tests.commands import forked
from tests.integration.left_alone import SHARD, Filled, contents, copy, fill

APPENDS = int(os.environ.get("PERSIST_LEFT_ALONE", "0"))
ROOT = Path(__file__).parents[2]
CONFIG = {} if APPENDS else {"merge_bytes": 16 * MIB}
"""Where there are fewer appends, a merge has less memory, so that there are rounds all the same."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if APPENDS else 600)]
servers.use_test_credentials()

Place = tuple[str, str | None]
LIBRARY = "import sys, persist_lib as p; c = p.open(*sys.argv[1:], config=p.Config(**{})); c.maintain('s'); c.close()"
DAGSTER = (
    "import sys; from orchestration.run import run_maintenance; "
    "sys.exit(run_maintenance(*sys.argv[1:], config={}).failure or 0)"
)


def run(command: list[str], place: Place, *, named: bool = True) -> None:
    url, consensus = place
    where = ["--location", url, *(["--consensus", consensus] if consensus else [])] if named else filter(None, place)
    env = {
        **os.environ,
        "PERSIST_CONFIG": json.dumps(CONFIG),
        "PERSIST_SPARK_MASTER": "local[2,4]",
        "PERSIST_SPARK_DRIVER_MEMORY": "700m",
    }
    done = subprocess.run([*command, *where], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def library(place: Place) -> None:
    run([sys.executable, "-c", LIBRARY.format(CONFIG)], place, named=False)


def command(place: Place) -> None:
    run([forked(), "maintain", SHARD], place)


def program(place: Place) -> None:
    """It only compacts. What is garbage then, the command collects."""
    run([sys.executable, "jobs/compact.py", "--engine", "spark"], place)
    with persist.open(*place, read_only=True) as client:
        assert client.census(SHARD).debt == 0
    run([forked(), "maintain", "--only", "rollups", SHARD], place)
    run([forked(), "maintain", "--only", "garbage", SHARD], place)


def dagster(place: Place) -> None:
    run([sys.executable, "-c", DAGSTER.format(CONFIG)], place, named=False)


Door = Callable[[Place], None]
SPARK, ON_DAGSTER = pytest.mark.spark, pytest.mark.dagster
DOORS = [library, command, pytest.param(program, marks=SPARK), pytest.param(dagster, marks=ON_DAGSTER)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Filled]:
    folder = tmp_path_factory.mktemp("left") / "data"
    return folder, fill(f"file:{folder}", APPENDS or 2_000)


@pytest.mark.parametrize("door", DOORS)
def test_one_run_brings_it_to_rest_on_files(door: Door, filled: tuple[Path, Filled], tmp_path: Path) -> None:
    folder, was = filled
    shutil.copytree(folder, tmp_path / "data")
    check_recovers(door, (f"file:{tmp_path / 'data'}", None), was)


@pytest.mark.parametrize("door", DOORS if APPENDS else [library])
def test_one_run_brings_it_to_rest_on_s3_and_postgresql(door: Door, filled: tuple[Path, Filled]) -> None:
    folder, was = filled
    name, log = os.urandom(8).hex(), servers.postgres_url()
    blobs = servers.s3_url()
    place = blobs, f"{log}{'&' if '?' in log else '?'}persist_schema=t{name}"
    copy(f"file:{folder}", *place)
    check_recovers(door, place, was)


def check_recovers(door: Door, place: Place, was: Filled) -> None:
    with persist.open(*place) as client:
        before = client.census(SHARD)
        assert (before.batches, before.updates) == (was.appends, was.updates)
        door(place)
        after = client.census(SHARD)
        assert (after.debt, after.writers, after.readers, after.inline_size) == (0, 0, 0, 0)
        assert after.batches == after.runs <= 4, "each of them weighs half of all that follows, or more"
        assert after.fingerprint == before.fingerprint
        assert contents(client) == was.digest
        # A fold for each 100 batches, a few merges of these, and what each duty commits once.
        assert after.seqno - before.seqno < was.appends / 50 + 20
        assert rows_of(client) <= 16
        assert after.garbage <= 2, "only what the last transitions replaced may wait"
        check_world(client, SHARD)
        client.maintain(SHARD)
        check_swept(client, SHARD)


def rows_of(client: persist.Client) -> int:
    """How many rows the log has."""
    return len(client.machine(SHARD).consensus.scan(SHARD, SeqNo(0), 10_000))
