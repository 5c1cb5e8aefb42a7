"""The compaction kernel beside DuckDB's same query: one thread, one memory limit, near-distinct updates, string keys.

Both read the same sorted runs from Parquet and write one consolidated Parquet result, each in a process of its own, so
that peak memory is its own. Runs of the two alternate, and the figure is the median of the ratios. `kernel-100m` merges
100 M updates as well, to see that memory does not grow with them; the peer does not take part in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.figures import Figure, peak_mib
from bench.peer import Peer
from persist_lib.format.descriptions import EncodedPart
from persist_lib.format.parts import PART_BYTES, PartRun, StoredPart, encode_part, parts_of
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.merge import merge_runs
from persist_lib.schema.schema import Schema

SCHEMA = Schema({"key": "string"}, {"state": "string", "amount": "int64"})
RUNS = 12
FULL, QUICK = 16_000_000, 400_000
LARGE, LARGE_QUICK = 100_000_000, 800_000
SLICE = 2_000_000  # rows of a run that are made at a time, so that making runs takes bounded memory
PAIRS = 3
LIMIT_MIB = 1024
SINCE = 600


def kernel(quick: bool) -> list[Figure]:
    """Throughput in updates per second, peak memory, and what the fingerprint costs."""
    updates = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="persist-kernel-") as folder:
        root = Path(folder)
        _in_own_process("runs", root, updates)
        rounds = [
            {
                "ours": _in_own_process("ours", root),
                "duckdb": _duckdb(root),
                "unhashed": _in_own_process("unhashed", root),
            }
            for _ in range(1 if quick else PAIRS)
        ]
    middle = sorted(rounds, key=lambda said: said["duckdb"]["seconds"] / said["ours"]["seconds"])[len(rounds) // 2]
    ours, theirs = (updates / middle[side]["seconds"] / 1e6 for side in ("ours", "duckdb"))
    cpu = {side: statistics.median(said[side]["cpu_seconds"] for said in rounds) for side in middle}
    memory, beside = (max(said[side]["peak_mib"] for said in rounds) for side in ("ours", "duckdb"))
    note = (
        f"{updates / 1e6:g} M updates, {RUNS} runs, {middle['ours']['rows']:,.0f} left; CPU {cpu['ours']:.1f} s, "
        f"DuckDB {cpu['duckdb']:.1f} s"
    )
    return [
        Figure("kernel", ours, theirs, "M updates/s", "DuckDB, 1 thread, 1 GB", at_least=5.0, note=note,
               settings=str(middle["duckdb"]["settings"])),
        Figure("kernel memory", memory, LIMIT_MIB, "MiB", "the limit", at_most=1.0,
               note=f"peak RSS of the process; DuckDB's {beside:,.0f} MiB"),
        Figure("fingerprint", cpu["ours"], cpu["unhashed"], "CPU s", "without it", at_most=1.1),
    ]  # fmt: skip


def kernel_100m(quick: bool) -> list[Figure]:
    """Peak memory and throughput of a merge of 100 M updates, beside those of 16 M, and the limit."""
    small, large = (QUICK, LARGE_QUICK) if quick else (FULL, LARGE)
    found = {}
    for updates in (small, large):
        with tempfile.TemporaryDirectory(prefix="persist-kernel-") as folder:
            _in_own_process("runs", Path(folder), updates)
            found[updates] = _in_own_process("ours", Path(folder))
    here, there = found[large], found[small]
    rate, beside_rate = (updates / said["seconds"] / 1e6 for updates, said in ((large, here), (small, there)))
    name, beside = f"{large / 1e6:g} M", f"{small / 1e6:g} M updates"
    return [
        Figure(f"kernel memory, {name}", here["peak_mib"], LIMIT_MIB, "MiB", "the limit", at_most=1.0,
               note=f"{RUNS} runs, {here['rows']:,.0f} left, {here['bytes'] / 1e6:,.0f} MB written"),
        Figure("kernel memory is flat", here["peak_mib"], there["peak_mib"], "MiB", beside, at_most=1.1),
        Figure(f"kernel, {name}", rate, beside_rate, "M updates/s", beside, at_least=0.8),
    ]  # fmt: skip


def write_runs(folder: Path, updates: int, runs: int = RUNS, seed: int = 1, slice_rows: int = SLICE) -> None:
    """Sorted runs of near-distinct updates: 20-byte keys, about one in ten retracted or corrected later.

    A run of more than `slice_rows` is made of sorted slices on disk, which are then merged.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index in range(runs):
        rows = updates // runs
        sizes = [min(slice_rows, rows - start) for start in range(0, rows, slice_rows)]
        made = [folder / f"{index}" if len(sizes) == 1 else folder / f"{index}-{n}" for n in range(len(sizes))]
        for path, size in zip(made, sizes, strict=True):
            _write(path, encode_part(SCHEMA, 0, consolidate(SCHEMA, updates_of(rng, size, updates, index))))
        if len(made) > 1:
            sorted_runs = [PartRun([_part(path.with_suffix(".parquet"))], SCHEMA) for path in made]
            [part] = parts_of(_merged(sorted_runs), SCHEMA, 0, 1 << 40)
            _write(folder / f"{index}", part)
            for path in made:
                path.with_suffix(".parquet").unlink()
                path.with_suffix(".digests").unlink()


