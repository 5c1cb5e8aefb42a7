"""`persist table read`, `changes`, `listen`, `insert`, `upsert`, `update`, `delete`, `transact` and `outcome`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from persist_lib.cli import units, values
from persist_lib.cli.arguments import DryRun, parse_frontier, time_words
from persist_lib.cli.by_key import COUNTS
from persist_lib.cli.changing import From, Until
from persist_lib.cli.collection_rows import STDIN, Input, input_of
from persist_lib.cli.collections import columns_of
from persist_lib.cli.reading import (
    AT_ONCE_S,
    Columns,
    Diff,
    End,
    Format,
    Idle,
    Key,
    Limit,
    Output,
    Start,
    Time,
    Wait,
    Waits,
    key_values,
    kind_of,
    print_rows,
    rows_shown,
    tell,
)
from persist_lib.cli.session import Session
from persist_lib.cli.tables import Table, Timeline, tabling
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    import pyarrow as pa

    from persist_lib.schema.schema import Schema
    from persist_lib.storage.tables import Done, Tables

CLOCK = values.clock("ms")


def read(
    session: Session,
    name: Table,
    as_of: Time = None,
    columns: Columns = None,
    key: Key = None,
    diff: Diff = False,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
    wait: Wait = 0.0,
    newest: Annotated[
        bool, typer.Option("--newest", help="If the time is not complete yet, the newest complete contents.")
    ] = False,
) -> None:
    """Print the rows of a table as of a time: by default, all that was acknowledged before.

    What is in the timeline's WAL and not in the table yet is there too.

    \b
    persist table read accounts --key 4711
    persist table read accounts --as-of '1 hour ago' --columns cents --format csv
    """
    kind, at = kind_of(session, format_, output), None if as_of is None else time_words(as_of, "--as-of")
    with tabling(session) as tables:
        keys = key_values(_schema(tables, name), key)
        found = tables.read(
            name, at, columns=columns_of(columns), key=keys, diff=diff, newest=newest, timeout=wait or None
        )
        with found:
            head = {"table": name, "as_of": found.as_of, **CLOCK}
            count = print_rows(session, head, found, kind, output, limit)
            show = found.shard_schema().show_as_of
    if kind == "table" or output is not None:
        session.note(f"{name} as of {show(found.as_of)}: {rows_shown(count, diff)}")


def changes(
    session: Session,
    name: Table,
    from_: From = None,
    to: Until = None,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
    wait: Wait = 0.0,
) -> None:
    """Print what happened to a table after one time, up to and with another: each change once, at its exact time.

    \b
    persist table changes accounts --from '1 hour ago'
    persist table changes accounts --from 2026-11-22T12:00Z --to 2026-11-22T13:00Z --format jsonl
    """
    kind = kind_of(session, format_, output)
    first, last = (None if text is None else time_words(text, what) for text, what in ((from_, "from"), (to, "to")))
    with tabling(session) as tables:
        schema = _schema(tables, name)
        start: Any = tables.controller.describe(name).since.time or 0 if first is None else first
        rows = tables.changes(name, start, last, timeout=max(wait, session_timeout(tables)))
        head = {"table": name, "from": start, "to": last, **CLOCK}
        count = print_rows(session, head, _Printed(schema.changes, rows), kind, output, limit)  # type: ignore[arg-type]
    if kind == "table" or output is not None:
        session.note(f"{name}: {units.of(count, 'change')}")


def listen(
    session: Session, name: Table, as_of: Start, until: End = "[]", timeout: Idle = None, wait: Waits = True
) -> None:
    """Follow a table: every update after a time, once, at its exact time, whether it was applied yet or not.

    What it prints is that of `persist listen`. It holds no history.

    \b
    persist table listen accounts --as-of now
    persist table listen accounts --as-of '5 minutes ago' --no-wait --json
    """
    start, end = time_words(as_of, "--as-of"), parse_frontier(until, "until")
    seconds = None if timeout is None else max(timeout, AT_ONCE_S)
    with tabling(session) as tables:
        schema = _schema(tables, name)
        last = Times("ms", tables.client.consensus.now).frontier(end, "until")
        with tables.listen(name, start, timeout=seconds) as events:
            for event in events if wait else events.poll():
                tell(session, schema, event)
                if last <= events.frontier:
                    break


def insert(session: Session, name: Table, file: Input, dry_run: DryRun = False) -> None:
    """Add the rows of a file, or of standard input. Where a constraint would not hold, nothing is written.

    \b
    persist table insert entries monday.parquet
    echo '{"entry": "e1", "cents": 5}' | persist table insert entries -
    """
    _change(session, name, file, dry_run, lambda tables, _, rows: tables.insert(name, rows, dry_run=dry_run))


def upsert(session: Session, name: Table, file: Input, dry_run: DryRun = False) -> None:
    """Make each row of a file the one row of its key. It may be run again: then all rows are unchanged.

    \b
    persist table upsert accounts today.csv --dry-run
    """
    _change(session, name, file, dry_run, lambda tables, _, rows: tables.upsert(name, rows, dry_run=dry_run))


def update(session: Session, name: Table, file: Input, dry_run: DryRun = False) -> None:
    """Change columns of rows that are there: the file has the key, and those value columns that get other values.

    The other columns stay as they are. Keys without rows are left alone.

    \b
    persist table update accounts limits.csv --dry-run
    echo '{"id": 1, "cents": 0}' | persist table update accounts -
    """
    _change(
        session, name, file, dry_run, lambda tables, schema, rows: _updated(tables, name, schema, rows, dry_run),
        is_partial=True,
    )  # fmt: skip


def delete(session: Session, name: Table, file: Input, dry_run: DryRun = False) -> None:
    """Take all rows of the keys in a file away. History before that stays readable as ever.

    \b
    persist table delete accounts closed.csv --dry-run
    """
    _change(
        session, name, file, dry_run, lambda tables, _, rows: tables.delete(name, rows, dry_run=dry_run), is_keys=True
    )


def transact(session: Session, file: Input, dry_run: DryRun = False) -> None:
    """Carry out a file of statements on several tables as one transaction: all of it or nothing, at one time.

    Each line is a JSON object with `table`, `op` (insert, upsert, update or delete) and `row`: all columns; for update
    the key and what changes, for delete the key. The tables are on one timeline with a WAL. If another transaction
    changed a key meanwhile, it is refused (exit code 1) with nothing written: run it again.

    \b
    persist table transact transfer.jsonl --dry-run
    echo '{"table": "accounts", "op": "upsert", "row": {"id": 1, "cents": 5}}' | persist table transact -
    """
    from persist_lib.cli.transactions import carry_out, parse_statements

    with input_of(file) as path, tabling(session, read_only=dry_run) as tables:
        statements = parse_statements(path, "standard input" if file == STDIN else file)
        timeline, _ = tables.timeline_of(statements[0].table)
        with tables.transaction(timeline, dry_run=dry_run) as transaction:
            counted = [(one, carry_out(transaction, tables, one)) for one in statements]
            done = None if dry_run else transaction.commit()
    counts: dict[str, dict[str, int]] = {}
    for one, count in counted:
        into = counts.setdefault(one.table, dict.fromkeys(COUNTS, 0))
        for kind in COUNTS:
            into[kind] += getattr(count, kind)
    lines = [f"{table}: {_counted(found) or 'no keys'}" for table, found in counts.items()]
    said = "nothing was changed" if done is None or done.time is None else f"committed at {_shown(done.time)}"
    value = {
        "timeline": timeline,
        "dry_run": dry_run,
        "tables": counts,
        "time": None,
        "updates": 0,
        "token": "",
        **CLOCK,
    }
    if done is not None:
        value |= {
            "time": done.time,
            "updates": done.count,
            "token": done.token.hex(),
            "cost": values.jsonable(done.cost),
        }
    session.answer(value, *lines, said)
    if done is not None:
        session.note(units.spent(done.cost))


def outcome(
    session: Session,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The commit's token, in hex, from its error message.")],
    timeline: Timeline = "default",
    table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Its table, on a timeline in YOLO mode.", show_default=False)
    ] = None,
) -> None:
    """Say what became of a commit whose answer was lost: its time, or that it never was and never will be.

    \b
    persist table outcome 5f2c…e1
    """
    try:
        raw = bytes.fromhex(token)
    except ValueError as error:
        raise InvalidUsage(f"the token must be in hex, as in the error message: got {token!r}") from error
    with tabling(session, read_only=False) as tables:
        time = tables.outcome(raw, timeline=timeline, table=table)
    said = "never: it is not there, and will not be" if time is None else f"committed at {_shown(time)}"
    session.answer({"timeline": timeline, "token": raw.hex(), "time": time, **CLOCK}, said)


class _Printed(NamedTuple):
    schema: pa.Schema
    rows: pa.Table

    def batches(self) -> Iterator[pa.Table]:
        return iter([self.rows])


def session_timeout(tables: Tables) -> float:
    """How long a read may take that waits for nothing: others may be about to copy what it needs."""
    return tables.client.config.timeout_s


def _change(
    session: Session, name: str, file: str, dry_run: bool, act: Callable[[Tables, Schema, Any], Done], *,
    is_keys: bool = False, is_partial: bool = False,
) -> None:  # fmt: skip
    from persist_lib.cli.inputs import read_file
    from persist_lib.cli.transactions import check_columns
    from persist_lib.schema.schema import Schema

    with input_of(file) as path, tabling(session, read_only=dry_run) as tables:
        schema = _schema(tables, name)
        if is_partial and path is not None and path.suffix.lower() == ".jsonl":
            check_columns(path, "standard input" if file == STDIN else file)
        rows = () if path is None else read_file(path, Schema(schema.key) if is_keys else schema)
        done = act(tables, schema, rows)
    counts = {kind: getattr(done, kind) for kind in COUNTS}
    what = f"{_counted(counts) or 'no keys'} ({units.of(done.count, 'update')})"
    if dry_run:
        said = f"{name}: would be {what}; nothing was changed"
    else:
        said = f"{name}: {what}; nothing was written" if done.time is None else f"{name}: {what} at {_shown(done.time)}"
    value = {"table": name, "time": done.time, "updates": done.count, **counts, "dry_run": dry_run}
    session.answer({**value, "token": done.token.hex(), **CLOCK, "cost": values.jsonable(done.cost)}, said)
    session.note(units.spent(done.cost))


def _updated(tables: Tables, name: str, schema: Schema, rows: Iterator[Any], dry_run: bool) -> Done:
    import pyarrow as pa

    from persist_lib.storage.tables.statements import new_values

    found = list(rows)
    given = new_values(name, schema, pa.concat_tables(found) if found else schema.data.empty_table())
    return tables.update(name, given.changed, given.keys(), dry_run=dry_run)


def _schema(tables: Tables, name: str) -> Schema:
    tables.timeline_of(name)  # raises for a collection
    return tables.controller.describe(name).schema


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{units.number(count)} {kind}" for kind, count in counts.items() if count)


def _shown(time: int) -> str:
    return Times("ms", lambda: 0).show(time)
