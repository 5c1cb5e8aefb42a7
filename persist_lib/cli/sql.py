"""`persist sql`: shards, collections and tables as tables of DuckDB, each as of a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import typer

from persist_lib.cli import formats, units
from persist_lib.cli.arguments import time_words
from persist_lib.cli.as_of import Query, Reference, parse_query
from persist_lib.cli.reading import TABLE_ROWS, Diff, Format, Limit, Output
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock
from persist_lib.errors import Determinate, InvalidName, InvalidUsage, NotFound

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    import duckdb

    from persist_lib.client import Client
    from persist_lib.schema.schema import Schema
    from persist_lib.storage.tables import Tables

ROWS_AT_ONCE = 100_000


def sql(
    session: Session,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One query; - reads it from standard input.")],
    diff: Diff = False,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
) -> None:
    """Query shards, collections and tables with SQL, by DuckDB.

    Each of them is a table with its contents at the newest complete time, or with `name as of T` at that time; tables
    on one timeline are read at one time, and one that is behind it at its own newest. A row is in it as often as it is
    there; with --diff once, with its multiplicity as the column `_diff`. Names with dashes, dots or slashes are put in
    double quotes. Only what the query names is read, and of that only the columns and row groups that it needs. Needs
    the extra persist-lib\\[sql].

    \b
    persist sql "select state, count(*) from orders group by all"
    persist sql "select * from orders as of 7 where cents > 1000" --format csv
    persist sql "select n.* from orders n anti join orders as of 7 o using (order_id)"
    """
    kind = "json" if session.as_json and format_ == "table" else format_
    if kind == "parquet" and output is None:
        raise InvalidUsage("Parquet can only be written to a file: name it with -o FILE")
    parsed = parse_query(sys.stdin.read() if query == "-" else query)
    times = {reference: time_words(reference.time, "as of") for reference in parsed.references}
    _installed()
    failures: list[BaseException] = []
    with session.open() as client, ExitStack() as open_, _told(failures):
        connection = open_.enter_context(_connect())
        tables = _tables(connection, client, parsed, times, open_, failures, diff=diff)
        reader = _execute(connection, parsed.sql)
        head = {"tables": [{"shard": shard, "as_of": as_of, **clock(read.times)} for shard, as_of, read in tables]}
        rows = (TABLE_ROWS if kind == "table" else 0) if limit is None else limit
        schema = _named(reader.schema)
        counted = formats.Counted(_presentable(reader, schema, is_text=kind in ("csv", "parquet")), rows)
        with formats.target(output) as stream:
            if kind == "table":
                formats.write_table(session, stream if output else None, schema, counted)
            else:
                formats.WRITERS[kind](stream, schema, counted, head)
    if counted.is_cut:
        session.note(f"only the first {units.number(rows)}; --limit 0 prints all")
    if kind == "table" or output is not None:
        said = ", ".join(f"{shard} as of {read.show(as_of)}" for shard, as_of, read in tables)
        session.note(f"{units.of(counted.rows, 'row')}{f'; {said}' if said else ''}")


def _installed() -> None:
    from persist_lib.relation.conversions import installed

    installed("duckdb", "sql", "persist sql")


def _connect() -> duckdb.DuckDBPyConnection:
    import duckdb

    # It must find no variables of this program, and fetch nothing from the network by itself.
    return duckdb.connect(
        ":memory:", config={"python_enable_replacements": False, "autoinstall_known_extensions": False}
    )


def _tables(
    connection: duckdb.DuckDBPyConnection,
    client: Client,
    query: Query,
    times: dict[Reference, int | str],
    open_: ExitStack,
    failures: list[BaseException],
    *,
    diff: bool,
) -> list[tuple[str, int, Schema]]:
    """Open the shards that the query names, and register them. Returns their names, times and schemas."""
    from persist_lib.relation.engines import dataset_of
    from persist_lib.times import Times, once

    named = {reference.table: (reference.shard, times[reference]) for reference in query.references}
    wanted: dict[str, tuple[str, int | str | None]] = {**named}
    names = _names_in(connection, query.sql)
    if names.perhaps - names.surely:
        names.surely.update(names.perhaps.intersection([*client.shards(), *_collections(client)]))
    wanted.update({table: (table, None) for table in names.surely if table not in named})
    readers: dict[str, Any] = {}
    timelines: dict[str, int] = {}
    registered: dict[str, str] = {}
    found = []
    clock_ms = once(client.consensus.now)
    for table, (shard, as_of) in sorted(wanted.items()):
        if (other := registered.setdefault(table.casefold(), table)) != table:
            raise InvalidUsage(
                f"the query names the shards {other} and {table}, and SQL does not tell upper and lower case apart: "
                "give one of them a time, as in `name as of 7`, or query them apart",
                query=query.sql,
            )
        if shard not in readers:
            readers[shard] = open_.enter_context(_reader(client, shard, timelines))
        schema = readers[shard].schema
        time = None if as_of is None else Times(schema.times, clock_ms).as_of(as_of, "as of")
        snapshot = open_.enter_context(readers[shard].snapshot(time, diff=diff, timeout=0.001))
        connection.register(table, dataset_of(snapshot, failures.append))
        found.append((shard, snapshot.as_of, schema))
    return list(dict.fromkeys(found))


def _reader(client: Client, name: str, times: dict[str, int]) -> Any:
    """A reader of the shard of this name, or of the collection or table, if there is no such shard."""
    try:
        return client.open_reader(name)
    except (NotFound, InvalidName):
        if name not in _collections(client):
            raise
    with client.controller() as controller:
        if name in (tables := controller.tables()).list():
            return _Table(tables, name, times)
        return controller.open_reader(name, owner="persist sql")


class _Table:
    """A table as a reader: with what its timeline's WAL has and the table's own shards do not have yet.

    All tables of a timeline are read at one time, which `times` has once the first of them was read.
    """

    def __init__(self, tables: Tables, name: str, times: dict[str, int]) -> None:
        self._tables, self._name, self._times = tables, name, times
        self.schema: Schema = tables.controller.describe(name).schema

    def snapshot(self, as_of: int | None, timeout: float, *, diff: bool) -> Any:  # noqa: ARG002 - it waits for copies at work
        timeline, _ = self._tables.timeline_of(self._name)
        at = self._times.get(timeline) if as_of is None else as_of
        # Where no time was asked for, a table that is behind its timeline is read at its own newest time, and says so.
        found = self._tables.read(self._name, at, newest=as_of is None, diff=diff)
        if as_of is None:
            self._times.setdefault(timeline, found.as_of)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tables.close()


def _collections(client: Client) -> list[str]:
    with client.controller() as controller:
        return controller.list()


class _Names(NamedTuple):
    """The tables that a query names: surely, or perhaps, where the name may also be one of the query's own."""

    surely: set[str]
    perhaps: set[str]


