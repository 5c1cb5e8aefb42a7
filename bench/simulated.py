"""What policies are said to do to a shard, held against what they did: the same appends lived under each of them.

A shard on the local disk takes upserts, and compaction runs after every few. Its log is replayed under other policies
(`persist_lib.report.simulate`), and the same appends are then made on shards that really have these. Of each policy
the prediction stands beside what happened; a ratio of 1 is a prediction that came true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure
from persist_lib import report

FULL, QUICK = (400_000, 120, 2_000), (4_000, 24, 200)
EVERY = 10
POLICIES = {
    "as it is": persist.Policy(), "eager": persist.Policy(weight=2.0), "lazy": persist.Policy(weight=0.1),
    "nothing ahead": persist.Policy(ahead=0.0),
}  # fmt: skip
WITHIN = 1.25
"""How far from 1 a ratio may be, either way."""


def simulated(quick: bool) -> list[Figure]:
    """For `make bench`: batches, bytes and rewritten updates of each policy, beside what they were."""
    rows, steps, keys = QUICK if quick else FULL
    with TemporaryDirectory(prefix="persist-simulated-") as folder:
        real = {name: _lived(f"file:{folder}/{at}", rows, steps, keys, name) for at, name in enumerate(POLICIES)}
        with persist.open(f"file:{folder}/0") as client:
            others = dict(list(POLICIES.items())[1:])
            found = {one.policy: one for one in report.simulate(client, "t", others).found}
        return list(_figures(found, real))


def _figures(found: Mapping[str, report.Simulated], real: Mapping[str, Mapping[str, float]]) -> Iterator[Figure]:
    for name, was in real.items():
        said: Any = found[name]
        for what, value, unit in (
            ("batches", said.batches, ""), ("bytes stored", said.stored / 1e6, "MB"),
            ("bytes written", said.written / 1e6, "MB"),
        ):  # fmt: skip
            yield Figure(
                f"simulated: {name}: {what}", value, was[what], unit, "what happened",
                at_least=1 / WITHIN, at_most=WITHIN,
            )  # fmt: skip


def _lived(url: str, rows: int, steps: int, keys: int, name: str) -> dict[str, float]:
    """The same appends under one policy, and what came of them."""
    policy, kinds = POLICIES[name], persist.Schema({"k": "int64"}, {"a": "int64", "b": "string"})
    with persist.open(url) as client, client.open_writer("t", kinds) as write:
        write.compare_and_append(_rows(np.arange(rows), 0), 0, 1)
        dice = np.random.default_rng(7)
        for step in range(1, steps + 1):
            write.upsert(_rows(np.unique(dice.integers(0, rows * 5 // 4, keys)), step))
            if step % EVERY == 0:
                client.compact("t", policy=policy)
        client.compact("t", policy=policy)
        state = client.inspect("t").state
        written = state.appended_bytes + state.maintained_bytes
        stored = sum(batch.size for batch in state.stored)
        return {"batches": len(state.filled), "bytes stored": stored / 1e6, "bytes written": written / 1e6}


def _rows(keys: np.ndarray, step: int) -> pa.Table:
    notes = np.char.add("note ", ((keys * 104_729 + step) % 1_000_003).astype(str))
    return pa.table({"k": keys, "a": keys + step, "b": notes})
