"""Take files into a shard: CSV, JSON lines, Parquet, or changes as Debezium writes them.

    ingest.py --location file:./data --shard orders --format jsonl --infer --key order_id ./files --dry-run
    ingest.py --location file:./data --shard orders --format csv --key order_id:int64 --value state:string ./files
    spark-submit ingest.py --location s3+cas://bucket/data --shard orders --format jsonl s3://bucket/landing/

Files are cut into chunks, which tasks read, parse and write in parallel, and each group of chunks is appended by one
commit. Kill it at any point, and run it again: it continues after the last group, and each line is in the shard once.
Run it later, and it takes the files that are new. A bad line stops nothing: it goes to the shard SHARD_bad with its
file, its number and the reason. SHARD_files says which files were taken.

Exit status: 0 if all is done, 1 if more lines than --max-bad were bad or something failed, 2 if the arguments are wrong
by themselves, whatever the files and the shard are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from jobs import program
from jobs.engine import SparkEngine
from jobs.ingesting.engines import Engine, Local, OnSpark
from jobs.ingesting.inputs import find_files
from jobs.ingesting.options import build_parser, settings_of
from jobs.ingesting.planning import new_files
from jobs.ingesting.running import Ingest, Outcome, ingest, look
from jobs.ingesting.sampling import describe, infer_schema, take_sample
from jobs.ingesting.settings import Settings
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop, stopping
from persist_lib.cli.schema_commands import build_schema
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, NotFound, PersistError, SchemaMismatch
from persist_lib.schema.evolution import place_of
from persist_lib.schema.schema import Schema
from persist_lib.times import Times


def schema_of(client: Client | None, parsed: argparse.Namespace, settings: Settings) -> tuple[Schema, bool]:
    """The shard's newest schema, or else the declared or inferred one; and whether the shard is there."""
    there = None if client is None else client.machine(parsed.shard).try_fetch()
    declared = None
    if parsed.key and not parsed.infer:
        declared = build_schema(parsed.key, parsed.value, times=parsed.times, unique=parsed.unique)
    if there is not None:
        newest = there.state.schemas[-1].shown
        if declared is not None and place_of(declared, there.state.schemas) is None:
            raise SchemaMismatch(
                f"shard {parsed.shard} exists already, with the schema {newest}; declared was {declared}",
                actual=newest,
                expected=declared,
            )
        return newest, True
    if declared is not None:
        return declared, False
    if not parsed.infer or not parsed.key:
        raise InvalidUsage(
            f"there is no shard {parsed.shard} yet: declare it with --key and --value, or use --infer and --key NAME"
        )
    first = find_files(parsed.inputs, settings.format).files[0]
    return infer_schema(first, settings, parsed.key, times=parsed.times, unique=parsed.unique), False


def job_of(client: Client | None, parsed: argparse.Namespace, settings: Settings) -> tuple[Ingest, bool]:
    """What is asked for, and whether the shard is there."""
    schema, is_there = schema_of(client, parsed, settings)
    bounds = None
    if parsed.until is not None:
        times = Times(schema.times, lambda: 0)
        until = int(parsed.until) if schema.times is None and parsed.until.isdecimal() else parsed.until
        bounds = (None, times.parse(until, "--until"))
    job = Ingest(
        parsed.shard,
        parsed.inputs,
        settings,
        schema,
        parsed.name,
        parsed.changed,
        parsed.bad_shard,
        parsed.lost,
        bounds,
    )
    job.check()
    return job, is_there


def engine_of(client: Client, parsed: argparse.Namespace, job: Ingest, stop: Stop) -> Engine:
    """Where tasks run. `auto`: on Spark if there is more to read than Spark is worth starting for."""
    name = parsed.engine
    if name == "auto":
        known, _ = look(client, job)
        size = sum(file.size for file in new_files(find_files(job.inputs, job.settings.format).files, known, "skip"))
        size += sum(file.size for file in known.last.files) if known.last is not None else 0
        is_here = client.url.startswith("memory:") or size <= client.config.spark_above_bytes
        name = "local" if is_here else "spark"
    if name == "local":
        return Local(stop, parsed.threads)
    return OnSpark(SparkEngine(client, program.sessions(parsed), stop=stop))


def check_sample(client: Client, job: Ingest, most: int) -> None:
    """Raise InvalidUsage, before anything is written, if the first new file does not look as the options say."""
    known, sequence = look(client, job)
    if known.last is not None and sequence < known.last.last:
        return
    files = new_files(find_files(job.inputs, job.settings.format).files, known, job.changed)
    if not files or job.bounds is not None:
        return
    sample = take_sample(files[0], job.settings, job.schema)
    if sample.is_mostly_bad and sample.counts.bad > most:
        raise InvalidUsage(
            f"{sample.counts.bad} of the first {sample.counts.read} lines of {files[0].path} are bad, so the options "
            "are probably wrong: "
            f"{'; '.join(sample.reasons)}. Nothing was written. To go on all the same, allow that many with --max-bad"
        )


def numbers(outcome: Outcome) -> dict[str, float]:
    """What an ingest did, in figures that can be added up."""
    tally = outcome.tally
    return {
        "files": outcome.files, "groups": outcome.groups, "lines": tally.read, "rows": tally.written, "bad": tally.bad,
        "silent": tally.silent, "updates": outcome.updates, "seconds": outcome.seconds,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = build_parser(__doc__ or "")
    parsed = parser.parse_args(argv)
    unfinished = unfinished or Unfinished()
    try:
        settings = settings_of(parsed)
        if parsed.dry_run:
            return _dry_run(parsed, settings)
        with program.telling() as tells, program.opened_client(parsed, create=True) as client:
            unfinished.begin([parsed.shard])
            outcome = _ingest(client, parsed, settings, tells)
            unfinished.done(parsed.shard)
    except PersistError as error:
        print(f"{parsed.shard}  FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidUsage) and not unfinished.shards else 1
    if outcome.tally.bad > parsed.max_bad:
        print(
            f"{outcome.tally.bad} lines were bad, more than --max-bad {parsed.max_bad}: persist read "
            f"{parsed.bad_shard or parsed.shard + '_bad'} lists them with their reasons. All other lines are in "
            f"{parsed.shard}",
            file=sys.stderr,
        )
        return 1
    return 0


def _ingest(client: Client, parsed: argparse.Namespace, settings: Settings, tells: program.Tells) -> Outcome:
    job, is_there = job_of(client, parsed, settings)
    if not is_there:
        tells.says(f"creating {parsed.shard}: {job.schema}")
    check_sample(client, job, parsed.max_bad)
    tells.begin(1, "planning")
    with stopping() as stop:
        outcome = ingest(client, job, engine_of(client, parsed, job, stop), stop, tells.step)
    tells.done(parsed.shard, {**numbers(outcome), **program.spent(client.metrics().cost)})
    return outcome


def _dry_run(parsed: argparse.Namespace, settings: Settings) -> int:
    with ExitStack() as opened:
        try:
            client = opened.enter_context(program.opened_client(parsed))
        except NotFound:  # there is no location yet
            client = None
        job, is_there = job_of(client, parsed, settings)
        lines = list(describe(client, job, is_there))
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
