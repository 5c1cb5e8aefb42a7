"""Shards of a chosen size and shape, and what compacting one takes: a program, so that memory is that of one process.

python -m tests.integration.sizes fill file:/tmp/shard 1000000 --batches 12 --hot 0.9
python -m tests.integration.sizes compact file:/tmp/shard --engine spark
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import persist_lib as persist
from jobs.engine import SparkEngine
from jobs.session import SparkSettings, build_session
from persist_lib.config import MIB
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.location.api import Blob
from persist_lib.maintain import Engine, local_engine
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.settings import config_of

SCHEMA = persist.Schema({"key": "int64"}, {"state": "string", "amount": "int64"})
STATES = ["open", "shipped", "returned", "cancelled", "lost"]
SLICE = 1_000_000
SHARD = "s"
SAMPLE_S = 0.05
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def updates(rng: np.random.Generator, rows: int, time: int, keys: int, hot: float, width: int) -> pa.Table:
    """Updates at one time. A share of them has one key; the others spread over so many keys."""
    chosen = np.where(rng.random(rows) < hot, keys // 2, rng.integers(0, keys, rows))
    states = np.array(STATES)[rng.integers(0, len(STATES), rows)]
    if width:
        states = pa.array(rng.integers(33, 126, (rows, width), np.uint8).view(f"S{width}").ravel()).cast("string")
    table = {"key": chosen, "state": states, "amount": rng.integers(0, 1 << 40, rows)}
    return pa.table({**table, "_time": np.full(rows, time, np.uint64), "_diff": np.ones(rows, np.int64)})


def fill(location: str, count: int, batches: int, hot: float, width: int) -> dict[str, Any]:
    """Append so many updates in so many batches."""
    rng, rows, started = np.random.default_rng(1), count // batches, time.monotonic()
    with persist.open(location, config=persist.Config(**config_of(os.environ))) as client:
        writer = client.open_writer(SHARD, SCHEMA)
        for number in range(batches):
            some = [min(SLICE, rows - at) for at in range(0, rows, SLICE)]
            writer.compare_and_append((updates(rng, n, number, count, hot, width) for n in some), number, number + 1)
        state = client.inspect(SHARD).state
        return {"seconds": time.monotonic() - started, "count": state.count, "bytes": state.size}


def compact(location: str, engine: str, heap: str) -> dict[str, Any]:
    """Compact the shard. Returns what it took; `peak_mib` is that of the largest process that ran a task."""
    with persist.open(location, config=persist.Config(**config_of(os.environ))) as client:
        machine, folder = client.machine(SHARD), Path(location.removeprefix("file:"))
        started = time.monotonic()
        state = machine.fetch().state
        opened_s, started = time.monotonic() - started, time.monotonic()
        plan_compaction(state, client.policy())
        planned_s, tasks, rows = time.monotonic() - started, list[int](), list[int]()
        run: Engine = local_engine(machine)
        if engine == "spark":
            session = build_session(SparkSettings(driver_memory=heap))
            run = SparkEngine(client, lambda: session, partial(noting, str(folder.parent / "peaks")))

        class Noting:
            """The engine, and how its tasks came out."""

            def __call__(self, work: Sequence[MergeTask]) -> list[TaskResult]:
                results = list(run(work))
                tasks.append(len(work))
                rows.extend(sum(part.rows for part in result.parts) for result in results)
                return results

            def pieces(self, size: int, task_bytes: int) -> int:
                return run.pieces(size, task_bytes) if isinstance(run, SparkEngine) else -(-size // task_bytes)

        Path("/proc/self/clear_refs").write_text("5")
        before, started = peak_mib(), time.monotonic()
        compacted = client.compact(SHARD, engine=Noting())
        seconds = time.monotonic() - started
        noted = [json.loads(path.read_text()) for path in (folder.parent / "peaks").glob("*")]
        peaks = [one["peak_mib"] for one in noted] or [peak_mib()]
        if engine == "spark":
            session.stop()
        after = client.inspect(SHARD).state
        return {
            "opened_s": opened_s, "planned_s": planned_s, "seconds": seconds, "batches": len(state.trace),
            "requests": len(compacted.applied), "folds": sum(one.reason == "fold" for one in compacted.applied),
            "updates_in": sum(one.updates_in for one in compacted.applied), "updates": state.count,
            "bytes": state.size, "read": compacted.bytes_in, "tasks": tasks, "most_rows": max(rows, default=0),
            "mean_rows": sum(rows) / max(1, len(rows)), "before_mib": before, "peak_mib": max(peaks),
            "batches_after": len([batch for batch in after.trace if batch.count]), "fingerprint": after.fingerprint,
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "profile_mib": [max(tenth) for tenth in zip(*(one["tenths"] for one in noted), strict=True)],
            "pandas": any(one["pandas"] for one in noted),
        }  # fmt: skip


def everything(client: persist.Client) -> object:
    """What no duty may do: have all rows in memory at once."""
    with client.open_reader(SHARD) as read:
        return read.snapshot(read.fetch_upper().time - 1).to_arrow().num_rows  # type: ignore[operator]


DUTIES: dict[str, Callable[[persist.Client], object]] = {
    "scrub": lambda client: client.scrub(SHARD),
    "verify": lambda client: client.verify(SHARD, full=True),
    "compact": lambda client: client.compact(SHARD),
    "roll_up": lambda client: client.roll_up(SHARD, force=True),
    "collect": lambda client: client.collect(SHARD),
    "orphans": lambda client: client.audit_orphans(SHARD),
    "publish": lambda client: client.publish(SHARD),
    "everything": everything,
}


def duty(location: str, name: str, most_mib: int) -> dict[str, Any]:
    """Carry out a duty with so much memory on top of what the process took before it."""
    with persist.open(location, config=persist.Config(**config_of(os.environ))) as client:
        client.inspect(SHARD)
        status = Path("/proc/self/status").read_text().splitlines()
        [data] = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmData")]
        resource.setrlimit(resource.RLIMIT_DATA, (data + most_mib * MIB, resource.RLIM_INFINITY))
        DUTIES[name](client)
        return {"peak_mib": peak_mib()}


def noting(folder: str, task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
    """Merge, and note what memory this process takes over the time of the task, and the most that it ever took."""
    samples, done = [resident_mib()], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            samples.append(resident_mib())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = run_task(task, blob, entropy)
    finally:
        done.set()
        sampler.join()
    tenths = [max(samples[len(samples) * i // 10 : len(samples) * (i + 1) // 10] or samples[:1]) for i in range(10)]
    said = {"peak_mib": peak_mib(), "tenths": tenths, "rows": result.sums.count, "pandas": "pandas" in sys.modules}
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / f"{entropy():x}").write_text(json.dumps(said))
    return result


def resident_mib() -> int:
    """The memory (resident, MiB) that this process takes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES // MIB


def peak_mib() -> int:
    """The most memory (resident, MiB) that this process took since it began, or since it was last reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


def main() -> None:
    """Run the program, and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fill", "compact", *DUTIES))
    parser.add_argument("location")
    parser.add_argument("count", type=int, nargs="?", default=MIB)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--hot", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--engine", choices=("local", "spark"), default="local")
    parser.add_argument("--heap", default="512m")
    parser.add_argument("--most-mib", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "fill":
        said = fill(asked.location, asked.count, asked.batches, asked.hot, asked.width)
    elif asked.most_mib:
        said = duty(asked.location, asked.what, asked.most_mib)
    else:
        said = compact(asked.location, asked.engine, asked.heap)
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
