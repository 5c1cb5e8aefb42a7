"""Reading a table, whatever carries it: its rows as of a time, its changes between two, following it, its history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from persist_lib.cli import json_values, row_formats
from persist_lib.cli import shared_options as opt
from persist_lib.cli.session import Session
from persist_lib.core import units
from persist_lib.errors import InvalidName, InvalidUsage, NotComplete, OfLayer, PersistError
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.relation.conversions import Doors as Rows
    from persist_lib.schema.schema import Schema
    from persist_lib.table.table import Table

T = TypeVar("T")
TABLE_ROWS = 50
AT_ONCE_S = 0.001
"""The shortest timeout that is allowed, in seconds: it looks once."""


def table_of(client: Client, name: str) -> Table:
    """The table of this name. A shard that a layer keeps for its own is read as any other."""
    try:
        return client.table(name)
    except (OfLayer, InvalidName):
        from persist_lib.table.carriers import ShardCarrier
        from persist_lib.table.opening import open_promoted
        from persist_lib.table.table import Table

        carrier = ShardCarrier(client, name, client.inspect(name).state.schemas[-1].shown)
        return Table(carrier, lambda: None, partial(open_promoted, client, client.controller().tables))


def completing(session: Session, client: Client, table: Table, as_of: Any, call: Callable[[Any], T]) -> T:
    """What a call reads as of a time. One that the clock has passed is completed first, where this may write.

    So does `Table` in a program; this one's client is opened to read.
    """
    if as_of is None:
        return call(None)
    at = Times(table.schema.times, client.consensus.now).as_of(as_of)  # now is the same moment in all that follows
    try:
        return call(at)
    except NotComplete:
        with suppress(PersistError), session.open(read_only=False) as writing:
            writing.table(table.name).read(at, keys=[]).release()
        return call(at)


class Printing(NamedTuple):
    """How rows are printed."""

    limit: opt.Limit = None
    format_: opt.Format = "table"
    output: opt.Output = None

    def form(self, session: Session) -> str:
        """The format. Raises InvalidUsage for one that only a file can have."""
        form = "json" if session.as_json and self.format_ == "table" else self.format_
        if form == "parquet" and self.output is None:
            raise InvalidUsage("Parquet can only be written to a file: name it with -o FILE")
        return form

    def rows(self, session: Session, head: dict[str, Any], found: Rows[Any] | _InMemory) -> int:
        """Print rows, and return their number. JSON begins with the fields of `head`."""
        from persist_lib.relation.conversions import Doors, schema_of

        form = self.form(session)
        most = (TABLE_ROWS if form == "table" else 0) if self.limit is None else self.limit
        schema, tables = found.schema, found.batches()
        if form != "parquet" and isinstance(found, Doors):
            schema, tables = row_formats.as_said(schema_of(found), schema, tables)
        counted = row_formats.Counted(tables, most)
        with row_formats.target(self.output) as stream:
            if form == "table":
                row_formats.write_table(session, stream if self.output else None, schema, counted)
            else:
                row_formats.WRITERS[form](stream, schema, counted, head)
        if counted.is_cut:
            session.note(f"only the first {units.number(most)}; --limit 0 prints all")
        return counted.rows

    def note(self, session: Session, said: str) -> None:
        """Say what was printed, unless a program reads it."""
        if self.form(session) == "table" or self.output is not None:
            session.note(said)


class Selected(NamedTuple):
    """Which contents are read."""

    as_of: opt.Time = None
    columns: opt.Columns = None
    key: opt.Key = None
    key_from: opt.KeyFrom = None
    key_to: opt.KeyTo = None
    diff: opt.Diff = False
    wait: opt.Wait = 0.0
    newest: opt.Newest = False


def read(session: Session, name: opt.AnyTable, select: Selected, printing: Printing) -> None:
    """Print the rows of a table as of a time.

    Each row is printed as often as it is there; with --diff once, with its multiplicity. Every reader gets the same
    rows for a time, always, until since passes it. By default, all that was acknowledged before. Memory stays small
    however large the table is. In JSON, bytes are base64, moments are ISO 8601, durations are counts of their unit, and
    floats that are not finite are null; Parquet keeps everything exactly.

    \b
    persist read orders
    persist read orders --as-of '1 hour ago'        if its times are a clock
    persist read orders --as-of 9 --columns state,cents --key 4711
    persist read orders --as-of 9 --format csv | head
    persist read orders --as-of 9 --format parquet -o orders.parquet
    """
    printing.form(session)
    at = opt.parse_time(select.as_of, "--as-of")
    with session.open() as client, table_of(client, name) as table:
        keys = {what: getattr(select, what) for what in ("key", "key_from", "key_to")}
        wanted: dict[str, Any] = {what: key_values(table.schema, given) for what, given in keys.items() if given}
        wanted |= {"columns": opt.parse_names(select.columns), "diff": select.diff, "newest": select.newest}
        with completing(
            session, client, table, at, lambda at: table.read(at, timeout=select.wait or None, **wanted)
        ) as found:
            number = getattr(found, "rendition", None)
            rendition = {} if number is None else {"rendition": number}
            head = {"table": name, **rendition, "as_of": found.as_of, **json_values.clock(table.schema.times)}
            count = printing.rows(session, head, found)
    of = "" if number is None else f", rendition {number}"
    rows = f"{units.number(count)} distinct" if select.diff else units.of(count, "row")
    printing.note(session, f"{name} as of {table.schema.show_as_of(found.as_of)}{of}: {rows}")


def changes(
    session: Session,
    name: opt.AnyTable,
    printing: Printing,
    from_: opt.From = None,
    to: opt.Until = None,
    wait: opt.Wait = 0.0,
) -> None:
    """Print what happened to a table after one time, up to and with another.

    Each row and time is printed once, with its `_time`, and with its change in multiplicity as `_diff`. The rows at the
    first time and these changes add up to the rows at the second, also across handovers, where it is the difference of
    both renditions. It fails if history at the first time has been given up.

    \b
    persist changes orders --from 7
    persist changes orders --from 7 --to 9 --format jsonl
    """
    from persist_lib.table.following import kept_changes

    printing.form(session)
    first, last = opt.parse_start(from_, "from"), opt.parse_time(to, "to")
    with (
        session.open() as client,
        table_of(client, name) as table,
        completing(
            session, client, table, last, lambda last: kept_changes(table, first, last, wait or AT_ONCE_S)
        ) as found,
    ):
        head = {"table": name, "from": found.from_, "to": found.to, **json_values.clock(table.schema.times)}
        count = printing.rows(session, head, found)
    show = table.schema.show_as_of
    after = "from the beginning" if found.from_ is None else f"after {show(found.from_)}"
    until = "" if found.to is None else f" to {show(found.to)}"
    printing.note(session, f"{name} {after}{until}: {units.of(count, 'change')}")


def listen(
    session: Session,
    name: opt.AnyTable,
    as_of: opt.Start = None,
    until: opt.End = "[]",
    timeout: opt.Idle = None,
    wait: opt.Waits = True,
    replace: Annotated[
        bool, typer.Option("--replace", help="At a handover to other columns: all old rows out, all new rows in.")
    ] = False,
) -> None:
    """Follow a table: every update after a time, once, at its exact time.

    It prints updates as lines, and `progress \\[t]` when everything before t was printed. With --json each line is an
    object, {"updates": \\[...]} or {"progress": \\[t]}. It runs until the table is complete; you can interrupt it at
    any time. To continue after `progress \\[t]`, give the time before t to --as-of; in JSON that is its `as_of`. It
    does not hold history: it fails with a message if since passes the time that it has come to.

    \b
    persist listen orders
    persist listen orders --as-of 9 --no-wait --json
    """
    start, end = opt.parse_start(as_of, "--as-of"), opt.parse_frontier(until, "until")
    seconds = None if timeout is None else max(timeout, AT_ONCE_S)
    with (
        session.open() as client,
        table_of(client, name) as table,
        table.listen(start, until=end, timeout=seconds, replace=replace) as events,
    ):
        for event in events if wait else events.poll():
            _tell(session, getattr(events, "schema", table.schema), event)


def history(
    session: Session, name: opt.AnyTable, printing: Printing, from_: opt.From = None, to: opt.Until = None
) -> None:
    """Print when a table was written, newest first, and by how much rows were added and retracted then.

    It reads all changes after --from, which is by default all history that is kept.

    \b
    persist history orders
    persist history orders --from '1 day ago' --limit 10
    """
    printing.form(session)
    first, last = opt.parse_start(from_, "from"), opt.parse_time(to, "to")
    with session.open() as client, table_of(client, name) as table:
        wait = None if last is None else AT_ONCE_S
        found = completing(session, client, table, last, lambda last: table.history(first, last, timeout=wait))
    head = {"table": name, **json_values.clock(table.schema.times)}
    count = printing.rows(session, head, _InMemory(found))
    printing.note(session, f"{name}: written at {units.of(count, 'time')}")


class _InMemory:
    """A table in memory, as what is printed."""

    def __init__(self, table: Any) -> None:
        self._table, self.schema = table, table.schema

    def batches(self) -> Any:
        """The whole of it."""
        return iter([self._table])


def key_values(schema: Schema, given: Sequence[str]) -> list[object]:
    """The texts as values of the leading key columns. Raises InvalidUsage for a text that is not such a value."""
    import pyarrow as pa

    if len(given) > len(schema.key):
        raise InvalidUsage(
            f"the key has {len(schema.key)} columns ({', '.join(schema.key_names)}), got {len(given)} values"
        )
    found = []
    for text, column in zip(given, schema.key, strict=False):
        try:
            found.append(pa.scalar(text).cast(column.field.type).as_py())
        except (pa.ArrowException, ValueError) as error:
            raise InvalidUsage(f"{text!r} is not a value of the key column {column}: {error}", value=text) from error
    return found


def _tell(session: Session, schema: Schema, event: Any) -> None:
    """Print one event of a listener: updates as lines such as `[12] +1  order_id=4 state=placed`, or progress."""
    from persist_lib.relation.listen import Progress

    if isinstance(event, Progress):
        value = {"progress": json_values.jsonable(event.frontier), "as_of": event.as_of}
        session.answer(value, f"progress {schema.show(event.frontier)}")
        return
    times = Times(schema.times, lambda: 0)
    _, (table,) = row_formats.as_said(schema, event.table.schema, iter([event.table]))
    for batch in row_formats.rows_of(table):
        rows, lines = row_formats.python_rows(batch), []
        if session.as_json:
            session.answer({"updates": rows})
            continue
        for row in rows:
            time, diff = times.show(times.parse(row.pop("_time"), "_time")), row.pop("_diff")
            cells = " ".join(f"{column}={row_formats.cell(value)}" for column, value in row.items())
            lines.append(f"[{time}] {diff:+}  {cells}")
        session.show("\n".join(lines))
