"""A process that dies in the middle, as processes do: `python -m examples.crash orders file:./data [CONSENSUS]`.

It reads, it has uploaded a part, and it is killed at the very moment at which it would have committed. What it leaves
behind is a reader whose lease runs out, a writer likewise, and an object that nobody refers to. Nothing else.
"""

from __future__ import annotations

import os
import signal
import sys

import pyarrow as pa

import persist_lib as persist
from examples.order_book import ORDERS, Book, generate
from persist_lib.testing import Rival

LEASE_MS = 1_000


def main(shard: str, url: str, consensus: str | None = None) -> None:
    """Never returns."""
    with persist.open(url, consensus, config=persist.Config(lease_ms=LEASE_MS, inline_bytes=0)) as client:
        write, _read = client.open_shard(shard, ORDERS)
        upper = write.upper.time or 0
        _, _, orders = next(iter(generate(Book(seed=1), 1_000, updates_per_append=1_000)))
        late = orders.set_column(
            orders.schema.get_field_index("_time"),
            orders.schema.field("_time"),
            pa.array([upper] * len(orders), pa.uint64()),
        )
        assert write.id  # registered by now: the next compare-and-set is the append's
        rival = Rival(write.machine.consensus)
        rival.before_next(lambda: os.kill(os.getpid(), signal.SIGKILL))
        write.machine.consensus = rival
        write.compare_and_append(late, upper, upper + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
