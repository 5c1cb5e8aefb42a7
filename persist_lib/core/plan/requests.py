"""A request of compaction: a slice of the trace to be replaced, the tasks that merge it, and the batch that they make.

`core.plan.compaction` says which slices these are, and at what price. `maintain.compaction` cuts a request into tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.plan import clusters
from persist_lib.core.plan.clusters import Clusters
from persist_lib.core.state import Batch, Part
from persist_lib.core.sums import Sums, total
from persist_lib.core.trace import sums_of_parts
from persist_lib.frontier import MAX_TIME, Antichain
from persist_lib.schema.schema import Schema

Reason = Literal["merge", "fold", "advance", "sort", "cluster", "flush", "fuse", "ahead", "settle", "drop", "publish"]
"""`fold`: a merge of neighbouring batches that comes first, as one merge cannot read all of their runs. `ahead`: the
contents are written beside the trace. `settle`: they take the place of what they stand for, without I/O. `drop`: they
are not wanted any more. `publish`: a publication wants it in one run, below its folder."""

REASONS: Mapping[Reason, str] = {
    "merge": "small batches behind what is newer than them",
    "fold": "it is in debt, and has more runs than one merge may read: these come first",
    "advance": "since has passed enough of its times to make it shrink",
    "sort": "several runs, or more than its bounds, are read each time",
    "cluster": "a filter on the column that it is to be clustered by reads most of it",
    "flush": "too many bytes in the state itself",
    "fuse": "empty neighbours; no I/O",
    "ahead": "history outweighs the rows: the contents beside it",
    "settle": "since has come to the contents ahead: no work",
    "drop": "contents ahead are switched off: no work",
    "publish": "a publication wants all of it in one run",
}


class Kept(NamedTuple):
    """Neighbouring parts of the oldest input that stay: it alone has updates with `lower <= key < upper`."""

    lower: bytes | None
    upper: bytes | None
    parts: tuple[Part, ...]

    def has(self, lower: bytes | None, upper: bytes | None) -> bool:
        """Whether a range of keys is in this one."""
        return (self.lower is None or (lower is not None and lower >= self.lower)) and (
            self.upper is None or (upper is not None and upper <= self.upper)
        )


class Request(msgspec.Struct, frozen=True):
    """One slice of the trace to be replaced: its batches, the since to advance to, why, and at what price.

    `part_bytes` is about the size of the parts that are to be written. `merges` is where the groups of runs start that
    are merged with each other. If there are several, what comes out has a run for each, and calls for another request.
    `output` is what replaces them where that is there already. `kept` are parts of the first run that nothing newer
    touches, in the order of their keys. A plan does not know them: it prices what is read and written at most. The
    shard is moved up to `format` first, if it is below.

    `clusters` are those that the output is put into, and `written` those of them that are not kept, as far as they
    follow one another. A plan does not know where to cut yet.
    """

    inputs: tuple[Batch, ...]
    since: Antichain
    schema: int
    reason: Reason
    cost: Cost
    part_bytes: int
    merges: tuple[int, ...] = (0,)
    output: Batch | None = None
    kept: tuple[Kept, ...] = ()
    format: int = 0
    clusters: Clusters | None = None
    written: tuple[Clusters, ...] = ()

    @property
    def kept_parts(self) -> tuple[Part, ...]:
        return tuple(part for one in self.kept for part in one.parts)

    @property
    def is_partial(self) -> bool:
        """Whether there is more to do once this has been carried out, as one merge could not read all the runs."""
        return self.reason == "fold" or len(self.merges) > 1

    @property
    def reads(self) -> bool:
        """Whether anything is read and written: what settles is there, and what is dropped only goes."""
        return self.output is None and self.reason != "drop"

    @property
    def ids(self) -> tuple[tuple[int, int], ...]:
        """The batches' ids, oldest first."""
        return tuple(batch.id for batch in self.inputs)

    @property
    def count(self) -> int:
        """Updates to be read."""
        return sum(one.count for one in self.inputs) - sum(one.rows for one in self.kept_parts) if self.reads else 0

    @property
    def size(self) -> int:
        """Bytes to be read."""
        return sum(one.size for one in self.inputs) - sum(one.size for one in self.kept_parts) if self.reads else 0

    @property
    def lower(self) -> Antichain:
        """Where the first batch starts."""
        return self.inputs[0].lower

    @property
    def upper(self) -> Antichain:
        """Where the last batch ends."""
        return self.inputs[-1].upper

    @property
    def advance_to(self) -> int:
        """Times below this become this.

        SUBTLE: never beyond the slice's own times. A since past upper would push updates out of the output's bounds,
        where readers would filter them away. Any time at or below since serves every as_of from since on.
        """
        last = MAX_TIME if self.upper.time is None else self.upper.time - 1
        return last if self.since.time is None else min(self.since.time, last)


class TaskInput(msgspec.Struct, frozen=True, array_like=True):
    """One sorted run to read in a task: its parts, and the times outside of which updates do not count."""

    parts: tuple[Part, ...]
    lower: int
    upper: int | None


class MergeTask(msgspec.Struct, frozen=True, array_like=True):
    """One disjoint key range `[key_lower, key_upper)` of a request: what one Spark task or local loop carries out."""

    shard: str
    uploader: str
    inputs: tuple[TaskInput, ...]
    schemas: tuple[Schema, ...]
    schema: int
    advance_to: int
    key_lower: bytes | None
    key_upper: bytes | None
    part_bytes: int
    merge_bytes: int
    published: bool = False
    """Whether its parts are to stand below a publication's folder."""
    says_sums: bool = False
    """Whether its parts are to say what their updates add up to."""
    clusters: Clusters | None = None
    """Which rows it writes, and into which clusters: each of its parts is of one."""


class TaskResult(msgspec.Struct, frozen=True, array_like=True):
    """What a task wrote: parts in key order, and the sums over them."""

    parts: tuple[Part, ...]
    sums: Sums


def task_inputs(request: Request) -> tuple[TaskInput, ...]:
    """The runs of all batches of a request. Registered bounds that are tighter than the parts' become filters."""
    return tuple(
        TaskInput(run, batch.lower.time or 0, batch.upper.time) for batch in request.inputs for run in batch.run_parts()
    )


def output_batch(request: Request, results: Sequence[TaskResult], merges: Sequence[int] = (0,)) -> Batch:
    """The batch that stands for a request's inputs, from its tasks' results: merge after merge, each in key order.

    `merges` is where the results of each merge start. Each merge is one run. Parts that are kept lie between those of
    tasks; their keys say where.
    """
    if request.output is not None:
        return request.output
    kept = request.kept_parts
    parts = tuple(part for result in results for part in result.parts)
    starts: Sequence[int] = ()
    if request.clusters is not None:
        parts, starts = clusters.in_clusters((*parts, *kept), request.clusters)
    elif kept:
        parts = tuple(sorted((*parts, *kept), key=lambda part: part.key_lower))
    before = [0, *accumulate(len(result.parts) for result in results)]
    runs = starts or sorted({before[start] for start in merges} - {len(parts)})
    sums = total((*(result.sums for result in results), sums_of_parts(kept) or Sums()))
    return Batch(
        request.inputs[0].lo, request.inputs[-1].hi, request.lower, request.upper, request.since,
        count=sums.count, diff_sum=sums.diff_sum, fingerprint=sums.fingerprint,
        parts=parts, runs=tuple(runs),
    )  # fmt: skip
