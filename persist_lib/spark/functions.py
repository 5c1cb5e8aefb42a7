"""A table function and views for SQL, and scans: the rows of a table as of a time, whatever carries it.

    SELECT * FROM persist_as_of('orders', '1 hour ago')                 one task: for looking
    CREATE TEMPORARY VIEW yesterday USING persist OPTIONS (table 'orders', as_of '1 day ago')      as many as it takes

A function of Python's runs in one task, however large the table is, and filters are not pushed down into it. So large
tables are better read by a view, which is of one time too: that of its making.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udtf
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult

from persist_lib.arguments import check_type, shown
from persist_lib.errors import InvalidUsage
from persist_lib.spark.batch_reader import Part, Reader, Table, batch_reader, look
from persist_lib.spark.options import as_texts

# Spark projects the rows of a source in Python once more than those of `mapInArrow`, as for every source that is not
# columnar. So a scan plans the slices in this process, and is a `mapInArrow` over their numbers. What tasks do is the
# same. Spark guesses how much `mapInArrow` yields from how much goes in, and broadcasts what it takes for small. So
# what goes in is so many numbers that the guess is right. A filter keeps one of them for each slice.
NUMBER_BYTES = 8
"""What a number counts for."""
MOST_NUMBERS = 1 << 31
"""With so many, the guess is above all that Spark ever broadcasts (8 GiB). They take it some seconds of CPU time."""


def scan(spark: SparkSession, table: str, **options: object) -> DataFrame:
    """A table as `format("persist")` with these options reads it, faster. For batches, not for streams.

        orders = scan(spark, "orders", as_of="1 day ago", columns=["id", "amount"], filter="amount > 100")

    It is of one time, which is decided now. It is planned now too, and by this process, which must reach the location,
    also where Spark is reached by Spark Connect. Raises what `format("persist")` would raise when it is loaded or
    planned, and InvalidUsage for the option `pushdown`.
    """
    given = as_texts({"table": check_type(table, str, "table", '"orders"'), **options})
    if any(name.lower() == "pushdown" for name in given):
        raise InvalidUsage(
            "a scan has no option pushdown, as Spark pushes no filters into it. Say by the option filter what to read",
            option="pushdown",
        )
    looked = look(given, batch=True)
    reader = batch_reader(given, looked.frame, looked)
    parts = reader.planned(slots(spark))
    if not parts:
        return spark.createDataFrame([], looked.frame)
    # Each is pickled by itself, so that a task unpickles its own alone.
    pickled, step = [pickle.dumps(part) for part in parts], -(-numbers(parts, len(looked.frame)) // len(parts))

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return read_numbered(reader, pickled, step, batches)

    ids = spark.range(0, len(parts) * step, 1, len(parts)).where(f"id % {step} = 0")
    return ids.mapInArrow(read, looked.frame)


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


NAME = "persist_as_of"
ARGUMENTS = ("table", "as_of", "location")


@dataclass
class Analyzed(AnalyzeResult):
    """What was decided when the query was analysed: the same for all that reads it."""

    table: Table | None = field(default=None)


class AsOf:
    """`persist_as_of(table, as_of, location)`: the rows as of a time. The last two may be left out."""

    def __init__(self, analyzed: Analyzed | None = None) -> None:
        self._table = None if analyzed is None else analyzed.table

    @staticmethod
    def analyze(
        table: AnalyzeArgument | None = None,
        as_of: AnalyzeArgument | None = None,
        location: AnalyzeArgument | None = None,
    ) -> Analyzed:
        given = {
            name: _constant(name, argument)
            for name, argument in zip(ARGUMENTS, (table, as_of, location), strict=True)
            if argument is not None
        }
        found = look({name: value for name, value in given.items() if value is not None}, batch=True)
        return Analyzed(schema=found.frame, table=found)

    def eval(self, *_arguments: Any, **_named: Any) -> Iterator[tuple[Any, ...]]:
        """The rows. Spark takes them one by one, as functions that choose their columns cannot yield Arrow."""
        if self._table is not None:
            reader = Reader(self._table, self._table.frame, None)
            for part in reader.partitions():
                for batch in reader.read(part):
                    yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _constant(name: str, argument: AnalyzeArgument) -> str | None:
    if argument.isTable or not argument.isConstantExpression:
        raise InvalidUsage(f"{NAME}: {name} must be a constant, as in {NAME}('orders', '1 hour ago')", argument=name)
    value = argument.value
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise InvalidUsage(f"{NAME}: {name} must be a text or an integer, got {shown(value)}", argument=name)
    return None if value is None else str(value)


def register_functions(spark: SparkSession) -> None:
    """Make the function known to a session."""
    made: Any = udtf(AsOf)
    spark.udtf.register(NAME, made)


def create_view(spark: SparkSession, name: str, table: str, **options: object) -> DataFrame:
    """Make a temporary view of a table, and return its DataFrame. `options` are those of the data source.

        create_view(spark, "yesterday", "orders", as_of="1 day ago")

    The view is of one time, decided now. Call it again for a later one.
    """
    frame = spark.read.format("persist").options(**as_texts({"table": table, **options})).load()
    frame.createOrReplaceTempView(name)
    return frame
