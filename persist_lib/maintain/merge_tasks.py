"""The tasks of a request: its key ranges or clusters, and what carries one out. An engine runs them, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from typing import Protocol, runtime_checkable

import msgspec

from persist_lib.core.formats import PART_SUMS
from persist_lib.core.pins import by_name
from persist_lib.core.plan.clusters import Clusters, split
from persist_lib.core.plan.cutting import cut_evenly
from persist_lib.core.plan.fan_in import SHARE, Room, fit, row_bytes
from persist_lib.core.plan.requests import MergeTask, Request, TaskInput, TaskResult, task_inputs
from persist_lib.core.state import State
from persist_lib.core.sums import total
from persist_lib.format.descriptions import EncodedPart
from persist_lib.format.parquet import Describing
from persist_lib.format.parts import parts_of, parts_of_clusters
from persist_lib.format.paths import blob_key, part_key
from persist_lib.format.value_bounds import where_of
from persist_lib.ids import ShardId, WriterId
from persist_lib.kernel.merge import merge_runs
from persist_lib.location.api import Blob
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.batches import as_part
from persist_lib.shard.commit import Machine
from persist_lib.shard.runs import Stored, may_keep, overlapping
from persist_lib.shard.small_runs import gather
from persist_lib.shard.stretches import Within, stretches

Engine = Callable[[Sequence[MergeTask]], Iterable[TaskResult]]
"""Carries out tasks, on any machine, and returns their results in the order of the tasks."""


@runtime_checkable
class Cuts(Protocol):
    """An optional protocol of an engine that runs several tasks at once: it says into how many to cut a request."""

    def pieces(self, size: int, task_bytes: int) -> int:
        """How many tasks to make of a request that reads `size` bytes, where a task may read `task_bytes`."""


LEAST_PART = 1 << 20
"""Parts of clusters are not made smaller than this, for want of memory."""


def local_engine(machine: Machine) -> Engine:
    """Return an engine that runs the tasks in this process, one after the other, in bounded memory."""
    runtime = machine.runtime

    def run(tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
        for task in tasks:
            with runtime.pool(machine.config.read_threads, "persist-merge") as pool:
                result = run_task(task, machine.blob, runtime.entropy, pool)
            yield result

    return run


def is_published_by(request: Request, state: State) -> bool:
    """Whether the parts of a request are to stand below a publication's folder: contents, where one needs that."""
    return request.reason == "publish" or (request.reason == "ahead" and bool(by_name(state)))


def merge_tasks(machine: Machine, worker: WriterId, request: Request, engine: Engine | None = None) -> list[MergeTask]:
    """Return the disjoint key ranges of a request, as tasks; no tasks if all batches of the request are empty.

    A request of several merges has the key ranges of each of them, one merge after the other.

    The engine may say how many; otherwise each reads about `task_bytes`, at most.
    """
    inputs = task_inputs(request)
    if not inputs or not request.reads:
        return []
    edges = [*request.merges, len(inputs)]
    merged = [inputs[start:end] for start, end in pairwise(edges)]
    if request.kept:
        kept = {part.key for part in request.kept_parts}
        left = (
            msgspec.structs.replace(run, parts=tuple(one for one in run.parts if one.key not in kept)) for run in inputs
        )
        merged = [tuple(run for run in left if run.parts)]
    if request.clusters is not None:
        return _clustering(machine, worker, request, merged[0], engine)
    return [task for runs in merged for task in _tasks(machine, worker, request, runs, engine)]


def _clustering(
    machine: Machine, worker: WriterId, request: Request, inputs: tuple[TaskInput, ...], engine: Engine | None
) -> list[MergeTask]:
    """The tasks of a merge into clusters: of as many of these together as there is room for the runs that have some."""
    state, room = machine.state, Room.of(machine.config.merge_bytes)
    schema = state.schemas[request.schema]

    def having(wanted: Clusters) -> tuple[TaskInput, ...]:
        return tuple(may_keep(where_of(schema, wanted), inputs, state.schemas, schema))

    def fits(wanted: Clusters) -> bool:
        return fit((run.parts for run in having(wanted)), row_bytes(schema), room)

    found, alone = list[MergeTask](), msgspec.structs.replace(request, kept=())  # what is kept has no keys of its own
    for wanted in (one for written in request.written for one in split(written, fits)):
        tasks = _tasks(machine, worker, alone, having(wanted), engine)
        found += [msgspec.structs.replace(task, clusters=wanted) for task in tasks]
    return found


