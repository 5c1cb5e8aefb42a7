"""The sides of a life on Spark, each with the SQL of its own users: ours, Delta Lake and Apache Iceberg.

Ours is on the Spark that we use. There are runtimes of the peers for an older one (4.1), which is put into a folder of
its own, as are the runtimes: Maven Central's, each verified by its digest. Nothing of ours is in a peer's process.

Each side has one session, with the JVM's default JIT and collector, which plans each read again, and is warm once the
changes are made.
"""

# ruff: noqa: S608 - queries of our own names and numbers
from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.life_peers import BELOW, among, loads, looked_up, stretches
from bench.peer import ROOT, Ready, install

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

SPARK_4_1 = ROOT / "build/spark-readers"
PINS = ROOT / "requirements"
CENTRAL = "https://repo1.maven.org/maven2"
RUNTIMES = {
    "org/apache/iceberg/iceberg-spark-runtime-4.1_2.13/1.12.0/iceberg-spark-runtime-4.1_2.13-1.12.0.jar":
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
    "io/delta/delta-spark_4.1_2.13/4.4.0/delta-spark_4.1_2.13-4.4.0.jar":
        "75a9400986853c061f5109f012547de2545a5759e5e752e5ef633dabe16a4f10",
    "io/delta/delta-storage/4.4.0/delta-storage-4.4.0.jar":
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
}  # fmt: skip
"""The runtimes of Iceberg and Delta for that Spark, and their digests (SHA-256)."""
SETTINGS = {
    "spark.driver.memory": "2g", "spark.sql.shuffle.partitions": "4", "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
}  # fmt: skip
TOLD = {"spark.driver.memory", "spark.sql.shuffle.partitions", "spark.databricks.delta.snapshotPartitions"}
MERGE = """
    MERGE INTO {table} USING changed ON {table}.k = changed.k
    WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *
"""
COLUMNS = "k BIGINT, a BIGINT, b STRING"
ALL = "count(*) AS rows, sum(k) AS k, sum(a) AS a, sum(hash(b)) AS b"
"""What makes a query read all columns of all rows."""


def runtimes() -> list[str]:
    """The runtimes' files, fetched when first needed, and verified each time. Raises OSError without Maven Central."""
    found = []
    for path, digest in RUNTIMES.items():
        jar = SPARK_4_1 / "runtimes" / path.rpartition("/")[2]
        if not jar.exists():
            jar.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"{CENTRAL}/{path}", timeout=60) as answer:  # noqa: S310 - https, as above
                jar.write_bytes(answer.read())
        if hashlib.sha256(jar.read_bytes()).hexdigest() != digest:
            raise OSError(f"{jar} is not what Maven Central had; delete it, and it is fetched again")
        found.append(str(jar))
    return found


def install_spark() -> None:
    """Put the peers' Spark into its folder, unless it is there. Raises CalledProcessError where that cannot be."""
    if not (SPARK_4_1 / "pyspark").is_dir():
        install(SPARK_4_1, PINS / "spark-readers.txt", "--build-constraints", PINS / "build.txt")


class Lake(NamedTuple):
    """A side: its table, its settings, and its SQL.

    `versions` has its versions as `version`, where the next one is so, in the order of the third; the load's is first.
    """

    table: str
    conf: dict[str, str]
    create: str
    upsert: str
    upkeep: Sequence[str] | Callable[[], object]
    versions: tuple[str, str, str]
    changes: str


@contextmanager
def delta(folder: str, _endpoint: str, *size: str) -> Iterator[Ready]:
    """A table of Delta Lake."""
    table = f"delta.`{folder}/table`"
    conf = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "4",  # 50 by default, which takes seconds for each change
    }
    lake = Lake(
        table, conf,
        f"CREATE TABLE {table} ({COLUMNS}) USING delta TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')",
        MERGE.format(table=table),
        [f"OPTIMIZE {table}"],
        (f"DESCRIBE HISTORY {table}", "operation IN ('WRITE', 'MERGE', 'DELETE')", "version"),
        f"SELECT * FROM table_changes_by_path('{folder}/table', {{after}} + 1, {{to}})",
    )  # fmt: skip
    with _peer(lake, size) as ready:
        yield ready


@contextmanager
def iceberg(folder: str, _endpoint: str, *size: str) -> Iterator[Ready]:
    """A table of Apache Iceberg, in a catalog that is a folder."""
    table = "lake.db.t"
    conf = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop", "spark.sql.catalog.lake.warehouse": folder,
    }  # fmt: skip

    lake = Lake(
        table, conf, f"CREATE TABLE {table} ({COLUMNS}) USING iceberg", MERGE.format(table=table),
        [f"CALL lake.system.{name}(table => 'db.t')" for name in ("rewrite_data_files", "rewrite_manifests")],
        (f"SELECT snapshot_id AS version, * FROM {table}.snapshots", "operation <> 'replace'", "committed_at"), "",
    )  # fmt: skip
    with _peer(lake, size) as ready:
        yield ready


