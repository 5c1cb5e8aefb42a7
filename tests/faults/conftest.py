"""Where processes that die are tried: in memory, and on servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.stores import CONSENSUSES


@pytest.fixture(params=["memory", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sqlite", "postgresql"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], tuple[str, str | None]]:
    def make(name: str) -> tuple[str, str | None]:
        if request.param == "memory":
            return "memory:", None
        folder = tmp_path / name
        folder.mkdir()
        url = CONSENSUSES[request.param].prepare(folder)
        return (url, None) if request.param == "sqlite" else (f"file:{folder}/blobs", url)

    return make
