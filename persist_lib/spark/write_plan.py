"""Writes from Spark: what a DataFrame is to become, and the two halves of it: what tasks write, and the commit.

    df.write.format("persist").mode("append").option("key", "id").save()     its rows, as one append at the next time
    ….mode("append").option("upsert", "true")                                each the one row of its key
    ….mode("overwrite")                                                      its rows become the contents

A column `_diff` makes rows changes: a retraction is -1. A column `_time`, with the options `lower` and `upper`, says at
which times. A table that is not there is created of the DataFrame's columns, if the option `key` says which tell rows
apart: on one shard, or with the option `shards` on a collection of so many. Columns go by their names. A nullable value
column that the DataFrame lacks is null. A collection is written in all its shards by one transaction, a table of a
timeline by one statement (`timeline_rows`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BooleanType, NullType, StructType

from persist_lib.arguments import did_you_mean, shown
from persist_lib.catalog import CollectionWriter, Controller
from persist_lib.catalog.records import CollectionRecord
from persist_lib.catalog.renditions import is_additive
from persist_lib.catalog.staging import CollectionStaged, CollectionTicket
from persist_lib.catalog.writer import fetch_schema
from persist_lib.catalog.writing import Written
from persist_lib.client import Client
from persist_lib.convert.casts import cast_column
from persist_lib.errors import AlreadyProduced, InvalidUsage, NotFound, PersistError, SchemaMismatch, UpperMismatch
from persist_lib.kernel.columns import array_of
from persist_lib.relation.appends import Appended
from persist_lib.relation.differences import DELETE
from persist_lib.relation.stage import Staged, Ticket
from persist_lib.relation.statements import Done
from persist_lib.relation.writer import WriteHandle
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.schema.types import parse_type, said_type
from persist_lib.shard.commit import Machine
from persist_lib.spark.options import Options, client_of
from persist_lib.spark.timeline_rows import RowsTicket, RowsWriter, StagedRows, check_minted
from persist_lib.spark.types import column_type, persist_schema
from persist_lib.table.opening import find_record, make_table
from persist_lib.times import Times, Unit, parse_unit

OWNER = "Spark"
"""Whose writers these are, in lists of them."""

Mode = Literal["append", "upsert", "overwrite"]
AnyWriter = WriteHandle | CollectionWriter | RowsWriter
AnyTicket = Ticket | CollectionTicket | RowsTicket
AnyStaged = Staged | CollectionStaged | StagedRows
"""Of a shard's stage, of a collection's, or of a table of a timeline, which has none."""


class Plan(NamedTuple):
    """What a write is, decided in the driver's Python worker and sent to all tasks."""

    urls: tuple[str, str]
    table: str
    record: CollectionRecord | None
    """What the catalog has of it; None for a shard."""
    schema: Schema
    mode: Mode
    deletes: str | None
    lease_s: float | None
    bounds: tuple[int | str, int | str] | None
    at: int | str | None
    base: int | None = None
    """The time of the contents that the rows were made of, if nothing may have been written since; -1: of none."""

    @property
    def client(self) -> Client:
        return client_of(*self.urls, writes=True)

    @property
    def subject(self) -> str:
        return f"table {self.table}"

    @contextmanager
    def writer(self) -> Iterator[AnyWriter]:
        """A writer of what carries the table: it stages, and appends what was staged."""
        if self.record is None:
            with self.client.open_writer(self.table, self.schema, owner=OWNER) as write:
                yield write
        elif self.record.kind == "table":
            yield RowsWriter(self.client, self.table, self.schema)
        else:
            yield self.collection_writer(self.record.id)

    @property
    def remembering(self) -> Machine:
        return self.client.machine(
            self.table if self.record is None else self.collection_writer(self.record.id).collection.shard
        )

    def collection_writer(self, id_: str) -> CollectionWriter:
        writer = collection_writer(self.client, self.table, id_)
        if not self._fits(writer):
            writer = collection_writer(self.client, self.table)
        if not self._fits(writer):
            raise SchemaMismatch(
                f"{self.subject} has the schema {writer.schema} by now, and this DataFrame was planned for "
                f"{self.schema}. Nothing was written. Run it again",
                table=self.table, expected=self.schema, actual=writer.schema,
            )  # fmt: skip
        return writer

    def _fits(self, writer: CollectionWriter) -> bool:
        if self.mode == "append":
            return is_additive(self.schema, writer.schema.shown)
        return self.schema == writer.schema.shown


