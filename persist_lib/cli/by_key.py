"""`persist upsert` and `persist delete`: make a file's rows those of their keys, or retract all rows of some keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persist_lib.cli import units
from persist_lib.cli.arguments import Create, CreateKey, DryRun, Shard, check_create
from persist_lib.cli.schemas import Clock, Unique
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable
from persist_lib.cli.writing import schema_for
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.relation.appends import Changed
    from persist_lib.schema.schema import Schema

Rows = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A .parquet, .csv or .jsonl file of rows.", exists=True, dir_okay=False, show_default=False
    ),
]
Keys = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A .parquet, .csv or .jsonl file with the key columns, and no others.", exists=True,
        dir_okay=False, show_default=False,
    ),
]  # fmt: skip
COUNTS = ("inserted", "updated", "unchanged", "deleted")


def upsert(
    session: Session,
    shard: Shard,
    file: Rows,
    dry_run: DryRun = False,
    create: Create = False,
    key: CreateKey = None,
    times: Clock = None,
    unique: Unique = False,
) -> None:
    """Make each row of a file the one row of its key, at the next time. Rows of other keys stay as they are.

    The file has the shard's columns, without `_time` and `_diff`. What the shard has for these keys is looked up, and
    retracted in the same append; rows that are there already are not written again. Two different rows for one key are
    refused. It may be run at once with other writers, and may be run again: then all rows are unchanged.

    \b
    persist upsert customers today.csv --dry-run      how many rows are new, changed or unchanged
    persist upsert customers today.csv
    persist upsert customers today.csv --create --key id --times ms --unique
    """
    check_create(create, key)
    if (times is not None or unique) and not create:
        raise InvalidUsage("--times and --unique are only for --create: they cannot be changed later")
    if create and dry_run:
        raise InvalidUsage("--dry-run changes nothing, so it goes without --create: all rows of a new shard are new")
    with session.open(read_only=False, create=create) as client:
        from persist_lib.cli.inputs import read_file

        schema = schema_for(client, shard, file, key, times, unique=unique)
        with client.open_writer(shard, schema) as write:
            done = write.upsert(read_file(file, schema), dry_run=dry_run)
        _answer(session, client, shard, schema, done, dry_run)


def delete(session: Session, shard: Shard, file: Keys, dry_run: DryRun = False) -> None:
    """Retract all rows of the keys in a file, at the next time. History before it stays readable as ever.

    The file has the shard's key columns, and no others. Keys that have no rows are left alone.

    \b
    persist delete customers forgotten.csv --dry-run
    persist delete customers forgotten.csv
    """
    with session.open(read_only=False) as client:
        from persist_lib.cli.inputs import read_file
        from persist_lib.schema.schema import Schema

        schema = schema_for(client, shard, None, None)
        with client.open_writer(shard, schema) as write:
            done = write.delete(read_file(file, Schema(schema.key)), dry_run=dry_run)
        _answer(session, client, shard, schema, done, dry_run)


def _answer(session: Session, client: Client, shard: str, schema: Schema, done: Changed, dry_run: bool) -> None:
    times = Times(schema.times, lambda: 0)
    cost = client.metrics().cost
    counts = {name: getattr(done, name) for name in COUNTS}
    what = ", ".join(f"{units.number(count)} {name}" for name, count in counts.items() if count) or "no keys"
    if dry_run:
        said = f"{shard}: would be {what} ({units.of(done.count, 'update')}); nothing was changed"
    elif done.time is None:
        said = f"{shard}: {what}; nothing was written, upper is {times.show(done.upper)}"
    else:
        wrote = units.of(done.count, "update")
        said = (
            f"{shard} v{done.seqno}: {what}; {wrote} at time {times.show(done.time)}, upper is {times.show(done.upper)}"
        )
    value = {"shard": shard, "seqno": done.seqno, "upper": jsonable(done.upper), "time": done.time}
    value |= {"updates": done.count, **counts, "dry_run": dry_run, "token": done.token.hex(), "attempts": done.attempts}
    session.answer({**value, **clock(schema.times), "cost": jsonable(cost)}, said)
    session.note(units.spent(cost))
