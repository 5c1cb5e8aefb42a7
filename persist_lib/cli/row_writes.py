"""Changing the rows of a table, whatever carries it: appends, and changes by key, from files of rows."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import clock, encode, jsonable
from persist_lib.cli.session import Session
from persist_lib.core import units
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.schema.schema import Schema
    from persist_lib.table.erase import Erased
    from persist_lib.table.table import Table


class Created(NamedTuple):
    """The shard that a write creates if there is no table of the name."""

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

    def make(self, client: Client, name: str, file: Path | None) -> None:
        """Make the shard, with the columns of a file, if that was asked for and there is no table of the name."""
        if self.key is None:
            return
        try:
            client.table(name)
        except NotFound:
            if file is None:
                raise InvalidUsage("to create a table, give a file: its columns are the schema") from None
            from persist_lib.cli.input_files import infer_schema
            from persist_lib.table.opening import make_table

            schema = infer_schema(
                file, opt.parse_names(self.key) or [], opt.parse_clock(self.times), unique=self.unique
            )
            make_table(client, name, schema)


COUNTS = ("inserted", "updated", "unchanged", "deleted", "late")
MS = Times("ms", lambda: 0)


Lower = Annotated[str | None, typer.Option(metavar="FRONTIER", help="What upper must be now, as 5 or [5].")]
Upper = Annotated[str | None, typer.Option(metavar="FRONTIER", help="What upper becomes; [] closes it for writing.")]


class Between(NamedTuple):
    """The times of an append that brings its own."""

    lower: Lower = None
    upper: Upper = None
    skip_covered: Annotated[
        bool,
        typer.Option(
            "--skip-covered",
            help="Skip times that it already has, instead of refusing: for several writers of the same data.",
        ),
    ] = False

    def frontiers(self, *, has_file: bool, dry_run: bool) -> list[Any]:
        """Both, or none at the next time. Raises InvalidUsage for what does not go together."""
        if (self.lower is None) != (self.upper is None):
            raise InvalidUsage("--lower and --upper go together: the times of the file are in [lower, upper)")
        between = ((self.lower, "lower"), (self.upper, "upper"))
        bounds = [opt.parse_frontier(text, what) for text, what in between if text is not None]
        if bounds and dry_run:
            raise InvalidUsage("--dry-run is for appends at the next time: leave out --lower and --upper")
        if not bounds and (self.skip_covered or not has_file):
            raise InvalidUsage(
                "give a FILE to append at the next time; an append without one, or with --skip-covered, takes --lower "
                "and --upper"
            )
        return bounds


@contextmanager
def _table(
    session: Session, name: str, created: Created, file: Path | None, *, dry_run: bool = False
) -> Iterator[Table]:
    created.check()
    if created.create and dry_run:
        raise InvalidUsage("--dry-run changes nothing, so it goes without --create: all rows of a new shard are new")
    with session.open(read_only=False, create=created.create) as client:
        created.make(client, name, file)
        with client.table(name) as table:
            yield table


def append(
    session: Session,
    name: opt.AnyTable,
    created: Created,
    between: Between,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="A .parquet, .csv or .jsonl file; - reads JSON lines from standard input. Without: only upper moves.",
        ),
    ] = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Append the rows of a file at the next time; or its updates with times in \\[lower, upper).

    Without --lower and --upper the file has the table's columns. With them, `_time`, too (may be left out if upper is
    lower + 1), and `_diff` (+1 if left out); upper must be exactly lower now. Either all of it becomes visible at once,
    or none. If another writer was first, an append of given times is refused with exit code 1: look at the upper in the
    message, and decide again what to append. Where writers append identical data, what is there already is skipped. A
    table of a timeline takes no times of yours.

    \b
    persist append orders monday.parquet
    echo '{"id": 1, "cents": 5}' | persist append orders -
    persist append orders monday.parquet --create --key order_id
    persist append ticks monday.parquet --lower 0 --upper 10 --create --key id --times none
    persist append visits day.csv --lower 0 --upper 2026-11-23 --create --key visitor
    persist append orders --lower 20 --upper 30      nothing happened before 30
    persist append orders --lower 30 --upper '[]'    nothing will ever happen again
    """
    bounds = between.frontiers(has_file=file is not None, dry_run=dry_run)
    with (
        nullcontext() if file is None else _input(file) as path,
        _table(session, name, created, path, dry_run=dry_run) as table,
    ):
        schema = table.schema
        if not bounds:
            done: Any = table.append(_rows(path, schema), dry_run=dry_run)
        else:
            with table.writer() as write:
                is_identical = between.skip_covered or getattr(write, "mode", "") == "append"
                done = (write.append if is_identical else write.compare_and_append)(_rows(path, schema), *bounds)
    _answer(session, name, schema, done, dry_run=dry_run)


