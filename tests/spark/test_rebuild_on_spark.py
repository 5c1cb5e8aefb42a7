"""A rendition rebuilt on Spark by the program, with a correction: killed while tasks write, and run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent.parent
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"name": "string", "cents": "int64"})
ROWS = 200_000
CORRECTION = """
import pyarrow.compute as pc

def cents(table):
    is_wrong = pc.equal(pc.bit_wise_and(table.column("id"), 1023), 0)
    right = pc.add(table.column("cents"), pc.cast(is_wrong, "int64"))
    return table.set_column(table.schema.get_field_index("cents"), "cents", right)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The program, in a process group of its own, so that its JVM and workers can be ended with it."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    env = {**os.environ, "PERSIST_LOCATION": f"file:{folder / 'data'}", "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "rebuild.py"), "--collection", "orders", "--engine", "spark",
         "--transform", "correction:cents", *arguments],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_a_rebuild_that_was_killed_is_finished_by_the_next_and_handed_over(tmp_path: Path) -> None:
    (tmp_path / "correction.py").write_text(CORRECTION)
    with persist.open(f"file:{tmp_path / 'data'}") as client, client.controller() as controller:
        controller.create("orders", SCHEMA, shards=3, mode="compare_and_append")
        ids = np.arange(ROWS)
        with controller.open_writer("orders") as write:
            write.append_now(pa.table({"id": ids, "name": [f"n{i % 7}" for i in range(ROWS)], "cents": ids}))
        made = controller.make_rendition("orders", shards=4, copy=True)
        with controller.open_reader("orders") as read, read.listen(0) as heard:
            before = read.snapshot(0, diff=True).to_arrow()
            killed = start(tmp_path, "--rendition", str(made.number))
            uploaded = client.machine(made.shards[0])
            deadline = time.monotonic() + 120
            while killed.poll() is None and not uploaded.fetch().state.writers and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.5)
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
            assert controller.describe("orders").active.number == 1
            with controller.open_writer("orders") as write:
                write.upsert([{"id": 1, "name": "meanwhile", "cents": 1}])
            again = start(tmp_path, "--rendition", str(made.number), "--compare", "--hand-over")
            said, _ = again.communicate(timeout=200)
            assert again.returncode == 0, said
            wrong = (ROWS + 1023) // 1024
            assert f"0 appeared, 0 vanished, {wrong} changed" in said
            assert f"cents: {wrong} changed" in said
            assert f"rendition {made.number} is the collection from" in said
            after = {row["id"]: (row["name"], row["cents"]) for row in read.snapshot(diff=True).to_pylist()}
            expected = {i: (f"n{i % 7}", i + (i % 1024 == 0)) for i in range(ROWS)} | {1: ("meanwhile", 1)}
            assert after == expected
            summed = {(row["id"], row["name"], row["cents"]): row["_diff"] for row in before.to_pylist()}
            for event in heard.poll():
                if isinstance(event, persist.Updates):
                    for row in event.table.to_pylist():
                        data = (row["id"], row["name"], row["cents"])
                        summed[data] = summed.get(data, 0) + row["_diff"]
            assert {data for data, diff in summed.items() if diff} == {(i, *rest) for i, rest in expected.items()}
            assert set(summed.values()) <= {0, 1}
