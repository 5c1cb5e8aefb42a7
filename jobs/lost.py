"""What to say when a task of a compaction was lost with its worker: which shard and range, and what to set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jobs.words import range_of
from persist_lib.config import MIB
from persist_lib.core.plan.requests import MergeTask
from persist_lib.errors import Determinate, PersistError

KILLED = re.compile(
    r"ExecutorLostFailure|Python worker exited unexpectedly|Python worker \S* ?crashed|exited with code 1(37|43)"
    r"|exit code:? 137|running beyond|memory limits|exceeding memory|heartbeat timed out"
)
"""What Spark says of a worker that was killed or died, on its own or by the kernel, YARN or Kubernetes."""
OUT_OF_MEMORY = re.compile(r"\bMemoryError|ArrowMemoryError|malloc of size \d+ failed|OutOfMemoryError|OOMKilled")
FAILED = re.compile(r"[Tt]ask (\d+) (?:of this Spark job|in stage [\d.]+ failed (\d+) times?)")
EXAMPLE = '{"merge_bytes": 67108864, "part_bytes": 33554432}'
LONGEST = 300


class TaskLost(Determinate):
    """A task was lost as often as Spark tries it: it was killed, or out of memory. Nothing of its request is committed.

    Fields: shard, key_lower and key_upper (of the task's range, encoded; None: no bound).
    """


def lost(error: Exception, tasks: Sequence[MergeTask]) -> TaskLost | None:
    """What to raise instead of Spark's own error if a task was lost; None if the error says something else."""
    said = str(error)
    is_memory = OUT_OF_MEMORY.search(said) is not None
    if isinstance(error, PersistError) or not (is_memory or KILLED.search(said)):
        return None
    found = FAILED.search(said)
    index = int(found[1]) if found else -1
    times = f", {found[2]} {'time' if found[2] == '1' else 'times'}" if found and found[2] else ""
    task = tasks[index] if 0 <= index < len(tasks) else None
    which = "a task" if task is None else f"the task of {range_of(task)}, {_size(task) / MIB:,.1f} MiB,"
    how = "ran out of memory" if is_memory else "was lost with its worker"
    first = next((line.strip() for line in said.splitlines() if KILLED.search(line) or OUT_OF_MEMORY.search(line)), "")
    settings = f"merge_bytes (now {tasks[0].merge_bytes:,}) or part_bytes (now {tasks[0].part_bytes:,})"
    return TaskLost(
        f"shard {tasks[0].shard}: {which} {how}{times}. Spark says: {first[:LONGEST]}. "
        "A worker that disappears is mostly out of memory: killed by the kernel (dmesg says so) or the cluster. "
        "What was committed before is kept, and nothing of this request is linked. "
        "Give each task more memory (spark.executor.memoryOverhead, fewer spark.executor.cores), or make it take less. "
        f"Lower {settings}, as in PERSIST_CONFIG='{EXAMPLE}'",
        shard=tasks[0].shard,
        key_lower=None if task is None else task.key_lower,
        key_upper=None if task is None else task.key_upper,
    )  # fmt: skip


def _size(task: MergeTask) -> int:
    return sum(part.size for run in task.inputs for part in run.parts)
