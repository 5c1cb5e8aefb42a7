"""The whole product on real input, in one command: `make demo [REPO=…] [ORDERS=…]`, or `make demo-s3` on servers.

The demo ingests a git history commit by commit, and also an order book with a million updates. It kills a process in
the middle of an append. Then Dagster runs the whole maintenance with Spark. Before and after, snapshots are compared
with an independent source: the files with `git ls-tree`, the orders with the generator's own arithmetic.

At the end a table is kept by transactions, rebuilt by a transformation that turns out to be wrong, corrected, and
handed over while somebody listens.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from examples import accounts, console, git_history, orders, places
from examples.crash import LEASE_MS
from examples.failures import Failed
from examples.git_log import FILES
from examples.git_repository import Repository
from examples.order_book import ORDERS, Book
from examples.picture import draw_moments, fetch_states
from examples.places import Place
from orchestration.run import RunReport, run_maintenance
from persist_lib.cli.render import compare_table, plain_table, shards_table
from persist_lib.core.cost import Cost
from persist_lib.core.units import dollars, size
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain import Census

OUTPUT = Path("demo-output")
SHARDS = ("files", "files_commits", "orders", "orders_book")
PICTURED = ("files", "orders")
SMALL_APPENDS = 2_000
"""Histories up to this many commits are ingested one commit at a time."""
CONFIG = {"spark_above_bytes": 4 << 20, "task_bytes": 8 << 20}
"""Small enough that the orders of a demo are work for several Spark tasks."""
CHECKED = 20
screen = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Clock:
    """The time and the cost of each phase. The requests of the killed process are not counted."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, Cost]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and time it."""
        screen.print(f"\n[bold cyan]{name}[/bold cyan]")
        started = time.perf_counter()
        with Spending() as spent:
            yield
        self.phases.append((name, time.perf_counter() - started, spent.cost))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code (see `console`)."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # like Ctrl-C: servers and leases are ended before the exit
    return console.run(lambda: _program(options))


