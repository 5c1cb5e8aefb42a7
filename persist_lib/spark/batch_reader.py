"""Batch reads: what a DataFrame is of, decided when it is made; its partitions; and its rows as Arrow batches.

    spark.read.format("persist").load("orders")                                        the newest complete time
    ….option("as_of", "1 hour ago")                                                    an earlier one
    ….option("changes", "true").option("from", 17).option("to", 40)                    the updates in (17, 40]

It is the same whatever carries the table: a shard, a collection or a timeline. A DataFrame is of one time, decided when
it is made: every action on it, and every task that is tried again, reads the same. Its rows are the table's as people
know tables: the columns, each row as often as its multiplicity. With `diff=true` it has the contents as they are, each
distinct row once with `_diff`. A row with a negative multiplicity is an error without `diff`, as no table can show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import CollectionRecord
from persist_lib.client import Client
from persist_lib.convert.times import shown_times
from persist_lib.errors import InvalidUsage, NotComplete, PersistError
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME
from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.multiplicity import is_once, places
from persist_lib.relation.held import kept_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.spark.collections import Piece, Shown, Steps, unleased
from persist_lib.spark.filters import Pushed, parse_where, pushed_down
from persist_lib.spark.history_holds import Keeping, Lease, take
from persist_lib.spark.options import READ, STREAM, Options, client_of
from persist_lib.spark.slices import Section, Slice, handle_of, plan_slices
from persist_lib.spark.sql_catalog.predicates import parse_predicates
from persist_lib.spark.types import arrow_schema, check_asked, chosen, spark_schema, to_spark
from persist_lib.table.opening import find_record

Kind = Literal["rows", "contents", "updates"]
BATCH = "a batch read"
LATEST = "latest"
PUSHED, LIMIT, EMPTY = OF_CATALOG = "pushed", "limit", "empty"
"""Options of the catalog: the filters and the number of rows that it pushes down; and that it found nothing, so that
what came since is not read."""
LEAST_BYTES = 64 << 10
BATCH_ROWS = 1 << 16
"""The most rows of one batch for the JVM, which reads them one by one."""
MOST_ROWS = 1 << 60


class Table(NamedTuple):
    """What one `load` is of. Pickled with the source, so that everything planned later is of the same.

    Of what is in the catalog `shard` is the rendition shard, which is what has to be held.
    """

    urls: tuple[str, str]
    name: str
    shard: str
    schema: Schema
    kind: Kind
    names: tuple[str, ...]
    section: Section | None
    """What a batch reads; None where there is no complete time yet."""
    frame: StructType
    read_only: bool
    pushed: Pushed
    """What the option `filter` leaves of it."""
    refusal: PersistError | None = None
    """Why a batch cannot read the updates that the options name. A stream that is restarted does not start there."""
    collection: CollectionRecord | None = None
    limit: int | None = None
    """How many rows a partition needs at most; None for all."""

    @property
    def client(self) -> Client:
        return client_of(*self.urls, read_only=self.read_only)

    @property
    def what(self) -> str:
        return f"table {self.name}"

    def shown(self, target: pa.Schema, where: Where | None) -> Shown:
        """What a read of a collection shows, given the columns that Spark asks for."""
        return Shown(self.schema, tuple(name for name in target.names if name in self.schema.names), where)


def look(given: Mapping[str, str], *, batch: bool | None = None) -> Table:
    """Look at the table: what the options ask for, and at which time. `batch` is None before that is known."""
    options = Options.of(
        given,
        tuple(dict.fromkeys((*READ, *STREAM))) if batch is None else (*READ, *OF_CATALOG) if batch else STREAM,
        "a read" if batch is None else BATCH if batch else "a streaming read",
    )
    read_only = options.flag("read_only", default=False)
    client = client_of(options.location, options.consensus, read_only=read_only)
    kind = kind_of(options)
    section, refusal = None, None
    with _opened(client, options) as handle:
        as_of = options.time("as_of")
        if isinstance(handle, RenditionReader) and as_of is not None and as_of != LATEST and kind != "updates":
            handle.adopt_at(as_of)
        try:
            is_stream = any(name in options for name in STREAM if name not in READ)
            if batch is not False and not is_stream and EMPTY not in options:
                section = section_of(options, kind, handle)
        except PersistError as error:
            if kind != "updates":
                raise
            refusal = error
        schema, collection, shard = handle.schema, None, options.table
        if isinstance(handle, RenditionReader):
            collection, shard = handle.collection, handle.collection.shard
    names = chosen(schema, options.names("columns"), f"table {options.table}") or tuple(schema.names)
    text = options.text("filter")
    columns = schema.changes if kind == "updates" else schema.data
    pushed = Pushed() if text is None else parse_where(text, schema, columns)
    return Table(
        (client.url, client.consensus_url), options.table, shard, schema, kind, names, section,
        frame_of(schema, kind, names), read_only, pushed, refusal, collection,
    )  # fmt: skip


@contextmanager
def _opened(client: Client, options: Options) -> Iterator[ReadHandle | RenditionReader]:
    """What reads the table of this name, without a lease. A shard that a layer keeps for its own is read as any."""
    if (record := find_record(client, options.table)) is not None:
        with unleased(client, record) as reader:
            yield reader
        return
    yield handle_of(client, options.table, client.machine(options.table).state.schemas[-1].shown)


def kind_of(options: Options) -> Kind:
    """What the options ask for. Raises InvalidUsage for two things at once."""
    changes = options.flag("changes", default="from" in options or "to" in options)
    diff = options.flag("diff", default=False)
    if changes and diff:
        raise InvalidUsage(
            f"the options diff and changes of {options.what} exclude each other: changes have {DIFF} anyway",
            option="diff",
        )
    if changes and "as_of" in options:
        raise InvalidUsage(
            "changes lie between two times, so they take the options from and to, not as_of. Leave out these for the "
            "contents as of a time",
            option="as_of",
        )
    return "updates" if changes else "contents" if diff else "rows"


def frame_of(schema: Schema, kind: Kind, names: tuple[str, ...]) -> StructType:
    """The columns of a DataFrame of this kind."""
    own = {"rows": [], "contents": [DIFF], "updates": [TIME, DIFF]}[kind]
    whole = schema.changes if kind == "updates" else schema.contents
    return spark_schema(pa.schema([whole.field(name) for name in (*names, *own)]), schema.times)


def section_of(options: Options, kind: Kind, handle: ReadHandle | RenditionReader) -> Section | None:
    """What a batch reads, decided now: the contents as of a time, or the updates between two."""
    if kind == "updates":
        from_, to = options.time("from"), options.time("to")
        if to is None and newest(handle) < 0:
            return None
        if from_ == LATEST:
            from_ = None if (time := newest(handle)) < 0 else time
        with handle.changes(from_, to, timeout=options.seconds("timeout") or 0) as changes:
            lower = 0 if changes.from_ is None else min(changes.from_ + 1, MAX_TIME)
            upper = None if changes.to == MAX_TIME else changes.to + 1
            return Section(None, lower, upper if changes.from_ is None or changes.to > changes.from_ else lower)
    for name in ("from", "to"):
        if name in options:
            raise InvalidUsage(
                f"the option {name} is about changes, and changes is false. Leave out changes, or read as_of a time",
                option=name,
            )
    as_of = options.time("as_of")
    if as_of == LATEST:
        as_of = None
    try:
        time = newest(handle, as_of, options.seconds("timeout") or 0)
    except NotComplete:
        if as_of is None or not options.flag("newest", default=False):
            raise
        time = newest(handle)
    return Section(time) if time >= 0 else None


def newest(handle: ReadHandle | RenditionReader, as_of: int | str | None = None, timeout: float = 0) -> int:
    """The newest complete time, or that of `as_of`. -1: there is none yet."""
    with handle.snapshot(as_of, timeout=timeout) as snapshot:
        return snapshot.as_of


def batch_reader(given: Mapping[str, str], schema: StructType, table: Table | None) -> Reader:
    """The reader of a batch. Without `table`, as a user passed the schema, the time is decided now."""
    options = Options.of(given, (*READ, *OF_CATALOG), BATCH)
    table = look(given, batch=True) if table is None else table
    if (text := options.text(PUSHED)) is not None:
        whole = frame_of(table.schema, table.kind, tuple(table.schema.names))
        found = [one for one in parse_predicates(text, whole) if one is not None]
        table = table._replace(pushed=table.pushed.both(pushed_down(found, table.schema)))
    table = table._replace(limit=options.integer(LIMIT, least=0))
    check_asked(schema, table.frame, table.what)
    pushes = options.flag("pushdown", default=False)
    return (PushingReader if pushes else Reader)(table, schema, options.size("partition_bytes", LEAST_BYTES))


class Part(InputPartition):
    """One partition: a slice of the shard (or of several of a collection), and the lease that keeps it."""

    def __init__(self, piece: Slice | Piece, lease: Lease | None) -> None:
        self.piece, self.lease = piece, lease


class Reader(DataSourceReader):
    """Plans the partitions of a DataFrame, and reads them in tasks."""

    def __init__(self, table: Table, schema: StructType, partition_bytes: int | None) -> None:
        self._table, self._target = table, arrow_schema(schema)
        self._partition_bytes = partition_bytes
        self._pushed = table.pushed

    def partitions(self) -> list[InputPartition]:
        """The partitions, as Spark asks for them. It does not say how many tasks it runs at a time."""
        return list(self.planned(1))

    def planned(self, slots: int) -> list[Part]:
        """Slices of the shard in key order, for so many tasks at a time. The planner's lease keeps what they read."""
        table, pushed = self._table, self._pushed
        if table.refusal is not None:
            raise table.refusal
        section = table.section
        if section is not None and section.as_of is None:
            section = section.between(pushed.lower, pushed.upper)
        if section is None or section.is_empty():
            return []
        client = table.client
        lease = None if table.read_only else take(client, table.shard, section.since)
        if table.collection is not None:
            with unleased(client, table.collection, table.schema) as reader:
                kept_of(reader).check_since(section.since)
                steps = Steps(reader, table.shown(self._target, pushed.where), self._partition_bytes, slots)
                return [Part(piece, lease) for piece in steps.pieces(section, pushed.keys)]
        handle = handle_of(client, table.shard, table.schema)
        names = tuple(name for name in self._target.names if name in table.schema.names)
        found = plan_slices(
            handle, section, names=names, where=pushed.where, keys=pushed.keys, slice_bytes=self._partition_bytes,
            slots=slots,
        )  # fmt: skip
        return [Part(piece, lease) for piece in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Part):  # Spark's own, where there is none of ours
            return iter(())
        return batches(self._table, self._target, partition)


