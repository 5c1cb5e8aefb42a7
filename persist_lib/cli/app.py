"""The application: its commands, and what `persist --help` says."""

from __future__ import annotations

from typing import Annotated

import typer

from persist_lib.cli import (
    by_key,
    capabilities,
    changing,
    collection_rows,
    collections,
    diff,
    duties,
    events,
    history,
    ingesting,
    log,
    looking,
    mending,
    pending,
    producers,
    reading,
    recovery,
    renditions,
    schemas,
    serving,
    settings,
    show,
    sources,
    sql,
    stream_lock,
    tables,
    tables_rows,
    watch,
    writing,
)
from persist_lib.cli.command import AsJson, Config, Consensus, Location, Prices, Shared, Verbose, command, prose
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

command(app, "shards", looking.shards, LOOKING)
command(app, "show", show.show, LOOKING)
command(app, "log", log.log, LOOKING)
command(app, "watch", watch.watch, LOOKING)
command(app, "diff", diff.diff, LOOKING)
command(app, "plan", looking.plan, LOOKING)
command(app, "config", settings.config, LOOKING)
for duty in DUTIES:
    if not duty.is_upkeep:
        command(app, duty.name, duties.command_of(duty), LOOKING)

command(app, "create", schemas.create, DATA)
command(app, "evolve", schemas.evolve, DATA)
command(app, "snapshot", reading.snapshot, DATA)
command(app, "listen", reading.listen, DATA)
command(app, "changes", changing.changes, DATA)
command(app, "sql", sql.sql, DATA)
command(app, "append", writing.append, DATA)
command(app, "upsert", by_key.upsert, DATA)
command(app, "delete", by_key.delete, DATA)

command(app, "maintain", duties.maintain, UPKEEP)
for duty in DUTIES:
    if duty.is_upkeep:
        command(app, duty.name, duties.command_of(duty), UPKEEP)
command(app, "upgrade", duties.upgrade, UPKEEP)
command(app, "serve", serving.serve, UPKEEP)

command(app, "restore", changing.restore, RECOVERY)
command(app, "outcome", recovery.outcome, RECOVERY)
command(app, "repair", recovery.repair, RECOVERY)

