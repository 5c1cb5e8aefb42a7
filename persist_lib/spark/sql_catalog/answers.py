"""What the catalog in Java asks, and what it gets: a column whose type and metadata are the answer.

Spark offers catalogs to Java alone, and Java a Python source only by its schema. So `PersistCatalog.java` makes a
source with the option `catalog`, which is one of `VERBS`, and reads the schema of it. An error is an answer too, by its
name and its message: an exception would come with a traceback of Python's.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import NullType, StructField, StructType

from persist_lib.arguments import did_you_mean, shown
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, NameTaken, NotFound, PersistError
from persist_lib.frontier import at
from persist_lib.relation.reader import ReadHandle
from persist_lib.schema.schema import Column
from persist_lib.spark.batch_reader import Table, look
from persist_lib.spark.collections import Steps, unleased
from persist_lib.spark.filters import EPOCH, AllOf, is_exact, pushed_down
from persist_lib.spark.history_holds import end_leases
from persist_lib.spark.options import Options, client_of
from persist_lib.spark.slices import handle_of
from persist_lib.spark.sql_catalog.metadata_tables import METADATA, metadata_of, when
from persist_lib.spark.sql_catalog.predicates import parse_predicates
from persist_lib.spark.types import column_type, spark_schema
from persist_lib.spark.write_plan import CREATION, create_table
from persist_lib.table.opening import find_record

VERB = "catalog"
"""The option that makes a source an answer."""
COMMON = ("read_only", "partition_bytes")
"""Options of a catalog beside where it is."""
OF_CREATE = ("schema", "properties", "primary")
"""What Java says of a table that is to be made."""
SPARKS = {"owner", "is_managed_location"}
"""Properties that Spark adds to a table, which say nothing of it."""
PROVIDERS = {"persist", "parquet"}
"""What USING may name: `saveAsTable` says Spark's default where it was not said."""


def answer(given: Mapping[str, str]) -> StructType:
    """The answer to the question in the options of a source."""
    values = {str(name).lower(): value for name, value in given.items()}
    verb = values.pop(VERB)
    try:
        found = VERBS[verb](values)
    except PersistError as error:
        found = StructField("error", NullType(), metadata={"error": type(error).__name__, "message": error.message})
    return StructType([found])


def _said(**about: Any) -> StructField:
    return StructField("answer", NullType(), metadata=about)


def _asked(values: Mapping[str, str], *names: str, writes: bool = False) -> tuple[Client, Options]:
    given = {name: value for name, value in values.items() if name not in names}
    options = Options.of({"table": "none", **given}, COMMON, "the catalog")
    client = client_of(
        options.location, options.consensus, read_only=options.flag("read_only", default=False), writes=writes
    )
    return client, options


def _tables(values: Mapping[str, str]) -> StructField:
    return _said(names="\n".join(name for name in _below(values) if "/" not in name))


def _namespaces(values: Mapping[str, str]) -> StructField:
    prefix = values["namespace"]
    found = sorted({name.partition("/")[0] for name in _below(values) if "/" in name})
    return _said(names="\n".join(f"{prefix}/{name}" if prefix else name for name in found))


def _below(values: Mapping[str, str]) -> list[str]:
    client, _ = _asked(values, "namespace")
    prefix = f"{values['namespace']}/" if values["namespace"] else ""
    return [name.removeprefix(prefix) for name in client.tables() if name.startswith(prefix)]


def _load(values: Mapping[str, str]) -> StructField:
    """A table as of one time, which is decided now; or a table about it, as in `orders/history`."""
    given = dict(values)
    if (micros := given.pop("micros", None)) is not None:
        given |= {"as_of": _moment(int(micros)), "newest": "true"}
    try:
        return _described(given)
    except NotFound:
        name, _, last = given["table"].rpartition("/")
        if last not in METADATA or not name:
            raise
        return _metadata(given, name, last)


def _moment(micros: int) -> str:
    try:
        return (EPOCH + dt.timedelta(microseconds=micros)).isoformat()
    except OverflowError:
        raise InvalidUsage(
            f"TIMESTAMP AS OF a time beyond the year 9999: {micros} microseconds", value=micros
        ) from None


def _described(given: Mapping[str, str]) -> StructField:
    table = look(given, batch=True)
    as_of = _as_of(table)
    name, schema = json.dumps({"table": table.name}), table.schema
    rows, size = estimated(table)
    properties = {
        "key": ",".join(schema.key_names), "times": schema.times or "none", "unique": str(schema.unique).lower(),
        "non_negative": str(schema.non_negative).lower(), "provider": "persist",
    }  # fmt: skip
    return _table(
        table.frame, id=table.shard, as_of=str(as_of), writable="as_of" not in given and not table.read_only,
        what="as of one time" if "as_of" in given else "in a catalog with read_only", rows=rows, bytes=size,
        cheap=cheapest(schema.data), stream=name, write=name, properties=json.dumps(properties),
        read=json.dumps({"table": table.name, **when("as_of", as_of)}),
    )  # fmt: skip


