"""Scans: the DataFrame that `format("persist")` gives, which Spark takes in with less of its own time.

Spark projects the rows of a source in Python once more than those of `mapInArrow`: it does so for every source that is
not columnar. So a scan plans the slices in this process, and is a `mapInArrow` over their numbers. What tasks do is the
same.

Spark guesses how much `mapInArrow` yields from how much goes in, and broadcasts what it takes for small. So what goes
in is so many numbers that the guess is right. A filter keeps one of them for each slice.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from persist_lib.arguments import check_type
from persist_lib.errors import InvalidUsage
from persist_lib.spark.options import as_texts
from persist_lib.spark.reading import Part, Reader, batch_reader, look

NUMBER_BYTES = 8
"""What a number counts for."""
MOST_NUMBERS = 1 << 31
"""With so many, the guess is above all that Spark ever broadcasts (8 GiB). They take it some seconds of CPU time."""


def scan(spark: SparkSession, shard: str | None = None, **options: object) -> DataFrame:
    """A shard as `format("persist")` with these options reads it, faster. For batches, not for streams.

        orders = scan(spark, "orders", as_of="1 day ago", columns=["id", "amount"], where="amount > 100")
        orders = scan(spark, collection="orders", as_of="1 day ago")

    It is of one time, which is decided now. It is planned now too, and by this process, which must reach the location,
    also where Spark is reached by Spark Connect. Raises what `format("persist")` would raise when it is loaded or
    planned, and InvalidUsage for the option `pushdown`.
    """
    if shard is not None:
        check_type(shard, str, "shard", '"orders"')
    given = as_texts({"shard": shard, **options})
    if any(name.lower() == "pushdown" for name in given):
        raise InvalidUsage(
            "a scan has no option pushdown, as Spark pushes no filters into it. Say what to read with the option where",
            option="pushdown",
        )
    table = look(given, batch=True)
    reader = batch_reader(given, table.frame, table)
    parts = reader.planned(slots(spark))
    if not parts:
        return spark.createDataFrame([], table.frame)
    # Each is pickled by itself, so that a task unpickles its own alone.
    pickled, step = [pickle.dumps(part) for part in parts], -(-numbers(parts, len(table.frame)) // len(parts))

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return read_numbered(reader, pickled, step, batches)

    ids = spark.range(0, len(parts) * step, 1, len(parts)).where(f"id % {step} = 0")
    return ids.mapInArrow(read, table.frame)


def slots(spark: SparkSession) -> int:
    """How many tasks Spark runs at a time. A client of Spark Connect cannot know, and takes it to be one."""
    return max(1, spark.sparkContext.defaultParallelism) if isinstance(spark, SparkSession) else 1


def numbers(parts: Sequence[Part], columns: int) -> int:
    """How many numbers have to go in, so that Spark's guess is about right: the bytes of all rows of these slices.

    That is a word for each row and value, but no less than what is stored, which is what Spark takes files for.
    """
    # Slices share the parts at their edges.
    stored = {id(part): part for one in parts for run in one.piece.inputs for part in run.parts}.values()
    size = sum(max(part.rows * NUMBER_BYTES * (1 + columns), part.size) for part in stored)
    return max(1, min(-(-size // NUMBER_BYTES), MOST_NUMBERS))


def read_numbered(
    reader: Reader, pickled: Sequence[bytes], step: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows of the slices whose numbers, times `step`, are in the batches."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from reader.read(pickle.loads(pickled[number // step]))  # noqa: S301, TID251 - the driver pickled it
