"""Doors to the ecosystem: what snapshots and changes offer to Arrow, pandas, polars, DuckDB and pydantic.

Everything that speaks Arrow's PyCapsule protocol reads them as a stream, in bounded memory: `pyarrow.table(snapshot)`,
`polars.DataFrame(snapshot)`, and `duckdb.sql("select … from snapshot")` for a variable of that name. A stream reads
while it is consumed. So the handle has to stay open until then; after that, an error says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import pyarrow as pa

from persist_lib.convert.codecs import python_rows, rows_as_models
from persist_lib.core.cost import Cost
from persist_lib.errors import InvalidUsage
from persist_lib.format.predicate import Where
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.held import Named, Part
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl


P = TypeVar("P", bound=Part)


class Doors(ABC, Generic[P]):
    """A table that is read from parts when it is asked for, for use in a `with` block; and ways to read it.

    Tables of `batches` and of `_selected` come in the same order, every time.
    """

    def __init__(self, of: Named, schema: Schema, parts: Sequence[P], spent: Spending) -> None:
        self._of, self._schema, self._parts, self._spent = of, schema, parts, spent
        self._is_released = False

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
    def _named(self) -> str:
        """What it is, for errors: `this snapshot of shard orders as of 7`."""

    @property
    def name(self) -> str:
        """The name of the shard, collection or table."""
        return self._of.name

    @property
    def cost(self) -> Cost:
        """The cost so far of finding it and of reading it here.

        The cost of reading splits is counted in the processes that read them.
        """
        return self._spent.cost

    @property
    def is_released(self) -> bool:
        """Whether it was released, so that it keeps nothing any more."""
        return self._is_released

    def release(self) -> None:
        """Stop keeping the states that are read from. Idempotent. Dropping the object does the same."""
        self._is_released = True
        for part in self._parts:
            part.release()

    def _check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        for part in self._parts:
            part.check_open()
        if self._is_released:
            raise InvalidUsage(
                f"{self._named()} was released, so what it reads from may be gone; take a new one, and keep it until "
                "everything has been read",
                **self._of.fields,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        return python_rows(self.to_arrow(), self._schema)

    def to_models(self, model: type[Any] | None = None) -> list[Any]:
        """The rows as instances of a pydantic model, each as often as its multiplicity `_diff` says.

        `model` takes the columns that have the names of its fields; columns that it does not have are left out. Without
        one, each row is a pair (key, value) of instances of the models that the shard was opened with. A side without a
        model is a dict then. Raises InvalidUsage for a row that the model refuses and for a negative multiplicity.
        """
        return rows_as_models(self._schema, self.to_arrow(), model)

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


def schema_of(rows: Doors[Any]) -> Schema:
    """The schema that rows are read in."""
    return rows._schema


def selected(rows: Doors[Any], names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
    """Some columns of the rows that `where` keeps. Rows that look alike stay apart."""
    return rows._selected(names, where)


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
