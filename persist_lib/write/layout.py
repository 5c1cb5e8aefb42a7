"""Staged parts as one batch: runs, sums, and what is inline put together."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from persist_lib.core.state import Batch, Part
from persist_lib.core.sums import Sums, total
from persist_lib.errors import InvalidUsage
from persist_lib.format.parts import decode_inline
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.kernel.consolidate import I64_MAX
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.write.staged import Staged

ONCE = at(1)
"""Beyond the time at which parts are written whose time the commit says."""


class Runs(NamedTuple):
    """Parts in the order of a batch, and where its runs start."""

    parts: tuple[Part, ...]
    starts: tuple[int, ...]

    def each(self) -> list[tuple[Part, ...]]:
        """The parts, run by run."""
        ends = (*self.starts[1:], len(self.parts))[: len(self.starts)]
        return [self.parts[start:end] for start, end in zip(self.starts, ends, strict=True)]


def laid_out(parts: Iterable[Part]) -> Runs:
    """As few runs as possible. Parts of one run follow each other; where bounds touch, parts may overlap."""
    runs: list[list[Part]] = []
    ends: list[tuple[bytes, int]] = []
    for part in sorted(parts, key=lambda part: part.key_lower):
        if ends and ends[0][0] < part.key_lower:
            _, run = heapq.heapreplace(ends, (part.key_upper, ends[0][1]))
        else:
            run = len(runs)
            runs.append([])
            heapq.heappush(ends, (part.key_upper, run))
        runs[run].append(part)
    starts: list[int] = []
    found: list[Part] = []
    for pieces in runs:
        starts.append(len(found))
        found += pieces
    return Runs(tuple(found), tuple(starts))


def batch_of(
    parts: Iterable[Part], sums: Sums, bounds: tuple[Antichain, Antichain] | None, table: pa.Table | None = None
) -> Built:
    """The batch of all these parts. Without bounds it is at time 0, for `core.placing.counted_at`."""
    runs = laid_out(parts)
    lower, upper = bounds or (MINIMUM, ONCE)
    batch = Batch(
        0, 0, lower, upper, MINIMUM, sums.count, sums.diff_sum, sums.fingerprint, runs.parts, runs.starts
    )  # fmt: skip
    return Built(batch, table=table)


def assembled(
    staged: Sequence[Staged], builder: Builder, schema: Schema, schemas: Sequence[Schema], inline_bytes: int
) -> Built:
    """One batch of all that was staged. What tasks answered inline becomes one inline part, or parts, of the builder.

    Raises DiffOverflow when a sum over several parts does not fit into 64 bits.
    """
    stored = [part for one in staged for part in one.parts if part.inline is None]
    if len({part.key for part in stored}) < len(stored):
        raise InvalidUsage("the same part is there twice, and would be appended twice; nothing was appended")
    laid = builder.lay(inline_tables(staged, schema, schemas), inline_bytes=inline_bytes)
    kept = [one for one in staged if any(part.inline is None for part in one.parts)]
    sums = total([laid.sums, *(one.sums for one in kept)])
    bounds = staged[0].bounds if staged else None
    built = batch_of([*stored, *laid.parts], sums, bounds, laid.table)
    most = laid.most + sum(one.most for one in kept)
    return builder.totalled(built) if most >= I64_MAX else built


def inline_tables(staged: Sequence[Staged], schema: Schema, schemas: Sequence[Schema]) -> Iterator[pa.Table]:
    """The rows that tasks answered inline."""
    for one in staged:
        for part in one.parts:
            if part.inline is not None:
                yield decode_inline("a task's answer", part.inline, schemas[part.schema], schema)