class _Open(NamedTuple):
    """What this process has open of a catalog: it asks the location only for what is new."""

    controller: Controller
    writers: dict[str, CollectionWriter]


_open: dict[tuple[int, str, str], _Open] = {}


def collection_writer(client: Client, name: str, id_: str | None = None) -> CollectionWriter:
    """A writer of a collection, in its newest columns. It stays open for the next call, as opening takes requests.

    Where `id_` is given, and this process has one of that, it is that one: the same call has looked at it before.
    """
    place = (os.getpid(), client.url, client.consensus_url)
    found = _open.setdefault(place, _Open(client.controller(), {}))
    known = found.writers.get(name)
    if known is not None and (known.collection.id == id_ or _is_current(found.controller, known)):
        return known
    if known is not None:
        del found.writers[name]
        with suppress(PersistError):
            known.close()
    fresh = found.writers[name] = found.controller.open_writer(name, owner=OWNER)
    return fresh


def _is_current(controller: Controller, writer: CollectionWriter) -> bool:
    """Whether it is the collection of its name still, and has its newest columns."""
    named = controller.catalog.fetch().named(writer.name)
    return named is not None and named.id == writer.collection.id and fetch_schema(writer) == writer.schema


PLAIN = "none"
"""The option `times` of a table whose times are plain integers."""
CREATION = ("key", "times", "unique", "non_negative", "shards")
BASE = "base"
"""The option by which the catalog says of which time the contents are that a statement changes."""
WRITE = (*CREATION, "upsert", "deletes", "at", "lower", "upper", "lease_s", "query", "epoch")
"""Options of batch writes."""
STREAM_WRITE = (*CREATION, "upsert", "deletes", "lease_s", "query")
"""Options of streaming writes."""
TABLE_BYTES = 8 << 20
"""Spark's batches have 10,000 rows. So many bytes of them are checked and converted at once."""


def plan_write(given: Mapping[str, str], frame: StructType, *, overwrite: bool, is_stream: bool) -> Plan:
    """Decide what a write is. Creates the shard if it is not there. Raises what makes the write impossible."""
    what = "a streaming write" if is_stream else "a batch write"
    options = Options.of(given, STREAM_WRITE if is_stream else (*WRITE, BASE), what)
    mode = _mode(options, overwrite=overwrite)
    deletes = options.text("deletes")
    _check_frame(frame, mode, deletes)
    bounds = _bounds(options, frame, mode)
    client = client_of(options.location, options.consensus, writes=True)
    kept = StructType([field for field in frame if field.name != deletes])
    schema, record = _schema_of(client, options, kept)
    if record is not None and record.kind == "table":
        check_minted(options, frame.fieldNames(), is_stream=is_stream)
    base = options.text(BASE)
    lease = options.integer("lease_s")
    at = options.time("at")
    if at is not None:
        if mode != "append" or bounds is not None:
            raise InvalidUsage("the option at is the time of an append without times of its own", option="at")
        Times(schema.times, client.consensus.now).parse(at, "at")
    return Plan(
        (client.url, client.consensus_url), options.table, record, schema, mode, deletes, lease, bounds, at,
        None if base is None else int(base),
    )  # fmt: skip


def _mode(options: Options, *, overwrite: bool) -> Mode:
    upsert = options.flag("upsert", default=False)
    if upsert and overwrite:
        raise InvalidUsage(
            'the option upsert goes with .mode("append"). .mode("overwrite") replaces the rows of all keys',
            option="upsert",
        )
    if "deletes" in options and not upsert:
        raise InvalidUsage("the option deletes names a column of an upsert: set upsert to true", option="deletes")
    return "overwrite" if overwrite else "upsert" if upsert else "append"


