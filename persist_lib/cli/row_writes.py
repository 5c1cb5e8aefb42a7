"""Changing the rows of a shard, a collection or a table: appends, and changes by key from a file of rows."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli import units
from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.row_kinds import COLLECTION, SHARD, TABLE, Kind, New, table_rows
from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.schema.schema import Schema


class Created(NamedTuple):
    """The shard that a write creates if there is none."""

    create: opt.Create = False
    key: opt.CreateKey = None
    times: opt.Clock = None
    unique: opt.Unique = False

    def check(self) -> None:
        """Raise InvalidUsage for --create without --key, or for what goes with it without it."""
        if self.create != (self.key is not None):
            raise InvalidUsage("--create needs --key with the key columns, and --key is only for --create")
        if (self.times is not None or self.unique) and not self.create:
            wrong = "--times" if self.times is not None else "--unique"
            raise InvalidUsage(f"{wrong} is only for --create: it cannot be changed later")

    def new(self, file: Path | None) -> New | None:
        """What is created, with the columns of a file."""
        return None if self.key is None else New(file, self.key, self.times, self.unique)


COUNTS = ("inserted", "updated", "unchanged", "deleted")
MS = Times("ms", lambda: 0)


def append(
    session: Session,
    shard: opt.Shard,
    created: Created,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="A .parquet, .csv or .jsonl file. Without one, the append only moves upper.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    lower: Annotated[str, typer.Option(metavar="FRONTIER", help="What upper must be now, as 5 or [5].")] = ...,  # type: ignore[assignment]
    upper: Annotated[
        str, typer.Option(metavar="FRONTIER", help="What upper becomes; [] closes the shard for writing.")
    ] = ...,  # type: ignore[assignment]
    skip_covered: Annotated[
        bool,
        typer.Option(
            "--skip-covered",
            help="Skip times that the shard already has, instead of refusing: for several writers of the same data.",
        ),
    ] = False,
) -> None:
    """Append a file's updates with times in \\[lower, upper), if the shard's upper is exactly lower.

    The file has the shard's columns, `_time` (may be left out if upper is lower + 1) and `_diff` (+1 if left out).
    Either all updates become visible at once, or none. If another writer was first, the append is refused with exit
    code 1: look at the upper in the message, and decide again what to append.

    \b
    persist append orders monday.parquet --lower 0 --upper 10 --create --key order_id
    persist append orders tuesday.csv --lower 10 --upper 20
    persist append orders --lower 20 --upper 30      nothing happened before 30
    persist append visits day.csv --lower 0 --upper 2026-11-23 --create --key visitor --times ms
    persist append orders --lower 30 --upper '[]'    nothing will ever happen again
    """
    low, high = opt.parse_frontier(lower, "lower"), opt.parse_frontier(upper, "upper")
    created.check()
    with SHARD.writer(session, shard, new=created.new(file)) as writer:
        write = writer.append if skip_covered else writer.compare_and_append
        done = write(_rows(file, writer.schema), low, high)
    _answer(session, SHARD, shard, writer.schema, done)


def append_to_collection(
    session: Session,
    name: opt.Collection,
    file: opt.Input,
    lower: Annotated[str | None, typer.Option(metavar="FRONTIER")] = None,
    upper: Annotated[str | None, typer.Option(metavar="FRONTIER")] = None,
) -> None:
    """Append a file's updates to a collection, or those of standard input.

    With --lower and --upper, its times are in \\[lower, upper): where writers exclude one another, lower must be the
    collection's upper; where they append identical data, what it has already is skipped. Without them, where writers
    exclude one another, all rows are appended at the next time.

    \b
    persist collection append orders monday.parquet --lower 0 --upper 10
    echo '{"id": 1, "cents": 5}' | persist collection append orders -
    """
    if (lower is None) != (upper is None):
        raise InvalidUsage("--lower and --upper go together: the times of the file are in [lower, upper)")
    between = ((lower, "lower"), (upper, "upper"))
    bounds = [opt.parse_frontier(text, what) for text, what in between if text is not None]
    with COLLECTION.writer(session, name) as write:
        if not bounds and write.mode == "append":
            raise InvalidUsage(
                f"collection {name} is written by appends of identical data, whose times are given: add --lower and "
                "--upper"
            )
        with _input(file) as path:
            way = (
                write.append_now if not bounds else write.append if write.mode == "append" else write.compare_and_append
            )
            done = way(_rows(path, write.schema), *bounds)
    _answer(session, COLLECTION, name, write.schema, done)


def insert(session: Session, name: opt.Table, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Add the rows of a file, or of standard input. Where a constraint would not hold, nothing is written.

    \b
    persist table insert entries monday.parquet
    echo '{"entry": "e1", "cents": 5}' | persist table insert entries -
    """
    with _input(file) as path, table_rows(session, name, dry_run=dry_run) as writer:
        done = writer.insert(_rows(path, writer.schema), dry_run=dry_run)
    _answer(session, TABLE, name, writer.schema, done, by_key=True, dry_run=dry_run)


