"""Locations for Dagster's side, and what Dagster itself warns of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.resources import Persist
from orchestration.sources import MEMORIES
from tests.orchestration.storing import Store
from tests.spark.collections import SMALL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Dagster warns of its own calls: of a beta parameter of sensors, and of what it has deprecated itself."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::dagster.BetaWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::dagster.PreviewWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:dagster"))


@pytest.fixture(autouse=True)
def may_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines may delete, as in `make dev`: `test_plans` is about those that may not."""
    monkeypatch.setenv("PERSIST_MAY_DELETE", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def client(folder: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as opened:
        yield opened


NO_OP = "dagster._core.storage.noop_compute_log_manager"
NO_LOGS = {"compute_logs": {"module": NO_OP, "class": "NoOpComputeLogManager"}}
"""What a step prints is not looked at here: to keep it, Dagster starts four processes for each."""


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of an instance on disk that has stored nothing."""
    home = tmp_path_factory.mktemp("home")
    with dg.DagsterInstance.local_temp(str(home)) as made:
        made.all_instigator_state()
    return home


@pytest.fixture
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """New, and on disk in modules with ON_DISK: the contexts of sensors and schedules open it again."""
    if not getattr(request.module, "ON_DISK", False):
        with dg.DagsterInstance.ephemeral() as made:
            yield made
        return
    # A copy costs a quarter of what it takes to make it.
    home = shutil.copytree(request.getfixturevalue("new_home"), tmp_path / "home")
    with dg.DagsterInstance.local_temp(str(home), NO_LOGS) as made:
        yield made


@pytest.fixture
def store(folder: Path, instance: dg.DagsterInstance) -> Store:
    return Store(folder, instance)


@pytest.fixture
def given(folder: Path) -> Iterator[Persist]:
    """The resource, as a tick gets it; what sensors remember of sources is forgotten."""
    MEMORIES.clear()
    resource = Persist(location=f"file:{folder}", config=SMALL)
    yield resource
    resource.teardown_after_execution(dg.build_init_resource_context())
