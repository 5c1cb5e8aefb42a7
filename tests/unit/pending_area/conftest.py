from __future__ import annotations

import pytest

from tests.unit.pending_area.areas import Area
from tests.worlds import World


@pytest.fixture
def area(world: World) -> Area:
    return Area(world)
