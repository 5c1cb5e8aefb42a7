"""Tables about a table: `lake.orders.history`, `.batches`, `.changes` and `.contents`.

changes     its updates, with _time and _diff; what is after a time is read alone: WHERE _time > …
contents    its rows, each distinct one once, with _diff
history     when something was written, and how many rows were added and retracted then
batches     what its shards store: the times of each batch, its updates, bytes, parts, and since which version
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StringType, StructField, StructType

from persist_lib.client import Client
from persist_lib.schema.schema import Schema
from persist_lib.spark.batch_reader import EMPTY, OF_CATALOG, frame_of
from persist_lib.spark.options import READ, Options, client_of
from persist_lib.spark.types import TIME_SPARK, arrow_schema, spark_field, to_spark

METADATA = ("changes", "contents", "history", "batches")
TOLD = "catalog"
"""The option that says which of `history` and `batches` is read."""
COUNTS: dict[str, tuple[str, ...]] = {
    "history": ("added", "retracted"), "batches": ("updates", "diff_sum", "bytes", "parts", "runs", "version"),
}  # fmt: skip
BOUNDS = ("lower", "upper")


class Metadata(NamedTuple):
    """The columns of such a table, and with which options it is read, in batches and as a stream."""

    frame: StructType
    read: dict[str, str]
    stream: dict[str, str]


def when(option: str, time: int) -> dict[str, str]:
    """The option by which something is read up to a time; -1: nothing was written yet."""
    return {option: str(time)} if time >= 0 else {EMPTY: "true"}


def metadata_of(what: str, schema: Schema, since: int, as_of: int) -> Metadata:
    """How to read such a table, of one whose history is kept from `since` on, up to a time."""
    names = tuple(schema.names)
    if what == "changes":
        between = {**when("to", as_of), **({"from": str(since)} if 0 < since <= as_of else {})}
        frame, own = frame_of(schema, "updates", names), {"changes": "true"}
        return Metadata(frame, {**own, **between}, own)
    if what == "contents":
        return Metadata(frame_of(schema, "contents", names), {"diff": "true", **when("as_of", as_of)}, {"diff": "true"})
    return Metadata(_frame(what, schema), {TOLD: what, **when("as_of", as_of)}, {TOLD: what})


def _frame(what: str, schema: Schema) -> StructType:
    counts = [StructField(name, TIME_SPARK, nullable=False) for name in COUNTS[what]]
    time = spark_field(schema.time_field, schema.times)
    if what == "history":
        return StructType([time, *counts])
    bounds = [StructField(name, time.dataType) for name in BOUNDS]
    return StructType([StructField("shard", StringType(), nullable=False), *bounds, *counts])


class MetadataReader(DataSourceReader):
    """Reads the history or the batches of a table, in one task."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        values = {str(name).lower(): value for name, value in given.items()}
        self._what = values.pop(TOLD)
        self._options = Options.of(values, (*READ, *OF_CATALOG), f"a read of {self._what}")  # Spark filters, and limits
        self._target = arrow_schema(schema)

    def partitions(self) -> list[InputPartition]:
        """One."""
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is one
        """The rows of it that Spark asks for."""
        options = self._options
        client = client_of(options.location, options.consensus, read_only=options.flag("read_only", default=False))
        as_of = options.integer("as_of", least=0)
        found = _batches(client, options.table) if self._what == "batches" else _history(client, options.table, as_of)
        yield from to_spark(found, self._target, f"{self._what} of {options.table}").to_batches()


def _history(client: Client, name: str, as_of: int | None) -> pa.Table:
    with client.table(name) as table:
        if as_of is None:  # nothing was written yet
            return table.history(to=0, timeout=0).slice(0, 0)
        return table.history(to=as_of)


def _batches(client: Client, name: str) -> pa.Table:
    with client.table(name) as table:
        schema, shards = table.schema, table.describe().shards
    found = []
    for shard in shards:
        for one in client.inspect(shard).state.trace:
            counts = (one.count, one.diff_sum, one.size, len(one.parts), len(one.runs), one.born)
            bounds = {"lower": one.lower.time, "upper": one.upper.time}
            found.append({"shard": shard, **bounds, **dict(zip(COUNTS["batches"], counts, strict=True))})
    time = schema.time_field.type if schema.times else pa.int64()
    whole = pa.schema([
        ("shard", pa.string()), *((name, pa.int64()) for name in (*BOUNDS, *COUNTS["batches"])),
    ])  # fmt: skip
    rows = pa.Table.from_pylist(found, schema=whole)
    for at, bound in enumerate(BOUNDS, 1):
        rows = rows.set_column(at, bound, rows.column(bound).cast(time))
    return rows
