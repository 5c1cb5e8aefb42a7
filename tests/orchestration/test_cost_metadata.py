"""What each duty asked of the location is on its asset, in numbers that draw timelines."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.duties import DUTIES
from orchestration.run import run_maintenance
from tests.spark.collections import SMALL, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(120)]
FIGURES = ("location_requests", "bytes_read", "bytes_written", "dollars")


@pytest.mark.parametrize("prices", [None, "s3", '{"get": 0.001}'])
def test_every_duty_tells_its_requests_bytes_and_dollars(
    client: persist.Client,
    folder: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    prices: str | None,
) -> None:
    write(client, "s", batches=4, rows=10)
    if prices:
        monkeypatch.setenv("PERSIST_PRICES", prices)
    report = run_maintenance(f"file:{folder}", config=SMALL, instance=instance, engine="local")
    assert report.success, report.failure
    figures = report.figures["s"]
    assert set(figures) == set(DUTIES)
    for duty in DUTIES:
        assert all(isinstance(figures[duty][name], (int, float)) for name in FIGURES), duty
        assert figures[duty]["location_requests"] > 0, duty
    compacted = figures["compaction"]
    assert compacted["bytes_read"] >= compacted["bytes_in"]
    assert compacted["bytes_written"] >= compacted["bytes_out"]
    assert "| dollars |" in compacted["report"]
    if prices is None:
        assert compacted["dollars"] == 0, "files are free"
    else:
        assert compacted["dollars"] >= compacted["dollars_planned"] > 0