def _check_frame(frame: StructType, mode: Mode, deletes: str | None) -> None:
    names = frame.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidUsage(f"the DataFrame has two columns {shown(twice[0])}; rename one of them", column=twice[0])
    if mode == "upsert" and DIFF in names:
        raise InvalidUsage(
            f"a DataFrame with {DIFF} has changes, which are appended as they are: leave out upsert. To delete keys in "
            "an upsert, name a boolean column with the option deletes",
            column=DIFF,
        )
    if deletes is not None and (deletes not in names or not isinstance(frame[deletes].dataType, BooleanType)):
        found = frame[deletes].dataType.simpleString() if deletes in names else f"not one of {names}"
        raise InvalidUsage(
            f"the option deletes names a boolean column, true for each key that is to have no row: {shown(deletes)} is "
            f"{found}",
            option="deletes",
        )  # fmt: skip


def _bounds(options: Options, frame: StructType, mode: Mode) -> tuple[int | str, int | str] | None:
    lower, upper = options.time("lower"), options.time("upper")
    has_times = TIME in frame.fieldNames()
    if (lower is None) != (upper is None):
        raise InvalidUsage("the options lower and upper come together: the times of the rows are in [lower, upper)")
    if lower is None or upper is None:
        if has_times:
            raise InvalidUsage(
                f"the DataFrame has a column {TIME}. Say with the options lower and upper which times it completes, "
                f"as in compare_and_append, or drop the column: then the rows are written at the next time",
                column=TIME,
            )
        return None
    if mode != "append" or not has_times:
        raise InvalidUsage(
            f'the options lower and upper are for .mode("append") of rows with a column {TIME}; without one, the rows '
            "are written at the next time",
            option="lower",
        )
    return lower, upper


def _schema_of(client: Client, options: Options, frame: StructType) -> tuple[Schema, CollectionRecord | None]:
    """The schema in which this DataFrame is written, the newest, and what carries it. Creates what is not there."""
    key, times, flags, _ = _declared(options)
    try:
        record = find_record(client, options.table)
    except NotFound:
        if key is None:
            raise NotFound(
                f"there is no table {options.table!r} in this location. To create it from this DataFrame, name the "
                f'columns that tell its rows apart, as in .option("key", "{frame.fieldNames()[0]}")',
                table=options.table,
            ) from None
        return create_table(client, options, frame), find_record(client, options.table)
    schema = _newest(client, options.table, record)
    _check_declared(options, schema, key, times, flags)
    _check_columns(options.table, schema, frame)
    return schema, record


def _newest(client: Client, table: str, record: CollectionRecord | None) -> Schema:
    if record is None:
        return client.machine(table).state.schemas[-1].shown
    return client.table(table).schema if record.kind == "table" else collection_writer(client, table).schema.shown


def _declared(options: Options) -> tuple[tuple[str, ...] | None, Unit | None, dict[str, bool], int | None]:
    """The key, the times, the constraints and the shards that options say a table has."""
    flags = {name: options.flag(name, default=False) for name in ("unique", "non_negative")}
    times = None if (text := options.text("times") or "ms") == PLAIN else parse_unit(text)  # as `db.table` makes them
    return options.names("key"), times, flags, options.integer("shards")


def create_table(client: Client, options: Options, frame: StructType) -> Schema:
    """Make a table with the columns of a DataFrame, as the options `CREATION` say. Answers its schema."""
    key, times, flags, shards = _declared(options)
    schema = persist_schema(frame, key or (), times=times, **flags)
    if shards is None and "/" not in options.table:  # which no shard's name has
        make_table(client, options.table, schema)
        return schema
    with client.controller() as controller:
        controller.create(options.table, schema, shards=shards or 1, mode="compare_and_append")
    return schema


def _check_declared(
    options: Options, schema: Schema, key: tuple[str, ...] | None, times: object, flags: Mapping[str, bool]
) -> None:
    """Refuse options that would create another shard than the one that is there."""
    said = {"key": key is None or set(key) == set(schema.key_names)}
    said["times"] = "times" not in options or times == schema.times
    said |= {name: name not in options or flag == getattr(schema, name) for name, flag in flags.items()}
    for name, agrees in said.items():
        if not agrees:
            raise SchemaMismatch(
                f"table {options.table} is there already, with the schema {schema}, and the option {name} says "
                f"{shown(options.text(name))}. Nothing was written. Leave the option out, or write to another one",
                option=name, actual=schema,
            )  # fmt: skip


