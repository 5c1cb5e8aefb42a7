"""A world with a folder of files, and sources there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sources.test_running import Place
from tests.worlds import World


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    world = World()
    yield Place(world, tmp_path / "in")
    world.close()
