"""The gateways of the example make one collection, whichever of them die or are offline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import persist_lib as persist
from examples import gateways
from examples.gateways import HOUR, SCHEMA, SENSORS, dashboard, day, gateway, heard
from persist_lib import pending_area


def test_a_day_is_put_whole_by_all_but_those_that_die() -> None:
    ends = {}
    for number in range(100):
        hours = list(day(f"gateway-{number}", 24 * HOUR))
        assert sorted(hours) == [(lower, upper) for lower, upper in sorted(hours) if lower < upper]
        ends[number] = max((upper for _, upper in hours), default=0)
        assert sum(upper - lower for lower, upper in hours) == ends[number], "no gap, and nothing twice"
    assert 10 < sum(end < 24 * HOUR for end in ends.values()) < 50
    assert any(list(day(f"gateway-{number}", 600)) != sorted(day(f"gateway-{number}", 600)) for number in range(20))


def test_what_many_gateways_put_is_what_the_sensors_said(tmp_path: Path) -> None:
    location, minutes = f"file:{tmp_path}/data", 3 * HOUR
    with persist.open(location) as client, pending_area.create(client, "sensors", SCHEMA) as read:
        for number in range(6):
            gateway(location, f"gateway-{number}", minutes)
            pending_area.absorb(client, "sensors")
        assert pending_area.absorb(client, "sensors").upper == persist.at(minutes)
        last = {row["sensor"]: row["celsius"] for row in heard(0, minutes) if row["_diff"] == 1}
        shown = dashboard(read, minutes - 1)
        assert shown.to_pylist() == [{"sensor": sensor, "celsius": last[sensor]} for sensor in range(SENSORS)]


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gateways", f"file:{tmp_path}/data", "--gateways", "9", "--hours", "2"]
    monkeypatch.setattr(sys, "argv", words)
    gateways.main()
    printed = capsys.readouterr().out
    assert "absorbed up to minute 120; 0 batches are left" in printed
    assert len(printed.splitlines()) > SENSORS