def _check_columns(table: str, schema: Schema, frame: StructType) -> None:
    """Refuse columns that the shard does not have, that it needs, or whose type never fits."""
    names = frame.fieldNames()
    for field in frame:
        if field.name in (TIME, DIFF):
            continue
        if field.name not in schema.names:
            raise SchemaMismatch(
                f"table {table} has no column {shown(field.name)}. {did_you_mean(field.name, schema.names)}It has "
                f"{schema.names}. Nothing was written. Rename or drop the column, or add it with evolve",
                column=field.name,
            )  # fmt: skip
        target = schema.data.field(field.name)
        given = pa.null() if isinstance(field.dataType, NullType) else parse_type(column_type(field))
        try:
            cast_column(pa.chunked_array([], given), target)
        except InvalidUsage as error:
            raise SchemaMismatch(
                f"column {shown(field.name)} of table {table} is {said_type(target)}, and takes no "
                f"{field.dataType.simpleString()} of Spark's. Nothing was written. Cast it first",
                column=field.name,
            ) from error  # fmt: skip
    needed = [one.name for one in schema.key if not one.fill]
    needed += [one.name for one in schema.value if not (one.nullable or one.fill or one.default is not None)]
    if missing := [name for name in needed if name not in names]:
        raise SchemaMismatch(
            f"the DataFrame lacks {missing} of table {table}, which {'is' if len(missing) == 1 else 'are'} never null. "
            f"It has {names}. Nothing was written",
            column=missing[0],
        )  # fmt: skip


def write_task(plan: Plan, ticket: AnyTicket, batches: Iterable[pa.RecordBatch]) -> AnyStaged:
    """What a task does: write its rows as parts of the stage."""
    return ticket.write(_arranged(plan, batches))


def _arranged(plan: Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables with the shard's columns, in its order; all rows as Spark has them.

    What it lacks is null, or left to who writes it where that has a default.
    """
    filled = {column.name for column in plan.schema.columns if column.fill or column.default is not None}
    for table in _gathered(batches):
        columns: dict[str, Any] = {}
        for field in plan.schema.data:
            if field.name in table.column_names:
                columns[field.name] = table.column(field.name)
            elif field.name not in filled:
                columns[field.name] = pa.nulls(table.num_rows, field.type)
        columns |= {name: table.column(name) for name in (TIME, DIFF) if name in table.column_names}
        if plan.deletes is not None:
            columns[DIFF] = _diffs(table.column(plan.deletes), plan.deletes)
        yield pa.table(columns)


def _diffs(flags: pa.ChunkedArray, name: str) -> pa.Array:
    if flags.null_count:
        raise InvalidUsage(
            f"column {shown(name)}, which says whether a key is to be deleted, is null in {flags.null_count} rows. "
            "Fill it with false",
            column=name,
        )
    return array_of(np.where(np.asarray(flags.combine_chunks().to_numpy(zero_copy_only=False)), DELETE, 1))


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= TABLE_BYTES:
            yield pa.Table.from_batches(held).combine_chunks()
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def commit_write(
    plan: Plan, staged: list[AnyStaged], producer: tuple[str, int] | None
) -> Appended | Written | Done | None:  # fmt: skip
    """What the driver's Python worker does with the answers of all tasks. None: it was done before."""
    with plan.writer() as write:
        given: list[Any] = staged
        try:
            if plan.mode == "upsert":
                return write.upsert_staged(given, producer=producer)
            if plan.base is not None and not isinstance(write, RowsWriter):
                return write.overwrite_staged(given, upper=plan.base + 1)
            if plan.mode == "overwrite":
                return write.overwrite_staged(given, producer=producer)
            return write.append_staged(given, at=plan.at, producer=producer)
        except UpperMismatch as error:
            if plan.base is None:
                raise
            raise UpperMismatch(
                f"{plan.subject} was changed by another writer while this statement ran. Nothing was written. Run it "
                "again",
                table=plan.table, **error.fields,
            ) from error  # fmt: skip
        except AlreadyProduced:
            return None
