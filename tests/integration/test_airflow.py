"""The DAGs of docs/airflow.md name only what there is; with an Airflow (`make airflow`), a scheduler runs them."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import persist_lib as persist
from jobs import program
from persist_lib.cli.app import app
from tests.integration.airflow_home import Airflow, running, wait_until

ROOT = Path(__file__).parents[2]
DAG = ROOT / "examples" / "airflow" / "persist_upkeep.py"
AIRFLOW = os.environ.get("PERSIST_AIRFLOW", "")
SCHEMA = persist.Schema(key={"id": "int64"}, value={"text": "string"})
needs_airflow = pytest.mark.skipif(not AIRFLOW, reason="`make airflow` has an Airflow and runs this")


def commands() -> dict[str, list[str]]:
    """The commands of the tasks, by task."""
    found = {}
    for node in ast.walk(ast.parse(DAG.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Program":
            of = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            found[str(of["task_id"])] = shlex.split(str(of["command"]))
    return found


def test_it_does_every_duty_of_the_table_that_changes_something() -> None:
    assert set(commands()) == {"leases", "garbage", "compaction", "maintain", "health", "scrub"}


@pytest.mark.parametrize("task", commands())
def test_it_names_only_commands_and_options_that_there_are(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *words = commands()[task]
    if name == "persist":
        group: Any = typer.main.get_command(app)
        while hasattr(group, "commands"):
            group = group.commands[words.pop(0)]
        options = {one for parameter in group.params for one in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options
        with group.make_context(task, list(words)) as context:
            assert context.params, "the words are parsed, and so are their values"
        return
    assert (name, words[0]) == ("python", "-m")
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setenv("PERSIST_LOCATION", "file:./data")
    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> Any:
        parsers.append(self)
        original(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(words[1]).main(words[2:])
    assert parsers
    assert program.exit_status({"a": persist.Corrupt("x"), "b": persist.TimedOut("x")}) == 3


def write(folder: Path) -> None:
    with persist.open(folder) as client, client.open_writer("orders", SCHEMA) as write:
        for time_ in range(20):
            write.compare_and_append([{"id": time_, "text": "x" * 20_000}], time_, time_ + 1)


def run_of(airflow: Airflow, dag: str, run: str, *, seconds: float = 240) -> dict[str, str]:
    """Trigger a DAG, and wait for the end of its run."""
    airflow.call("dags", "trigger", dag, "--run-id", run)
    over = {"success", "failed", "upstream_failed", "skipped"}

    def ended() -> dict[str, str] | None:
        states = airflow.states(dag, run)
        return states if states and set(states.values()) <= over else None

    found: dict[str, str] = wait_until(ended, seconds, f"{dag} has ended", airflow)
    return found


def once_interrupted(folder: Path) -> Path:
    """The programs; of which `persist maintain --only` is terminated the first time, as by a machine that goes away."""
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    real = Path(sys.executable).parent / "persist"
    script = folder / "persist"
    script.write_text(
        f"""#!/bin/bash
if [ "$2" = --only ] && mkdir "{folder}/was" 2>/dev/null; then exit 143; fi
exec {real} "$@"
"""
    )
    for one in folder.iterdir():
        one.chmod(0o755)
    return folder


KILLED = """
import importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("dags", sys.argv[1])
dags = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dags)
one = dags.Program(task_id="t", command="python -c 'import time; print(1, flush=True); time.sleep(90)'")
found = []
def execute():
    try:
        one.execute({})
    except Exception as error:
        found.append(error)
thread = threading.Thread(target=execute)
began = time.monotonic()
thread.start()
while one._process is None or one._process.poll() is not None:
    time.sleep(0.05)
one.on_kill()
thread.join(20)
assert not thread.is_alive() and time.monotonic() - began < 15
assert type(found[0]).__name__ == "AirflowException", found
"""


@needs_airflow
def test_a_task_that_is_stopped_stops_its_program(tmp_path: Path) -> None:
    environ = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "PERSIST_BIN": str(Path(sys.executable).parent)}
    environ.pop("PYTHONPATH", None)
    command = [str(Path(AIRFLOW) / "python"), "-c", KILLED, str(DAG)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_airflow
@pytest.mark.timeout(1200)
def test_a_scheduler_runs_it_and_takes_its_exit_codes_for_what_they_are(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data)
    settings = {
        "PERSIST_BIN": str(once_interrupted(tmp_path / "bin")),
        "PERSIST_LOCATION": f"file:{data}",
        "PERSIST_RETRY_S": "1",
        "PYTHONPATH": str(ROOT),
    }
    with running(Path(AIRFLOW), tmp_path / "airflow", DAG, **settings) as airflow:
        dags = ("persist_leases", "persist_garbage", "persist_upkeep", "persist_scrub")

        def loaded() -> bool:
            return {one["dag_id"] for one in airflow.listed("dags", "list")} >= set(dags)

        wait_until(loaded, 180, "the DAGs are there", airflow)
        for dag in ("persist_garbage", "persist_upkeep", "persist_scrub"):
            airflow.call("dags", "unpause", dag)

        done = run_of(airflow, "persist_upkeep", "first")
        says = airflow.attempts("persist_upkeep", "compaction", "first")[0]
        assert done == {"compaction": "success", "maintain": "success", "health": "success"}, says[-5000:]
        with persist.open(data) as client:
            assert client.census("orders").debt == 0
        assert '"event": "done", "shard": "orders"' in says.replace("\\", "")

        logs = airflow.home / "logs" / "dag_id=persist_garbage"  # of the run that was due when it was unpaused
        due = wait_until(lambda: min(logs.glob("run_id=*"), default=None), 120, "the due run has begun", airflow)
        run = due.name.removeprefix("run_id=")
        wait_until(lambda: airflow.states("persist_garbage", run) == {"garbage": "success"}, 120, "it is done", airflow)
        first, _ = airflow.attempts("persist_garbage", "garbage", run)  # what was interrupted is tried again
        assert "ended with 143" in first

        assert run_of(airflow, "persist_scrub", "sound") == {"scrub": "success"}
        for part in data.rglob("*.parquet"):
            damaged = bytearray(part.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            part.write_bytes(damaged)
        assert run_of(airflow, "persist_scrub", "damaged") == {"scrub": "failed"}
        (says,) = airflow.attempts("persist_scrub", "scrub", "damaged")  # it is not tried again
        assert "ended with 3: stored data is damaged" in says
