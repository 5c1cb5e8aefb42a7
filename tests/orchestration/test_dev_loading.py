"""What a real `dagster dev` loads: names, two locations at once, settings that cannot be right; and no warnings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from tests.orchestration.dagster_dev import (
    ROOT,
    DagsterDev,
    dagster_dev,
    free_port,
    is_up,
    restore_interrupts,
    stop,
    wait_until,
    workspace_of,
)
from tests.spark.collections import SMALL, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(400)]

DUTIES = ["census", "compaction", "garbage", "leases", "orphans", "publication", "retention", "rollups", "scrub"]
ASSETS = [*DUTIES, "collections", "sources", "pending", "erasures", "plans", "health", "fleet", "shard_page", "tables"]
JOBS = sorted(
    [
        *DUTIES,
        "maintenance",
        "apply",
        "collections",
        "compare",
        "erase",
        "fleet",
        "handover",
        "ingest",
        "pending",
        "prune",
        "rebuild",
    ]
)
SCHEDULES = [
    f"{name}_schedule"
    for name in (
        "census",
        "collections",
        "compaction",
        "fleet",
        "garbage",
        "leases",
        "orphans",
        "pending",
        "prune",
        "scrub",
    )
]
SENSORS = ["alerts", "compaction_debt", "shard_discovery", "source_news", "source_watch"]

TWO = """
import dagster as dg
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
eu = Settings(location={eu!r}, is_running=False)
us = Settings(location={us!r}, is_running=False)
defs = dg.Definitions.merge(
    build_definitions(eu, name="eu"),
    build_definitions(us, name="us", key_prefix=["lake", "us"], group="storage"),
)
"""
MISTYPED = """
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
defs = build_definitions(Settings(location={location!r}, is_running=False))
"""
BAD_CONFIG = """
import os
os.environ["PERSIST_CONFIG"] = {config!r}
from orchestration.definitions import build_definitions
defs = build_definitions()
"""


def test_two_locations_in_one_code_location_and_what_cannot_load(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("eu", "us", "mistyped")}
    for name in ("eu", "us"):
        with persist.open(f"file:{places[name]}", config=persist.Config(**SMALL)) as client:
            write(client, f"of_{name}", batches=6, rows=5)
    workspace = workspace_of(
        tmp_path,
        two=TWO.format(eu=f"file:{places['eu']}", us=f"file:{places['us']}"),
        mistyped=MISTYPED.format(location=f"file:{places['mistyped']}"),
        unknown_field=BAD_CONFIG.format(config='{"part_bites": 7}'),
        no_json=BAD_CONFIG.format(config="{part_bytes: 7"),
    )
    with dagster_dev(tmp_path / "home", workspace, {"PERSIST_LOCATION": f"file:{places['eu']}"}) as dev:
        dev.wait_loaded()
        assert_a_bad_setting_fails_the_load_in_words(dev)
        assert_a_location_that_is_not_there_is_not_made(replace(dev, location="mistyped"), places["mistyped"])
        assert_both_pipelines_work_side_by_side(replace(dev, location="two"))


def assert_a_bad_setting_fails_the_load_in_words(dev: DagsterDev) -> None:
    assert "part_bites" in dev.load_error("unknown_field")
    error = dev.load_error("no_json")
    assert "PERSIST_CONFIG" in error, "the message names what to correct"
    assert "{part_bytes: 7" in error


def assert_a_location_that_is_not_there_is_not_made(dev: DagsterDev, place: Path) -> None:
    assert not dev.load_error()
    run = dev.wait_finished(dev.launch("census"))
    assert not place.exists(), "a typing error creates no location"
    assert run.status == "FAILURE"
    assert str(place) in dev.failure_of(run.id)


def assert_both_pipelines_work_side_by_side(dev: DagsterDev) -> None:
    assert not dev.load_error()
    (repository,) = dev.locations()["two"]["locationOrLoadError"]["repositories"]
    assert assets_of(repository) == {
        **{f"eu/{name}": "eu_data" if name == "tables" else "eu" for name in ASSETS},
        **{f"lake/us/{name}": "us_data" if name == "tables" else "storage" for name in ASSETS},
    }
    assert names_of(repository, "jobs") == sorted(f"{name}_{job}" for name in ("eu", "us") for job in JOBS)
    assert names_of(repository, "sensors") == sorted(f"{name}_{one}" for name in ("eu", "us") for one in SENSORS)
    assert names_of(repository, "schedules") == sorted(f"{name}_{one}" for name in ("eu", "us") for one in SCHEDULES)
    runs = {name: dev.launch(f"{name}_compaction") for name in ("eu", "us")}
    for name, asset in (("eu", "eu/compaction"), ("us", "lake/us/compaction")):
        run = dev.wait_finished(runs[name])
        assert run.status == "SUCCESS", dev.why(run.id)
        assert dev.partitions(asset)["materialized"] == {f"of_{name}"}
        assert not dev.partitions(asset)["unmaterialized"], "each location has partitions of its own"


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