holds = typer.Typer(no_args_is_help=True, help="Keep history by name, durably and without a lease.")
app.add_typer(holds, name="hold", rich_help_panel=HISTORY)
command(holds, "set", history.set_hold)
command(holds, "downgrade", history.downgrade_hold)
command(holds, "release", history.release_hold)
command(holds, "list", history.list_holds)
numbered = typer.Typer(no_args_is_help=True, help="Who numbers its appends, so that none is committed twice.")
app.add_typer(numbered, name="producers", rich_help_panel=LOOKING)
command(numbered, "list", producers.list_producers)
command(numbered, "forget", producers.forget_producer)
kept = typer.Typer(no_args_is_help=True, help="Collections, their renditions, and handovers between them.")
app.add_typer(kept, name="collection", rich_help_panel=COLLECTIONS)
command(kept, "list", collections.list_, LOOKING)
command(kept, "show", collections.show, LOOKING)
command(kept, "capabilities", capabilities.capabilities, LOOKING)
command(kept, "create", collections.create, CHANGING)
command(kept, "alter", collections.alter, CHANGING)
command(kept, "evolve", collections.evolve, CHANGING)
command(kept, "rename", collections.rename, CHANGING)
command(kept, "drop", collections.drop, CHANGING)
command(kept, "tend", collections.tend, CHANGING)
command(kept, "compare", renditions.compare, RENDITIONS)
command(kept, "hand-over", renditions.hand_over, RENDITIONS)
command(kept, "snapshot", collection_rows.snapshot, DATA)
command(kept, "changes", collection_rows.changes, DATA)
command(kept, "listen", collection_rows.listen, DATA)
command(kept, "append", collection_rows.append, DATA)
command(kept, "upsert", collection_rows.upsert, DATA)
command(kept, "delete", collection_rows.delete, DATA)
made = typer.Typer(no_args_is_help=True, help="Make, fill and drop the renditions of a collection.")
kept.add_typer(made, name="rendition", rich_help_panel=RENDITIONS)
command(made, "make", renditions.make)
command(made, "copy", renditions.copy)
command(made, "drop", renditions.drop)
kept_by = typer.Typer(no_args_is_help=True, help="Keep a collection's history by name, across handovers.")
kept.add_typer(kept_by, name="hold", rich_help_panel=CHANGING)
command(kept_by, "set", capabilities.set_hold)
command(kept_by, "release", capabilities.release_hold)
command(kept_by, "list", capabilities.list_holds)
fed = typer.Typer(no_args_is_help=True, help="Outside data as collections: what is declared, and how it is.")
app.add_typer(fed, name="source", rich_help_panel=COLLECTIONS)
command(fed, "list", sources.list_, LOOKING)
command(fed, "show", sources.show, LOOKING)
command(fed, "create", sources.create, CHANGING)
command(fed, "check", sources.check, LOOKING)
command(fed, "mend", mending.mend, CHANGING)
command(fed, "pause", sources.pause, CHANGING)
command(fed, "resume", sources.resume, CHANGING)
command(fed, "reset", sources.reset, CHANGING)
command(fed, "drop", sources.drop, CHANGING)
command(app, "ingest", ingesting.ingest, COLLECTIONS)
areas = typer.Typer(no_args_is_help=True, help="What writers without coordination put, and how far it is absorbed.")
app.add_typer(areas, name="pending", rich_help_panel=COLLECTIONS)
command(areas, "list", pending.list_, LOOKING)
command(areas, "show", pending.show, LOOKING)
command(areas, "absorb", pending.absorb, CHANGING)
command(areas, "choose", pending.choose, CHANGING)
command(areas, "delete", pending.delete, CHANGING)
rows = typer.Typer(no_args_is_help=True, help="Tables: rows that people change, alone or in transactions.")
app.add_typer(rows, name="table", rich_help_panel=COLLECTIONS)
command(rows, "list", tables.list_, LOOKING)
command(rows, "show", tables.show, LOOKING)
command(rows, "create", tables.create, CHANGING)
command(rows, "drop", tables.drop, CHANGING)
command(rows, "read", tables_rows.read, DATA)
command(rows, "changes", tables_rows.changes, DATA)
command(rows, "listen", tables_rows.listen, DATA)
command(rows, "insert", tables_rows.insert, DATA)
command(rows, "upsert", tables_rows.upsert, DATA)
command(rows, "update", tables_rows.update, DATA)
command(rows, "delete", tables_rows.delete, DATA)
command(rows, "transact", tables_rows.transact, DATA)
command(rows, "outcome", tables_rows.outcome, RECOVERY)
streamed = typer.Typer(no_args_is_help=True, help="Streams: written first, sealed later, by one writer a location.")
app.add_typer(streamed, name="streams", rich_help_panel=COLLECTIONS)
command(streamed, "list", stream_lock.list_, LOOKING)
command(streamed, "show", stream_lock.show, LOOKING)
command(streamed, "wipe", stream_lock.wipe, CHANGING)
locked = typer.Typer(no_args_is_help=True, help="The lock of the one writer.")
streamed.add_typer(locked, name="lock", rich_help_panel=CHANGING)
command(locked, "show", stream_lock.show_lock)
command(locked, "break", stream_lock.break_lock)
logged = typer.Typer(no_args_is_help=True, help="Event logs, which programs replay: looking, checking, copying.")
app.add_typer(logged, name="events", rich_help_panel=COLLECTIONS)
command(logged, "kinds", events.kinds, LOOKING)
command(logged, "show", events.show, LOOKING)
command(logged, "cat", events.cat, LOOKING)
command(logged, "head", events.head, LOOKING)
command(logged, "tail", events.tail, LOOKING)
command(logged, "check", events.check, LOOKING)
command(logged, "copy", events.copy, CHANGING)
command(logged, "mark", events.mark, RECOVERY)
command(logged, "repair", events.repair, RECOVERY)
command(app, "set-retention", history.retention, HISTORY)
command(app, "finish", history.finish, HISTORY)
