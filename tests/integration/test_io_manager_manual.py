"""docs/io-manager.md is true: its tables of names are what the code does. tests/docs runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestration.io.names import place_of

pytestmark = [
    pytest.mark.dagster,
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:dagster"),
]
TEXT = (Path(__file__).parents[2] / "docs" / "io-manager.md").read_text()


def test_its_names_are_those_that_assets_get() -> None:
    table = TEXT.partition("\n## Names\n")[2].partition("\n\nThe metadata")[0]
    rows = re.findall(r"^\| (`.+`) \| (?:`(.+)`)? ?\| `(.+)` \|$", table, re.MULTILINE)
    assert len(rows) == 4
    for asset, partition, shard in rows:
        path = [part.strip("` ") for part in asset.split(" / ")]
        assert place_of(path, partition.replace("\\|", "|") or None, {}).table == shard
    assert place_of(["raw", "orders"], "2026-11-22", {}).table == "raw.orders.2026-11-22"
