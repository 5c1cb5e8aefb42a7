"""Keeps Spark's classes as a JVM has them in memory (class data sharing), for the JVMs of tests: build/spark.jsa.

    scripts/spark_archive.py COMMAND...     make it, and then run this

A JVM that has them takes some 40 % less CPU until its first queries are answered. Made once for a Java and a PySpark;
a JVM that cannot use the file starts as without it, and so do all where it cannot be made.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parents[1]))

import persist_lib as persist
import persist_lib.spark
from tests.jvms import ARCHIVE, SMALL


def key() -> str:
    """What the archive is made for: this Java, and the place and release of PySpark."""
    java = subprocess.run(
        [Path(os.environ["JAVA_HOME"], "bin", "java"), "-version"], capture_output=True, text=True, check=True
    ).stderr
    return hashlib.sha256(
        f"{java} {os.environ['JAVA_HOME']} {pyspark.__file__} {pyspark.__version__}".encode()
    ).hexdigest()


def make(archive: Path, folder: str) -> None:
    """Use Spark as tests do, and keep what its JVM has loaded when it ends."""
    url = f"file:{folder}/location"
    with persist.open(url) as client:
        client.table("t", persist.Schema({"id": "int64 not null"}, {"state": "string"})).upsert(
            [{"id": 1, "state": "a"}]
        )
    conf: dict[str, Any] = {
        **persist_lib.spark.catalog_conf(url, "lake"),
        "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1", "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.driver.extraJavaOptions": f"{SMALL} -Xlog:disable -XX:ArchiveClassesAtExit={archive}",
    }  # fmt: skip
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    persist_lib.spark.register(spark)
    for statement in (
        "SELECT state, count(*) FROM lake.t GROUP BY state ORDER BY state",
        "INSERT INTO lake.t VALUES (2, 'b')",
        "SELECT * FROM lake.t a JOIN lake.t b ON a.id = b.id WHERE a.id > 1",
    ):
        spark.sql(statement).collect()
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def make_once() -> None:
    """Make the archive, if there is none for this Java and PySpark."""
    made_for = ARCHIVE.with_suffix(".of")
    if ARCHIVE.exists() and made_for.exists() and made_for.read_text() == key():
        return
    ARCHIVE.parent.mkdir(exist_ok=True)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory(dir=ARCHIVE.parent) as folder:
        archive = Path(folder) / ARCHIVE.name
        make(archive, folder)
        archive.replace(ARCHIVE)
    made_for.write_text(key())


if __name__ == "__main__":
    try:
        make_once()
    except Exception as error:  # noqa: BLE001 - tests take longer without
        sys.stderr.write(f"no archive of Spark's classes: {error}\n")
    if sys.argv[1:]:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the command of the Makefile
