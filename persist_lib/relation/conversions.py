"""Doors to the ecosystem: what snapshots and changes offer to Arrow, pandas, polars, DuckDB and pydantic.

Everything that speaks Arrow's PyCapsule protocol reads them as a stream, in bounded memory: `pyarrow.table(snapshot)`,
`polars.DataFrame(snapshot)`, and `duckdb.sql("select … from snapshot")` for a variable of that name. A stream reads
while it is consumed. So the handle has to stay open until then; after that, an error says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from persist_lib.convert.codecs import python_rows, rows_as_models
from persist_lib.errors import InvalidUsage
from persist_lib.format.predicate import Where
from persist_lib.kernel.columns import integers
from persist_lib.kernel.multiplicity import built, check_count, check_rows, repeated, total
from persist_lib.schema.schema import DIFF, Schema

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl


class Doors(ABC):
    """A table that is read when it is asked for: its columns, and ways to read it.

    Tables of `batches` and of `_selected` come in the same order, every time.
    """

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""

    @abstractmethod
    def batches(self) -> Iterator[pa.Table]:
        """All rows, as tables of bounded size."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """All rows as one table."""

    @abstractmethod
    def _selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the rows that `where` keeps. Rows that look alike stay apart."""

    @abstractmethod
    def _check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""

    @abstractmethod
    def _shard_schema(self) -> Schema:
        """The schema that it is read in."""

    @abstractmethod
    def release(self) -> None:
        """Stop keeping what it is read from. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """The rows as a pandas frame; options go to `pyarrow.Table.to_pandas`.

        Raises InvalidUsage without pandas, and for a type that Arrow does not make a pandas column of.
        """
        installed("pandas", "pandas", "to_pandas()")
        try:
            return self.to_arrow().to_pandas(**options)
        except pa.ArrowNotImplementedError as error:
            raise InvalidUsage(
                f"Arrow makes no pandas column of this: {error}. Keep Arrow's types, by "
                "to_pandas(types_mapper=pandas.ArrowDtype), or read other columns"
            ) from error

    def to_polars(self) -> pl.DataFrame:
        """The rows as a polars frame; decimals of more than 38 digits are text. Raises InvalidUsage without polars."""
        polars = installed("polars", "polars", "to_polars()")
        from persist_lib.relation.engines import for_engines  # noqa: PLC0415 - it needs Arrow's datasets

        frame: pl.DataFrame = polars.DataFrame(for_engines(self.to_arrow()))
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as a list of dicts."""
        return python_rows(self.to_arrow(), self._shard_schema())

    def to_models(self, model: type[Any] | None = None) -> list[Any]:
        """The rows as instances of a pydantic model, each as often as its multiplicity `_diff` says.

        `model` takes the columns that have the names of its fields; columns that it does not have are left out. Without
        one, each row is a pair (key, value) of instances of the models that the shard was opened with. A side without a
        model is a dict then. Raises InvalidUsage for a row that the model refuses and for a negative multiplicity.
        """
        return rows_as_models(self._shard_schema(), self.to_arrow(), model)

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as a stream of Arrow record batches in bounded memory. It can be consumed once."""
        return reader_of(self.schema, self._while_readable(self.batches()))

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """The rows as a relation of DuckDB, in `connection` or in DuckDB's default one.

        The relation reads when it is executed, and then only the columns and row groups that its query can use. Keep
        the handle open until then. Raises InvalidUsage without DuckDB.
        """
        duckdb_ = installed("duckdb", "sql", "to_duckdb()")
        from persist_lib.relation.engines import dataset_of  # noqa: PLC0415 - it needs Arrow's datasets

        if connection is not None and not isinstance(connection, duckdb_.DuckDBPyConnection):
            raise InvalidUsage(
                f"connection must be one of DuckDB's, as in duckdb.connect(): got a {type(connection).__name__}",
                argument="connection",
            )
        self._check_readable()
        relation: duckdb.DuckDBPyRelation = (connection or duckdb_).from_arrow(dataset_of(self))
        return relation

    def scan_polars(self) -> pl.LazyFrame:
        """The rows as a lazy frame of polars, which reads when it is collected.

        Only the columns that the query uses are read, and only the row groups that comparisons of integers, text,
        booleans, dates and timestamps with constants leave; polars applies all other filters. Keep the handle open
        until then. Raises InvalidUsage without polars.
        """
        installed("polars.io.plugins", "polars", "scan_polars()")
        from persist_lib.relation.engines import lazy_frame_of  # noqa: PLC0415 - it needs polars

        self._check_readable()
        return lazy_frame_of(self)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The rows as an Arrow C stream. Each call starts a new one. `requested_schema` may ask for other types.

        A type is cast if its values allow it; otherwise reading fails. A schema with other columns is refused.
        """
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        """The schema as an Arrow C schema."""
        return self.schema.__arrow_c_schema__()

    def _while_readable(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The same tables, the first of which is read now, so that most errors keep their type."""
        self._check_readable()
        first = [table for table in [next(tables, None)] if table is not None]

        def rest() -> Iterator[pa.Table]:
            while True:
                self._check_readable()
                if (table := next(tables, None)) is None:
                    return
                yield table

        return chain(first, rest())


class Rows(Doors):
    """Contents as of a time. Doors give each row as often as it is there; where `diff` is set, each distinct row once.

    With `diff` there is a last column `_diff`, the multiplicity, which may be negative. Without it, reading raises
    InvalidUsage for a negative one, and where more than `most_rows` (100 million) rows would be built in memory.

    The consolidated tables are what `diff` shows. Everything that repeats rows does so here, last.
    """

    diff: bool = False

    @property
    @abstractmethod
    def _contents_schema(self) -> pa.Schema:
        """The columns, then `_diff`."""

    @abstractmethod
    def _consolidated(self) -> Iterator[pa.Table]:
        """Each distinct row once, with `_diff`, as tables of bounded size."""

    @abstractmethod
    def _consolidated_table(self) -> pa.Table:
        """The same as one table."""

    @abstractmethod
    def _consolidated_selection(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the distinct rows that `where` keeps; rows that look alike stay apart."""

    @abstractmethod
    def _named(self) -> str:
        """What it is, for errors: `this snapshot of orders as of 7`."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""
        found = self._contents_schema
        return found if self.diff else found.remove(found.get_field_index(DIFF))

    def batches(self) -> Iterator[pa.Table]:
        """The contents as tables of bounded size, however large they are."""
        return self._consolidated() if self.diff else repeated(self._consolidated(), self._named())

    def to_arrow(self) -> pa.Table:
        """The contents as one table. Parts are fetched and decoded in parallel."""
        table = self._consolidated_table()
        return table if self.diff else built(table, self._named())

    def _selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the rows that `where` keeps, in the order of `batches`. Query engines read through this."""
        if self.diff:
            return self._consolidated_selection(names, where)
        return repeated(self._consolidated_selection([*names, DIFF], where), self._named())

    def count(self) -> int:
        """How many rows there are: the sum of the multiplicities, whether `diff` is set or not."""
        count = 0
        for table in self._consolidated_selection([DIFF], None):
            diffs = integers(table.column(DIFF))
            check_rows(table, diffs, self._named())
            count += total(diffs)
        return count

    def to_models(self, model: type[Any] | None = None) -> list[Any]:
        """The rows as instances of a pydantic model, each as often as it is there. See `Doors.to_models`."""
        table = self._consolidated_table()
        check_count(total(integers(table.column(DIFF))), self._named())
        return rows_as_models(self._shard_schema(), table, model)


def schema_of(rows: Doors) -> Schema:
    """The schema that rows are read in."""
    return rows._shard_schema()


def selected(rows: Doors, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
    """Some columns of the rows that `where` keeps. Rows that look alike stay apart."""
    return rows._selected(names, where)


def consolidated_table(rows: Rows) -> pa.Table:
    """Each distinct row once, with `_diff`, as one table."""
    return rows._consolidated_table()


def reader_of(schema: pa.Schema, tables: Iterable[pa.Table]) -> pa.RecordBatchReader:
    """The tables as a stream of record batches, which is read while it is consumed."""
    return pa.RecordBatchReader.from_batches(schema, (batch for table in tables for batch in table.to_batches()))


def installed(module: str, extra: str, what: str) -> ModuleType:
    """Import an optional dependency. Raises InvalidUsage that says which extra installs it."""
    from importlib import import_module  # noqa: PLC0415

    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise InvalidUsage(
            f"{what} needs {name}, which is not installed or too old ({error}): pip install 'persist-lib[{extra}]', or "
            "use to_arrow()",
            missing=name,
        ) from error
