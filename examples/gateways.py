"""Gateways that hear the same sensors: `python -m examples.gateways [LOCATION] [--gateways 100] [--hours 24]`.

Each gateway puts what it heard below its own name, and does nothing else: it knows no database, and no other gateway.
What one of them misses another one has. Some die, some are offline for most of the day and put what they have
afterwards. A controller absorbs what was put, and a dashboard reads it, also what is not absorbed yet.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

import persist_lib as persist
from persist_lib import pending_area

SCHEMA = persist.Schema(key={"sensor": "int64 not null"}, value={"celsius": "float64"})
SENSORS = 20
HOUR = 60
"""Times are minutes since the first of them."""


def heard(lower: int, upper: int) -> list[dict[str, object]]:
    """What the sensors sent in these minutes: each gateway hears the same. A sensor replaces its last reading."""
    found: list[dict[str, object]] = []
    for minute in range(lower, upper):
        sensor, at = minute % SENSORS, minute // SENSORS
        if at:
            found.append({"sensor": sensor, "celsius": _celsius(sensor, at - 1), "_time": minute, "_diff": -1})
        found.append({"sensor": sensor, "celsius": _celsius(sensor, at), "_time": minute, "_diff": 1})
    return found


def _celsius(sensor: int, number: int) -> float:
    return 15 + (7 * sensor + 3 * number) % 20 / 2


def day(name: str, minutes: int) -> Iterator[tuple[int, int]]:
    """The hours that a gateway puts, in the order in which it does: `[lower, upper)`, cut as it happened to wake up."""
    dice = random.Random(name)
    fate = dice.choice(["well", "well", "dies", "offline"])
    end = dice.randrange(minutes) if fate == "dies" else minutes
    step = dice.choice([HOUR // 4, HOUR // 2, HOUR])
    hours = [(lower, min(lower + step, end)) for lower in range(0, end, step)]
    return iter(hours if fate != "offline" else [*hours[: len(hours) // 8], *hours[-1:], *hours[len(hours) // 8 : -1]])


def gateway(location: str, name: str, minutes: int) -> int:
    """Be one gateway for a day. Returns how many batches it put."""
    with pending_area.Writer(location, "sensors", name, SCHEMA) as write:
        return sum(bool(write.put(heard(lower, upper), lower, upper)) for lower, upper in day(name, minutes))


def dashboard(read: pending_area.PendingReader, as_of: int) -> pa.Table:
    """The newest reading of each sensor."""
    return read.contents(as_of).select(["sensor", "celsius"]).sort_by("sensor")


def main() -> None:
    """Let all gateways put their day, absorb it meanwhile, and show what the sensors said last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("location", nargs="?", default="file:./data")
    parser.add_argument("--gateways", type=int, default=100)
    parser.add_argument("--hours", type=int, default=24)
    options = parser.parse_args()
    minutes = options.hours * HOUR
    names = [f"gateway-{number}" for number in range(options.gateways)]
    with persist.open(options.location) as client, ThreadPoolExecutor(8) as pool:
        read = pending_area.create(client, "sensors", SCHEMA)
        putting = [pool.submit(gateway, options.location, name, minutes) for name in names]
        while not all(future.done() for future in putting):
            done = pending_area.absorb(client, "sensors")
            print(f"absorbed {done.batches} batches up to minute {done.upper.time}, {done.discarded} not needed")
        print(f"{sum(future.result() for future in putting)} batches put")
        done = pending_area.absorb(client, "sensors")
        print(f"absorbed up to minute {done.upper.time}; {done.left} batches are left")
        print(dashboard(read, minutes - 1).to_pandas().to_string(index=False))
        read.close()


if __name__ == "__main__":
    main()
