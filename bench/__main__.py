"""`make bench [NAME=…] [QUICK=1]`: prints a line for each figure, and exits with 1 if a target is missed."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.figures import Figure

BENCHMARKS = {
    "small-append": "bench.append:small_append",
    "table-append": "bench.append:table_append",
    "bulk-append": "bench.append:bulk_append",
    "snapshot": "bench.snapshot:snapshot",
    "kernel": "bench.kernel:kernel",
    "kernel-100m": "bench.kernel:kernel_100m",
    "spark": "bench.spark:spark",
    "spark-100m": "bench.spark:spark_100m",
    "spark-sizes": "bench.spark_sizes:spark_sizes",
    "spark-scan": "bench.spark_scan:spark_scan",
    "spark-write": "bench.spark_write:spark_write",
    "ingest": "bench.ingest:ingest",
    "ingest-spark": "bench.ingest:ingest_spark",
    "policy": "bench.policy:policy",
    "simulated": "bench.simulated:simulated",
    "postgres-append": "bench.postgres:postgres_append",
    "postgres-lag": "bench.postgres_lag:postgres_lag",
    "contention": "bench.postgres:contention",
    "server": "bench.server:server",
    "cost": "bench.cost:cost",
    "idle-passes": "bench.passes:idle_passes",
    "debt-to-rest": "bench.passes:debt_to_rest",
    "read-uncompacted": "bench.reading:read_uncompacted",
    "read-history": "bench.reading:read_history",
    "maintain-small": "bench.reading:maintain_small",
    "survey": "bench.survey:survey",
    "scale": "bench.scale:scale",
    "whole": "bench.whole:whole",
    "upsert": "bench.upsert:upsert",
    "life": "bench.life:life",
    "life-long": "bench.life:life_long",
    "life-pyiceberg": "bench.life:life_pyiceberg",
    "life-s3": "bench.life:life_s3",
    "life-s3-postgres": "bench.life:life_s3_postgres",
    "life-spark": "bench.life:life_spark",
    "tables": "bench.tables:tables",
    "streams": "bench.streams:streams",
    "collections": "bench.collections:collections",
    "sources": "bench.sources:sources",
    "load": "bench.load:load",
    "kafka": "bench.kafka:kafka",
    "pending": "bench.pending:pending",
    "events": "bench.events:events",
    "imports": "bench.imports:imports",
    "push": "bench.push:push",
    "nested": "bench.nested:nested",
    "publish": "bench.publish:publish",
}
ON_REQUEST = {
    "kernel-100m",
    "life-long",
    "life-pyiceberg",
    "life-s3-postgres",
    "life-spark",
    "spark-100m",
    "spark-sizes",
}
"""Benchmarks that take many minutes and run only if they are named."""
console = Console(width=None if sys.stdout.isatty() else 150)


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Which: {', '.join(BENCHMARKS)} (default: all but {', '.join(ON_REQUEST)})."),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Small sizes, seconds instead of minutes; targets are not judged.")
    ] = False,
) -> None:
    """Measure, each figure beside its peer in the same run."""
    unknown = [name for name in names or [] if name not in BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    missed: list[str] = []
    for name in names or [name for name in BENCHMARKS if name not in ON_REQUEST]:
        module, _, function = BENCHMARKS[name].partition(":")
        console.print(f"[dim]measuring {name} …[/dim]")
        figures: list[Figure] = getattr(importlib.import_module(module), function)(quick)
        console.print(_table(figures))  # at once: the next one takes minutes
        for line in dict.fromkeys(f"{f.peer_name}: {f.settings}" for f in figures if f.settings):
            console.print(f"  {line}", markup=False, highlight=False)
        missed += [figure.name for figure in figures if not figure.is_met()]
    if missed and not quick:
        console.print(f"missed: {', '.join(missed)}")
        sys.exit(1)


def _table(figures: list[Figure]) -> Table:
    table = Table("figure", "ours", "peer", "unit", "ratio", "target", "beside", "note")
    for figure in figures:
        colour = "green" if figure.is_met() else "red"
        table.add_row(
            figure.name, f"{figure.ours:.3g}", f"{figure.peer:.3g}", figure.unit,
            f"[{colour}]{figure.ratio:.2f}x[/{colour}]", figure.target, figure.peer_name, figure.note,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
