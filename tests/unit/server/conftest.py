"""A shard of a server over a location in memory."""

from __future__ import annotations

import pytest

from tests.unit.server.serving import Served
from tests.worlds import World


@pytest.fixture
def served(world: World) -> Served:
    return Served(world)