@contextmanager
def ours(folder: str, _endpoint: str, *size: str) -> Iterator[Ready]:
    """A table of our catalog, on the Spark that we use, in a session such as the peers have."""
    import persist_lib as persist  # noqa: PLC0415 - not in the processes of the peers
    import persist_lib.spark  # noqa: PLC0415

    def upkeep() -> None:
        with persist.open(f"file:{folder}") as client:
            client.maintain("t")

    persist.open(f"file:{folder}").close()
    lake = Lake(
        "lake.t", persist_lib.spark.catalog_conf(f"file:{folder}", name="lake"),
        f"CREATE TABLE lake.t ({COLUMNS}, PRIMARY KEY (k))",
        "INSERT INTO lake.t WITH ('upsert' = 'true') SELECT * FROM changed", upkeep,
        ("SELECT unix_millis(_time) AS version FROM lake.t.history", "true", "version"),
        "SELECT * FROM lake.t.changes WHERE _time > timestamp_millis({after}) AND _time <= timestamp_millis({to})",
    )  # fmt: skip
    with _session(lake, size) as ready:
        yield ready


@contextmanager
def _peer(lake: Lake, size: tuple[str, ...]) -> Iterator[Ready]:
    sys.path.insert(0, str(SPARK_4_1))
    lake.conf["spark.jars"] = ",".join(runtimes())
    with _session(lake, size) as ready:
        yield ready


class Table:
    """What a session does with its table. It has no versions before the load."""

    def __init__(self, session: SparkSession, lake: Lake, size: tuple[str, ...]) -> None:
        rows, steps, every, self._some = size
        self._session, self._lake, self._count = session, lake, int(rows)
        self._left = stretches(rows, steps, every)
        self._ends: list[Any] = []

    def load(self) -> None:
        self._session.sql(self._lake.create)
        for source in loads(self._count):
            self._bring("loaded", source)
            self._session.sql(f"INSERT INTO {self._lake.table} SELECT * FROM loaded")

    def upserts(self) -> None:
        for source, deleted in next(self._left):
            self._bring("changed", source)
            self._session.sql(self._lake.upsert)
            if deleted.size:
                self._session.sql(f"DELETE FROM {self._lake.table} WHERE k IN ({', '.join(map(str, deleted))})")

    def upkeep(self) -> None:
        if callable(self._lake.upkeep):
            self._lake.upkeep()
            return
        for statement in self._lake.upkeep:
            self._session.sql(statement).collect()

    def read(self, where: str = "", as_of: object = None) -> int:
        """How many rows there are, all of which are read."""
        of = self._lake.table if as_of is None else f"{self._lake.table} VERSION AS OF {as_of}"
        return self._read(f"{of} {where}")

    def versions(self) -> int:
        return sum(self.read(as_of=version) for version in among(self._versions(), self._some))

    def changes(self) -> int:
        ends = self._versions()
        after, to = ends[len(ends) // 4], ends[len(ends) // 2]
        return self._read(f"({self._lake.changes.format(after=after, to=to)})")

    def _bring(self, name: str, source: pa.Table) -> None:
        self._session.createDataFrame(source).createOrReplaceTempView(name)

    def _read(self, what: str) -> int:
        [found] = self._session.sql(f"SELECT {ALL} FROM {what}").collect()
        return int(found.rows)

    def _versions(self) -> list[Any]:
        """The version after each change, the load left out. Asked for once."""
        if not self._ends:
            all_of, where, order = self._lake.versions
            found = self._session.sql(all_of).where(where).orderBy(order).collect()
            self._ends = [row["version"] for row in found[1:]]
        return self._ends


@contextmanager
def _session(lake: Lake, size: tuple[str, ...]) -> Iterator[Ready]:
    """A session of the Spark that is found first, with the JVM's defaults but for its memory."""
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    from pyspark.sql import SparkSession  # noqa: PLC0415 - a peer's is in a folder of its own

    conf = {**SETTINGS, **lake.conf}
    session = SparkSession.builder.master("local[*]").config(map=dict(conf)).getOrCreate()
    told = ", ".join(f"{name.removeprefix('spark.')}={value}" for name, value in conf.items() if name in TOLD)
    session.sparkContext.setLogLevel("ERROR")
    table, some = Table(session, lake, size), ", ".join(map(str, looked_up(int(size[0]))))
    try:
        yield Ready(f"Spark {session.version}, local[*], the JVM's default JIT and collector, {told}", {
            "load": table.load, "upserts": table.upserts, "upkeep": table.upkeep, "scan": table.read,
            "versions": table.versions, "changes": table.changes,
            "filtered scan": lambda: table.read(f"WHERE a < {BELOW}"),
            "look-up": lambda: table.read(f"WHERE k IN ({some})"),
        })  # fmt: skip
    finally:
        session.stop()
