"""A real `dagster dev`, started and stopped as a user would, and driven over GraphQL as its own pages do."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from persist_lib.testing.servers import free_port
from tests.orchestration import dagster_asks as asks
from tests.orchestration.dagster_answers import Event, Run, event_from, key_of, run_from, text_of
from tests.servers import postgres_url

T = TypeVar("T")
ROOT = Path(__file__).parent.parent.parent
REPOSITORY = "__repository__"
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
STARTED_PROCESS = re.compile(r"Started process for run \(pid: (\d+)\)")


@dataclass(frozen=True)
class DagsterDev:
    """A running `dagster dev`: its address, its DAGSTER_HOME and its process."""

    url: str
    home: Path
    process: subprocess.Popen[bytes]
    location: str = "persist"

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return (self.home / "log").read_text(errors="replace")

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """Ask one GraphQL request. Returns its data."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        assert "errors" not in found, found
        data: dict[str, Any] = found["data"]
        return data

    # Locations.

    def locations(self) -> dict[str, dict[str, Any]]:
        """What is known of each code location, by name; a failure to load is in it."""
        entries = self.ask(asks.LOCATIONS)["workspaceOrError"]["locationEntries"]
        return {entry["name"]: entry for entry in entries}

    def wait_loaded(self, seconds: float = 240) -> dict[str, dict[str, Any]]:
        """Wait until every code location is loaded or has failed to load. Returns all of them."""

        def all_are() -> dict[str, dict[str, Any]] | None:
            found = self.locations()
            is_there = found and all(one["loadStatus"] == "LOADED" for one in found.values())
            return found if is_there and all(one["locationOrLoadError"] for one in found.values()) else None

        return wait_until(all_are, seconds, "the code locations are loaded")

    def load_error(self, location: str | None = None) -> str:
        """Why the location did not load, with all causes; empty if it did."""
        found = self.locations()[location or self.location]["locationOrLoadError"] or {}
        messages = [found.get("message") or ""]
        while cause := found.get("cause"):
            messages.append(cause["message"])
            found = cause
        return "\n".join(message for message in messages if message)

    # Runs.

    def launch(
        self, job: str, config: Mapping[str, object] | None = None, *, tags: Mapping[str, str] | None = None,
        assets: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Launch a job, or the assets of `__ASSET_JOB`, as the launchpad does. Returns the run's id."""
        selector = {"repositoryLocationName": self.location, "repositoryName": REPOSITORY, "jobName": job}
        params = {
            "selector": {**selector, **({"assetSelection": [key_of(one) for one in assets]} if assets else {})},
            "runConfigData": config or {},
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in (tags or {}).items()]},
        }
        answer = self.ask(asks.LAUNCH, params=params)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def launch_partition(
        self, assets: Sequence[str], partition: str, config: Mapping[str, object] | None = None
    ) -> str:
        """Materialize assets of one partition, as the asset's page does. Returns the run's id."""
        return self.launch("__ASSET_JOB", config, tags={"dagster/partition": partition}, assets=assets)

    def backfill(
        self, assets: Sequence[str], partitions: Sequence[str], config: Mapping[str, object] | None = None
    ) -> str:
        """Launch a backfill, as "materialize selected partitions" does. Returns the backfill's id."""
        params = {
            "partitionNames": list(partitions), "assetSelection": [key_of(one) for one in assets],
            "runConfigData": config or {}, "title": "from a test",
        }  # fmt: skip
        answer = self.ask(asks.BACKFILL, params=params)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return str(answer["backfillId"])

    def backfill_status(self, backfill: str) -> str:
        """The status of a backfill, as in COMPLETED_SUCCESS."""
        return str(self.ask(asks.BACKFILL_STATUS, id=backfill)["partitionBackfillOrError"]["status"])

    def wait_backfill(self, backfill: str, seconds: float = 240) -> str:
        """Wait until a backfill has ended. Returns its status."""

        def ended() -> str | None:
            status = self.backfill_status(backfill)
            return None if status in ("REQUESTED", "CANCELING", "COMPLETED") else status

        return wait_until(ended, seconds, f"the backfill {backfill} has ended")

    def terminate(self, run: str) -> None:
        """Cancel a run, as the button "Terminate" does. Returns when the request was accepted."""
        answer = self.ask(asks.TERMINATE, id=run)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def run(self, run: str) -> Run:
        """One run as it is now."""
        return run_from(self.ask(asks.RUN, id=run)["runOrError"])

    def runs(self, *, job: str | None = None, tags: Mapping[str, str] | None = None) -> list[Run]:
        """The runs of a job or with tags, the oldest first."""
        filter_: dict[str, object] = {} if job is None else {"pipelineName": job}
        if tags:
            filter_["tags"] = [{"key": key, "value": value} for key, value in tags.items()]
        return [run_from(one) for one in reversed(self.ask(asks.RUNS, filter=filter_)["runsOrError"]["results"])]

    def wait_finished(self, run: str, seconds: float = 240) -> Run:
        """Wait until a run has ended, however it did."""
        wait_until(lambda: self.run(run).is_finished, seconds, f"run {run} has ended")
        return self.run(run)

    def events(self, run: str) -> list[Event]:
        """The whole log of a run."""
        found, after = [], None
        while True:
            answer = self.ask(asks.EVENTS, id=run, after=after)["logsForRun"]
            found += [event_from(one) for one in answer["events"]]
            if not answer["hasMore"]:
                return found
            after = answer["cursor"]

    def wait_said(self, run: str, pattern: str, seconds: float = 240) -> Event:
        """Wait until the log of a run has a message that matches. Fails at once if the run ends without."""

        def said() -> Event | None:
            is_over = self.run(run).is_finished
            events = self.events(run)
            found = [one for one in events if re.search(pattern, one.message)]
            assert found or not is_over, f"the run ended without saying {pattern!r}:\n{text_of(events)}"
            return found[0] if found else None

        return wait_until(said, seconds, f"run {run} says {pattern!r}")

    def why(self, run: str) -> str:
        """The last lines of a run's log, for a failed assertion."""
        return text_of(self.events(run))[-6000:]

    def failure_of(self, run: str) -> str:
        """The text that the run's page shows in red: the messages and causes of its failures."""
        return "\n".join(f"{one.message}\n{one.error}" for one in self.events(run) if one.level == "ERROR" or one.error)

    def worker(self, run: str, seconds: float = 120) -> int:
        """Wait until the process of a run has started. Returns its pid."""
        said = self.wait_said(run, STARTED_PROCESS.pattern, seconds)
        match = STARTED_PROCESS.search(said.message)
        assert match
        return int(match[1])

    # Assets, partitions and checks.

    def add_partitions(self, name: str, keys: Sequence[str]) -> None:
        """Add dynamic partitions, as the asset's page does."""
        repository = {"repositoryLocationName": self.location, "repositoryName": REPOSITORY}
        for key in keys:
            self.ask(asks.ADD_PARTITION, key=key, name=name, repository=repository)

    def partitions(self, asset: str) -> dict[str, set[str]]:
        """The partitions of an asset by colour: materialized, failed, unmaterialized, materializing."""
        found = self.ask(asks.PARTITION_STATUSES, key=key_of(asset))["assetNodeOrError"]["assetPartitionStatuses"]
        return {name.removesuffix("Partitions"): set(keys) for name, keys in found.items()}

    def latest_checks(self, asset: str) -> dict[str, dict[str, Any] | None]:
        """The execution of each check for the latest materialization: what the asset's page and graph show."""
        node = self.ask(asks.LATEST_CHECKS, key=key_of(asset))["assetNodeOrError"]
        return {one["name"]: one["executionForLatestMaterialization"] for one in node["assetChecksOrError"]["checks"]}

    # Sensors and schedules.

    def sensor(self, name: str) -> dict[str, Any]:
        """The state of a sensor: id, status, cursor and ticks, the newest first."""
        state: dict[str, Any] = self.ask(asks.SENSOR, selector=self._instigator("sensorName", name))["sensorOrError"]
        return state["sensorState"]

    def start_sensor(self, name: str) -> None:
        """Turn a sensor on."""
        self.ask(asks.START_SENSOR, selector=self._instigator("sensorName", name))

    def stop_sensor(self, name: str) -> None:
        """Turn a sensor off."""
        self.ask(asks.STOP_SENSOR, id=self.sensor(name)["id"])

    def set_cursor(self, name: str, cursor: str | None) -> None:
        """Overwrite a sensor's cursor; None loses it."""
        self.ask(asks.SET_CURSOR, selector=self._instigator("sensorName", name), cursor=cursor)

    def wait_tick(self, name: str, after: float, seconds: float = 240) -> dict[str, Any]:
        """Wait for a tick that began after a moment and has ended. A failed tick fails the test."""

        def ticked() -> dict[str, Any] | None:
            ended = [
                one for one in self.sensor(name)["ticks"] if one["timestamp"] > after and one["status"] != "STARTED"
            ]
            return ended[-1] if ended else None

        tick = wait_until(ticked, seconds, f"{name} ticks")
        assert tick["status"] != "FAILURE", tick["error"]
        return tick

    def _instigator(self, field: str, name: str) -> dict[str, str]:
        return {"repositoryLocationName": self.location, "repositoryName": REPOSITORY, field: name}


