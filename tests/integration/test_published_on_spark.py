"""Published tables, read by Spark with the runtimes of Iceberg and Delta, which know nothing of Persist.

There are none yet for the release of Spark that we use, so that it is another one, in a folder of its own. It is not
run where Maven Central is not reached, nor where that Spark cannot be installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import persist_lib as persist
from bench.life_spark import SPARK_4_1, install_spark, runtimes
from jobs.java import find_java_home
from tests.integration.test_published_tables import CONFIG, Rows, life, rows, versions

UNSIGNED = persist.Schema({"id": "int64 not null"}, {"word": "string", "price": "uint32"}, unique=True)
PROGRAM = Path(__file__).with_name("published_spark_program.py")


def test_spark_reads_each_published_time(tmp_path: Path) -> None:
    try:
        jars = runtimes()
        install_spark()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not run: Spark 4.1 or a runtime is not there, and cannot be fetched ({error})")
    asks, expected = list[list[object]](), list[Rows]()
    for as_ in ("iceberg", "delta"):
        with persist.open(f"file:{tmp_path / as_}", config=CONFIG) as client:
            seen, published = life(client, as_)
            unsigned = client.table("unsigned", UNSIGNED)
            for ids in (range(100), range(100, 300)):  # what is appended later stands below Delta's folder
                unsigned.append([{"id": id_, "word": f"w{id_}", "price": 2**32 - 1 - id_} for id_ in ids])
                other = unsigned.publish(as_)
            assert bool(other.copied) == (as_ == "iceberg")
            other_rows = rows(unsigned.read().to_arrow())
        place, of = published.version if as_ == "iceberg" else published.place, versions(published)
        asks.append([as_, place, {}])
        asks += [[as_, place, {"versionAsOf": str(of[time])}] for time in seen]
        asks.append([as_, other.version if as_ == "iceberg" else other.place, {}])
        expected += [seen[published.as_of], *seen.values(), other_rows]
    without = {"PYTHONPATH", "SPARK_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": find_java_home()}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(SPARK_4_1), ",".join(jars), json.dumps(asks)],
        capture_output=True, text=True, check=False, timeout=900, env=environment,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert said, done.stderr[-2000:]
    for (ask, wanted), (found, filtered, counted) in zip(
        zip(asks, expected, strict=True), json.loads(said[0].removeprefix("FOUND ")), strict=True
    ):
        assert found == wanted, ask
        assert counted == len(wanted)
        assert filtered == sum(int(row[0]) < 10 and row[1].startswith("w") for row in wanted)
