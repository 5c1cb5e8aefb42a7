"""Where processes that die are tried: in memory, and on servers; and shard servers that die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.stores import CONSENSUSES
from tests.faults.shard_servers import Site


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


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Two shard servers as processes, and the store behind them."""
    url = CONSENSUSES[request.param].prepare(tmp_path)
    made = Site(url, None) if request.param == "sqlite" else Site(f"file:{tmp_path}/blobs", url)
    yield made
    made.close()
