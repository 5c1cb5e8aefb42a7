"""How the JVMs of tests run: each ends long before it would repay optimised code, or a large collector."""

from __future__ import annotations

import os
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "build" / "spark.jsa"
"""Spark's classes as a JVM has them in memory, where `make test` has made it (scripts/spark_archive.py)."""
SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""As sessions on this machine have it (jobs/session.py)."""
LIGHT = f"{SMALL} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable" if ARCHIVE.exists() else SMALL
"""The same with the archive. A JVM that cannot use it begins without. An executor needs this by
`spark.executor.extraJavaOptions`."""


def be_light() -> None:
    """Have it so for what Spark's own scripts start below this process: launchers, drivers, masters and workers."""
    for variable in ("SPARK_LAUNCHER_OPTS", "SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
        os.environ.setdefault(variable, LIGHT)
