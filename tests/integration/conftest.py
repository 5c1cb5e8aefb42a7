"""What tests of the command share: a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_cli import Shell


@pytest.fixture
def sh(tmp_path: Path) -> Shell:
    """Commands on a location that is not there yet."""
    return Shell(tmp_path / "data")
