"""The Spark session of every program. Only this module knows which settings are tested, and where Spark runs.

    spark = build_session()                                         # PERSIST_SPARK_MASTER or _REMOTE, else here
    spark = build_session(SparkSettings(master="spark://host:7077"))
    spark = build_session(SparkSettings(remote="sc://host:15002"))  # one long-lived Connect server, shared by many runs

Persist has to be importable where tasks run. On this machine it is, because this same interpreter runs the tasks. To
other machines `ship` sends it as a zip (compiled dependencies such as pyarrow must be installed there).
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from pyspark.sql import SparkSession

from jobs.java import find_java_home
from jobs.reach import check_master, check_remote

Sessions = Callable[[], SparkSession]
"""Makes the session on first use, so that a program that has no work for Spark never starts a JVM."""

LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Cuts start-up by about a third. Python and Arrow do the work, so the JVM need not optimise its code.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}
ALWAYS = {
    # For reads of the data source `persist` with its option `pushdown`. Spark leaves it off by default.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.shuffle.partitions": "4",
}
OF_AN_APPLICATION = {
    # Requests of several shards are in flight at once, and a small one must not wait for all tasks of a large one.
    # A Connect server has decided that when it started, and warns of a client that asks for it.
    "spark.scheduler.mode": "FAIR",
}
SHIPPED = ("persist_lib", "jobs")
"""Packages that tasks import."""

_building = threading.RLock()


class SparkSettings(BaseModel):
    """Where Spark runs, and how. `remote` (Spark Connect) wins over `master`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    master: str | None = None
    """None: the master of spark-submit, else this machine."""
    remote: str | None = None
    driver_memory: str = Field(default="1g", pattern=r"^\d+[kmgt]$")
    """Tasks merge outside of the JVM, so it only needs room for plans and results."""
    app_name: str = "persist"
    conf: Mapping[str, str] = {}
    """More of Spark's own settings. They win over all others."""
    ship: bool | None = None
    """Whether to send our code to the executors. None: only if they are not on this machine."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> SparkSettings:
        """The settings in PERSIST_SPARK_MASTER, PERSIST_SPARK_REMOTE and PERSIST_SPARK_DRIVER_MEMORY."""
        environ = os.environ if environ is None else environ
        named = {name: environ.get(f"PERSIST_SPARK_{name.upper()}") for name in ("master", "remote", "driver_memory")}
        return cls.model_validate({name: value for name, value in named.items() if value})

    @property
    def is_local(self) -> bool:
        """Whether tasks run on this machine, by this interpreter."""
        return self.remote is None and (self.master or "local").startswith("local")


def spark_conf(settings: SparkSettings, *, submitted: bool = False) -> dict[str, str]:
    """All settings of the session. `submitted`: spark-submit has started the JVM and knows the master."""
    conf = {**ALWAYS, "spark.app.name": settings.app_name}
    if settings.remote is not None:
        conf["spark.remote"] = settings.remote
    elif not submitted or settings.master is not None:
        # SUBTLE: plain local[n] never retries a task; the second number is how often one may fail.
        conf["spark.master"] = settings.master or "local[*,4]"
    if settings.is_local:
        conf |= LOCAL
    if settings.remote is None:
        conf |= {**OF_AN_APPLICATION, "spark.driver.memory": settings.driver_memory}
    return {**conf, **settings.conf}


def build_session(settings: SparkSettings | None = None) -> SparkSession:
    """Return the session of this process, or make one. Safe to call from several threads, and again.

    Raises SparkUnreachable within seconds, before a JVM starts, if the master or the Connect server does not answer.
    """
    settings = settings or SparkSettings.from_environment()
    with _building:
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ
        check_reachable(settings, submitted=submitted)
        prepare_environment(settings, submitted=submitted)
        builder = SparkSession.builder
        for key, value in spark_conf(settings, submitted=submitted).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        if settings.remote is None:
            spark.sparkContext.setLogLevel("ERROR")
        if settings.ship or (settings.ship is None and not _runs_here(spark, settings)):
            ship(spark)
        return spark


def check_reachable(settings: SparkSettings, *, submitted: bool = False) -> None:
    """Raise SparkUnreachable if the session would have to wait for a Spark that does not answer."""
    conf = spark_conf(settings, submitted=submitted)
    if "spark.remote" in conf:
        check_remote(conf["spark.remote"])
    elif SparkSession.getActiveSession() is None:
        check_master(conf.get("spark.master", ""))


def prepare_environment(settings: SparkSettings, *, submitted: bool = False) -> None:
    """Set the environment variables that must be set before a JVM or a Python worker starts.

    SUBTLE: without PYSPARK_PYTHON, workers are the first `python3` on PATH, which lacks our packages.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if settings.is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if settings.remote is None and not submitted and SparkSession.getActiveSession() is None:
        os.environ["JAVA_HOME"] = find_java_home()


def ship(spark: SparkSession) -> str:
    """Make our code importable in the executors of a session, by a zip named for its contents; returns its name."""
    data = _zipped(SHIPPED)
    name = f"persist-{hashlib.blake2b(data, digest_size=8).hexdigest()}.zip"
    path = _shipping_folder() / name
    if not path.exists():  # executors may be fetching it
        path.write_bytes(data)
    spark.addArtifacts(str(path), pyfile=True)
    return name


@cache
def _shipping_folder() -> Path:
    """SUBTLE: one a process. Spark refuses a file of the same name from another folder, as a second call would have."""
    return Path(tempfile.mkdtemp(prefix="persist-ship-"))


def _runs_here(spark: SparkSession, settings: SparkSettings) -> bool:
    return settings.remote is None and str(spark.conf.get("spark.master", "local")).startswith("local")


def _zipped(packages: tuple[str, ...]) -> bytes:
    """The packages as a zip: the same bytes for the same code."""
    with tempfile.SpooledTemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for package in packages:
                # Each from where it is: they are two distributions, and one may be a checkout and the other installed.
                folder = Path(str(import_module(package).__file__)).parent
                for path in sorted(folder.rglob("*.py")):
                    name = (Path(package) / path.relative_to(folder)).as_posix()
                    archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
        file.seek(0)
        return file.read()
