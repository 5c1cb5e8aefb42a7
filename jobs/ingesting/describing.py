"""What an ingest would do, in lines of text: a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.ingesting.inputs import find_files
from jobs.ingesting.journal import Known
from jobs.ingesting.planning import Changed, new_files, plan_run
from jobs.ingesting.reading import S3_PIECE
from jobs.ingesting.running import Ingest, bounds_of, look, read_nothing
from jobs.ingesting.sampling import take_sample
from persist_lib.client import Client
from persist_lib.config import MIB, Config
from persist_lib.core.cost import FREE, S3_LIST, Cost

OBJECT_SHARE = 1 / 3
"""What Parquet takes of the bytes of text: a guess for the price."""


def describe(client: Client | None, job: Ingest, is_there: bool) -> Iterator[str]:
    """Yield the lines. Reads the inputs' names, headers and first lines, and changes nothing."""
    yield f"{job.shard} {'exists' if is_there else 'would be created'}: {job.schema}"
    known, sequence = (read_nothing(), 0) if client is None or not is_there else look(client, job)
    if known.last is not None and sequence < known.last.last:
        yield (
            f"run {known.last.number} is not done: groups {sequence - known.last.first + 2} to "
            f"{known.last.last - known.last.first + 1} of its "
            f"{len(known.last.files)} files come first"
        )
    found = find_files(job.inputs, job.settings.format)
    changed: Changed = job.changed
    files = new_files(found.files, known, changed)
    others = (
        f"; {found.left_out} names that do not look like {job.settings.format} are left out" if found.left_out else ""
    )
    yield f"{len(found.files)} files in the inputs, of which {len(files)} are new{others}"
    if not files:
        return
    bounds = None if client is None or not is_there or job.bounds is None else bounds_of(client, job)
    if job.bounds is not None and bounds is None:
        bounds = (0, job.bounds[1])
    run = plan_run(files, job.settings, job.schema, known, bounds)
    groups = run.groups()
    tasks = sum(len(group.tasks) for group in groups)
    size = sum(group.size for group in groups)
    yield f"{size / MIB:,.1f} MiB in {tasks} tasks and {len(groups)} commits"
    largest = max((file for file in files if file.compression), key=lambda file: file.size, default=None)
    if largest is not None and largest.size > 4 * job.settings.chunk_bytes:
        yield f"a compressed file is one task, the largest of {largest.size / MIB:,.1f} MiB: {largest.path}"
    yield f"about {_price(client, size, tasks, len(groups), known):,.4f} dollars for requests"
    sample = take_sample(files[0], job.settings, job.schema, bounds)
    yield f"of the first {sample.counts.read} lines of {files[0].path} {sample.counts.bad} are bad"
    for reason in sample.reasons:
        yield f"  bad: {reason}"
    for row in sample.rows:
        yield f"  {row}"


def _price(client: Client | None, size: int, tasks: int, groups: int, known: Known) -> float:  # noqa: ARG001
    """Reading by ranges, a part for each task at least, and three commits for each group."""
    config = Config() if client is None else client.config
    prices = FREE if client is None else client.prices
    puts = tasks + int(size * OBJECT_SHARE / config.part_bytes) + 3 * groups
    reads = Cost(gets=-(-size // S3_PIECE)).priced(S3_LIST if prices is not FREE else FREE)
    return Cost(puts=puts, gets=6 * groups).priced(prices).dollars + reads.dollars
