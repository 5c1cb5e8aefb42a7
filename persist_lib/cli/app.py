"""The application: its commands, and what `persist --help` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

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
from persist_lib.cli.history import log
from persist_lib.cli.location_commands import config, health, serve
from persist_lib.cli.query import sql
from persist_lib.cli.report_command import report
from persist_lib.cli.root import Group, Root
from persist_lib.cli.root import commands as list_commands
from persist_lib.cli.schema_commands import evolve
from persist_lib.cli.simulate_command import simulate
from persist_lib.cli.source_commands import ingest
from persist_lib.cli.source_declaration import declare, mend
from persist_lib.cli.verify_command import verify

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


READING = "Reading"
WRITING = "Writing"
TABLES = "What tables there are, and how they are kept"
LOCATION = "The location"
PARTS = "What tables are made of, and what feeds them"


def commands(within: typer.Typer, panel: str | None, *runs: Callable[..., None], **named: Callable[..., None]) -> None:
    """Register commands in a panel of the help, by the names of their functions, or by those given."""
    for name, run in [*((run.__name__, run) for run in runs), *named.items()]:
        command(within, name.rstrip("_").replace("_", "-"), run, panel)


def group(within: typer.Typer, name: str, does: str, panel: str | None = None) -> typer.Typer:
    """A group of commands."""
    made = typer.Typer(cls=Group, no_args_is_help=True, help=does)
    within.add_typer(made, name=name, rich_help_panel=panel)
    return made


commands(app, READING, reads.read, reads.changes, reads.listen, sql, reads.history)
commands(
    app, WRITING, writes.append, writes.upsert, writes.update, writes.delete, writes.apply, writes.transact,
    writes.erase, recovery.restore, recovery.outcome,
)  # fmt: skip
commands(
    app, TABLES, tables.tables, tables.describe, tables.create, evolve, holds.promote, holds.rename, holds.drop,
    holds.set_retention,
)  # fmt: skip
hold = group(app, "hold", "Keep history by name, durably and without a lease.", TABLES)
commands(hold, None, holds.set_, holds.release)
commands(
    app, LOCATION, health, verify, simulate, report, duties.maintain, ingest, serve, config, commands=list_commands
)

shard = group(app, "shard", "Shards, of which tables are made: their state, their log, and whether it is sound.", PARTS)
commands(
    shard, None, shards.list_, shards.show, log, recovery.producers, duties.scrub, duties.upgrade, recovery.repair
)  # fmt: skip
collection = group(app, "collection", "Other shards, columns or contents for a collection, from a time on.", PARTS)
commands(collection, None, renditions.compare, renditions.hand_over)
rendition = group(collection, "rendition", "Make, fill and drop the renditions of a collection.")
commands(rendition, None, renditions.make, renditions.copy, renditions.drop)
source = group(app, "source", "Outside data as collections: what is declared, and how it is.", PARTS)
commands(
    source, None, sources.show, mend, sources.add_table, sources.pause, sources.reset, sources.drop,
    create=declare,
)  # fmt: skip
area = group(app, "pending", "What writers without coordination put, and how far it is absorbed.", PARTS)
commands(area, None, pending.show, pending.choose, pending.delete)
stream = group(app, "streams", "Streams: written first, sealed later, by one writer a location.", PARTS)
commands(stream, None, streams.show, streams.wipe, streams.unlock)
event = group(app, "events", "Event logs, which programs replay: looking, checking, copying.", PARTS)
commands(event, None, events.show, events.cat, events.check, events.copy, events.mark)
