"""What keeps a worker of Spark small, as far as it can be counted exactly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa

from jobs.tasks import ANSWER, answer, tell
from persist_lib.config import MIB
from persist_lib.core.cost import Cost
from persist_lib.errors import Corrupt
from persist_lib.format.parquet import PartEncoder
from persist_lib.schema.schema import Schema

ROOT = Path(__file__).parents[3]
SCHEMA = Schema({"id": "int64"}, {"payload": "int64"})


def test_a_task_is_answered_without_pandas(tmp_path: Path) -> None:
    program = """
        import sys
        import pyarrow as pa
        from jobs.tasks import encode_work, run_all
        from persist_lib.core.plan.requests import MergeTask, TaskResult
        from persist_lib.core.sums import Sums

        task = MergeTask("s", "w", (), (), 0, 0, None, None, 1, 1)
        work = encode_work(f"file:{sys.argv[1]}", f"file:{sys.argv[1]}", [task])
        rows = pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(bytes(8))])], ["i"])
        done = lambda task, blob, entropy: TaskResult((), Sums(7, 7, 7))
        [answered] = run_all(iter([rows]), work, done)
        assert answered.num_rows == 1
        sys.exit("pandas" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_answer_says_which_of_result_and_error_it_has() -> None:
    [good] = answer(3, {"a": 1}, Cost()).to_pylist()
    [bad] = answer(4, tell(Corrupt("broken", key="k")), Cost()).to_pylist()
    assert (good["task"], good["result"], good["error"]) == (3, b"\x81\xa1a\x01", None)
    assert (bad["task"], bad["result"]) == (4, None)
    assert b"broken" in bad["error"]
    assert answer(3, {}, Cost()).schema == ANSWER


def test_an_encoder_keeps_the_part_once() -> None:
    rows, rng = 1 << 20, np.random.default_rng(1)
    columns = [np.arange(rows), rng.integers(0, 1 << 62, rows), np.zeros(rows, np.uint64), np.ones(rows, np.int64)]
    table = pa.table([pa.array(column) for column in columns], schema=SCHEMA.updates)
    pools = [pa.default_memory_pool(), pa.system_memory_pool()]
    before = sum(pool.bytes_allocated() for pool in pools)
    encoder = PartEncoder(SCHEMA, 0)
    encoder.write(table)
    allocated = sum(pool.bytes_allocated() for pool in pools) - before
    part = encoder.finish()
    assert part.size > 7 * MIB
    assert allocated < part.size / 2, "Arrow would have it besides"
