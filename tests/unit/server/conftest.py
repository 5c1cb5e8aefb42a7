"""A shard of a server over a location in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.server.serving import Served
from tests.worlds import World


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def served(world: World) -> Served:
    return Served(world)