def _names_in(connection: duckdb.DuckDBPyConnection, query: str) -> _Names:
    """The tables of a query, which must be one statement that only reads."""
    statements = connection.extract_statements(query)
    kinds = [getattr(statement.type, "name", str(statement.type)) for statement in statements]
    found = connection.execute("select json_serialize_sql(?)", [query]).fetchall() if kinds == ["SELECT"] else []
    parsed = json.loads(found[0][0]) if found else {"error": True}
    if parsed["error"]:
        raise InvalidUsage(
            f"persist sql takes one SELECT: got {', '.join(kinds) or 'nothing'}. Shards are written with "
            "`persist append`",
            query=query,
        )
    names = _Names(set(), set())
    own: set[str] = set()
    _collect(parsed, names, own)
    inner = {name for name in names.surely if name.casefold() in own}
    return _Names(names.surely - inner, names.perhaps | inner)


def _collect(node: Any, names: _Names, own: set[str]) -> None:
    """Collect the names of tables below a node of DuckDB's parse tree, and those that WITH gives."""
    if isinstance(node, list):
        for each in node:
            _collect(each, names, own)
    if not isinstance(node, dict):
        return
    if node.get("type") == "BASE_TABLE":
        if schema := node.get("schema_name"):
            name = f"{schema}.{node['table_name']}"
            raise InvalidUsage(
                f'there is no table {name}. A shard of that name is written "{name}", in double quotes', name=name
            )
        names.surely.add(node["table_name"])
    elif node.get("type") == "SHOW_REF":  # describe, summarize, show
        names.perhaps.add(str(node.get("table_name")).strip('"'))
    own.update(each["key"].casefold() for each in node.get("cte_map", {}).get("map", ()))
    for each in node.values():
        _collect(each, names, own)


def _execute(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    """The answer as a stream of Arrow."""
    relation: Any = connection.sql(query)
    streamed = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
    return streamed(ROWS_AT_ONCE)


@contextmanager
def _told(failures: list[BaseException]) -> Iterator[None]:
    """Turn what DuckDB raises into errors of the library; an error of reading comes out as what it was."""
    import duckdb
    import pyarrow as pa

    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if failures:
            raise failures[0] from error
        if isinstance(error, OSError):
            raise
        if isinstance(error, duckdb.InterruptException):
            raise KeyboardInterrupt from error
        message = str(error).strip()
        if isinstance(error, (duckdb.ProgrammingError, duckdb.DataError, duckdb.NotSupportedError, pa.ArrowException)):
            raise InvalidUsage(f"the query failed. {message}", query_error=type(error).__name__) from error
        raise Determinate(f"DuckDB failed. {message}", query_error=type(error).__name__) from error


def _named(schema: Any) -> Any:
    """The schema with each name once: a query may give two columns the same name."""
    names: list[str] = []
    for name in schema.names:
        fresh, number = name, 1
        while fresh in names:
            fresh, number = f"{name}_{number}", number + 1
        names.append(fresh)
    import pyarrow as pa

    return pa.schema([field.with_name(name) for field, name in zip(schema, names, strict=True)])


def _presentable(reader: Any, schema: Any, *, is_text: bool) -> Iterator[Any]:
    """The answer's tables. Sums, which DuckDB has in 128 bits, are integers again where they fit."""
    import pyarrow as pa

    for batch in reader:
        table = pa.Table.from_batches([batch]).rename_columns(schema.names)
        if not is_text:
            for place, field in enumerate(table.schema):
                if field.type == pa.decimal128(38, 0):
                    table = _as_integers(table, place)
        yield table


def _as_integers(table: Any, place: int) -> Any:
    import pyarrow as pa

    try:
        column = table.column(place).cast(pa.int64())
    except pa.ArrowInvalid:
        return table
    return table.set_column(place, pa.field(table.schema.field(place).name, pa.int64()), column)
