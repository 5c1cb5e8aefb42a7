"""What Spark makes for each use of `format("persist")`: it says what the columns are, and who reads or writes.

Spark asks for the schema before it says whether it reads a batch or a stream. So it depends on the options alone:

    (none)                      the table's rows: its columns, each row as often as its multiplicity
    diff=true                   its contents: the columns and `_diff`, each distinct row once
    changes=true, from, to      its updates: the columns, `_time` and `_diff`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from persist_lib.spark.stream_reader import StreamReader
from pathlib import Path

from persist_lib.arguments import check_type, shown
from persist_lib.errors import InvalidUsage

NAME = "persist"
CATALOG = "catalog"
"""The option by which the catalog in Java asks (`sql_catalog`)."""


class PersistSource(DataSource):
    """One use of the source. Spark pickles it once it has asked for the schema; what was decided by then stays."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._table: Any = None

    @classmethod
    def name(cls) -> str:
        """The name in `format(…)`."""
        return NAME

    def schema(self) -> StructType:
        """The columns that the options ask for, of the newest schema. Decides the time of a batch read without one."""
        if CATALOG in self.options:
            from persist_lib.spark.sql_catalog.answers import answer  # noqa: PLC0415

            return answer(self.options)
        from persist_lib.spark.batch_reader import look  # noqa: PLC0415 - Spark loads this module in every worker

        self._table = look(self.options)
        return self._table.frame

    def reader(self, schema: StructType) -> DataSourceReader:
        if CATALOG in self.options:
            from persist_lib.spark.sql_catalog.metadata_tables import MetadataReader  # noqa: PLC0415

            return MetadataReader(self.options, schema)
        from persist_lib.spark.batch_reader import batch_reader  # noqa: PLC0415

        return batch_reader(self.options, schema, self._table)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        from persist_lib.spark.stream_reader import StreamReader  # noqa: PLC0415

        return StreamReader(self.options, schema, self._table)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from persist_lib.spark.sink import BatchWriter  # noqa: PLC0415

        return BatchWriter(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        from persist_lib.spark.sink import StreamWriter  # noqa: PLC0415

        return StreamWriter(dict(self.options), schema, overwrite)


CLASS = "io.persist.spark.PersistCatalog"
JAR = Path(__file__).with_name("sql_catalog") / "persist-catalog.jar"


def conf(location: str | None, name: str, options: dict[str, str]) -> dict[str, str]:
    """See `persist_lib.spark.catalog_conf`."""
    check_type(name, str, "name", '"lake"')
    if not name.isidentifier() or name.lower() in {NAME, "spark_catalog"}:
        raise InvalidUsage(
            f"name must be a word of letters, digits and _ that is neither {NAME} (the data source: Spark would take "
            f"{NAME}.orders for a path) nor spark_catalog: got {shown(name)}",
            argument="name", value=name,
        )  # fmt: skip
    prefix = f"spark.sql.catalog.{name}"
    given = options if location is None else {"location": location, **options}
    return {prefix: CLASS, **{f"{prefix}.{option}": value for option, value in given.items()}, "spark.jars": str(JAR)}
