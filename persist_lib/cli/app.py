"""The application: its commands, and what `persist --help` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from persist_lib.cli import collection_commands as collections
from persist_lib.cli import duty_commands as duties
from persist_lib.cli import event_commands as events
from persist_lib.cli import hold_commands as holds
from persist_lib.cli import pending_commands as pending
from persist_lib.cli import recovery_commands as recovery
from persist_lib.cli import rendition_commands as renditions
from persist_lib.cli import row_reads as reads
from persist_lib.cli import row_writes as writes
from persist_lib.cli import shard_commands as shards
from persist_lib.cli import source_commands as sources
from persist_lib.cli import stream_commands as streams
from persist_lib.cli import table_commands as tables
from persist_lib.cli.command import AsJson, Config, Consensus, Location, Prices, Shared, Verbose, command, prose
from persist_lib.cli.config_command import config
from persist_lib.cli.history import diff, log
from persist_lib.cli.ingest_command import ingest
from persist_lib.cli.query import sql
from persist_lib.cli.root import Group, Root
from persist_lib.cli.root import commands as list_commands
from persist_lib.cli.schema_commands import create, evolve
from persist_lib.cli.serve_command import serve
from persist_lib.cli.source_declaration import declare, mend
from persist_lib.cli.watch import watch
from persist_lib.core.duties import DUTIES

app = typer.Typer(
    name="persist", cls=Root, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)  # fmt: skip


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"persist {version('persist-lib')}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    location: Location = None,
    consensus: Consensus = None,
    json_: AsJson = False,
    verbose: Verbose = 0,
    prices: Prices = None,
    config: Config = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,  # noqa: ARG001
) -> None:
    """Tables that remember, on plain object storage: each time from since up to upper is read the same, for ever.

    `persist COMMAND --help` shows options and examples, `persist commands` all commands, and `persist config` what is
    in force of --location, $PERSIST_LOCATION and persist.toml. --json prints one object, for machines.

    Exit codes: 0 done; 1 refused, or a store or the network failed; 2 wrong usage; 3 stored data is damaged; 4 (of
    ingest) starting it again does not help; 130 interrupted. Failures say on standard error what to do.
    """
    ctx.obj = Shared(location, consensus, json_, verbose, prices, config)


app.callback(help=prose(_root.__doc__ or ""))(_root)


LOOKING = "Looking (no data is ever changed)"
DATA = "Data"
UPKEEP = "Upkeep (any time, anywhere, several at once)"
RECOVERY = "When something went wrong"
HISTORY = "How much history is kept"
COLLECTIONS = "Collections and tables"
CHANGING = "Changing"
RENDITIONS = "Renditions and handovers"


def commands(within: typer.Typer, panel: str | None, *runs: Callable[..., None], **named: Callable[..., None]) -> None:
    """Register commands in a panel of the help, by the names of their functions, or by those given."""
    for name, run in [*((run.__name__, run) for run in runs), *named.items()]:
        command(within, name.rstrip("_").replace("_", "-"), run, panel)


def group(within: typer.Typer, name: str, panel: str, does: str) -> typer.Typer:
    """A group of commands."""
    made = typer.Typer(cls=Group, no_args_is_help=True, help=does)
    within.add_typer(made, name=name, rich_help_panel=panel)
    return made


def commands_of_duties(*, is_upkeep: bool) -> list[Callable[..., None]]:
    """The commands of the duties of one sort."""
    return [duties.command_of(duty) for duty in DUTIES if duty.is_upkeep == is_upkeep]


commands(
    app, LOOKING, reads.tables, shards.shards, shards.show, log, watch, diff, shards.plan, config,
    *commands_of_duties(is_upkeep=False), commands=list_commands,
)  # fmt: skip
commands(
    app, DATA, create, evolve, reads.read, reads.changes, reads.listen, sql, writes.append, writes.upsert,
    writes.update, writes.delete, writes.apply, reads.history, reads.describe,
)  # fmt: skip
commands(app, UPKEEP, duties.maintain, *commands_of_duties(is_upkeep=True), duties.upgrade, serve)
commands(app, RECOVERY, recovery.restore, recovery.outcome, recovery.repair)
hold = group(app, "hold", HISTORY, "Keep history by name, durably and without a lease.")
commands(hold, None, holds.set_, holds.downgrade, holds.release, holds.list_)
producers = group(app, "producers", LOOKING, "Who numbers its appends, so that none is committed twice.")
commands(producers, None, list=recovery.list_producers, forget=recovery.forget_producer)

collection = group(app, "collection", COLLECTIONS, "Collections, their renditions, and handovers between them.")
commands(collection, LOOKING, collections.list_, collections.show, holds.capabilities)
commands(
    collection, CHANGING, collections.create, collections.tend,
)  # fmt: skip
commands(collection, RENDITIONS, renditions.compare, renditions.hand_over)
rendition = group(collection, "rendition", RENDITIONS, "Make, fill and drop the renditions of a collection.")
commands(rendition, None, renditions.make, renditions.copy, renditions.drop)
source = group(app, "source", COLLECTIONS, "Outside data as collections: what is declared, and how it is.")
commands(source, LOOKING, sources.list_, sources.show, sources.check)
commands(source, CHANGING, mend, sources.pause, sources.resume, sources.reset, sources.drop, create=declare)
commands(app, COLLECTIONS, ingest)
area = group(app, "pending", COLLECTIONS, "What writers without coordination put, and how far it is absorbed.")
commands(area, LOOKING, pending.list_, pending.show)
commands(area, CHANGING, pending.absorb, pending.choose, pending.delete)

table = group(app, "table", COLLECTIONS, "Tables: rows that people change, alone or in transactions.")
commands(table, LOOKING, tables.list_, tables.show)
commands(table, CHANGING, tables.create)
commands(table, DATA, writes.transact)
commands(table, RECOVERY, outcome=recovery.outcome_of_commit)

stream = group(app, "streams", COLLECTIONS, "Streams: written first, sealed later, by one writer a location.")
commands(stream, LOOKING, streams.list_, streams.show)
commands(stream, CHANGING, streams.wipe)
lock = group(stream, "lock", CHANGING, "The lock of the one writer.")
command(lock, "show", streams.show_lock)
command(lock, "break", streams.break_lock)
event = group(app, "events", COLLECTIONS, "Event logs, which programs replay: looking, checking, copying.")
commands(event, LOOKING, events.kinds, events.show, events.cat, events.head, events.tail, events.check)
commands(event, CHANGING, events.copy)
commands(event, RECOVERY, events.mark, events.repair)
commands(app, HISTORY, holds.set_retention, holds.rename, holds.drop)
