"""Clients with the settings of the file that asks for them (`CONFIG`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from tests.worlds import World


@pytest.fixture
def client(request: pytest.FixtureRequest, world: World) -> persist.Client:
    return world.client(request.module.CONFIG)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[persist.Client]:
    """A location that other programs can read."""
    with persist.open(f"file:{tmp_path}", config=request.module.CONFIG) as client:
        yield client
