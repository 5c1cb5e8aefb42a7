"""Readings of sensors that arrive late and out of order: `python -m examples.readings [LOCATION] [--seconds 10]`.

A gateway writes readings as they come, and seals them by a watermark: the newest time it has seen, less the lateness
that it allows. A dashboard in another runtime reads what is sealed, which never changes again, and beside it what is
not sealed yet.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from persist_lib import streams

SCHEMA = persist.Schema(
    key={"sensor": "string not null", "number": "int64 not null"}, value={"celsius": "float64"}, times="ms"
)
LATENESS_MS = 2_000
"""How late a reading may be. What comes later than that is not taken."""
SENSORS = ("attic", "cellar", "kitchen")


class Reading(NamedTuple):
    """What a sensor measured: its number counts the readings of that sensor, `time` is ms since 1970."""

    sensor: str
    number: int
    celsius: float
    time: int


def measured(dice: random.Random, start_ms: int, count: int) -> list[Reading]:
    """Readings in the order in which they arrive: each some time after it was made, some far too late."""
    made = [
        Reading(sensor, number, round(18 + dice.gauss(0, 1), 1), start_ms + 100 * number + dice.randrange(50))
        for number in range(count)
        for sensor in SENSORS
    ]
    delays = {reading: dice.choice([0, 0, 50, 300, 1_500, 5_000]) for reading in made}
    return sorted(made, key=lambda reading: reading.time + delays[reading])


def ingest(write: streams.StreamWriter, arriving: Iterable[list[Reading]]) -> Iterator[tuple[int, int]]:
    """Write what arrives, and seal by the watermark. Yields how many were taken and dropped, for each lot."""
    watermark = write.upper.time or 0
    for lot in arriving:
        taken = [reading for reading in lot if reading.time >= watermark]
        writing = write.write(
            [{"sensor": r.sensor, "number": r.number, "celsius": r.celsius, "_time": r.time} for r in taken]
        )
        watermark = max([watermark, *(reading.time - LATENESS_MS for reading in taken)])
        write.seal(watermark)  # it usually shares the commit of the write
        writing.result()
        yield len(taken), len(lot) - len(taken)


def dashboard(read: streams.StreamReader) -> pa.Table:
    """Averages by sensor, of what is final and of what is not yet."""
    with read.contents() as found:
        rows = found.to_arrow()
    rows = rows.append_column("final", pc.equal(rows.column("_state"), "sealed"))
    return rows.group_by(["sensor", "final"]).aggregate([("celsius", "mean"), ("celsius", "count")])


def main() -> None:
    """Write and show for some seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("location", nargs="?", default="file:./data")
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with persist.open(options.location) as db:
        write, _ = db.stream("readings", SCHEMA, reentrance_id="gateway", owner="examples.readings")
        arrived = measured(random.Random(), time.time_ns() // 1_000_000, round(options.seconds * 10))

        def pace() -> Iterator[list[Reading]]:
            for at in range(0, len(arrived), 3):
                time.sleep(0.1)
                yield arrived[at : at + 3]

        gateway = threading.Thread(target=lambda: print(f"(taken, dropped) by lot: {list(ingest(write, pace()))[-5:]}"))
        gateway.start()
        with persist.open(options.location, read_only=True) as reading:
            read = reading.stream("readings")
            while gateway.is_alive():
                print(f"sealed up to {SCHEMA.show(read.fetch_upper())}")
                print(dashboard(read).to_pandas().sort_values(["sensor", "final"]).to_string(index=False))
                gateway.join(1)


if __name__ == "__main__":
    main()
