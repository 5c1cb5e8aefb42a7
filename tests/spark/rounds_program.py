"""A compaction on Spark in many rounds, beside others of its kind; it may kill itself after one of its commits.

python rounds_program.py LOCATION FOLDER NAME AFTER

It makes the file `planned-NAME` when its first tasks are planned, and waits for the file `go` before it runs them.
After the commit with the number AFTER (0: none) it ends by SIGKILL, before anybody hears of it. Otherwise it prints the
seqnos of its commits, null for each request that another compactor committed first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import persist_lib as persist
from jobs.engine import SparkEngine
from jobs.session import SparkSettings, build_session
from persist_lib.config import MIB
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.maintain import compaction

ROUNDS: dict[str, Any] = {
    "part_bytes": 64 * 1024, "inline_bytes": 0, "task_bytes": 4 * MIB, "merge_bytes": MIB, "lease_ms": 120_000,
    "rollup_every": 20,
}  # fmt: skip
"""So little memory for a merge that a hundred batches are merged in rounds."""


def die_after(commits: int) -> None:
    """End this process right after so many commits of requests."""
    commit, done = compaction.commit, []

    def commit_and_die(*given: Any) -> Any:
        answer = commit(*given)
        done.extend([answer] * (answer[0] is not None))
        if len(done) == commits:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    compaction.commit = commit_and_die  # type: ignore[assignment]


def main(location: str, folder: str, name: str, after: str) -> None:
    """Compact the shard `s`."""
    spark = build_session(SparkSettings(master="local[2,4]", driver_memory="512m"))
    if int(after):
        die_after(int(after))
    with persist.open(location, config=persist.Config(**ROUNDS)) as client:
        engine = SparkEngine(client, lambda: spark)

        def run(tasks: Sequence[MergeTask]) -> Iterable[TaskResult]:
            Path(folder, f"planned-{name}").touch()
            while not Path(folder, "go").exists():
                time.sleep(0.01)
            return engine(tasks)

        compacted = client.compact("s", engine=run)
        print("APPLIED " + json.dumps([one.seqno for one in compacted.applied]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
