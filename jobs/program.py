"""What the programs share: their arguments, the location they open, and their reports to a terminal or to Dagster.

A program that was started by Dagster Pipes reports to Dagster; otherwise it prints one line a shard, of JSON with
PERSIST_LOG=json. Exit status: 0 if all is done, 1 if a shard failed (the others are done; try again), 3 if stored data
is damaged, 2 for wrong arguments, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import persist_lib as persist
from jobs.parallel import Answer, Outcome
from jobs.session import Sessions, SparkSettings, build_session
from jobs.signals import Unfinished
from persist_lib.cli.json_values import exit_code
from persist_lib.client import Client
from persist_lib.core.cost import Cost, parse_prices
from persist_lib.errors import NotFound, PersistError
from persist_lib.settings import config_of
from persist_lib.telemetry import JsonFormatter, log_line, logs_json

if TYPE_CHECKING:
    from persist_lib.catalog import Controller

PIPES = "DAGSTER_PIPES_CONTEXT"
Numbers = Mapping[str, float]


@dataclass
class Terminal:
    """Reports to the terminal: a line for every shard, and a progress bar if standard output is a terminal."""

    console: Console = field(default_factory=lambda: Console(stderr=False, highlight=False))
    _progress: Progress | None = field(default=None, init=False)
    _task: TaskID | None = field(default=None, init=False)
    _bars: dict[str, TaskID] = field(default_factory=dict, init=False)

    def begin(self, shards: int, doing: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self._task = self._progress.add_task(doing, total=shards)
        self._progress.start()

    def step(self, doing: str, done: float, of: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=doing, completed=done, total=of)

    def done(self, shard: str, numbers: Numbers, says: str = "") -> None:
        figures = "  ".join(f"{name}={number:,.6g}" for name, number in numbers.items())
        self._line("  ".join(filter(None, (shard, says, figures))) if says or figures else f"{shard}  nothing to do")

    def failed(self, shard: str, error: Exception) -> None:
        self._line(f"{shard}  FAILED: {type(error).__name__}: {error}")

    def moves(self, shard: str, what: str, done: int, total: int) -> None:
        """A bar for a shard that is worked on: how many of its tasks are done. It goes away at 0 of 0."""
        if self._progress is None:
            return
        bar = self._bars.get(shard)
        if not total:
            if bar is not None:
                self._progress.remove_task(self._bars.pop(shard))
        elif bar is None:
            self._bars[shard] = self._progress.add_task(f"{shard}: {what}", total=total, completed=done)
        else:
            self._progress.update(bar, description=f"{shard}: {what}", completed=done, total=total)

    def says(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)


class JsonLines:
    """Reports as JSON, one object a line: what a collector of logs reads. `PERSIST_LOG=json` asks for it.

    Each has `time`, `event` (begin, step, done, failed, says, end), and what it is about: `shard`, `figures`,
    `error`. What the library logs are lines of the event `log`.
    """

    def __init__(self) -> None:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])

    def _say(self, event: str, **fields: Any) -> None:
        print(log_line(event, time.time(), **fields), flush=True)

    def begin(self, shards: int, doing: str) -> None:
        self._say("begin", doing=doing, shards=shards)

    def step(self, doing: str, done: float, of: float) -> None:
        self._say("step", doing=doing, done=done, of=of)

    def done(self, shard: str, numbers: Numbers, says: str = "") -> None:
        self._say("done", shard=shard, figures=dict(numbers), says=says)

    def failed(self, shard: str, error: Exception) -> None:
        self._say("failed", shard=shard, error=type(error).__name__, says=str(error))

    def says(self, line: str) -> None:
        self._say("says", says=line)

    def moves(self, shard: str, what: str, done: int, total: int) -> None:
        """Nothing: `says` tells it each half minute."""

    def end(self) -> None:
        """A line, so that a log that ends without it is of a program that was killed."""
        self._say("end")


class Pipes:
    """Reports to Dagster by Pipes: a log line for every shard, and at the end the sums of their figures.

    The sums go into a custom message, for ops and assets alike (`completed.get_custom_messages()`), and into the log.
    An asset is reported as materialized only if no shard failed.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._log: logging.Logger = context.log
        self._sums: dict[str, float] = {}
        self._failed: list[str] = []
        self._shards = 0

    def begin(self, shards: int, doing: str) -> None:
        self._log.info("%s: %d shards", doing, shards)

    def step(self, doing: str, done: float, of: float) -> None:
        self._log.info("%s: %g of %g", doing, done, of)

    def done(self, shard: str, numbers: Numbers, says: str = "") -> None:
        self._shards += 1
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0) + number
        self._log.info("%s: %s%s", shard, f"{says}; " if says else "", dict(numbers))

    def failed(self, shard: str, error: Exception) -> None:
        self._failed.append(shard)
        self._log.error("%s: %s: %s", shard, type(error).__name__, error)

    def says(self, line: str) -> None:
        self._log.info("%s", line)

    def moves(self, shard: str, what: str, done: int, total: int) -> None:
        """Nothing: `says` tells it each half minute, which is enough for a log."""

    def end(self) -> None:
        """Report the sums. An op has no asset to materialize, and a step of several assets does not say which one."""
        sums = {"shards": self._shards, "failed": len(self._failed), **self._sums}
        self._context.report_custom_message(sums)
        if self._failed:
            self._log.error("failed: %s; %d shards are done", ", ".join(sorted(self._failed)), self._shards)
            return
        self._log.info("all done: %s", sums)
        if self._context.is_asset_step and len(self._context.asset_keys) == 1:
            self._context.report_asset_materialization(metadata=sums)