def _write(path: Path, part: EncodedPart) -> None:
    path.with_suffix(".parquet").write_bytes(part.data)
    path.with_suffix(".digests").write_bytes(part.digests)


def updates_of(rng: np.random.Generator, rows: int, keys: int, batch: int) -> pa.Table:
    """One append's worth: at times of its own, over keys that all appends share."""
    ids = rng.integers(0, keys, rows).astype(np.uint64)
    # A bijection spreads ids, so that neighbours in key order are not neighbours in time.
    names = _names((ids * np.uint64(2654435761)) % np.uint64(10**11))
    states = pa.array(["placed", "paid", "packed", "shipped", "delivered", "returned", "cancelled"])
    amounts = ids.astype(np.int64) % 9973
    times = rng.integers(100 * batch, 100 * batch + 100, rows).astype(np.uint64)
    diffs = np.where(rng.random(rows) < 0.8, 1, -1)
    columns = [names, states.take(pa.array(ids % np.uint64(7))), *map(pa.array, (amounts, times, diffs))]
    return pa.table(columns, schema=SCHEMA.updates)


def _names(numbers: npt.NDArray[np.uint64]) -> pa.Array:
    """`customer-%011d` of each number: written as bytes, which is many times as fast as formatting."""
    text = np.empty((len(numbers), 20), np.uint8)
    text[:, :9] = np.frombuffer(b"customer-", np.uint8)
    for place in range(19, 8, -1):
        numbers, digit = np.divmod(numbers, np.uint64(10))
        text[:, place] = digit + np.uint64(ord("0"))
    offsets = np.arange(0, 20 * len(numbers) + 1, 20, dtype=np.int32)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(text))


def merge_folder(source: Path, target: Path, since: int) -> dict[str, int]:
    """Merge the runs of a folder into parts of another, through verified ranged reads."""
    target.mkdir(exist_ok=True)
    runs = [PartRun([_part(path)], SCHEMA) for path in sorted(source.glob("*.parquet"))]
    rows = written = 0
    names = count()
    # SUBTLE: a part that is written must not stay in memory while the next one grows. `enumerate` would keep it.
    for part in parts_of(_merged(runs, since), SCHEMA, 0, PART_BYTES):
        with (target / f"{next(names)}.parquet").open("wb") as file:
            file.write(part.data)
        rows, written = rows + part.said.sums.count, written + part.size
        del part
    return {"rows": rows, "bytes": written}


def _merged(runs: list[PartRun], since: int | None = None) -> Iterator[pa.Table]:
    """What a compaction writes parts of."""
    return merge_runs(runs, SCHEMA, advance_to=since, on_overflow="split", dictionaries=True)


def _part(path: Path) -> StoredPart:
    file = os.open(path, os.O_RDONLY)
    digests = path.with_suffix(".digests").read_bytes()
    return StoredPart(
        str(path), os.fstat(file).st_size, digests, SCHEMA, None, None,
        lambda start, end: os.pread(file, end - start, start),
    )  # fmt: skip


def _in_own_process(which: str, root: Path, *words: object) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.kernel", which, str(root), *map(str, words)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def _duckdb(root: Path) -> dict[str, Any]:
    with Peer("bench.duck:consolidate", root, SINCE) as duck:
        begun = duck.ask("cpu")
        [seconds] = duck.run()
        return {
            "seconds": seconds, "rows": duck.answer, "settings": duck.settings,
            "cpu_seconds": duck.ask("cpu") - begun, "peak_mib": duck.ask("peak"),
        }  # fmt: skip


def main(which: str, root: Path, updates: int = FULL) -> None:
    """Run one side in this process, and print its seconds and peak memory."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    said: dict[str, float] = {}
    if which == "unhashed":
        mock.patch("persist_lib.format.descriptions.hash_rows", _no_hashes).start()
    start, cpu = time.perf_counter(), time.process_time()
    if which == "runs":
        write_runs(root / "runs", updates)
    else:
        said |= merge_folder(root / "runs", root / "out", SINCE)
    said |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps(said | {"peak_mib": peak_mib()}))


def _no_hashes(_: Schema, table: pa.Table) -> npt.NDArray[np.uint64]:
    return np.zeros(table.num_rows, np.uint64)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