def _program(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    entered = places.servers(options.servers) if options.servers else places.folder(options.output)
    with entered as place:
        demo(options.repo, options.orders, options.output, place)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def demo(repo: Path, updates: int, output: Path, place: Place) -> None:
    """Ingest, read, break, maintain, read again. Raises when anything differs from its source."""
    repository, book, clock = Repository(repo), Book(seed=7), Clock()
    with clock.phase(f"Ingesting the git history of {repo.resolve().name}, a small append per commit"):
        commits = ingest_files(place, repository)
    with clock.phase(f"Ingesting {updates:,} updates of an order book"):
        ingest_orders(place, book, updates)
    with clock.phase("Killing a process in the middle of an append"):
        crash(place)
    with clock.phase(f"Reading {CHECKED} past times of each, before maintenance"):
        check(place, repository, book)
    before = censuses(place)
    screen.print(shards_table(before))
    states = fetch_states(place.url, PICTURED, place.consensus)
    with clock.phase("Maintaining all of it: Dagster decides, Spark merges, one transition commits"):
        report(run_maintenance(place.url, place.consensus, config=CONFIG, log_level="WARNING"))
    with clock.phase(f"Reading {CHECKED} past times of each, after maintenance"):
        check(place, repository, book)
    after = censuses(place)
    screen.print(shards_table(after))
    screen.print(compare_table(before, after))
    with clock.phase("Tables kept by transactions: corrected, cut into more shards, and handed over under a listener"):
        accounts.show(place, screen.print)
    moments = [
        ("before maintenance", states),
        ("after maintenance", fetch_states(place.url, PICTURED, place.consensus)),
    ]
    draw_moments(moments, output / "trace.png")
    summary(clock, place, output, commits)


def ingest_files(place: Place, repository: Repository) -> int:
    """Ingest the repository's tree at every commit of its first-parent history; returns the number of commits."""
    with place.open() as client:
        total = git_history.pending(client, repository, "files")
        if total == 0:
            raise Failed("the repository has no commits; name another one with REPO=")
        per_append = 1 if total <= SMALL_APPENDS else -(-total // SMALL_APPENDS)
        with console.progress("commits", total) as advance:
            done = git_history.ingest(
                client, repository, "files", max_commits=per_append,
                on_append=lambda append: advance(append.upper - append.lower),
            )  # fmt: skip
    screen.print(f"{done.upper:,} commits, {done.updates:,} updates, {done.appends:,} appends")
    return done.upper


def ingest_orders(place: Place, book: Book, updates: int) -> None:
    """Ingest the order book, and keep the last tenth of its history."""
    with place.open() as client:
        with console.progress("updates", updates) as advance:
            done = orders.ingest(client, book, updates, "orders", on_append=lambda table: advance(len(table)))
        client.set_retention("orders", max(1, done.upper // 10))
    screen.print(
        f"{done.updates:,} updates at {done.upper:,} times, {done.appends:,} appends; the last tenth is retained"
    )


def crash(place: Place) -> None:
    """Start a process that is killed after it uploaded a part and before it commits; wait until its leases end."""
    killed = subprocess.run([sys.executable, "-m", "examples.crash", "orders", *place.urls], check=False)
    if killed.returncode != -signal.SIGKILL:
        raise Failed(f"the process that should have been killed ended with {killed.returncode}")
    time.sleep(2 * LEASE_MS / 1000)
    with place.open(read_only=True) as client:
        census, found = client.census("orders"), client.audit_orphans("orders", dry_run=True)
    screen.print(f"it left {census.overdue} overdue leases, and an object that will never be linked", end="")
    screen.print(f" ({len(found.orphans)} orphans while its writer still counts as live)")


def check(place: Place, repository: Repository, book: Book) -> None:
    """Compare snapshots with git and with the generator."""
    with place.open(read_only=True) as client:
        files, book_read = client.open_reader("files", FILES), client.open_reader("orders", ORDERS)
        positions = git_history.spread(CHECKED, files.since.time or 0, files.upper.time or 0)
        with console.progress("snapshots beside git ls-tree", len(positions)) as advance:
            paths = git_history.verify(files, repository, positions, on_verified=lambda _: advance(1))
        times = git_history.spread(CHECKED, book_read.since.time or 0, book_read.upper.time or 0)
        with console.progress("snapshots beside the book", len(times)) as advance:
            for as_of in times:
                orders.verify(book_read, book, as_of)
                advance(1)
    screen.print(f"[green]✓[/green] {len(positions)} trees equal `git ls-tree`, {paths:,} paths compared")
    screen.print(
        f"[green]✓[/green] {len(times)} states of the order book equal the generator's, since {book_read.since}"
    )


def censuses(place: Place) -> list[Census]:
    """One census a shard."""
    with place.open(read_only=True) as client:
        return [client.census(name) for name in SHARDS]


def report(run: RunReport) -> None:
    """Print what the run recorded in Dagster. Raises Failed if the run failed."""
    table = plain_table("shard", "duty", "what Dagster recorded", "seconds", right=("seconds",))
    for shard in SHARDS:
        for duty, figures in run.figures.get(shard, {}).items():
            news = [f"{name} {_figure(value)}" for name, value in figures.items() if _is_news(name, value)]
            if news:
                table.add_row(shard, duty, ", ".join(news), f"{figures.get('seconds', 0):.1f}")
    screen.print(table)
    good = sum(verdict.passed for verdict in run.verdicts)
    screen.print(f"{good} of {len(run.verdicts)} asset checks passed")
    for verdict in run.failed_checks:
        screen.print(f"[red]{verdict.shard} {verdict.check}: {verdict.says}[/red]")
    if not run.success:
        raise Failed(f"maintenance failed: {run.failure}")


def summary(clock: Clock, place: Place, output: Path, commits: int) -> None:
    """Print where the time, the money and the bytes went."""
    columns = "seconds", "requests", "read", "written", "dollars"
    table = plain_table("where the time and the money went", *columns, right=columns)
    all_of_it = (
        "all",
        sum(seconds for _, seconds, _ in clock.phases),
        sum((c for *_, c in clock.phases), Cost()),
    )
    for name, seconds, cost in (*clock.phases, all_of_it):
        spent = size(cost.bytes_read), size(cost.bytes_written), dollars(cost.dollars)
        style = "bold" if name == "all" else None
        table.add_row(name, f"{seconds:.1f}", f"{cost.requests:,}", *spent, style=style)
    screen.print(table)
    table = plain_table("where the bytes went", "objects", "bytes", right=("objects", "bytes"))
    with place.open(read_only=True) as client:
        for kind, found in places.sizes(client, SHARDS).items():
            table.add_row(kind, f"{len(found)}", size(sum(found)))
    table.add_row("consensus", "", size(place.consensus_bytes()))
    screen.print(table)
    screen.print(f"{commits:,} commits and the order book were at {place.url}; the traces: {output}/trace.png")
    for sentence in place.farewell:
        screen.print(sentence)


def _is_news(name: str, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0 and name in REPORTED


REPORTED = (
    "expired", "batches_before", "batches_after", "bytes_in", "bytes_out", "updates_in", "updates_out", "tasks",
    "deleted", "deleted_bytes", "log_rows", "orphans", "orphan_bytes", "since_before",
    "since_after", "written", "bytes",
)  # fmt: skip


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=(__doc__ or "").split("\n")[0])
    own = Path(__file__).resolve().parent.parent
    parser.add_argument("--repo", type=Path, default=own, help="a git repository (default: this one)")
    parser.add_argument("--orders", type=console.positive, default=1_000_000, help="order updates (default: a million)")
    parser.add_argument(
        "--servers", nargs="?", const="s3", choices=places.STORES, metavar="STORE",
        help=f"on PostgreSQL and a store ({', '.join(places.STORES)}), started and stopped for it",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"where data and pictures go (default: {OUTPUT})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
