"""A pending area: absorbing a million updates in a thousand batches, beside one bulk append of the same updates."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure, timed
from persist_lib import pending_area

SCHEMA = persist.Schema(key={"id": "int64"}, value={"sku": "string", "cents": "int64", "state": "string"})
ROUNDS = 3


def pending(quick: bool) -> list[Figure]:
    """Updates a second, file + SQLite: of a thousand small batches, which are rewritten, and of a few large ones, which
    are adopted. The peer is one `compare_and_append` of all of them to another shard of the same location, in turns.
    """
    updates, batches = (200_000, 200) if quick else (1_000_000, 1_000)
    small = _absorbed(updates, batches)
    few = 1 if quick else 4
    large = _absorbed(updates, few)
    return [
        Figure("pending-absorb", updates / small[0], updates / small[1], "updates/s", "one bulk append", at_least=0.5,
               note=f"{batches:,} batches, rewritten; {small[2]} objects written"),
        Figure("pending-adopt", updates / large[0], updates / large[1], "updates/s", "one bulk append", at_least=0.5,
               note=f"{few} batches, adopted; {large[2]} objects written"),
    ]  # fmt: skip


def _absorbed(updates: int, batches: int) -> tuple[float, float, int]:
    """The best seconds of absorbing and of appending, and how many objects the absorption wrote."""
    ours, peers, written = [], [], 0
    for round_ in range(ROUNDS):
        with TemporaryDirectory(prefix="persist-bench-") as folder, persist.open(f"file:{folder}/data") as client:
            table = _updates(updates, batches, seed=round_)
            pending_area.create(client, "pending", SCHEMA).close()
            step = updates // batches
            with pending_area.Writer(f"file:{folder}/data", "pending", "edge-7", SCHEMA) as write:
                for number in range(batches):
                    write.put(table.slice(number * step, step), number, number + 1)
            with client.open_writer("bulk", SCHEMA) as bulk:
                peers.append(timed(lambda: bulk.compare_and_append(table, 0, batches)))  # noqa: B023
            with persist.Spending() as spent:
                ours.append(timed(lambda: pending_area.absorb(client, "pending")))
            written = spent.cost.puts
            assert client.inspect("pending").state.fingerprint == client.inspect("bulk").state.fingerprint
    return min(ours), min(peers), written


def _updates(count: int, batches: int, seed: int) -> pa.Table:
    """Rows like orders, in the order of their times, with ids at random."""
    rng = np.random.default_rng(seed)
    states = np.array(["placed", "paid", "sent"])
    columns = {
        "id": rng.integers(0, 10 * count, count), "sku": [f"sku-{n}" for n in rng.integers(0, 5_000, count).tolist()],
        "cents": rng.integers(100, 99_999, count), "state": states[rng.integers(0, 3, count)],
        "_time": (np.arange(count) * batches // count).astype(np.uint64), "_diff": np.ones(count, np.int64),
    }  # fmt: skip
    return pa.table(columns, schema=SCHEMA.updates)
