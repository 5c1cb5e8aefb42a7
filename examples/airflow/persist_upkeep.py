"""A DAG of Airflow 3 that looks after a location: the duties of Dagster's schedules, as programs with exit codes.

Copy it into the folder of your DAGs. The programs are in an environment of their own, so that Airflow's packages and
those of Persist never meet: PERSIST_BIN is its `bin`, with persist-pipeline installed. PERSIST_LOCATION,
PERSIST_CONSENSUS and the like are the programs' own, and come from the environment of the worker.

    0           done
    1           refused, or a store failed: the task is tried again, as each program continues where it was
    2, 3        a wrong call; stored data is damaged: the task fails at once, as trying again helps with neither
    130, 143    interrupted: every shard is correct, and the task is tried again
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

FINAL = {2: "the call is wrong", 3: "stored data is damaged: see docs/operations.md#what-each-error-means"}
"""Exit codes after which a second attempt would end alike."""
GRACE_S = 20.0
"""How long a program that is stopped has to say what is unfinished. It needs some seconds."""


class Program(BaseOperator):  # type: ignore[misc] # Airflow is in an environment of its own
    """Runs a program of PERSIST_BIN, writes what it prints into the task's log, and answers for its exit code."""

    template_fields = ("command",)

    def __init__(self, *, command: str, **options: Any) -> None:
        super().__init__(**options)
        self.command = command
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> None:  # noqa: ARG002 - Airflow passes it by name
        """Run it to its end. Raises AirflowFailException, which is not tried again, for the codes in FINAL."""
        program, *words = shlex.split(self.command)
        command = [str(Path(os.environ["PERSIST_BIN"]) / program), *words]
        environ = {"PERSIST_LOG": "json", **os.environ}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
        ) as self._process:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self.log.info("%s", line.rstrip())
        code = self._process.returncode
        if code in FINAL:
            raise AirflowFailException(f"{self.command} ended with {code}: {FINAL[code]}")
        if code:
            raise AirflowException(f"{self.command} ended with {code}")

    def on_kill(self) -> None:
        """Stop the program as Ctrl-C would. Nothing that was committed is lost."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


OPTIONS: dict[str, Any] = {
    "start_date": datetime(2026, 1, 1, tzinfo=UTC),
    "catchup": False,
    "max_active_runs": 1,  # a second one would find nothing to do, or Busy
    "default_args": {"retries": 2, "retry_delay": timedelta(seconds=float(os.environ.get("PERSIST_RETRY_S", "60")))},
}

with DAG("persist_leases", schedule="* * * * *", **OPTIONS):
    Program(task_id="leases", command="persist maintain --only leases")

with DAG("persist_garbage", schedule="7 * * * *", **OPTIONS):
    Program(task_id="garbage", command="persist maintain --only retention --only rollups --only garbage")

with DAG("persist_upkeep", schedule="53 4 * * *", **OPTIONS):
    compaction = Program(task_id="compaction", command="python -m jobs.compact --engine auto")
    rest = Program(task_id="maintain", command="persist maintain")
    health = Program(task_id="health", command="persist health", retries=0)
    compaction >> rest >> health

with DAG("persist_scrub", schedule="41 3 * * 0", **OPTIONS):
    Program(task_id="scrub", command="python -m jobs.scrub --engine auto")
