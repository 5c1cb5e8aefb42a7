"""Published tables, read by Spark with the runtimes of Iceberg and Delta, which know nothing of Persist.

There are none yet for the release of Spark that we use, so that it is another one, in a folder of its own. It is not
run where Maven Central is not reached, nor where that Spark cannot be installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import persist_lib as persist
from jobs.java import find_java_home
from tests.integration.test_published_tables import CONFIG, Rows, life, versions

ROOT = Path(__file__).parents[2]
READERS, PROGRAM = ROOT / "build/spark-readers", Path(__file__).with_name("published_spark_program.py")
CENTRAL = "https://repo1.maven.org/maven2"
JARS = {
    "org/apache/iceberg/iceberg-spark-runtime-4.1_2.13/1.12.0/iceberg-spark-runtime-4.1_2.13-1.12.0.jar":
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
    "io/delta/delta-spark_4.1_2.13/4.4.0/delta-spark_4.1_2.13-4.4.0.jar":
        "75a9400986853c061f5109f012547de2545a5759e5e752e5ef633dabe16a4f10",
    "io/delta/delta-storage/4.4.0/delta-storage-4.4.0.jar":
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
}  # fmt: skip
"""The runtimes, and their digests (SHA-256)."""


def jars() -> list[str]:
    """The runtimes, fetched when first needed, and verified each time."""
    found = []
    for path, digest in JARS.items():
        jar = READERS / "runtimes" / path.rpartition("/")[2]
        if not jar.exists():
            jar.parent.mkdir(parents=True, exist_ok=True)
            try:
                with urllib.request.urlopen(f"{CENTRAL}/{path}", timeout=60) as answer:
                    jar.write_bytes(answer.read())
            except OSError as error:
                pytest.skip(f"not run: Maven Central is not reached ({error})")
        assert hashlib.sha256(jar.read_bytes()).hexdigest() == digest, jar
        found.append(str(jar))
    return found


def installed() -> bool:
    """Whether that Spark is in its folder; installs it, if that can be."""
    if (READERS / "pyspark").is_dir():
        return True
    uv, pins = Path(sys.executable).with_name("uv"), ROOT / "requirements"
    words = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", READERS]
    words += ["--build-constraints", pins / "build.txt", "-r", pins / "spark-readers.txt"]
    return subprocess.run(list(map(str, words)), check=False).returncode == 0


def test_spark_reads_each_published_time(tmp_path: Path) -> None:
    runtimes = jars()
    if not installed():
        pytest.skip("not run: Spark 4.1 is not installed, and cannot be")
    asks, expected = list[list[object]](), list[Rows]()
    for as_ in ("iceberg", "delta"):
        with persist.open(f"file:{tmp_path / as_}", config=CONFIG) as client:
            seen, published = life(client, as_)
        place, of = published.version if as_ == "iceberg" else published.place, versions(published)
        asks.append([as_, place, {}])
        asks += [[as_, place, {"versionAsOf": str(of[time])}] for time in seen]
        expected += [seen[published.as_of], *seen.values()]
    without = {"PYTHONPATH", "SPARK_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": find_java_home()}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(READERS), ",".join(runtimes), json.dumps(asks)],
        capture_output=True, text=True, check=False, timeout=900, env=environment,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert said, done.stderr[-2000:]
    for (ask, rows), (found, filtered, counted) in zip(
        zip(asks, expected, strict=True), json.loads(said[0].removeprefix("FOUND ")), strict=True
    ):
        assert found == rows, ask
        assert counted == len(rows)
        assert filtered == sum(int(row[0]) < 10 and row[1].startswith("w") for row in rows)
