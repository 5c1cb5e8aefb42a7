"""A process that puts, absorbs or reads the collection `c`: `put|absorb|read LOCATION CONSENSUS NAME`.

It says a line for each thing that it did. A reader compares what it reads with what the gateways of the example heard,
and ends with a traceback where that differs.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from contextlib import suppress

import pyarrow as pa

import persist_lib as persist
from examples.gateways import SCHEMA, heard
from persist_lib import pending_area

NAME, MINUTES = "c", 4_000
CONFIG = persist.Config(timeout_s=30, lease_ms=4_000)


def contents(upper: int) -> Counter[tuple[object, object]]:
    found: Counter[tuple[object, object]] = Counter()
    for row in heard(0, upper):
        found[row["sensor"], row["celsius"]] += row["_diff"]  # type: ignore[operator]
    return +found


def counted(table: pa.Table) -> Counter[tuple[object, object]]:
    columns = (table.column(name).to_pylist() for name in ("sensor", "celsius", "_diff"))
    return Counter({(sensor, celsius): diff for sensor, celsius, diff in zip(*columns, strict=True)})


def put_all(location: str, name: str, upper: int, step: int = 25) -> None:
    """Put everything before `upper`."""
    with pending_area.Writer(location, NAME, name, SCHEMA) as write:
        for lower in range(0, upper, step):
            write.put(heard(lower, min(upper, lower + step)), lower, min(upper, lower + step))


def put(location: str, _consensus: str, name: str) -> None:
    """Put for ever, from some time on, that a former process of this name may have put already."""
    dice = random.Random(os.getpid())
    lower = dice.randrange(MINUTES // 4)
    with pending_area.Writer(location, NAME, name, SCHEMA) as write:
        while True:
            upper = min(MINUTES, lower + dice.randrange(1, 9))
            write.put(heard(lower, upper), lower, upper)
            print("put", upper, flush=True)
            lower = upper if upper < MINUTES else dice.randrange(MINUTES)
            time.sleep(0.01)


def absorb(location: str, consensus: str, _name: str) -> None:
    """Absorb and maintain for ever."""
    with persist.open(location, consensus, config=CONFIG) as client:
        while True:
            with suppress(persist.Indeterminate, persist.TimedOut):
                print("absorbed", pending_area.absorb(client, NAME).upper.time, flush=True)
                client.maintain(NAME)


def read(location: str, consensus: str, _name: str) -> None:
    """Read for ever: as of some time, and what happens after it, by a reader or its clone."""
    dice = random.Random(os.getpid())
    with persist.open(location, consensus, config=CONFIG) as client:
        while True:
            with (
                suppress(persist.TimedOut, persist.LeaseExpired, persist.SinceViolation),
                pending_area.acquire_read_handle(client, NAME) as handle,
                handle.clone() as reader,
            ):
                as_of = min(MINUTES - 1, (reader.upper.time or 0) + dice.randrange(20))
                found = counted(reader.contents(as_of, diff=True, timeout=2))
                assert found == contents(as_of + 1), (as_of, found - contents(as_of + 1), contents(as_of + 1) - found)
                print("read", as_of, flush=True)
                events = reader.listen(as_of, timeout=1)
                for event in events:
                    if isinstance(event, persist.Progress):
                        assert found == contents(event.frontier.time or 0), event
                        print("read", event.frontier.time, flush=True)
                        if dice.random() < 0.3:
                            break
                    else:
                        for row in event.table.to_pylist():
                            found[row["sensor"], row["celsius"]] += row["_diff"]
                        found = +found


if __name__ == "__main__":
    {"put": put, "absorb": absorb, "read": read}[sys.argv[1]](*sys.argv[2:])
