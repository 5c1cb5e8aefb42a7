"""The real programs, stopped by real signals at each stage: they end within seconds, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import persist_lib as persist
from tests.spark.collections import SMALL, check, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]
ROOT = Path(__file__).parent.parent.parent
LONGEST_S = 30.0
"""From the signal to the end of the program: its grace ten times, for a busy machine. What it stops takes longer."""
CHILDREN_S = 30.0
"""And from there to the end of the JVM and of its Python workers."""

START = """
import signal, sys, time
from functools import partial
signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
import jobs.compact, jobs.scrub, jobs.engine, jobs.tasks
import persist_lib.maintain.compaction as compaction
import persist_lib.maintain.merge_tasks as merge_tasks
from jobs.signals import end, run
from persist_lib.shard.commit import Machine
def reached(*_, **__):
    sys.stdout.write("reached\\n"); sys.stdout.flush()
def stuck(*_, **__):
    reached()
    time.sleep(100)
"""
STAGES = {
    "planning": ("compact", "compaction.plan_compaction = stuck", "local"),
    "merging": ("compact", "merge_tasks.run_task = stuck", "local"),
    "committing": ("compact", "compaction.commit = stuck", "local"),
    "scrubbing": ("scrub", 'sys.modules["persist_lib.maintain.scrub"].add_up_task = stuck', "local"),
    "starting": (
        "compact",
        "real = jobs.program.build_session; jobs.program.build_session = lambda s: (reached(), real(s))[1]",
        "spark",
    ),
    "running": (
        "compact",
        """
import os, threading
mark = sys.argv.pop()
def slow(task, blob, entropy):
    import time
    open(mark, "w").close()
    time.sleep(100)
slow.__module__ = "__main__"
real = jobs.compact.SparkEngine
jobs.compact.SparkEngine = lambda *a, **k: real(*a, slow, **k)
def look():
    while not os.path.exists(mark): time.sleep(0.05)
    reached()
threading.Thread(target=look, daemon=True).start()
""",
        "spark",
    ),
}


@pytest.mark.parametrize(
    ("stage", "number", "status"),
    [
        ("planning", signal.SIGTERM, 143), ("merging", signal.SIGINT, 130), ("merging", signal.SIGTERM, 143),
        ("committing", signal.SIGTERM, 143), ("scrubbing", signal.SIGINT, 130), ("starting", signal.SIGINT, 130),
        ("starting", signal.SIGTERM, 143), ("running", signal.SIGINT, 130), ("running", signal.SIGTERM, 143),
    ],
)  # fmt: skip
def test_a_signal_ends_the_program_within_seconds(tmp_path: Path, stage: str, number: int, status: int) -> None:
    folder = tmp_path / "data"
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as client:
        model = write(client, "s", batches=3)
        program, patch, engine = STAGES[stage]
        (tmp_path / "main.py").write_text(f"{START}{patch}\nend(run(partial(jobs.{program}.main, sys.argv[1:])))\n")
        arguments = ["--location", f"file:{folder}", "--engine", engine]
        mark = [str(tmp_path / "mark")] if stage == "running" else []
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "main.py"), *arguments, *mark],
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "PERSIST_CONFIG": json.dumps(SMALL),
                "PERSIST_SPARK_MASTER": "local[2,4]",
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert b"reached\n" in iter(process.stdout.readline, b""), process.communicate()
            time.sleep(1.0)
            started = time.monotonic()
            process.send_signal(number)
            _, error = process.communicate(timeout=60)
            took = time.monotonic() - started
        finally:
            process.kill()
        print(f"{stage}: {took:.1f} s")
        assert process.returncode == status, error.decode()
        assert b"unfinished: s." in error
        assert took < LONGEST_S, error.decode()
        left = gone(process.pid)
        assert not left, left
        assert client.census("s").batches == 3
        check(client, "s", model)


def gone(session: int) -> list[str]:
    """The processes of a session that do not end within `CHILDREN_S`."""
    deadline = time.monotonic() + CHILDREN_S
    while (left := of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"its children took {CHILDREN_S - (deadline - time.monotonic()):.1f} s more")
    return left


def of_session(session: int) -> list[str]:
    """The commands of the processes of a session that run now."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(f"{entry.name} {command[:200]}")
    return found