Tells = Terminal | JsonLines | Pipes


@contextmanager
def telling() -> Iterator[Tells]:
    """Yield where to report: `Pipes` if Dagster started this program by Pipes, else `JsonLines` or `Terminal`.

    Raises InvalidUsage if PERSIST_LOG is neither json nor empty.
    """
    if PIPES not in os.environ:
        terminal = JsonLines() if logs_json(os.environ) else Terminal()
        try:
            yield terminal
        finally:
            terminal.end()
        return
    from dagster_pipes import open_dagster_pipes  # noqa: PLC0415 - not a dependency of programs

    with open_dagster_pipes() as context:
        pipes = Pipes(context)
        yield pipes
        pipes.end()


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments of a program over shards."""
    parser = place_arguments(description)
    parser.add_argument("--shard", action="append", default=[], help="may be repeated; without it, all shards")
    parser.add_argument("--in-flight", type=int, default=4, help="shards worked on at once")
    return parser


def place_arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that every program takes: where the location is, what it costs, and where Spark runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    location = os.environ.get("PERSIST_LOCATION")
    parser.add_argument("--location", default=location, required=location is None, help="or PERSIST_LOCATION")
    parser.add_argument("--consensus", default=os.environ.get("PERSIST_CONSENSUS"), help="or PERSIST_CONSENSUS")
    parser.add_argument(
        "--prices", default=os.environ.get("PERSIST_PRICES"), help="s3, free or JSON, or PERSIST_PRICES"
    )
    parser.add_argument("--master", help="Spark's, or PERSIST_SPARK_MASTER; without it this machine")
    parser.add_argument("--remote", help="a Spark Connect server, or PERSIST_SPARK_REMOTE")
    return parser


def spark_settings(parsed: argparse.Namespace) -> SparkSettings:
    """Where Spark runs, by the arguments, else by the environment."""
    given = {name: getattr(parsed, name) for name in ("master", "remote") if getattr(parsed, name)}
    return SparkSettings.from_environment().model_copy(update=given)


def sessions(parsed: argparse.Namespace) -> Sessions:
    """What makes the session there, on first use."""
    return partial(build_session, spark_settings(parsed))


def letters(name: str) -> str:
    """A name in the letters that names in Dagster may have."""
    return "".join(one if one.isalnum() and one.isascii() else "_" for one in name)


def spent(cost: Cost) -> dict[str, float]:
    """The requests to the location and their price, in figures that can be added up and drawn over time."""
    return {
        "location_requests": cost.requests,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
        "dollars": cost.dollars,
    }


@contextmanager
def opened(parsed: argparse.Namespace, lease_ms: int | None = None) -> Iterator[tuple[Client, list[str]]]:
    """Open the location; yields the client and the shards asked for, or all. NotFound if one of these does not exist.

    The rest is that of `opened_client`.
    """
    with opened_client(parsed, lease_ms) as client:
        there = client.shards()
        if unknown := sorted(set(parsed.shard) - set(there)):
            raise NotFound(f"there are no shards {unknown} in {client.url}; there are {there}", shards=unknown)
        yield client, parsed.shard or there


@contextmanager
def opened_client(parsed: argparse.Namespace, lease_ms: int | None = None, *, create: bool = False) -> Iterator[Client]:
    """Open the location, and `create` it if there is none.

    PERSIST_CONFIG has fields of `persist.Config` as JSON. `lease_ms` counts if it does not say otherwise.
    """
    config = persist.Config.model_validate(config_of(os.environ))
    if lease_ms is not None and "lease_ms" not in config.model_fields_set:
        config = config.model_copy(update={"lease_ms": lease_ms})
    prices = parse_prices(parsed.prices) if parsed.prices else None
    with persist.open(parsed.location, parsed.consensus, config=config, prices=prices, create=create) as client:
        yield client


def on_one(
    name: str,
    parsed: argparse.Namespace,
    unfinished: Unfinished,
    act: Callable[[Client, Controller, argparse.Namespace, Tells], None],
) -> int:
    """Do something with the collection or source of this name; returns the exit status of the program."""
    try:
        with telling() as tells, opened_client(parsed) as client, client.controller() as controller:
            unfinished.begin([name])
            act(client, controller, parsed, tells)
            unfinished.done(name)
    except PersistError as error:
        print(f"{name}  FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def over_shards(
    parsed: argparse.Namespace, unfinished: Unfinished | None, doing: str,
    do: Callable[[Client, list[str], Tells], Iterator[Outcome[Answer]]],
    told: Callable[[Tells, str, Answer], Exception | None],
    lease_ms: int | None = None,
) -> int:  # fmt: skip
    """Do something on the shards that were asked for; returns the exit status of the program.

    `told` tells what was done on one, or answers what is wrong with it.
    """
    failed: dict[str, Exception] = {}
    unfinished = unfinished or Unfinished()
    with telling() as tells, opened(parsed, lease_ms) as (client, shards):
        unfinished.begin(shards)
        tells.begin(len(shards), doing)
        for shard, done, error in do(client, shards, tells):
            unfinished.done(shard)
            if (wrong := error if done is None else told(tells, shard, done)) is not None:
                failed[shard] = wrong
                tells.failed(shard, wrong)
    return exit_status(failed)


def exit_status(failed: Mapping[str, Exception]) -> int:
    """Return the exit status: 0, or that of the gravest error of the shards that failed. Their names are printed."""
    if failed:
        print(f"failed: {', '.join(sorted(failed))}; everything else is done", file=sys.stderr)
    return max(map(exit_code, failed.values()), default=0)
