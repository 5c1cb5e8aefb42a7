"""Locations for Dagster's side, and what Dagster itself warns of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from tests.spark.collections import SMALL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Dagster warns of its own calls: of a beta parameter of sensors, and of what it has deprecated itself."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::dagster.BetaWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::dagster.PreviewWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:dagster"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def client(folder: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as opened:
        yield opened


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral
