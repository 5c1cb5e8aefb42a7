from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.pending_area.areas import Area
from tests.worlds import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture
def area(world: World) -> Area:
    return Area(world)
