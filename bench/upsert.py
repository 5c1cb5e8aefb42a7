"""What an upsert costs in seconds, requests and bytes: some keys into 10 M rows, beside the merges of others.

Half of the keys are in the shard and half are new, spread over the whole key space, so that no file and no row group
can be left out: the worst case for both. One more figure has keys that lie together. Each side has its table on the
local disk, with its default settings, and opens it again for each change.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure, beside, timed
from bench.merges import KEYS, MIB, QUICK_KEYS, QUICK_ROWS, ROWS, TURNS, ids_of, install_ducklake, table_of
from bench.peer import Peer

ROUNDS = 3
SCHEMA = persist.Schema({"id": "int64"}, {"state": "string", "cents": "int64", "note": "string"})


def upsert(quick: bool) -> list[Figure]:
    """Upserts of 1,000 and of 100,000 keys beside deltalake's merge, and of 1,000 keys that lie together."""
    rows, many = (QUICK_ROWS, QUICK_KEYS) if quick else (ROWS, KEYS)
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        url = f"file:{folder}/data"
        with persist.open(url) as client, client.open_writer("orders", SCHEMA) as write:
            write.compare_and_append(
                (table_of(np.arange(start, min(start + MIB, rows)) * 2, 0) for start in range(0, rows, MIB)), 0, 1
            )
            client.maintain("orders")
        install_ducklake()
        found: list[Figure] = []
        for start, name in (("delta", "deltalake"), ("ducklake", "DuckLake")):
            with Peer(f"bench.merges:{start}", folder, rows) as peer:
                found += [figure for keys in many for figure in _spread(url, peer, name, rows, keys)]
                found.append(_together(url, peer, name, rows, many[0]))
        return found


def _spread(url: str, peer: Peer, whose: str, rows: int, keys: int) -> list[Figure]:
    done: list[persist.Changed] = []

    def ours() -> float:
        table = table_of(ids_of(rows, keys, keys + len(done)), next(TURNS))
        return timed(lambda: done.append(_upsert(url, table)))

    mine, theirs = beside(ours, lambda: peer.run(call=f"merge {keys}")[0], ROUNDS)
    cost, name = done[-1].cost, f"upsert-{keys}-beside-{whose.lower()}"
    if done[-1].inserted + done[-1].updated != keys:
        raise SystemExit(f"{done[-1]} is not what was to be changed")
    return [
        Figure(name, mine, theirs, "s", f"{whose}'s merge", at_most=1.0, settings=peer.settings,
               note=f"{rows:,} rows; {cost.requests} requests, {cost.bytes_read / MIB:.1f} MiB read"),
        Figure(f"{name}-written", cost.bytes_written / MIB, peer.ask("written") / MIB, "MiB", f"{whose}'s merge",
               at_most=1.0, settings=peer.settings),
    ]  # fmt: skip


def _together(url: str, peer: Peer, whose: str, rows: int, keys: int) -> Figure:
    """Keys that follow those that are there, all in a row group or two."""
    done: list[persist.Changed] = []

    def ours() -> float:
        table = table_of(np.arange(rows * 2, rows * 2 + keys), next(TURNS))
        return timed(lambda: done.append(_upsert(url, table)))

    mine, theirs = beside(ours, lambda: peer.run(call="merge together")[0], ROUNDS)
    cost = done[-1].cost
    note = f"at the end; {cost.requests} requests, {cost.bytes_read / MIB:.1f} MiB read"
    name = f"upsert-{keys}-together-beside-{whose.lower()}"
    return Figure(name, mine, theirs, "s", f"{whose}'s merge", at_most=1.0, note=note, settings=peer.settings)


def _upsert(url: str, table: pa.Table) -> persist.Changed:
    with persist.open(url) as client, client.open_writer("orders", SCHEMA) as write:
        return write.upsert(table)
