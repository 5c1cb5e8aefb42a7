"""Compare a rendition of a collection with the active one, on Spark where they are large. Changes nothing.

    compare.py --location file:./data --collection orders --rendition 3
    spark-submit compare.py --location s3+cas://bucket/data --collection orders --rendition 3 --keep

Tasks compare ranges of keys, and their findings add up to what `controller.compare` says. With --keep the difference
itself is kept, and listeners that pass the handover read it instead of merging both renditions, if the handover is at
the time after the one that was compared. A rendition that was handed over to is compared at its handover. Kill it at
any point: nothing is left but garbage. What is kept goes with the old rendition.

Exit status: 0 if it was compared, 1 if something failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from jobs import program
from jobs.engine import SparkEngine
from jobs.rebuild import compared
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop, stopping
from jobs.watch import Tells, silent
from jobs.works import carry_out, engine_of, pieces
from persist_lib.catalog import Controller
from persist_lib.catalog.compare_task import run as run_work
from persist_lib.catalog.comparing import Comparison
from persist_lib.client import Client
from persist_lib.times import TimeLike


def compare(
    controller: Controller, name: str, rendition: int, *, to: int | None = None, as_of: TimeLike | None = None,
    keep: bool = False, engine: SparkEngine | None = None, stop: Stop | None = None,
    tells: Tells = silent, timeout: float | None = None,
) -> Comparison:  # fmt: skip
    """What `controller.compare` answers, by tasks: on Spark with an `engine`, otherwise by threads of this process."""
    stop = stop or Stop()
    with controller.begin_comparison(name, rendition, to=to, as_of=as_of, keep=keep, timeout=timeout) as begun:
        works = begun.works(pieces(begun.size, engine), here=engine is None)
        pair = begun.pair
        says = f"{name}: comparing renditions {pair.old.number} and {pair.new.number} as of {pair.is_}"
        return begun.total(carry_out(works, begun.run_here, run_work, engine, stop, says, tells))


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = _parser().parse_args(argv)
    return program.on_one(parsed.collection, parsed, unfinished or Unfinished(), _run)


def _parser() -> argparse.ArgumentParser:
    parser = program.place_arguments(__doc__ or "")
    parser.add_argument("--collection", required=True)
    parser.add_argument("--rendition", type=int, required=True, help="the rendition that is judged")
    parser.add_argument("--to", type=int, help="the rendition it is compared with; without it the active one")
    parser.add_argument("--as-of", help="a time; without it the newest that both have")
    parser.add_argument("--keep", action="store_true", help="keep the difference for listeners at the handover")
    parser.add_argument("--engine", choices=("auto", "local", "spark"), default="auto", help="auto: Spark for much")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each step (3600)")
    return parser


def _run(client: Client, controller: Controller, parsed: argparse.Namespace, tells: program.Tells) -> None:
    name, text = parsed.collection, parsed.as_of
    as_of = None if text is None else int(text) if text.isascii() and text.isdigit() else text
    tells.begin(1, "planning")
    shards = [shard for one in controller.describe(name).renditions for shard in one.shards]
    engine = "local" if client.url.startswith("memory:") else parsed.engine
    with stopping() as stop:
        found = compare(
            controller, name, parsed.rendition, to=parsed.to, as_of=as_of, keep=parsed.keep,
            engine=engine_of(client, shards, engine, program.sessions(parsed), stop), stop=stop, tells=tells.step,
            timeout=parsed.timeout,
        )  # fmt: skip
    for line in compared(name, found):
        tells.says(line)
    says = f"rendition {found.new} beside {found.old} as of {found.as_of}" + (", kept" if parsed.keep else "")
    tells.done(name, program.spent(client.metrics().cost), says)


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
