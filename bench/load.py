"""The first load of a source by tasks on Spark, beside one instance of it, and beside Spark's own plan, on all cores.

The same lines and peers as in `bench.sources`, and more of them. Sessions are warm.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import persist_lib as persist
from bench.figures import Figure, beside, timed
from bench.peer import Peer
from bench.sources import FILE, SCHEMA, write_lines
from jobs.engine import SparkEngine
from jobs.loading import OnSpark
from jobs.session import SparkSettings, build_session
from jobs.watch import silent
from persist_lib.sources import Files, Meaning, Sources
from persist_lib.sources.loading import Loads

FULL, QUICK = 6_000_000, 40_000
ROUNDS = 2
SMALL = 500_000
"""Bytes of a task where it is only tried."""


def load(quick: bool) -> list[Figure]:
    """Lines a second, from a file to the newest row of each key."""
    lines, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    with TemporaryDirectory(prefix="persist-load-") as folder, persist.open(f"file:{folder}/data") as client:
        keys = write_lines(Path(folder), lines)
        size = (Path(folder) / "in" / FILE).stat().st_size
        note = f"{lines:,} lines ({size / 1e6:,.0f} MB) of {keys:,} keys in one file"
        made, session = client.controller().sources(), build_session(SparkSettings(driver_memory="1g"))
        engine = SparkEngine(client, lambda: session)
        loads = Loads(OnSpark(engine, silent))
        if quick:
            loads = loads._replace(task_bytes=SMALL)
        by_tasks = _once(made, folder, keys, loads, SMALL if quick else 0)
        try:
            ours, alone = beside(lambda: timed(by_tasks), lambda: timed(_once(made, folder, keys, None, 0)), rounds)
            figures = [_figure("one-instance", lines, ours, alone, "one instance", note, "")]
            with Peer("bench.sources:newest_by_spark", folder) as peer:
                ours, theirs = beside(lambda: timed(by_tasks), lambda: peer.run()[0], rounds)
                figures.append(_figure("spark", lines, ours, theirs, "Spark, to Parquet", note, peer.settings))
        finally:
            session.stop()
        if not engine.tasks_run:
            raise SystemExit("nothing was loaded by tasks")
        return figures


def _figure(name: str, lines: int, ours: float, theirs: float, peer: str, note: str, settings: str) -> Figure:
    return Figure(f"load-{name}", lines / ours / 1e6, lines / theirs / 1e6, "M/s", peer, note=note, settings=settings)


def _once(made: Sources, folder: str, keys: int, loads: Loads | None, step_bytes: int) -> Callable[[], None]:
    def once() -> None:
        name = f"orders{next(_turns)}"
        made.create(name, Files(place=f"{folder}/in", format="jsonl"), SCHEMA, meaning=Meaning(envelope="upsert"))
        with closing(made.open(name, loads=loads)) as instance:
            instance.step_bytes = step_bytes or instance.step_bytes
            while not instance.step().is_idle:
                pass
        with made.controller.open_reader(name) as reader, reader.snapshot() as rows:
            if (found := sum(table.num_rows for table in rows.batches())) != keys:
                raise SystemExit(f"{found} rows of {keys} keys")

    return once


_turns = iter(range(1_000_000))