def upsert(
    session: Session, name: opt.AnyTable, file: opt.Input, created: Created, dry_run: opt.DryRun = False
) -> None:
    """Make each row of a file the one row of its key, at the next time. Rows of other keys stay as they are.

    The file has the columns of the table, without `_time` and `_diff`. What is there for these keys is looked up, and
    retracted in the same commit; rows that are there already are not written again. A value column that the file, or a
    line of JSON, lacks keeps what the row of the key has; a new key gets null there. Two different rows for one key are
    refused. It may be run at once with other writers, and may be run again: then all rows are unchanged.

    \b
    persist upsert customers today.csv --dry-run      how many rows are new, changed or unchanged
    persist upsert customers today.csv
    """
    with _input(file) as path, _table(session, name, created, path, dry_run=dry_run) as table:
        done = table.upsert(_partial(path, file, table.schema), dry_run=dry_run)
    _answer(session, name, table.schema, done, by_key=True, dry_run=dry_run)


def delete(session: Session, name: opt.AnyTable, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Take away all rows of the keys in a file, at the next time. History before it stays readable as ever.

    The file has the key columns of the table, and no others. Keys that have no rows are left alone.

    \b
    persist delete customers forgotten.csv --dry-run
    persist delete customers forgotten.csv
    """
    with _input(file) as path, _table(session, name, Created(), path, dry_run=dry_run) as table:
        done = table.delete(_keys(path, table.schema), dry_run=dry_run)
    _answer(session, name, table.schema, done, by_key=True, dry_run=dry_run)


def erase(
    session: Session,
    name: opt.AnyTable,
    keys: Annotated[str, typer.Option(metavar="FILE", help="The keys, as `persist delete` takes them.")],
    receipt: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the answer there, too, as JSON.")
    ] = None,
    yes: opt.Yes = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Take the rows of some keys away for ever: no object and no row of the log has them any more.

    Their rows are deleted first. The history of the whole table up to then is given up, whatever its retention keeps.
    Then what had the keys is rewritten and deleted, and all that the table has is looked through again. What readers or
    holds still keep is listed with the reason, and the exit code is 1: run it again once they are gone. Killed and
    started again, it continues. Not looked at: caches of other programs, backups, versions that a bucket keeps, tables
    made of this one, and what a source reads again.

    \b
    persist erase people --keys forgotten.csv --dry-run     what has them, and who is in the way
    persist erase people --keys forgotten.csv --receipt receipt.json
    """
    with _input(keys) as path, _table(session, name, Created(), path, dry_run=dry_run) as table:
        wanted, times = list(_keys(path, table.schema)), Times(table.schema.times, lambda: 0)
        if not (dry_run or yes):
            planned = table.erase(iter(wanted), dry_run=True)
            session.confirm(name, "erasing", "table", *_erased(planned, times), yes=False)
        with session.progress("erase") as advance:
            done = table.erase(iter(wanted), dry_run=dry_run, progress=advance)
    value = {**jsonable(done), **clock(table.schema.times), "left": list(done.left)}
    if receipt is not None:
        receipt.write_text(encode(value) + "\n")
    session.answer(value, *_erased(done, times))
    session.note(units.spent(done.cost))
    if done.left and not dry_run:
        raise typer.Exit(1)


def _erased(done: Erased, times: Times) -> list[str]:
    """What was done, or would be: counts, the history that goes with it, what is in the way, and what is left."""
    would, is_ = ("would be ", "") if done.dry_run else ("", "is ")
    looked = f"{units.of(len(done.shards), 'shard')}, {units.of(sum(one.objects for one in done.shards), 'object')}"
    found = units.of(done.keys, "key")
    said = [f"{done.table}: {found}; the rows of {done.deleted:,} of them {would or 'are '}deleted"]
    if done.since_before < done.since:
        kept = times.show(done.since_before)
        said.append(f"history before {times.show(done.since)} {would}{is_}given up; it was kept from {kept} on")
    said += [f"in the way: {one}" for one in done.in_the_way]
    said += done.left[:SHOWN]
    if (more := len(done.left) - SHOWN) > 0:
        said.append(f"and {units.of(more, 'place')} more, which --json and --receipt have")
    if not (done.left or done.dry_run):
        gone = units.of(sum(len(one.gone) for one in done.shards), "object")
        said.append(f"they are gone for ever: {gone} that had them deleted, and nothing found in {looked}")
    elif not done.dry_run:
        said.append(f"they are not gone yet: {units.of(len(done.left), 'place')} left of {looked}. Erase them again")
    return said


SHOWN = 20
"""Places that are listed."""


def update(session: Session, name: opt.AnyTable, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Change columns of rows that are there: the file has the key, and those value columns that get other values.

    The other columns stay as they are. Keys without rows are left alone.

    \b
    persist update accounts limits.csv --dry-run
    echo '{"id": 1, "cents": 0}' | persist update accounts -
    """
    import pyarrow as pa

    from persist_lib.cli.input_files import check_columns
    from persist_lib.relation.statements import new_values

    with _input(file) as path, _table(session, name, Created(), path, dry_run=dry_run) as table:
        schema = table.schema
        if path is not None and path.suffix.lower() == ".jsonl":
            check_columns(path, _named(file))
        found = list(_rows(path, schema))
        given = new_values(name, schema, pa.concat_tables(found) if found else schema.data.empty_table())
        done = table.update(given.changed, given.keys(), dry_run=dry_run)
    _answer(session, name, schema, done, by_key=True, dry_run=dry_run)


def apply(
    session: Session,
    name: opt.AnyTable,
    file: opt.Input,
    deletes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The keys to delete, as in `persist delete`; of a table that keeps deleted keys, with its column.",
        ),
    ] = None,
    newer: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Upsert only rows that have more in this column than the row that is there, and of "
            "several rows of a key the last one by it: so late changes do not overwrite newer ones.",
        ),
    ] = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Upsert the rows of a file and delete the keys of another one, in one commit, as changes come from elsewhere.

    Rows may lack columns, as those of `persist upsert`. A key that is in both is refused. With --newer, rows that are
    late are left out, and count as unchanged. --newer goes with --deletes on a table that keeps deleted keys (`persist
    set-retention --keep-deletes`), which orders all changes by its column anyway, and counts late ones. On others a
    late row would bring its key back: keep deleted keys as rows there, with true in a column `deleted`.

    \b
    persist apply orders changed.jsonl --deletes gone.jsonl --dry-run
    persist apply readings today.parquet --newer seq
    """
    if file == deletes == STDIN:
        raise InvalidUsage("standard input is either the rows or the keys to delete: name a file for one of both")
    with (
        _input(file) as path,
        nullcontext() if deletes is None else _input(deletes) as gone,
        _table(session, name, Created(), path, dry_run=dry_run) as table,
    ):
        import pyarrow.compute as pc

        from persist_lib.relation.statements import old

        kept = None if deletes is None and newer is None else table.describe().keep_deletes
        column = None if kept is None else kept.column
        only_if = None if newer in {None, column} else pc.field(newer) > old(newer)
        done = table.apply(
            _partial(path, file, table.schema), None if deletes is None else _keys(gone, table.schema, column),
            only_if=only_if, order_by=newer, dry_run=dry_run,
        )  # fmt: skip
    _answer(session, name, table.schema, done, by_key=True, dry_run=dry_run)


def transact(session: Session, file: opt.Input, dry_run: opt.DryRun = False) -> None:
    """Carry out a file of statements on several tables as one transaction: all of it or nothing, at one time.

    Each line is a JSON object with `table`, `op` (insert, upsert, update or delete) and `row`: all columns; for update
    the key and what changes, for delete the key. The tables are on one timeline with a WAL. If another transaction
    changed a key at the same time, it is refused (exit code 1) with nothing written: run it again.

    \b
    persist transact transfer.jsonl --dry-run
    echo '{"table": "accounts", "op": "upsert", "row": {"id": 1, "cents": 5}}' | persist transact -
    """
    from persist_lib.cli.input_files import carry_out, parse_statements

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
    session: Session, name: str, schema: Schema, done: Any, *, by_key: bool = False, dry_run: bool = False
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
    value |= {"table": name, "updates": done.count, "dry_run": dry_run, "token": done.token.hex()}
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
            wrong = "what is at {} is not a file" if path.exists() else "there is no file {}"
            raise InvalidUsage(f"{wrong.format(file)}; - reads JSON lines from standard input")
        yield None if path.suffix.lower() == ".jsonl" and not path.stat().st_size else path  # no lines are no rows
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.jsonl"
        with path.open("wb") as lines:
            shutil.copyfileobj(sys.stdin.buffer, lines)
        try:
            yield path if path.stat().st_size else None
        except InvalidUsage as error:
            if error.fields.get("path") == str(path):
                said = error.message.replace(str(path), _named(file))
                raise InvalidUsage(said, **{**error.fields, "path": _named(file)}) from error
            raise


def _partial(path: Path | None, file: str, schema: Schema) -> Iterator[Any]:
    """Rows of which each may lack columns."""
    from persist_lib.cli.input_files import rows_by_line

    return iter(()) if path is None else rows_by_line(path, _named(file), schema)


def _keys(file: Path | None, schema: Schema, column: str | None = None) -> Iterator[Any]:
    """Keys, with a value column where one is named."""
    from persist_lib.schema.schema import Schema as Columns

    return _rows(file, Columns(schema.key, [one for one in schema.value if one.name == column]))


def _rows(file: Path | None, schema: Schema) -> Iterator[Any]:
    from persist_lib.cli.input_files import read_file, rows_by_line

    if file is None:
        return iter(())
    has_defaults = any(one.default is not None for one in schema.columns)  # a line that lacks the column has it
    return rows_by_line(file, _named(str(file)), schema) if has_defaults else read_file(file, schema)
