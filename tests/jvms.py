"""How the JVMs of tests run: each ends long before it would repay optimised code, or a large collector."""

from __future__ import annotations

import os

LIGHT = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""As sessions on this machine have it (jobs/session.py). An executor needs it by `spark.executor.extraJavaOptions`."""


def be_light() -> None:
    """Have it so for what Spark's own scripts start below this process: launchers, drivers, masters and workers."""
    for variable in ("SPARK_LAUNCHER_OPTS", "SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
        os.environ.setdefault(variable, LIGHT)
