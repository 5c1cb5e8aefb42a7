"""The compaction kernel beside DuckDB's same query: one thread, one memory limit, near-distinct updates, string keys.

Both read the same sorted runs from Parquet and write one consolidated Parquet result, each in a process of its own, so
that peak memory is its own. Runs of the two alternate, and the figure is the median of the ratios.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bench.figures import Figure
from persist_lib.format.consolidation import consolidate
from persist_lib.format.parts import PartSource, encode_part, open_run
from persist_lib.merge import merge_to_parts
from persist_lib.schema import Schema

SCHEMA = Schema({"key": "string"}, {"state": "string", "amount": "int64"})
RUNS = 12
FULL, QUICK = 16_000_000, 400_000
PAIRS = 3
MEMORY = "1GB"
QUERY = """
    COPY (SELECT key, state, amount, greatest(_time, {since}::UBIGINT) AS _time, sum(_diff)::BIGINT AS _diff
          FROM read_parquet('{source}/*.parquet') GROUP BY ALL HAVING sum(_diff) <> 0 ORDER BY 1, 2, 3, 4)
    TO '{target}' (FORMAT parquet)
"""


def kernel(quick: bool) -> list[Figure]:
    """Throughput in updates per second, peak memory, and what the fingerprint costs."""
    updates = QUICK if quick else FULL
    sides = ("ours", "duckdb", "unhashed")
    with tempfile.TemporaryDirectory(prefix="persist-kernel-") as folder:
        root = Path(folder)
        write_runs(root / "runs", updates)
        rounds = [{side: _measured(side, root) for side in sides} for _ in range(1 if quick else PAIRS)]
    middle = sorted(rounds, key=lambda said: said["duckdb"]["seconds"] / said["ours"]["seconds"])[len(rounds) // 2]
    ours, theirs = (updates / middle[side]["seconds"] / 1e6 for side in ("ours", "duckdb"))
    cpu = {side: statistics.median(said[side]["cpu_seconds"] for said in rounds) for side in sides}
    memory = max(said["ours"]["peak_mib"] for said in rounds)
    note = f"{updates / 1e6:g} M updates, {RUNS} runs, {middle['ours']['rows']:,.0f} left"
    return [
        Figure("kernel", ours, theirs, "M updates/s", "DuckDB, 1 thread, 1 GB", at_least=4.0, note=note),
        Figure("kernel memory", memory, 1024, "MiB", "the limit", at_most=1.0, note="peak RSS of the process"),
        Figure("fingerprint", cpu["ours"], cpu["unhashed"], "CPU s", "without it", at_most=1.2),
    ]


def write_runs(folder: Path, updates: int, runs: int = RUNS, seed: int = 1) -> None:
    """Sorted runs of near-distinct updates: 20-byte keys, about one in ten retracted or corrected later."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index in range(runs):
        rows = updates // runs
        table = consolidate(SCHEMA, updates_of(rng, rows, updates, index))
        part = encode_part(SCHEMA, 0, table)
        (folder / f"{index}.parquet").write_bytes(part.data)
        (folder / f"{index}.digests").write_bytes(part.digests)


def updates_of(rng: np.random.Generator, rows: int, keys: int, batch: int) -> pa.Table:
    """One append's worth: at times of its own, over keys that all appends share."""
    ids = rng.integers(0, keys, rows).astype(np.uint64)
    # A bijection spreads ids, so that neighbours in key order are not neighbours in time.
    names = np.char.mod("customer-%011d", (ids * np.uint64(2654435761)) % np.uint64(10**11))
    states = np.array(["placed", "paid", "packed", "shipped", "delivered", "returned", "cancelled"])
    amounts = ids.astype(np.int64) % 9973
    times = rng.integers(100 * batch, 100 * batch + 100, rows).astype(np.uint64)
    diffs = np.where(rng.random(rows) < 0.8, 1, -1)
    columns = [names, states[(ids % np.uint64(7)).astype(np.int64)], amounts, times, diffs]
    return pa.table([pa.array(column) for column in columns], schema=SCHEMA.updates)


def merge_folder(source: Path, target: Path, since: int) -> dict[str, int]:
    """Merge the runs of a folder into parts of another, through verified ranged reads."""
    target.mkdir(exist_ok=True)
    runs = [open_run([_part(path)], SCHEMA) for path in sorted(source.glob("*.parquet"))]
    rows = written = 0
    for index, part in enumerate(merge_to_parts(runs, SCHEMA, 0, advance_to=since)):
        with (target / f"{index}.parquet").open("wb") as file:
            file.write(part.data)
        rows, written = rows + part.said.rows, written + part.size
        del part  # or it would be in memory while the next one grows
    return {"rows": rows, "bytes": written}


def _part(path: Path) -> PartSource:
    file = os.open(path, os.O_RDONLY)
    digests = path.with_suffix(".digests").read_bytes()
    return PartSource(
        str(path), os.fstat(file).st_size, digests, SCHEMA, None, None,
        lambda start, end: os.pread(file, end - start, start),
    )  # fmt: skip


def _measured(which: str, root: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernel", which, str(root)], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout))


def main(which: str, root: Path, since: int = 600) -> None:
    """One side of a pair, in this process; prints its seconds and peak memory."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    said: dict[str, float] = {}
    if which == "unhashed":
        mock.patch("persist_lib.format.encoded.hash_rows", _no_hashes).start()
    start, cpu = time.perf_counter(), time.process_time()
    said |= _duckdb(root, since) if which == "duckdb" else merge_folder(root / "runs", root / "out", since)
    said |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    said |= {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    print(json.dumps(said))


def _no_hashes(_: Schema, table: pa.Table) -> npt.NDArray[np.uint64]:
    return np.zeros(table.num_rows, np.uint64)


def _duckdb(root: Path, since: int) -> dict[str, float]:
    target = root / "duckdb.parquet"
    connection = duckdb.connect()
    connection.execute(f"SET threads=1; SET memory_limit='{MEMORY}'; SET temp_directory='{root / 'spill'}'")
    connection.execute("SET preserve_insertion_order=false")
    connection.execute(QUERY.format(source=root / "runs", target=target, since=since))
    return {"rows": float(pq.read_metadata(target).num_rows), "bytes": float(target.stat().st_size)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
