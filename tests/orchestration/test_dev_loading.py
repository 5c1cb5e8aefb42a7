"""What `make dev` loads: all that is listed, without a warning."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from orchestration.duties import DUTIES
from persist_lib.testing.servers import free_port
from tests.orchestration.dagster_dev import (
    ROOT,
    DagsterDev,
    is_up,
    restore_interrupts,
    stop,
    wait_until,
)
from tests.orchestration.test_definitions import ASSETS
from tests.spark.collections import write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(400)]

ALSO = ("maintenance", "apply", "collections", "compare", "erase", "fleet", "handover", "ingest", "pending", "prune")
JOBS = sorted([*DUTIES, *ALSO, "rebuild"])
SCHEDULES = [
    f"{name}_schedule"
    for name in (
        "census", "collections", "compaction", "fleet", "garbage", "leases", "orphans", "pending", "prune", "scrub",
    )
]  # fmt: skip
SENSORS = ["alerts", "compaction_debt", "shard_discovery", "source_news", "source_watch"]


def test_make_dev_starts_without_a_warning_and_loads_what_is_listed(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path / 'data'}") as client:
        write(client, "seen", batches=6, rows=5)
    with make_dev(tmp_path) as dev:
        (location,) = dev.wait_loaded().values()
        assert location["name"] == "persist"
        (repository,) = location["locationOrLoadError"]["repositories"]
        assert assets_of(repository) == {**dict.fromkeys(ASSETS, "maintenance"), "tables": "data"}
        assert names_of(repository, "jobs") == JOBS
        assert names_of(repository, "schedules") == SCHEDULES
        assert names_of(repository, "sensors") == SENSORS
        tick = wait_until(lambda: ran(dev, "compaction_debt"), 240, "the debt sensor requests a run by itself")
        assert dev.wait_finished(tick["runIds"][0]).status == "SUCCESS", dev.why(tick["runIds"][0])
        warned = [line for line in dev.log.splitlines() if re.search(r"warning|error|traceback", line, re.IGNORECASE)]
        assert warned == [], "\n".join(warned)


@contextmanager
def make_dev(folder: Path) -> Iterator[DagsterDev]:
    """`make dev` as a user starts it, with an instance and a location of its own."""
    port, home = free_port(), folder / "home"
    home.mkdir()
    (folder / "dagster.yaml").symlink_to(ROOT / "dagster.yaml")  # where `make dev` links DAGSTER_HOME's file to
    env = {**os.environ, "PERSIST_LOCATION": f"file:{folder / 'data'}"}
    with (home / "log").open("ab") as log:
        server = subprocess.Popen(
            ["make", "--silent", "dev", f"PORT={port}", f"DAGSTER_HOME={home}"], env=env, cwd=ROOT, stdout=log,
            stderr=log, preexec_fn=restore_interrupts, start_new_session=True,  # noqa: PLW1509 - it takes no lock
        )  # fmt: skip
    dev = DagsterDev(f"http://127.0.0.1:{port}", home, server)
    try:
        wait_until(lambda: is_up(dev), 240, "make dev serves")
        yield dev
    finally:
        stop(server)


def ran(dev: DagsterDev, sensor: str) -> dict[str, Any] | None:
    """The newest tick of a sensor that requested a run."""
    return next((tick for tick in dev.sensor(sensor)["ticks"] if tick["runIds"]), None)


def assets_of(repository: dict[str, Any]) -> dict[str, str]:
    """The assets of a repository and their groups."""
    return {"/".join(node["assetKey"]["path"]): node["groupName"] for node in repository["assetNodes"]}


def names_of(repository: dict[str, Any], kind: str) -> list[str]:
    """The names of jobs, schedules or sensors, without the job that Dagster makes of all assets."""
    return sorted(one["name"] for one in repository[kind] if not one["name"].startswith("__"))