def _tasks(
    machine: Machine, worker: WriterId, request: Request, inputs: tuple[TaskInput, ...], engine: Engine | None
) -> list[MergeTask]:
    """The tasks of one merge. Each has only the parts that may hold something of its key range."""
    config, state = machine.config, machine.state
    schemas = state.schemas
    size, task_bytes = sum(part.size for run in inputs for part in run.parts), config.task_bytes
    count = engine.pieces(size, task_bytes) if isinstance(engine, Cuts) else -(-size // task_bytes)
    cuts: list[bytes] = []
    if count > 1:
        with machine.runtime.pool(config.read_threads, "persist-cut") as pool:
            found = stretches(
                machine.blob, machine.shard, inputs, schemas, min(task_bytes, size // count), pool.map,
                within=Within(schemas[request.schema], request.advance_to),
            )  # fmt: skip
        cuts = cut_evenly(found, count)
    bounds = {bound for one in request.kept for bound in (one.lower, one.upper) if bound is not None}
    edges = [None, *sorted(bounds.union(cuts)), None]
    return [
        MergeTask(
            machine.shard, worker, tuple(overlapping(inputs, lower, upper)), schemas, request.schema,
            request.advance_to, lower, upper, request.part_bytes, config.merge_bytes, is_published_by(request, state),
            state.format >= PART_SUMS,
        )
        for lower, upper in pairwise(edges)
        if not any(one.has(lower, upper) for one in request.kept)
    ]  # fmt: skip


def run_task(task: MergeTask, blob: Blob, entropy: Callable[[], int], pool: Executor | None = None) -> TaskResult:
    """Merge the task's key range and upload the parts, under fresh keys below the uploader's id.

    Small inputs are read in the pool, if there is one; otherwise the calling thread does everything.

    Running it twice leaves orphans, never damage. Raises Missing if an input is gone, Corrupt if one is damaged.
    """
    shard, parts, sums = ShardId(task.shard), [], []
    for encoded in merged(task, blob, pool or Runtime(background=False).pool(1, "persist-merge")):
        key = part_key(WriterId(task.uploader), entropy(), published=task.published)
        blob.set(blob_key(shard, key), encoded.data)
        part, said = as_part(encoded, key, task.schema), encoded.said.sums
        parts.append(msgspec.structs.replace(part, sums=said) if task.says_sums else part)
        sums.append(said)
        del encoded  # otherwise it stays in memory while the next one is built
    return TaskResult(tuple(parts), total(sums))


def merged(task: MergeTask, blob: Blob, pool: Executor) -> Iterator[EncodedPart]:
    """The parts that stand for the task's inputs, none of them uploaded. Small inputs are gathered first."""
    shard, schema = ShardId(task.shard), task.schemas[task.schema]
    where = None if task.clusters is None else where_of(schema, task.clusters)
    stored = Stored(blob, shard, task.schemas, schema, task.key_lower, task.key_upper, where)
    inputs = overlapping(task.inputs, task.key_lower, task.key_upper)
    gathered = gather(stored, inputs, task.advance_to, task.merge_bytes // SHARE, pool)
    parallel: Describing = map
    if gathered.table is not None and not gathered.rest:
        windows, parallel = iter([gathered.table] if gathered.table.num_rows else []), pool.map
    else:
        runs = gathered.streams(stored)
        windows = merge_runs(
            runs, schema, advance_to=task.advance_to, merge_bytes=task.merge_bytes, on_overflow="split",
            dictionaries=True,
        )  # fmt: skip
    if task.clusters is None:
        return parts_of(windows, schema, task.schema, task.part_bytes, parallel)
    if where is not None:  # what is read of large runs is only what the clusters need, roughly
        windows = (table for table in map(where.kept, windows) if table.num_rows)
    part_bytes = min(task.part_bytes, max(LEAST_PART, task.merge_bytes // (SHARE * (len(task.clusters.cuts) + 1))))
    return parts_of_clusters(windows, schema, task.schema, part_bytes, task.clusters.column, task.clusters.cuts)