def _table(frame: StructType, **about: Any) -> StructField:
    """What Java knows of a table; what is not said of it is nothing."""
    nothing = {"id": "", "as_of": "-1", "writable": False, "what": "", "rows": 0, "bytes": 0, "new": False}
    said = dict.fromkeys(("read", "stream", "write", "properties"), "{}")
    return StructField("table", frame, metadata={**nothing, **said, **about})


def _as_of(table: Table) -> int:
    """Of which time a table is; -1 where nothing was written yet."""
    return -1 if table.section is None or table.section.as_of is None else table.section.as_of


def _metadata(given: Mapping[str, str], name: str, what: str) -> StructField:
    table = look({**given, "table": name}, batch=True)
    as_of = _as_of(table)
    with table.client.table(name) as handle:
        since = handle.describe().since.time or 0
    frame, read, stream = metadata_of(what, table.schema, since, as_of)
    return _table(
        frame, id=f"{table.shard}/{what}", as_of=str(as_of), what=f"a table about {name}", rows=1000, bytes=100_000,
        cheap=frame.names[-1], read=json.dumps({"table": name, **read}), stream=json.dumps({"table": name, **stream}),
        properties=json.dumps({"provider": "persist"}),
    )  # fmt: skip


def cheapest(columns: pa.Schema) -> str:
    """The column of which a count reads the least: the narrowest of one width."""
    return min(columns, key=_width).name


def _width(field: pa.Field) -> int:
    try:
        return int(field.type.bit_width)
    except ValueError:  # it has none of its own
        return 1 << 20 if pa.types.is_nested(field.type) else 1 << 10


def estimated(table: Table) -> tuple[int, int]:
    """About how many rows a table has as of its time, and how many bytes are stored of them."""
    if (as_of := _as_of(table)) < 0:
        return 0, 0
    client = table.client
    if table.collection is None:
        found = [_of_shard(handle_of(client, table.shard, table.schema), as_of)]
    else:
        with unleased(client, table.collection, table.schema) as reader:
            steps = Steps(reader, table.shown(table.schema.data, None), None, 1)
            found = [_of_shard(handle, as_of) for handle in steps.handles(as_of)]
    return sum(max(rows, 0) for rows, _ in found), sum(size for _, size in found)


def _of_shard(handle: ReadHandle, as_of: int) -> tuple[int, int]:
    batches = [one for one in handle.machine.fetch().state.trace if one.count and one.lower.is_before(as_of + 1)]
    return sum(one.diff_sum for one in batches), sum(one.size for one in batches)


def _create(values: Mapping[str, str]) -> StructField:
    client, declared, frame = _declared(values)
    if "key" not in declared:
        raise InvalidUsage(
            f"CREATE TABLE needs the key, the columns that tell the rows of {declared.table} apart, as in PRIMARY KEY "
            f"({frame.names[0]}) for one row a key, or TBLPROPERTIES ('key' = '{frame.names[0]}') for any number",
            option="key",
        )
    _check_free(client, declared.table)
    create_table(client, declared, frame)
    return _described(_place(values))


def _stage(values: Mapping[str, str]) -> StructField:
    """What a write is to make. The key may be an option of that (`saveAsTable`), so that it is not asked for here."""
    client, declared, frame = _declared(values)
    _check_free(client, declared.table)
    write = json.dumps({"table": declared.table, **declared.values})
    return _table(frame, writable=True, new=True, cheap=frame.names[0], write=write)


def _replace(values: Mapping[str, str]) -> StructField:
    """A table whose contents are to be replaced. It stays what it is, so that it has to have these columns."""
    _, declared, frame = _declared(values)
    found = _described(_place(values))
    types = [{field.name: field.dataType for field in one} for one in (frame, cast(StructType, found.dataType))]
    key = declared.names("key")
    if types[0] != types[1] or (key is not None and ",".join(key) != json.loads(found.metadata["properties"])["key"]):
        raise InvalidUsage(
            f"table {declared.table} has other columns, or another key: {found.dataType.simpleString()}. To replace a "
            "table keeps it and its history, and replaces its rows. DROP TABLE it first, or give the new one another "
            "name",
            table=declared.table,
        )  # fmt: skip
    return found


def _declared(values: Mapping[str, str]) -> tuple[Client, Options, StructType]:
    """What CREATE TABLE says: as options of writes, and the columns."""
    client, _ = _asked(values, *OF_CREATE, writes=True)
    properties = _properties(json.loads(values["properties"]))
    frame = StructType.fromJson(json.loads(values["schema"]))
    if "primary" in values:
        if "key" in properties:
            raise InvalidUsage("CREATE TABLE says the key twice, by PRIMARY KEY and by the property key: leave out one")
        properties |= {"key": values["primary"], "unique": properties.get("unique", "true")}
    declared = Options.of({**_place(values), **properties}, (*CREATION, *COMMON), "CREATE TABLE")
    _check_order(frame, declared.names("key") or ())
    return client, declared, frame


