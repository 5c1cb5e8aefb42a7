"""What unit tests share: a world."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds import World


@pytest.fixture
def world() -> Iterator[World]:
    """A location in memory, whose clients and clock a test decides."""
    made = World()
    yield made
    made.close()
