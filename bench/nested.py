"""Nested and null-heavy columns beside flat ones with the same leaves: appends, a compaction and a snapshot, by bytes.

Rates are bytes of Arrow for each second of CPU of this process, so that what runs beside does not count. Peers run in
processes of their own; theirs and ours beside them are by the clock. A round appends random ids in four batches,
compacts them, and reads them all. Rounds of all shapes alternate, and the figure is the median of the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure
from bench.peer import Peer

ITEMS, PAIRS = 16, 4
ACTS = ("append", "compact", "read")
LEAST = 0.7
BESIDE = {
    "list": "floats", "fixed list": "floats", "list with nulls": "floats with nulls", "structs": "pairs",
    "struct": "pairs", "map": "keyed pairs", "floats with nulls": "floats",
}  # fmt: skip
PEERS = {"parquet": "pyarrow", "delta": "deltalake", "duck": "DuckDB"}
PEERED = ("list", "structs", "floats with nulls")


def nested(quick: bool) -> list[Figure]:
    """Rates of each shape beside that of its flat one, and of some beside peers."""
    rows, rounds = (20_000, 1) if quick else (200_000, 7)
    shapes = {name: _numbered(columns) for name, columns in shapes_of(rows).items()}
    cpu: dict[tuple[str, str], list[float]] = defaultdict(list)
    clock: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds + 1):  # the first one warms up
        for name, table in shapes.items():
            for act, (seconds, passed) in round_of(table).items():
                cpu[name, act].append(table.nbytes / seconds / 1e6)
                clock[name, act].append(table.nbytes / passed / 1e6)
    found = [_beside(name, act, cpu) for name in BESIDE for act in ACTS]
    for name in PEERED:
        for start, peer in PEERS.items():
            rates, settings = peer_rates(start, shapes[name], rounds)
            found += [
                Figure(f"{name}: {act}", statistics.median(clock[name, act][1:]), rates[act], "MB/s", peer,
                       settings=settings)
                for act in ACTS
            ]  # fmt: skip
    return found


def _beside(name: str, act: str, rates: dict[tuple[str, str], list[float]]) -> Figure:
    """The round of the median ratio, and what the ratio was in the others."""
    pairs = sorted(
        zip(rates[name, act][1:], rates[BESIDE[name], act][1:], strict=True), key=lambda pair: pair[0] / pair[1]
    )
    (ours, flat), least, most = pairs[len(pairs) // 2], pairs[0], pairs[-1]
    return Figure(
        f"{name}: {act}", ours, flat, "MB/s of CPU", "the flat one", at_least=LEAST,
        note=f"{BESIDE[name]}; {least[0] / least[1]:.2f}x to {most[0] / most[1]:.2f}x in {len(pairs)} rounds",
    )  # fmt: skip


def round_of(rows: pa.Table) -> dict[str, tuple[float, float]]:
    """Seconds of CPU, and of the clock, that each act takes in a shard of its own."""
    schema = persist.Schema({"id": "int64"}, pa.schema([field for field in rows.schema if field.name != "id"]))
    step = -(-len(rows) // 4)
    with TemporaryDirectory(prefix="persist-bench-") as folder, persist.open(f"file:{folder}/data") as client:
        write, read = client.open_shard("nested", schema)

        def append() -> None:
            for time_, start in enumerate(range(0, len(rows), step)):
                piece = rows.slice(start, step)
                times, diffs = np.full(len(piece), time_, np.uint64), np.ones(len(piece), np.int64)
                updates = piece.append_column("_time", pa.array(times)).append_column("_diff", pa.array(diffs))
                write.compare_and_append(updates, time_, time_ + 1)

        def snapshot() -> None:
            if read.snapshot(3).to_arrow().num_rows != len(rows):
                raise SystemExit("the snapshot lost rows")

        found = {"append": _spent(append)}
        read.downgrade_since(3)
        found["compact"] = _spent(lambda: client.maintain("nested"))
        found["read"] = _spent(snapshot)
        return found


def peer_rates(start: str, rows: pa.Table, rounds: int) -> tuple[dict[str, float], str]:
    """Megabytes a second of each act, and how the peer is configured."""
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        source = f"{folder}/rows.arrow"
        with pa.OSFile(source, "wb") as file, pa.ipc.new_file(file, rows.schema) as arrow:
            arrow.write_table(rows)
        with Peer(f"bench.nested_peers:{start}", source, folder) as peer:
            rounds_ = [{act: peer.run(1, act)[0] for act in ACTS} for _ in range(rounds + 1)][1:]
            return {act: rows.nbytes / statistics.median(r[act] for r in rounds_) / 1e6 for act in ACTS}, peer.settings


def shapes_of(rows: int) -> dict[str, dict[str, pa.Array]]:
    """Columns by name: flat ones, and nested ones of the same leaves."""
    rng = np.random.default_rng(7)
    floats = rng.random(rows * ITEMS, np.float32)
    missing = rng.random(rows * ITEMS) < 0.9
    gone = rng.random(rows) < 0.5
    texts = pa.array([f"name-{n:05d}" for n in range(20_000)])
    ints, words = rng.integers(0, 1 << 40, rows * PAIRS), texts.take(pa.array(rng.integers(0, 20_000, rows * PAIRS)))
    keys = pa.array([f"key-{n}" for n in range(PAIRS)]).take(pa.array(np.tile(np.arange(PAIRS), rows)))
    structs = pa.StructArray.from_arrays([pa.array(ints), words], ["a", "b"])
    pairs = _columns(pa.array(ints), PAIRS, "a") | _columns(words, PAIRS, "b")
    every, fourth = (pa.array(np.arange(0, rows * n + 1, n, dtype=np.int32)) for n in (ITEMS, PAIRS))
    sparse = pa.array(floats, mask=missing)
    return {
        "floats": _columns(pa.array(floats), ITEMS, "v"),
        "list": {"v": pa.ListArray.from_arrays(every, pa.array(floats))},
        "fixed list": {"v": pa.FixedSizeListArray.from_arrays(pa.array(floats), ITEMS)},
        "floats with nulls": _columns(sparse, ITEMS, "v"),
        "list with nulls": {"v": pa.ListArray.from_arrays(every, sparse, mask=pa.array(gone))},
        "pairs": pairs,
        "structs": {"v": pa.ListArray.from_arrays(fourth, structs)},
        "struct": {"v": pa.StructArray.from_arrays(list(pairs.values()), list(pairs))},
        "keyed pairs": _columns(pa.array(ints), PAIRS, "a") | _columns(keys, PAIRS, "b"),
        "map": {"v": pa.MapArray.from_arrays(fourth, keys, pa.array(ints))},
    }


def _columns(leaves: pa.Array, count: int, name: str) -> dict[str, pa.Array]:
    rows = len(leaves) // count
    return {f"{name}{at}": leaves.take(pa.array(np.arange(rows) * count + at)) for at in range(count)}


def _numbered(columns: dict[str, pa.Array]) -> pa.Table:
    """The columns behind ids in random order."""
    ids: npt.NDArray[np.int64] = np.random.default_rng(1).permutation(len(next(iter(columns.values()))))
    return pa.table({"id": ids, **columns})


def _spent(act: Callable[[], object]) -> tuple[float, float]:
    cpu, clock = time.process_time(), time.perf_counter()
    act()
    return time.process_time() - cpu, time.perf_counter() - clock
