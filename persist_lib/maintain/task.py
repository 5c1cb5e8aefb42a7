"""One merge task: a key range of some runs, merged, cut into parts and uploaded, in this process or on Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from persist_lib.core.plan.compaction import MergeTask, TaskResult
from persist_lib.core.plan.fan_in import SHARE
from persist_lib.core.sums import total
from persist_lib.format.descriptions import EncodedPart
from persist_lib.format.parts import merge_to_parts, parts_of
from persist_lib.format.paths import blob_key, part_key
from persist_lib.ids import ShardId, WriterId
from persist_lib.location.api import Blob
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.batches import as_part
from persist_lib.shard.runs import Stored, overlapping
from persist_lib.shard.small_runs import gather


def run_task(task: MergeTask, blob: Blob, entropy: Callable[[], int], pool: Executor | None = None) -> TaskResult:
    """Merge the task's key range and upload the parts, under fresh keys below the uploader's id.

    Small inputs are read in the pool, if there is one; otherwise the calling thread does everything.

    Running it twice leaves orphans, never damage. Raises Missing if an input is gone, Corrupt if one is damaged.
    """
    shard, parts, sums = ShardId(task.shard), [], []
    for encoded in _merged(task, blob, pool or Runtime(background=False).pool(1, "persist-merge")):
        key = part_key(WriterId(task.uploader), entropy())
        blob.set(blob_key(shard, key), encoded.data)
        parts.append(as_part(encoded, key, task.schema))
        sums.append(encoded.said.sums)
        del encoded  # otherwise it stays in memory while the next one is built
    return TaskResult(tuple(parts), total(sums))


def _merged(task: MergeTask, blob: Blob, pool: Executor) -> Iterator[EncodedPart]:
    """The parts that replace the task's inputs. Small inputs are gathered first; often all inputs are small."""
    shard, schema = ShardId(task.shard), task.schemas[task.schema]
    stored = Stored(blob, shard, task.schemas, schema, task.key_lower, task.key_upper)
    inputs = overlapping(task.inputs, task.key_lower, task.key_upper)
    gathered = gather(stored, inputs, task.advance_to, task.merge_bytes // SHARE, pool)
    if gathered.table is not None and not gathered.rest:
        tables = [gathered.table] if gathered.table.num_rows else []
        return parts_of(tables, schema, task.schema, task.part_bytes, pool.map)
    return merge_to_parts(
        gathered.streams(stored), schema, task.schema,
        advance_to=task.advance_to, part_bytes=task.part_bytes, merge_bytes=task.merge_bytes,
    )  # fmt: skip
