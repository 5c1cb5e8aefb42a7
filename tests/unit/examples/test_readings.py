"""Readings that arrive late are where a plain list has them, and what the dashboard calls final never changes."""

from __future__ import annotations

import random

from examples.readings import LATENESS_MS, SCHEMA, SENSORS, dashboard, ingest, measured
from persist_lib import streams


def test_what_is_sealed_is_what_arrived_in_time_and_stays_as_it_is() -> None:
    arrived = measured(random.Random(3), 1_000_000, 80)
    lots = [arrived[at : at + 9] for at in range(0, len(arrived), 9)]
    assert arrived != sorted(arrived, key=lambda reading: reading.time)
    with streams.open("memory:") as runtime:
        write, read = runtime.create_or_load("readings", SCHEMA)
        counts = []
        final: set[tuple[object, ...]] = set()
        for taken_and_dropped in ingest(write, lots):
            counts.append(taken_and_dropped)
            if read.fetch_upper().time:
                rows = {tuple(row.values()) for row in read.snapshot().to_pylist()}
                assert final <= rows
                final = rows
        table = dashboard(read)
        assert sum(table.column("celsius_count").to_pylist()) == sum(taken for taken, _ in counts)
        runtime.flush()
        newest = max(reading.time for reading in arrived)
        assert newest - LATENESS_MS - 5_000 < (write.upper.time or 0) <= newest - LATENESS_MS
        assert sum(dropped for _, dropped in counts) > 0
        assert set(table.column("sensor").to_pylist()) == set(SENSORS)
