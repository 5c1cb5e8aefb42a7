"""What an upsert costs: some keys into 10 M rows, beside a merge by deltalake, in seconds, requests and bytes.

Half of the keys are in the shard and half are new, spread over the whole key space, so that no file and no row group
can be left out: the worst case for both. One more figure has keys that lie together. Each side has its table on the
local disk, with its default settings, and opens it anew for each change.

DuckLake is no peer here: its extension of DuckDB is downloaded from its own site, and no package index has it.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure, beside, timed
from bench.peer import Peer, Ready

ROWS, QUICK_ROWS = 10_000_000, 200_000
KEYS, QUICK_KEYS = (1_000, 100_000), (100, 2_000)
ROUNDS = 3
SCHEMA = persist.Schema({"id": "int64"}, {"state": "string", "cents": "int64", "note": "string"})
MIB = 1 << 20
TURNS = itertools.count(1)
"""Each change has other values than those before it."""


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
        with Peer("bench.upsert:delta", folder, rows) as peer:
            found = [figure for keys in many for figure in _spread(url, peer, rows, keys, ROUNDS)]
            return [*found, _together(url, peer, rows, many[0])]


def table_of(ids: np.ndarray, round_: int) -> pa.Table:
    """Rows for these ids, other ones in each round."""
    states = np.array(["placed", "paid", "packed", "sent"])[(ids + round_) % 4]
    cents = (ids * 7919 + round_) % 100_000
    notes = np.char.add("note ", ((ids * 104_729) % 1_000_003).astype(str))
    return pa.table({"id": ids, "state": pa.array(states), "cents": cents, "note": pa.array(notes)})


def ids_of(rows: int, keys: int, round_: int) -> np.ndarray:
    """Half of them even, so that they are there, and half of them odd."""
    random = np.random.default_rng(round_)
    there = random.choice(rows, keys // 2, replace=False) * 2
    return np.sort(np.concatenate([there, random.choice(rows, keys - keys // 2, replace=False) * 2 + 1]))


def _spread(url: str, peer: Peer, rows: int, keys: int, rounds: int) -> list[Figure]:
    done: list[persist.Changed] = []

    def ours() -> float:
        table = table_of(ids_of(rows, keys, keys + len(done)), next(TURNS))
        return timed(lambda: done.append(_upsert(url, table)))

    mine, theirs = beside(ours, lambda: peer.run(call=f"merge {keys}")[0], rounds)
    cost, name = done[-1].cost, f"upsert-{keys}"
    if done[-1].inserted + done[-1].updated != keys:
        raise SystemExit(f"{done[-1]} is not what was to be changed")
    return [
        Figure(name, mine, theirs, "s", "deltalake's merge", at_most=1.0, settings=peer.settings,
               note=f"{rows:,} rows; {cost.requests} requests, {cost.bytes_read / MIB:.1f} MiB read"),
        Figure(f"{name}-written", cost.bytes_written / MIB, peer.ask("written") / MIB, "MiB", "deltalake's merge",
               at_most=1.0, settings=peer.settings),
    ]  # fmt: skip


def _together(url: str, peer: Peer, rows: int, keys: int) -> Figure:
    """Keys that follow those that are there, all in a row group or two."""
    done: list[persist.Changed] = []

    def ours() -> float:
        table = table_of(np.arange(rows, rows + keys), next(TURNS))
        return timed(lambda: done.append(_upsert(url, table)))

    mine, theirs = beside(ours, lambda: peer.run(call="merge together")[0], ROUNDS)
    cost = done[-1].cost
    note = f"at the end; {cost.requests} requests, {cost.bytes_read / MIB:.1f} MiB read"
    return Figure(f"upsert-{keys}-together", mine, theirs, "s", "deltalake's merge", at_most=1.0, note=note,
                  settings=peer.settings)  # fmt: skip


def _upsert(url: str, table: pa.Table) -> persist.Changed:
    with persist.open(url) as client, client.open_writer("orders", SCHEMA) as write:
        return write.upsert(table)


@contextmanager
def delta(folder: str, rows: str) -> Iterator[Ready]:
    """A Delta table with the same rows, and merges of the same keys."""
    import deltalake  # noqa: PLC0415 - only its process needs it

    place, count = str(Path(folder, "delta")), int(rows)
    for start in range(0, count, MIB):
        deltalake.write_deltalake(place, table_of(np.arange(start, min(start + MIB, count)) * 2, 0), mode="append")
    deltalake.DeltaTable(place).optimize.compact()
    sizes: list[int] = []

    def merge(source: pa.Table) -> None:
        before = _size(place)
        table = deltalake.DeltaTable(place)
        merging = table.merge(source, predicate="t.id = s.id", source_alias="s", target_alias="t")
        merging.when_matched_update_all().when_not_matched_insert_all().execute()
        sizes.append(_size(place) - before)

    def spread(keys: int) -> Callable[[], None]:
        return lambda: merge(table_of(ids_of(count, keys, next(TURNS)), next(TURNS)))

    def together() -> None:
        few = (KEYS if count == ROWS else QUICK_KEYS)[0]
        merge(table_of(np.arange(count, count + few), next(TURNS)))

    calls: dict[str, Callable[[], object]] = {f"merge {keys}": spread(keys) for keys in (*KEYS, *QUICK_KEYS)}
    calls |= {"merge together": together, "written": lambda: sizes[-1]}
    yield Ready(
        f"deltalake {deltalake.__version__}, its defaults, all cores, opened anew each time, files compacted before; "
        "merge on t.id = s.id, update all, insert all",
        calls,
    )
    shutil.rmtree(place, ignore_errors=True)


def _size(place: str) -> int:
    return sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file())
