"""A process that dies in the middle, as processes do: `python -m examples.crash orders file:./data [CONSENSUS]`.

It reads, uploads a part, and is killed just before it would commit. It leaves behind a reader and a writer whose leases
run out, and an object that no state refers to, and nothing else.
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
    """Append one part, and be killed just before the commit. It never returns."""
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