class PushingReader(Reader):
    """The same, where Spark pushes filters down (the option `pushdown`)."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Use what can be used, and let Spark apply all of them once more.

        Spark 4.3 keeps what was planned with these filters for its DataFrame, and reads it again for another
        query of the same DataFrame that has other filters or none, and for the other side of a self-join. That query
        loses rows. So this is only for a DataFrame that one query uses once.
        """
        self._pushed = self._table.pushed.both(pushed_down(filters, self._table.schema))
        return filters


def batches(table: Table, target: pa.Schema, part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, or so many of them as are needed, as Spark's Arrow batches."""
    left = MOST_ROWS if table.limit is None else table.limit
    for batch in _all_batches(table, target, part):
        yield batch.slice(0, left)
        if (left := left - batch.num_rows) <= 0:
            return  # before another is read, and before Spark closes the pipe under a worker that writes


def _all_batches(table: Table, target: pa.Schema, part: Part) -> Iterator[pa.RecordBatch]:
    client = table.client
    keeping = Keeping(client, table.shard, part.lease)
    with Runtime(background=False).pool(2, "persist-spark") as pool:
        for rows in part.piece.read(client, pool):
            keeping.look()
            for piece in multiplied(rows, table) if table.kind == "rows" else (rows,):
                yield from as_batches(piece, target, table)


def as_batches(rows: pa.Table, target: pa.Schema, table: Table) -> Iterator[pa.RecordBatch]:
    """Rows in Spark's types."""
    if table.kind == "updates":
        rows = shown_times(table.schema, rows)
    yield from to_spark(rows, target, table.what).to_batches(BATCH_ROWS)


def multiplied(rows: pa.Table, table: Table) -> Iterator[pa.Table]:
    """Each row as often as its multiplicity, as tables of bounded size. Raises InvalidUsage for a negative one."""
    diffs = integers(rows.column(DIFF))
    if is_once(diffs):
        yield rows
        return
    if diffs.min() < 0:
        raise _negative(rows, int(np.argmin(diffs)), table)
    if float(diffs.sum(dtype=np.float64)) > MOST_ROWS:
        raise InvalidUsage(
            f"{table.what} has multiplicities that add up to more than {MOST_ROWS:,} rows. Read it with the "
            'option diff ("true")',
            shard=table.shard,
        )
    for repeats in places(diffs, BATCH_ROWS):
        yield rows.take(array_of(repeats))


def _negative(rows: pa.Table, row: int, table: Table) -> InvalidUsage:
    values = rows.slice(row, 1).to_pylist()[0]
    if TIME in rows.column_names:
        return InvalidUsage(
            f"{table.what}: the update {values} takes rows away, which a stream of rows cannot show. Read it with the "
            'option changes ("true"): its updates have _time and _diff',
            shard=table.shard,
        )  # fmt: skip
    return InvalidUsage(
        f"{table.what}: the row {values} has a negative multiplicity, which a table cannot show. Read it with the "
        'option diff ("true"), or find out who took away what was not there',
        shard=table.shard,
    )  # fmt: skip
