"""Clusters: runs of a batch that lie apart in the values of one column, so that a filter on it leaves most of them out.

Equal rows have equal values, so each is in one cluster: runs that lie apart never add up with each other, and merge as
any runs do. Nothing in the state says what a cluster is. Whether runs lie apart follows from the bounds of values that
their parts say, so a batch that does not is in debt, and one that does is not, whichever program wrote it.

Nulls are with the greatest values. See docs/design/0270-clustering.md.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from persist_lib.core.state import Batch, Part
from persist_lib.core.trace import CHUNK_BYTES
from persist_lib.schema.schema import Schema, bounded

MOST = 16
"""The most clusters of a batch. A read of all of it merges them."""
FIT = re.compile(r"u?int\d+|date32|(time64|timestamp|duration)\[.*")
"""The types that clusters can go by: all values in one order, none of which is NaN."""


class By(NamedTuple):
    """What a shard's rows are clustered by: a column, whatever it is called in an older schema, and its type."""

    id: str
    type: str


class Clusters(msgspec.Struct, frozen=True, array_like=True):
    """What an output is put into: at most `most` clusters by the values of a column, cut at `cuts`.

    `column` is its place in the schema that is written. A plan does not know the cuts yet. A task has the clusters in
    `[lower, upper)` alone; None is no bound. Nulls are where there is no upper one.
    """

    column: int
    most: int
    cuts: tuple[int, ...] = ()
    lower: int | None = None
    upper: int | None = None

    def between(self, lower: int | None, upper: int | None) -> Clusters:
        """Those of them in `[lower, upper)`."""
        cuts = (cut for cut in self.cuts if (lower is None or cut > lower) and (upper is None or cut < upper))
        return msgspec.structs.replace(self, cuts=tuple(cuts), lower=lower, upper=upper)


def by_name(schemas: Sequence[Schema], name: str | None, written: Schema | None = None) -> By | None:
    """What clusters go by in the schema that is written (None: the newest), for the name of a column of a shard.

    Where the newest schema has no column of that name, it is the one that was called so last, and has another name now.
    None where it has no such column, or parts do not say bounds of it that are in one order.
    """
    written, there = written or schemas[-1], {column.id for column in schemas[-1].columns if not column.is_dropped}
    called = ({column.id for column in schema.columns if column.name == name} & there for schema in reversed(schemas))
    ids = next(filter(None, called), set[str]())
    found = [column for place in bounded(written) if (column := written.columns[place]).id in ids]
    return By(found[0].id, found[0].type) if found and FIT.fullmatch(found[0].type) else None


def place_of(schema: Schema, by: By) -> int | None:
    """Where the column is in a schema that has it with this type."""
    return next((at for at, one in enumerate(schema.columns) if By(one.id, one.type) == by), None)


def ends(parts: Iterable[Part], schemas: Sequence[Schema], by: By) -> tuple[int, ...] | None:
    """The least and greatest value of some parts, or `()` where all are null. None where a part does not say it."""
    found: list[int | float] = []
    for part in parts:
        place = place_of(schemas[part.schema], by)
        said = next((one for one in part.values if one.column == place), None)
        if said is None:
            return None
        if said.lower is not None and said.upper is not None:
            found += (said.lower, said.upper)
    return (int(min(found)), int(max(found))) if found else ()


def are_apart(batch: Batch, schemas: Sequence[Schema], by: By | None) -> bool:
    """Whether the batch is in clusters: it has several runs, no two of which share a value."""
    if by is None or len(batch.runs) < 2 or not batch.exact:
        return False
    found = [ends(run, schemas, by) for run in batch.run_parts()]
    known = sorted(one for one in found if one)
    return None not in found and len(found) - len(known) < 2 and all(a[1] < b[0] for a, b in pairwise(known))


def share(batch: Batch, schemas: Sequence[Schema], by: By) -> float:
    """About which share of the bytes of a batch a filter for one value has to read. 0 where that is not known."""
    spans = [ends((part,), schemas, by) for part in batch.parts]
    known = [one for one in spans if one]
    if None in spans or not known:
        return 0.0
    whole = max(upper for _, upper in known) - min(lower for lower, _ in known)
    read = sum(part.size * (one[1] - one[0]) for part, one in zip(batch.parts, spans, strict=True) if one)
    return read / (whole * batch.size) if whole else 0.0


def count_of(size: int, part_bytes: int) -> int:
    """Into how many clusters so many bytes are put: of a chunk, or a part where that is less, at least."""
    return min(MOST, size // min(CHUNK_BYTES, part_bytes))


def merged_runs(batch: Batch, schemas: Sequence[Schema], by: By | None) -> list[tuple[Part, ...]]:
    """The runs of a batch that one task of a merge has to read side by side, at least: of clusters the two heaviest."""
    runs = batch.run_parts()
    if not are_apart(batch, schemas, by):
        return runs
    return sorted(runs, key=lambda run: sum(part.size for part in run))[-2:]


def cuts_of(weighed: Iterable[tuple[int, float]], count: int) -> tuple[int, ...]:
    """Where to cut values, each of some weight, into at most `count` clusters of about the same weight.

    Each cut is the least value of a cluster, and none is the least of all.
    """
    found = sorted(weighed)
    reached = list(accumulate(weight for _, weight in found))
    if not found:
        return ()
    wanted = (reached[-1] * number / count for number in range(1, count))
    cuts = {found[min(bisect_right(reached, at), len(found) - 1)][0] for at in wanted}
    return tuple(sorted(cuts - {found[0][0]}))


def split(clusters: Clusters, fits: Callable[[Clusters], bool]) -> list[Clusters]:
    """The clusters in as few tasks as fit, in order."""
    if not clusters.cuts or fits(clusters):
        return [clusters]
    middle = clusters.cuts[len(clusters.cuts) // 2]
    halves = (clusters.between(clusters.lower, middle), clusters.between(middle, clusters.upper))
    return [one for half in halves for one in split(half, fits)]


def in_clusters(parts: Sequence[Part], clusters: Clusters) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Parts that tasks wrote, each of one cluster: cluster by cluster, in order within it, and where each begins."""

    def cluster(part: Part) -> int:
        [lower] = [one.lower for one in part.values if one.column == clusters.column]
        return len(clusters.cuts) if lower is None else bisect_right(clusters.cuts, lower)

    placed = sorted(((cluster(part), part.key_lower, at) for at, part in enumerate(parts)))
    starts = [at for at, (one, *_) in enumerate(placed) if not at or placed[at - 1][0] != one]
    return tuple(parts[at] for *_, at in placed), tuple(starts)