def _place(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in OF_CREATE}


def _check_free(client: Client, name: str) -> None:
    with suppress(NotFound):
        find_record(client, name)
        raise NameTaken(f"there is a table {name} already", table=name)


def _discard(values: Mapping[str, str]) -> StructField:
    """Drop a table that a query was to make, unless something was written to it."""
    client, options = _asked(values, writes=True)
    with client.table(options.table) as table:
        if table.describe().upper == at(0):
            table.drop()
    return _said()


def _check_order(frame: StructType, key: Sequence[str]) -> None:
    """Refuse columns in another order than a table has them: SQL writes by place."""
    if set(key) <= set(frame.names) and list(key) != frame.names[: len(key)]:
        rest = [name for name in frame.names if name not in key]
        raise InvalidUsage(
            f"the columns of a table of Persist begin with those of its key, {', '.join(key)}, and SQL goes by their "
            f"places. Name them in this order: {', '.join([*key, *rest])}",
            option="key",
        )  # fmt: skip


def _properties(given: Mapping[str, str]) -> dict[str, str]:
    """What CREATE TABLE says beside the columns, as options of writes. `.option(…)` comes with a prefix."""
    found = {name.removeprefix("option."): value for name, value in given.items() if name not in SPARKS}
    provider = found.pop("provider", "persist")
    if provider.lower() not in PROVIDERS:
        raise InvalidUsage(f"a catalog of Persist makes tables USING persist, and not USING {shown(provider)}")
    for name in found:
        if name not in CREATION:
            raise InvalidUsage(
                f"CREATE TABLE of a table of Persist has no property {shown(name)}. {did_you_mean(name, CREATION)}It "
                f"takes {', '.join(CREATION)}",
                option=name,
            )
    return found


def _alter(values: Mapping[str, str]) -> StructField:
    client, options = _asked(values, "schema", "widened", "changes", "properties", writes=True)
    added, widened = (StructType.fromJson(json.loads(values[name])) for name in ("schema", "widened"))
    changes = json.loads(values["changes"])
    properties = json.loads(values["properties"])
    if unknown := set(properties) - {"retention"}:
        raise InvalidUsage(
            f"ALTER TABLE sets the property retention alone, as in '30 days', and not {shown(min(unknown))}"
        )
    with client.table(options.table) as table:
        schema = table.describe().schema.rename(changes["rename"])
        schema = schema.widen({field.name: column_type(field) for field in widened})
        schema = schema.relax(changes["relax"]).drop(changes["drop"])
        if added.names:
            schema = schema.add([Column(field.name, column_type(field)) for field in added])
        for name, after in changes["reorder"]:
            schema = schema.reorder(name, after or None)
        if schema != table.describe().schema:
            table.evolve(schema)
        if "retention" in properties:
            text = properties["retention"]
            table.set_retention(int(text) if text.isdigit() else text)
    return _said()


def _drop(values: Mapping[str, str]) -> StructField:
    client, options = _asked(values, writes=True)
    with client.table(options.table) as table:
        if find_record(client, options.table) is None:  # leases of queries outlast them, and would be in the way
            end_leases(client.machine(options.table))
        table.drop()
    return _said()


def _rename(values: Mapping[str, str]) -> StructField:
    client, options = _asked(values, "to", writes=True)
    with client.table(options.table) as table:
        table.rename(values["to"])
    return _said()


def _deletes(values: Mapping[str, str]) -> StructField:
    """Whether DELETE with these predicates can be done by a filter."""
    client, options = _asked(values, "pushed")
    return _said(exact=_chosen(client, options, values["pushed"]) is not None)


def _delete(values: Mapping[str, str]) -> StructField:
    client, options = _asked(values, "pushed", writes=True)
    chosen = _chosen(client, options, values["pushed"])
    if chosen is None:
        raise InvalidUsage("DELETE with this condition cannot be done by a filter")
    with client.table(options.table) as table:
        table.delete(filter=chosen)
    return _said()


def _chosen(client: Client, options: Options, text: str) -> pc.Expression | None:
    """Exactly the rows that predicates are true of; None where that is not known."""
    with client.table(options.table) as table:
        schema = table.schema
    found = parse_predicates(text, spark_schema(schema.data, schema.times))
    known = [one for one in found if one is not None and is_exact(one, schema)]
    if len(known) < len(found):
        return None
    if not known:
        return pc.scalar(True)
    where = pushed_down([AllOf(tuple(known))], schema).where
    return None if where is None else where.expression


VERBS: dict[str, Callable[[Mapping[str, str]], StructField]] = {
    "tables": _tables, "namespaces": _namespaces, "load": _load, "create": _create, "alter": _alter, "drop": _drop,
    "rename": _rename, "deletes": _deletes, "delete": _delete, "stage": _stage,
    "replace": _replace, "discard": _discard,
}  # fmt: skip
