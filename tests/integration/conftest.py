"""What tests of the command share, a shell; and those of a table of PostgreSQL that is followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from persist_lib.sources.postgres import reader as reading
from tests.integration.test_cli import Shell
from tests.integration.test_postgres_source import Shop


@pytest.fixture
def sh(tmp_path: Path) -> Shell:
    """Commands on a location that is not there yet."""
    return Shell(tmp_path / "data")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A schema of its own on a server, and a world with sources of its tables.

    A step waits half a minute for a server that is too busy to send: unlike a run, a test does not ask again.
    """
    monkeypatch.setattr(reading, "FEW_WAITS", 300)
    found = Shop()
    yield found
    found.close()
