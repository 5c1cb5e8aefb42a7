"""What tests of shards share: the stores of one shard, and the shard as it was created."""

from __future__ import annotations

import pytest

from persist_lib.shard.commit import Machine
from tests.unit.core.core_shard import Store


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def machine(store: Store) -> Machine:
    """That of the process which created it."""
    return store.created()
