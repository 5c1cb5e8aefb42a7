"""An Airflow of its own on the loopback interface: a scheduler, a processor of DAGs and an API server, with SQLite."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persist_lib.testing.servers import free_port

PARTS = (("api-server", "--workers", "1"), ("dag-processor",), ("scheduler",))


@dataclass(frozen=True)
class Airflow:
    """A running Airflow: its `bin`, its home, and the environment of its processes."""

    bin: Path
    home: Path
    environ: Mapping[str, str]

    def call(self, *words: str) -> str:
        """A command of Airflow; what it prints."""
        done = subprocess.run(
            [str(self.bin / "airflow"), *words], env=dict(self.environ), capture_output=True, text=True, check=False,
            timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def listed(self, *words: str) -> list[dict[str, Any]]:
        """What a command lists."""
        lines = self.call(*words, "--output", "json").strip().splitlines()  # warnings come before it
        found: list[dict[str, Any]] = json.loads(lines[-1])
        return found

    def states(self, dag: str, run: str) -> dict[str, str]:
        """The state of each task of a run."""
        return {one["task_id"]: one["state"] or "" for one in self.listed("tasks", "states-for-dag-run", dag, run)}

    def attempts(self, dag: str, task: str, run: str) -> list[str]:
        """What each attempt of a task of a run has logged."""
        files = (self.home / "logs" / f"dag_id={dag}" / f"run_id={run}" / f"task_id={task}").glob("attempt=*.log")
        return [path.read_text(errors="replace") for path in sorted(files)]


@contextmanager
def running(bin_: Path, home: Path, dag: Path, **environ: str) -> Iterator[Airflow]:
    """An Airflow with one file of DAGs, for the length of the block."""
    (home / "dags").mkdir(parents=True)
    shutil.copy(dag, home / "dags" / dag.name)
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON", "PERSIST"))}
    settings = {
        **kept,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
        **environ,
    }
    airflow = Airflow(bin_, home, settings)
    airflow.call("db", "migrate")
    processes = []
    try:
        for part in PARTS:
            with (home / f"{part[0]}.log").open("wb") as log:
                command = [str(bin_ / "airflow"), *part]
                processes.append(
                    subprocess.Popen(command, env=settings, stdout=log, stderr=log, start_new_session=True, cwd=home)
                )
        yield airflow
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def wait_until(what: Any, seconds: float, says: str, airflow: Airflow) -> Any:
    """Wait until it answers something. Fails with what the parts of Airflow have logged."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := what():
            return found
        time.sleep(2)
    logs = "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in airflow.home.glob("*.log"))
    raise AssertionError(f"not within {seconds:g} s: {says}\n{logs}")
