"""Copy a collection into a new rendition: with other shards, other columns, or a corrected transformation.

    rebuild.py --location file:./data --collection orders --shards 8
    rebuild.py --location file:./data --collection orders --transform corrections:cents --compare
    spark-submit --py-files corrections.py rebuild.py --location s3+cas://bucket/data --collection orders --shards 64
    rebuild.py --location file:./data --collection orders --rendition 3 --compare --hand-over

Tasks read the active rendition in parallel and write the new one; then it follows what was written meanwhile. Nobody
reads the new rendition before it is handed over to. Kill it at any point, and run it again with --rendition: it goes
on. Nothing of the old rendition changes.

Exit status: 0 if all is done, 1 if something failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from jobs import program
from jobs.engine import SparkEngine
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop, stopping
from jobs.watch import Tells, silent
from jobs.works import carry_out, engine_of, pieces
from persist_lib.catalog import Controller
from persist_lib.catalog.comparing import Comparison
from persist_lib.catalog.copies import Copied, load_transform
from persist_lib.catalog.copies import run as run_work
from persist_lib.cli.schema_commands import build_schema
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage


class Rebuilt(NamedTuple):
    """What a rebuild did: the `rows` of the first copy, in so many `tasks`, and how far the rendition has come."""

    rendition: int
    rows: int
    tasks: int
    copied: Copied


def rebuild(
    controller: Controller, name: str, rendition: int, *, transform: str | None = None,
    engine: SparkEngine | None = None, stop: Stop | None = None, tells: Tells = silent,
    timeout: float | None = None,
) -> Rebuilt:  # fmt: skip
    """Bring the rendition, a copy, up to where the one is that it copies. May be killed, and called again.

    With an `engine` the first copy is made on Spark, otherwise by threads of this process.
    """
    stop = stop or Stop()
    rows = count = 0
    with controller.begin_rebuild(name, rendition, transform=transform) as begun:
        if begun is not None:
            works = begun.works(pieces(begun.size, engine), here=engine is None)
            count = len(works)
            says = f"{name}: rendition {rendition} as of {begun.as_of}"
            rows = begun.commit(carry_out(works, begun.run_here, run_work, engine, stop, says, tells), timeout)
    function = None if transform is None else load_transform(transform)
    copied = controller.copy_rendition(name, rendition, transform=function, timeout=timeout)
    return Rebuilt(rendition, rows, count, copied)


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = _parser().parse_args(argv)
    return program.on_one(parsed.collection, parsed, unfinished or Unfinished(), _run)


def _parser() -> argparse.ArgumentParser:
    parser = program.place_arguments(__doc__ or "")
    parser.add_argument("--collection", required=True)
    parser.add_argument("--rendition", type=int, help="continue with this one; without it a new one is made")
    parser.add_argument("--shards", type=int, help="of a new rendition; without it as many as the active one has")
    parser.add_argument("--key", action="append", default=[], metavar="NAME:TYPE", help="a key column, if they change")
    parser.add_argument(
        "--value", action="append", default=[], metavar="NAME:TYPE", help="a value column, if they change"
    )
    parser.add_argument("--transform", metavar="MODULE:FUNCTION", help="makes new rows of old ones: table to table")
    parser.add_argument("--engine", choices=("auto", "local", "spark"), default="auto", help="auto: Spark for much")
    parser.add_argument("--compare", action="store_true", help="say what the rendition would change")
    parser.add_argument("--hand-over", action="store_true", help="make it the collection at the end")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each step (3600)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be copied")
    return parser


def _run(client: Client, controller: Controller, parsed: argparse.Namespace, tells: program.Tells) -> None:
    name = parsed.collection
    active = controller.describe(name).active
    schema = build_schema(parsed.key, parsed.value, times=active.schema.times) if parsed.key else None
    if parsed.value and schema is None:
        raise InvalidUsage("--value goes with --key: name all columns of the new rendition")
    if parsed.transform is not None:
        load_transform(parsed.transform)
    if parsed.dry_run:
        shards = parsed.shards or len(active.shards)
        size = sum(client.inspect(shard).state.size for shard in active.shards)
        new = f"rendition {parsed.rendition}" if parsed.rendition else f"a new rendition of {shards} shards"
        tells.says(f"{name}: would copy {size:,} bytes of rendition {active.number} into {new}. Nothing was changed")
        return
    number = parsed.rendition
    if number is None:
        made = controller.make_rendition(name, shards=parsed.shards, schema=schema, copy=True, timeout=parsed.timeout)
        number = made.number
        tells.says(f"{name}: made rendition {number} of {len(made.shards)} shards; to resume: --rendition {number}")
    tells.begin(1, "planning")
    with stopping() as stop:
        engine = engine_of(client, active.shards, parsed.engine, program.sessions(parsed), stop)
        done = rebuild(
            controller, name, number, transform=parsed.transform, engine=engine, stop=stop, tells=tells.step,
            timeout=parsed.timeout,
        )  # fmt: skip
    show = active.schema.show
    tells.says(f"{name}: rendition {number} has all that was before {show(done.copied.upper)}")
    if parsed.compare:
        for line in compared(name, controller.compare(name, number, timeout=parsed.timeout)):
            tells.says(line)
    figures = {"rows": done.rows, "tasks": done.tasks, **program.spent(client.metrics().cost)}
    says = f"rendition {number}"
    if parsed.hand_over:
        function = None if parsed.transform is None else load_transform(parsed.transform)
        start = controller.hand_over(name, number, advance=True, transform=function, timeout=parsed.timeout)
        says = f"rendition {number} is the collection from {show(start)} on"
    tells.done(name, figures, says)


def compared(name: str, found: Comparison) -> Iterator[str]:
    """What a comparison found, in lines."""
    yield (
        f"{name}: of {found.old_rows:,} rows and {found.new_rows:,} new ones, {found.equal_keys:,} keys are equal, "
        f"{found.appeared:,} appeared, {found.vanished:,} vanished, {found.changed:,} changed"
    )
    for column, count in found.columns.items():
        if count:
            yield f"  {column}: {count:,} changed"
    for kind, rows in found.samples.items():
        for row in rows:
            yield f"  {kind}: {row}"


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