def upsert(
    session: Session, kind: Kind, name: str, file: opt.Input, created: Created, dry_run: opt.DryRun = False
) -> None:
    """Make each row of a file the one row of its key, at the next time. Rows of other keys stay as they are.

    The file has the columns of the $kind, without `_time` and `_diff`. What is there for these keys is looked up, and
    retracted in the same append; rows that are there already are not written again. Two different rows for one key are
    refused. It may be run at once with other writers, and may be run again: then all rows are unchanged. Writers of a
    collection have to exclude one another.

    \b
    $persist upsert customers today.csv --dry-run      how many rows are new, changed or unchanged
    $persist upsert customers today.csv
    """
    created.check()
    if created.create and dry_run:
        raise InvalidUsage("--dry-run changes nothing, so it goes without --create: all rows of a new shard are new")
    with _input(file) as path:
        new = {"new": created.new(path)} if created.create else {}
        with kind.writer(session, name, dry_run=dry_run, **new) as writer:
            done = writer.upsert(_rows(path, writer.schema), dry_run=dry_run)
    _answer(session, kind, name, writer.schema, done, by_key=True, dry_run=dry_run)


def delete(session: Session, kind: Kind, name: str, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Retract all rows of the keys in a file, at the next time. History before it stays readable as ever.

    The file has the key columns of the $kind, and no others. Keys that have no rows are left alone.

    \b
    $persist delete customers forgotten.csv --dry-run
    $persist delete customers forgotten.csv
    """
    from persist_lib.schema.schema import Schema

    with _input(file) as path, kind.writer(session, name, dry_run=dry_run) as writer:
        done = writer.delete(_rows(path, Schema(writer.schema.key)), dry_run=dry_run)
    _answer(session, kind, name, writer.schema, done, by_key=True, dry_run=dry_run)


def update(session: Session, name: opt.Table, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Change columns of rows that are there: the file has the key, and those value columns that get other values.

    The other columns stay as they are. Keys without rows are left alone.

    \b
    persist table update accounts limits.csv --dry-run
    echo '{"id": 1, "cents": 0}' | persist table update accounts -
    """
    import pyarrow as pa

    from persist_lib.cli.statement_files import check_columns
    from persist_lib.relation.statements import new_values

    with _input(file) as path, table_rows(session, name, dry_run=dry_run) as writer:
        schema = writer.schema
        if path is not None and path.suffix.lower() == ".jsonl":
            check_columns(path, _named(file))
        found = list(_rows(path, schema))
        given = new_values(name, schema, pa.concat_tables(found) if found else schema.data.empty_table())
        done = writer.update(given.changed, given.keys(), dry_run=dry_run)
    _answer(session, TABLE, name, schema, done, by_key=True, dry_run=dry_run)


def transact(session: Session, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Carry out a file of statements on several tables as one transaction: all of it or nothing, at one time.

    Each line is a JSON object with `table`, `op` (insert, upsert, update or delete) and `row`: all columns; for update
    the key and what changes, for delete the key. The tables are on one timeline with a WAL. If another transaction
    changed a key at the same time, it is refused (exit code 1) with nothing written: run it again.

    \b
    persist table transact transfer.jsonl --dry-run
    echo '{"table": "accounts", "op": "upsert", "row": {"id": 1, "cents": 5}}' | persist table transact -
    """
    from persist_lib.cli.statement_files import carry_out, parse_statements

    with _input(file) as path, session.tables(read_only=dry_run) as tables:
        statements = parse_statements(path, _named(file))
        timeline, _ = tables.timeline_of(statements[0].table)
        with tables.transaction(timeline, dry_run=dry_run) as transaction:
            counted = [(one, carry_out(transaction, tables, one)) for one in statements]
            done = None if dry_run else transaction.commit()
    counts: dict[str, dict[str, int]] = {}
    for one, count in counted:
        into = counts.setdefault(one.table, dict.fromkeys(COUNTS, 0))
        for kind in COUNTS:
            into[kind] += getattr(count, kind)
    lines = [f"{table}: {_counted(found)}" for table, found in counts.items()]
    said = "nothing was changed" if done is None or done.time is None else f"committed at {MS.show(done.time)}"
    value: dict[str, Any] = {"timeline": timeline, "dry_run": dry_run, "tables": counts, **clock("ms")}
    value |= {"time": None, "updates": 0, "token": ""}
    if done is not None:
        value |= {"time": done.time, "updates": done.count, "token": done.token.hex(), "cost": jsonable(done.cost)}
    session.answer(value, *lines, said)
    if done is not None:
        session.note(units.spent(done.cost))


def _answer(
    session: Session, kind: Kind, name: str, schema: Schema, done: Any, *, by_key: bool = False, dry_run: bool = False
) -> None:
    """Say what a write did, or would do: what became of each key, how many updates that is, and when."""
    times, updates = Times(schema.times, lambda: 0), units.of(done.count, "update")
    value = {field: jsonable(getattr(done, field)) for field in ANSWERED if hasattr(done, field)}
    what = f"{_counted({kind: value[kind] for kind in COUNTS})} ({updates})" if by_key else updates
    if dry_run:
        said = f"{name}: would be {what}; nothing was changed"
    else:
        time, upper, seqno = (getattr(done, field, None) for field in ("time", "upper", "seqno"))
        said = f"{name}{f' v{seqno}' if seqno is not None and done.count else ''}: {what}"
        if time is not None:
            said += f" at time {times.show(time)}"
        elif by_key:
            said += "; nothing was written"
        said += "" if upper is None else f", upper is {times.show(upper)}"
    value |= {kind.noun: name, "updates": done.count, "dry_run": dry_run, "token": done.token.hex()}
    session.answer({**value, **clock(schema.times), "cost": jsonable(done.cost)}, said)
    session.note(units.spent(done.cost))


ANSWERED = ("seqno", "upper", "time", "attempts", *COUNTS)
"""The fields of the result of a write that JSON has, where the result has them."""


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{units.number(count)} {what}" for what, count in counts.items() if count) or "no keys"


def _named(file: str) -> str:
    return "standard input" if file == STDIN else file


STDIN = "-"


@contextmanager
def _input(file: str) -> Iterator[Path | None]:
    """The file, or one with the JSON lines of standard input, which may be read twice. None where nothing came."""
    if file != STDIN:
        path = Path(file)
        if not path.is_file():
            raise InvalidUsage(f"there is no file {file}; - reads JSON lines from standard input")
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.jsonl"
        with path.open("wb") as lines:
            shutil.copyfileobj(sys.stdin.buffer, lines)
        yield path if path.stat().st_size else None


def _rows(file: Path | None, schema: Schema) -> Iterator[Any]:
    from persist_lib.cli.input_files import read_file

    return iter(()) if file is None else read_file(file, schema)
