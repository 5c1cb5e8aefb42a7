"""Load much of a source on Spark: all that is there, to the same collections as `persist ingest` makes.

    load.py --location file:./data --source orders
    spark-submit load.py --location s3+cas://bucket/data --source orders

For sources of files. Ranges of bytes are decoded by tasks, and each window of them is one commit to the output, the
errors and the raw messages together. Tasks have to see the files at the place that the source names. Kill it at any
point, and run it again, or let `persist ingest` go on: it goes on after the last window. Instances may run meanwhile.

What is less than Spark is worth starting for is taken by this process, unless --engine says otherwise.

Exit status: 0 if all that was there is durable, 1 if something failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from jobs import program
from jobs.engine import SparkEngine
from jobs.loading import OnSpark
from jobs.session import Sessions
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop, stopping
from jobs.watch import Tells
from persist_lib.catalog import Controller
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.sources import Progress, Sources
from persist_lib.sources.loading import LOAD_BYTES, Loads, check_loadable, unloadable
from persist_lib.sources.records import SourceRecord

ENGINES = ("auto", "local", "spark")


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed, unfinished = _parser().parse_args(argv), unfinished or Unfinished()
    return program.on_one(parsed.source, parsed, unfinished, _load)


def _parser() -> argparse.ArgumentParser:
    parser = program.place_arguments(__doc__ or "")
    parser.add_argument("--source", required=True)
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="auto: Spark for much")
    parser.add_argument("--window-mib", type=int, default=LOAD_BYTES // MIB, help="MiB that are committed together")
    parser.add_argument("--dry-run", action="store_true", help="say what is left, and read nothing of it")
    return parser


def _load(
    client: Client, controller: Controller, parsed: argparse.Namespace, tells: program.Tells
) -> None:  # fmt: skip
    name, sums = parsed.source, {"messages": 0, "errors": 0}

    def told(what: Progress | PersistError) -> None:
        if isinstance(what, PersistError):
            tells.says(f"{name}: {what}; trying again")
            return
        sums["messages"] += what.messages
        sums["errors"] += what.errors

    with stopping() as stop, closing(controller.sources()) as sources:
        record = sources.find(name)
        if parsed.dry_run:
            check_loadable(record)
            tells.says(_left(client, sources, record))
            return
        sessions, window = program.sessions(parsed), parsed.window_mib * MIB
        loads, tasks_run = loads_for(client, record, parsed.engine, sessions, stop, tells.step, window)
        tells.begin(1, "binding what is there")
        sources.run(name, until_idle=True, told=told, loads=loads)
    tells.done(name, {**sums, "tasks": tasks_run(), **program.spent(client.metrics().cost)})


def loads_for(
    client: Client, record: SourceRecord, engine: str, sessions: Sessions, stop: Stop, tells: Tells,
    load_bytes: int = LOAD_BYTES,
) -> tuple[Loads | None, Callable[[], int]]:  # fmt: skip
    """How an instance is to load a source, None for an ordinary one; and what says how many tasks ran on Spark.

    `auto`: what is more than Spark is worth starting for, if the source can be loaded so. Raises InvalidUsage for
    another engine's name, and where Spark is asked for and cannot be had.
    """
    if engine not in ENGINES:
        raise InvalidUsage(f"engine must be one of {', '.join(ENGINES)}: got {engine!r}. Nothing was done")
    if engine == "auto" and (unloadable(record) or client.url.startswith("memory:")):
        engine = "local"
    if engine == "local":
        return None, lambda: 0
    check_loadable(record)
    spark = SparkEngine(client, sessions, stop=stop)
    above = client.config.spark_above_bytes if engine == "auto" else 0
    return Loads(OnSpark(spark, tells), above, load_bytes), lambda: spark.tasks_run


def _left(client: Client, sources: Sources, record: SourceRecord) -> str:
    """What there is to do, in words."""
    durable = sources.show(record.name).durable
    with closing(record.reader.open_reader(client, record)) as reader:
        reader.high_watermarks(durable, 1)  # it looks what is there
        left = reader.lag(durable)
    if not left:
        return f"{record.name}: nothing is left to load"
    size = f"{sum(left.values()):,} {record.decoding.reads.counts} in {len(left):,} files"
    return f"{record.name}: {size} are left. Nothing was done"


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