AS_MAKE_DEV = {"PERSIST_RUNNING": "1", "PERSIST_MAY_DELETE": "1"}


@contextmanager
def dagster_dev(home: Path, workspace: Path, env: Mapping[str, str]) -> Iterator[DagsterDev]:
    """`dagster dev` with the repository's dagster.yaml, until the block ends."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        (home / "dagster.yaml").symlink_to(ROOT / "dagster.yaml")
    port = free_port()
    address = ["-w", str(workspace), "-h", "127.0.0.1", "-p", str(port)]
    command = [str(Path(sys.executable).with_name("dagster")), "dev", *address]
    with (home / "log").open("ab") as log:
        server = subprocess.Popen(
            command, env={**AS_MAKE_DEV, **os.environ, **env, "DAGSTER_HOME": str(home)},
            cwd=ROOT, stdout=log, stderr=log, preexec_fn=restore_interrupts,  # noqa: PLW1509 - it takes no lock
            start_new_session=True,
        )  # fmt: skip
    dev = DagsterDev(f"http://127.0.0.1:{port}", home, server)
    try:
        wait_until(lambda: is_up(dev), 240, "dagster dev serves")
        yield dev
    finally:
        stop(server)


STORAGES = ("sqlite", "postgres")


def database(name: str) -> str:
    """A new database of this name, as Dagster's storage takes it.

    The driver is named, as SQLAlchemy takes another one by default, with which Dagster's NOTIFY fails.
    """
    url, name = postgres_url().partition("?")[0], name.replace("-", "_").lower()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}"'.encode())
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{url.rpartition('/')[0]}/{name}".replace("postgresql:", "postgresql+psycopg2:", 1)


def store_in(home: Path, storage: str) -> None:
    """Have a Dagster of this home store what it keeps there, or in a database of its own, with our dagster.yaml."""
    home.mkdir(parents=True, exist_ok=True)
    if storage == "sqlite":
        return
    pytest.importorskip("dagster_postgres", reason="PostgreSQL as Dagster's storage needs dagster-postgres")
    url = database(f"dev_{home.parent.name}")
    storage = f"storage:\n  postgres: {{postgres_url: {json.dumps(url)}}}\n"
    (home / "dagster.yaml").write_text(f"{(ROOT / 'dagster.yaml').read_text()}\n{storage}")


STOPPED = """from orchestration.definitions import build_definitions
from orchestration.settings import Settings
defs = build_definitions(Settings(is_running=False))
"""
"""The pipeline without its schedules and sensors: only what a test starts or launches runs."""


def workspace_of(folder: Path, **sources: str) -> Path:
    """Write a workspace with a code location for each source, by its name; without any, of the stopped pipeline."""
    load_from = []
    for name, source in (sources or {"persist": STOPPED}).items():
        (folder / f"{name}_location.py").write_text(source)
        file = {"relative_path": f"{name}_location.py", "working_directory": str(ROOT), "location_name": name}
        load_from.append({"python_file": file})
    (folder / "workspace.yaml").write_text(json.dumps({"load_from": load_from}))
    return folder / "workspace.yaml"


def stop(server: subprocess.Popen[bytes]) -> None:
    """Stop it as Ctrl-C in a terminal does, then end what is left of its processes."""
    os.killpg(server.pid, signal.SIGINT)
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(timeout=30)
    finally:
        end_group(server.pid)


def restore_interrupts() -> None:
    """Make a child stop by SIGINT, also when this process is killed.

    SUBTLE: Dagster gives SIGTERM what it finds at SIGINT, and a shell's background job finds it ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def end_group(pid: int) -> None:
    """Code servers live on for a while after their parent."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_up(dev: DagsterDev) -> bool:
    """Whether the web server answers."""
    assert dev.process.poll() is None, dev.log[-3000:]
    try:
        with urllib.request.urlopen(f"{dev.url}/server_info", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(is_so: Callable[[], T | None], seconds: float, what: str) -> T:
    """Ask again and again. Returns the first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := is_so()):
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}"
        time.sleep(0.25)
    return answer
