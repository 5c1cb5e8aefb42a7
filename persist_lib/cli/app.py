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
from persist_lib.cli.row_kinds import COLLECTION, SHARD, TABLE, command_over
from persist_lib.cli.schema_commands import create, evolve
from persist_lib.cli.serve_command import serve
from persist_lib.cli.source_declaration import declare, mend
from persist_lib.cli.watch import watch
from persist_lib.core.duties import DUTIES

app = typer.Typer(
    name="persist", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
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
    """Durable, definite, time-varying collections on plain object storage.

    A [bold]shard[/] is one collection. Its contents can be read as of any time from [bold]since[/] on and before
    [bold]upper[/]: history before since is given up, and updates from upper on are not known yet. A frontier is
    written as \\[5] (at 5) or as \\[] (the end: the shard is complete, or all history is given up).

    \b
    persist shards                      all shards, one line each
    persist show orders                 one shard: its batches, readers, writers and holds
    persist log orders                  what happened to it, newest last
    persist snapshot orders --as-of 9   its contents at a time
    persist maintain --all --dry-run    what upkeep would do (without --dry-run, it does it)

    Options count over the environment ($PERSIST_LOCATION and others), and that over a persist.toml of this folder or
    its parents, up to the repository's root or home. `persist config` shows what is in force, and says more.

    Exit codes: 0 done; 1 refused, or a store or the network failed; 2 wrong usage; 3 stored data is damaged (stop
    and investigate); 4 (of ingest) starting it again does not help; 130 interrupted. Failures are printed on standard
    error, as one sentence that says what to do (with --json, as an object).
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
    made = typer.Typer(no_args_is_help=True, help=does)
    within.add_typer(made, name=name, rich_help_panel=panel)
    return made


def commands_of_duties(*, is_upkeep: bool) -> list[Callable[..., None]]:
    """The commands of the duties of one sort."""
    return [duties.command_of(duty) for duty in DUTIES if duty.is_upkeep == is_upkeep]


SHARD_ONLY, COLLECTION_ONLY, TABLE_ONLY = ("create", "key", "times", "unique"), ("replace",), ("newest",)
NO_RANGE = ("key_from", "key_to")

commands(
    app, LOOKING, shards.shards, shards.show, log, watch, diff, shards.plan, config,
    *commands_of_duties(is_upkeep=False),
)  # fmt: skip
commands(
    app, DATA, create, evolve, command_over(SHARD, reads.snapshot, *TABLE_ONLY),
    command_over(SHARD, reads.listen, *COLLECTION_ONLY), command_over(SHARD, reads.changes), sql, writes.append,
    command_over(SHARD, writes.upsert), command_over(SHARD, writes.delete),
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
    collection, CHANGING, collections.create, collections.alter, collections.evolve, collections.rename,
    collections.drop, collections.tend,
)  # fmt: skip
commands(collection, RENDITIONS, renditions.compare, renditions.hand_over)
commands(
    collection, DATA, command_over(COLLECTION, reads.snapshot, *TABLE_ONLY), command_over(COLLECTION, reads.changes),
    command_over(COLLECTION, reads.listen), command_over(COLLECTION, writes.upsert, *SHARD_ONLY),
    command_over(COLLECTION, writes.delete), append=writes.append_to_collection,
)  # fmt: skip
rendition = group(collection, "rendition", RENDITIONS, "Make, fill and drop the renditions of a collection.")
commands(rendition, None, renditions.make, renditions.copy, renditions.drop)
kept = group(collection, "hold", CHANGING, "Keep a collection's history by name, across handovers.")
commands(
    kept, None, set=holds.set_collection_hold, release=holds.release_collection_hold, list=holds.list_collection_holds
)

source = group(app, "source", COLLECTIONS, "Outside data as collections: what is declared, and how it is.")
commands(source, LOOKING, sources.list_, sources.show, sources.check)
commands(source, CHANGING, mend, sources.pause, sources.resume, sources.reset, sources.drop, create=declare)
commands(app, COLLECTIONS, ingest)
area = group(app, "pending", COLLECTIONS, "What writers without coordination put, and how far it is absorbed.")
commands(area, LOOKING, pending.list_, pending.show)
commands(area, CHANGING, pending.absorb, pending.choose, pending.delete)

table = group(app, "table", COLLECTIONS, "Tables: rows that people change, alone or in transactions.")
commands(table, LOOKING, tables.list_, tables.show)
commands(table, CHANGING, tables.create, tables.drop)
commands(
    table, DATA, command_over(TABLE, reads.changes), command_over(TABLE, reads.listen, *COLLECTION_ONLY),
    writes.insert, command_over(TABLE, writes.upsert, *SHARD_ONLY), writes.update, command_over(TABLE, writes.delete),
    writes.transact, read=command_over(TABLE, reads.snapshot, *NO_RANGE),
)  # fmt: skip
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
commands(app, HISTORY, holds.set_retention, holds.finish)
