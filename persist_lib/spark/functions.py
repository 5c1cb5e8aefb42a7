"""A table function and views for SQL: the contents of a shard, or of a collection, as of a time.

    SELECT * FROM persist_as_of('orders', '1 hour ago')                 one task: for looking
    SELECT * FROM persist_as_of(collection => 'orders', as_of => '1 hour ago')
    CREATE TEMPORARY VIEW yesterday USING persist OPTIONS (shard 'orders', as_of '1 day ago')      as many as it takes

A function of Python's runs in one task, however large the shard is, and filters are not pushed down into it. So large
shards are better read by a view, which is of one time too: that of its making.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.functions import udtf
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.spark.options import as_texts
from persist_lib.spark.reading import Reader, Table, look

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "persist_as_of"
ARGUMENTS = ("shard", "as_of", "location", "collection")


@dataclass
class Analyzed(AnalyzeResult):
    """What was decided when the query was analysed: the same for all that reads it."""

    table: Table | None = field(default=None)


class AsOf:
    """`persist_as_of(shard, as_of, location)`: the rows as of a time. The last two may be left out.

    `persist_as_of(collection => name)`, with the same others by name, has those of a collection.
    """

    def __init__(self, analyzed: Analyzed | None = None) -> None:
        self._table = None if analyzed is None else analyzed.table

    @staticmethod
    def analyze(
        shard: AnalyzeArgument | None = None,
        as_of: AnalyzeArgument | None = None,
        location: AnalyzeArgument | None = None,
        collection: AnalyzeArgument | None = None,
    ) -> Analyzed:
        """The columns, and the time."""
        given = {
            name: _constant(name, argument)
            for name, argument in zip(ARGUMENTS, (shard, as_of, location, collection), strict=True)
            if argument is not None
        }
        table = look({name: value for name, value in given.items() if value is not None}, batch=True)
        return Analyzed(schema=table.frame, table=table)

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


def create_view(spark: SparkSession, name: str, shard: str | None = None, **options: object) -> DataFrame:
    """Make a temporary view of a shard, and return its DataFrame. `options` are those of the data source.

        create_view(spark, "yesterday", "orders", as_of="1 day ago")
        create_view(spark, "yesterday", collection="orders", as_of="1 day ago")

    The view is of one time, decided now. Call it again for a later one.
    """
    frame = spark.read.format("persist").options(**as_texts({"shard": shard, **options})).load()
    frame.createOrReplaceTempView(name)
    return frame
