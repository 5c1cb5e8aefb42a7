"""`persist sql`: shards, collections and tables as tables of DuckDB, each as of a time.

    select * from orders as of 7 o join "late-orders" as of 7 using (order_id)

DuckDB has no such clause. So each `name as of time` becomes the name of a table of its own, with the shard's name as
its alias if the query gives none. Only the tokens of a query matter: what is in strings and comments stays as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from persist_lib.cli.json_values import clock
from persist_lib.cli.row_reads import Printing, completing, table_of
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import Diff, parse_time
from persist_lib.core import units
from persist_lib.errors import Determinate, InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    import duckdb

    from persist_lib.client import Client
    from persist_lib.schema.schema import Schema

ROWS_AT_ONCE = 100_000


def sql(
    session: Session,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One query; - reads it from standard input.")],
    printing: Printing,
    diff: Diff = False,
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
    from persist_lib.relation.conversions import installed

    form = printing.form(session)
    installed("duckdb", "sql", "persist sql")
    parsed = parse_query(sys.stdin.read() if query == "-" else query)
    times = {reference: parse_time(reference.time, "as of") for reference in parsed.references}
    failures: list[BaseException] = []
    with session.open() as client, ExitStack() as open_, _told(failures):
        connection = open_.enter_context(_connect())
        tables = _tables(session, connection, client, parsed, times, open_, failures, diff=diff)
        head = {"tables": [{"shard": shard, "as_of": as_of, **clock(read.times)} for shard, as_of, read in tables]}
        answer = _Answer(connection.sql(parsed.sql), is_text=form in ("csv", "parquet"))
        count = printing.rows(session, head, answer)  # type: ignore[arg-type]
    said = "".join(f"; {shard} as of {read.show_as_of(as_of)}" for shard, as_of, read in tables)
    printing.note(session, f"{units.of(count, 'row')}{said}")


def _connect() -> duckdb.DuckDBPyConnection:
    import duckdb

    # It must find no variables of this program, and fetch nothing from the network by itself.
    return duckdb.connect(
        ":memory:", config={"python_enable_replacements": False, "autoinstall_known_extensions": False}
    )


def _tables(
    session: Session,
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
        with client.controller() as controller:
            names.surely.update(names.perhaps.intersection([*client.shards(), *controller.list()]))
    wanted.update({table: (table, None) for table in names.surely if table not in named})
    tables: dict[str, Any] = {}
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
        if shard not in tables:
            tables[shard] = open_.enter_context(table_of(client, shard))
        of = tables[shard]
        schema, newest = of.schema, as_of is None
        # All tables of a timeline are read at one time. One that is behind it is read at its own newest, and says so.
        time = timelines.get(of.carrier) if as_of is None else Times(schema.times, clock_ms).as_of(as_of, "as of")
        read = partial(of.read, diff=diff, newest=newest)
        snapshot = open_.enter_context(completing(session, client, of, time, read))
        if newest and of.carrier not in {"shard", "collection"}:
            timelines.setdefault(of.carrier, snapshot.as_of)
        connection.register(table, dataset_of(snapshot, failures.append))
        found.append((shard, snapshot.as_of, schema))
    return list(dict.fromkeys(found))


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


class _Answer:
    """The answer to a query as rows to print, with each name once: a query may give two columns the same name.

    Sums, which DuckDB has in 128 bits, are integers again where they fit, unless they are printed as text.
    """

    def __init__(self, relation: Any, *, is_text: bool) -> None:
        import pyarrow as pa

        streamed = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
        reader = streamed(ROWS_AT_ONCE)
        self._reader, self._is_text = reader, is_text
        names: list[str] = []
        for name in reader.schema.names:
            fresh, number = name, 1
            while fresh in names:
                fresh, number = f"{name}_{number}", number + 1
            names.append(fresh)
        self.schema = pa.schema([f.with_name(name) for f, name in zip(reader.schema, names, strict=True)])

    def batches(self) -> Iterator[Any]:
        """The rows."""
        import pyarrow as pa

        for batch in self._reader:
            table = pa.Table.from_batches([batch]).rename_columns(self.schema.names)
            for place, field in enumerate(() if self._is_text else table.schema):
                if field.type == pa.decimal128(38, 0):
                    with suppress(pa.ArrowInvalid):
                        column = table.column(place).cast(pa.int64())
                        table = table.set_column(place, pa.field(field.name, pa.int64()), column)
            yield table


# What may follow a table in a query without being its alias.
_AFTER_TABLE = frozenset({
    "where", "group", "having", "window", "qualify", "order", "limit", "offset", "fetch", "union", "intersect",
    "except", "join", "inner", "left", "right", "full", "outer", "cross", "natural", "asof", "positional", "semi",
    "anti", "on", "using", "tablesample", "pivot", "unpivot", "for", "sample", "at",
})  # fmt: skip


class Reference(NamedTuple):
    """A shard as of a time, as a query names it. `table` is what the rewritten query calls it."""

    shard: str
    time: str
    table: str


class Query(NamedTuple):
    """A query that DuckDB understands, and the tables in it that are shards as of a time."""

    sql: str
    references: tuple[Reference, ...]


class _Token(NamedTuple):
    kind: str  # as DuckDB calls it
    text: str
    start: int
    end: int

    def is_word(self, word: str) -> bool:
        return self.text.lower() == word

    def is_name(self) -> bool:
        return self.kind in ("identifier", "keyword")

    def value(self) -> str:
        """The name or text without its quotes."""
        quote = self.text[:1]
        return self.text[1:-1].replace(quote * 2, quote) if quote in ("'", '"') else self.text


def parse_query(sql: str) -> Query:
    """Find what is `as of` a time. Raises InvalidUsage where a name before it has dots and no quotes."""
    tokens = list(_tokens(sql))
    found: dict[tuple[str, str], Reference] = {}
    pieces, done = [], 0
    for index in range(len(tokens) - 3):
        name, as_, of, time = tokens[index : index + 4]
        is_time = time.text[:1].isdecimal() or time.text[:1] == "'"
        if not (name.is_name() and as_.is_word("as") and of.is_word("of") and is_time):
            continue
        if index and tokens[index - 1].text == ".":
            raise InvalidUsage(
                f"{tokens[index - 2].text if index > 1 else ''}.{name.text} as of {time.text}: put the whole name of a "
                'shard with dots in double quotes, as in "a.b"',
                query=sql,
            )
        key = (name.value(), time.value())
        reference = found.setdefault(key, Reference(*key, _fresh(f"{key[0]} as of {key[1]}", found.values())))
        alias = "" if _has_alias(tokens[index + 4 : index + 6]) else f" as {_quoted(key[0])}"
        pieces += [sql[done : name.start], _quoted(reference.table), alias]
        done = time.end
    return Query("".join((*pieces, sql[done:])), tuple(found.values()))


def _has_alias(following: Sequence[_Token]) -> bool:
    if not following:
        return False
    first = following[0]
    if first.is_word("as"):
        return True
    return first.is_name() and first.text.lower() not in _AFTER_TABLE


def _fresh(name: str, taken: Iterable[Reference]) -> str:
    """The name, or one like it that is not taken: DuckDB does not tell upper and lower case apart."""
    folded = {reference.table.casefold() for reference in taken}
    found, number = name, 1
    while found.casefold() in folded:
        number += 1
        found = f"{name} ({number})"
    return found


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _tokens(sql: str) -> Iterator[_Token]:
    """The tokens that are not comments, as DuckDB takes the query apart."""
    import duckdb

    data = sql.encode()  # DuckDB counts in bytes
    found: list[tuple[int, Any]] = [*duckdb.tokenize(sql), (len(data), None)]
    for (at, kind), (end, _) in pairwise(found):
        if kind != duckdb.token_type.comment:
            text = data[at:end].rstrip().decode()
            start = len(data[:at].decode())
            yield _Token(kind.name, text, start, start + len(text))
