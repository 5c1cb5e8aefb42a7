"""Shards with many parts, and an independent account of what is in them: a plain dictionary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import persist_lib as persist

SCHEMA = persist.Schema(key={"k": "int64"}, value={"v": "string"})
SMALL: dict[str, Any] = {
    "part_bytes": 64 * 1024,
    "task_bytes": 64 * 1024,
    "inline_bytes": 0,
    "spark_above_bytes": 100_000,
    "compaction_ahead": 0.0,
}
"""Parts and tasks as small as they may be, so that little data makes several of each."""

Contents = dict[tuple[int, str], int]


@dataclass
class Model:
    """What a shard must hold: every update ever written."""

    updates: list[tuple[int, str, int, int]] = field(default_factory=list)
    upper: int = 0

    def contents(self, as_of: int) -> Contents:
        """Added up one by one."""
        counts: Counter[tuple[int, str]] = Counter()
        for k, v, time, diff in self.updates:
            if time <= as_of:
                counts[k, v] += diff
        return {data: count for data, count in counts.items() if count}


def write(client: persist.Client, name: str, *, batches: int = 5, rows: int = 4000, seed: int = 0) -> Model:
    """Append seeded updates, `rows` at each time; about one in four takes back what an earlier one added."""
    rng, model = np.random.default_rng(seed), Model()
    with client.open_writer(name, SCHEMA) as writer:
        model.upper = writer.fetch_upper().time or 0
        for time in range(model.upper, model.upper + batches):
            keys = rng.integers(0, 20_000, rows)
            values = [f"{k * 2654435761 % 2**32:08x}{k % 3}" for k in keys.tolist()]
            diffs = rng.choice([1, 1, 1, -1], rows)
            table = pa.table({"k": keys, "v": values, "_time": np.full(rows, time, np.uint64), "_diff": diffs})
            writer.compare_and_append(table, time, time + 1)
            model.updates += zip(keys.tolist(), values, [time] * rows, diffs.tolist(), strict=True)
            model.upper = time + 1
    return model


def contents(client: persist.Client, name: str, as_of: int) -> Contents:
    """What a reader sees."""
    with client.open_reader(name) as reader:
        table = reader.snapshot(as_of, diff=True).to_arrow()
    return {(k, v): d for k, v, d in zip(*(table[c].to_pylist() for c in ("k", "v", "_diff")), strict=True)}


def check(client: persist.Client, name: str, model: Model) -> None:
    """Every complete time reads as the model says."""
    for as_of in range(model.upper):
        assert contents(client, name, as_of) == model.contents(as_of), f"{name} as of {as_of}"


def stored(client: persist.Client, name: str) -> set[str]:
    """The keys that are in Blob."""
    return {entry.key.removeprefix(f"{name}/") for entry in client.blob.list(f"{name}/")}


def referred(client: persist.Client, name: str) -> set[str]:
    """The keys that the newest state refers to."""
    state = client.inspect(name).state
    return {key for batch in state.trace for key in batch.keys} | {rollup.key for rollup in state.rollups.values()}


def damage_a_part(folder: Path, name: str) -> Path:
    """Flip one bit in the middle of one of the shard's parts."""
    victim = min(parts_of(folder, name))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    return victim


def parts_of(folder: Path, name: str) -> Iterator[Path]:
    """The files of the shard's parts, whoever wrote them."""
    return (folder / "blob" / name).rglob("*.parquet")
