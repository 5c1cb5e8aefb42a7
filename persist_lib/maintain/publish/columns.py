"""A table's columns as other engines have them, and which of its parts they can read as they are.

A part has the names, the types and the columns of when it was written. Engines that go by names find in it what is
called as now; Iceberg's also what was called otherwise, by a mapping from names to the ids of columns. What neither
tells right is copied: a name that stood for another column, a default that the part does not say, a type that no
reader makes wider, and an unsigned number as Iceberg, whose types are signed: pyiceberg's filters take it for a signed
one and find no row, and Spark's reader refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from persist_lib.errors import Unpublishable
from persist_lib.schema.evolution import evolved
from persist_lib.schema.schema import Column, Schema
from persist_lib.schema.types import UUID

_WIDER = {"uint8": pa.int16(), "uint16": pa.int32(), "uint32": pa.int64()}
_MISSING = {
    "iceberg": ("uint64", "duration", "decimal256", "timestamp[s", "timestamp[ms", "timestamp[ns"),
    "delta": ("uint64", "duration", "decimal256", "timestamp[s", "timestamp[ms", "timestamp[ns", "time64"),
}


@dataclass(frozen=True, slots=True)
class Columns:
    """What is published. `shown` are the columns in Arrow, `ids` says whose each is, in the same order.

    `names` are all names that files have for columns, with the ids of these.
    """

    format: str
    shown: pa.Schema
    ids: tuple[str, ...]
    names: Mapping[str, str]
    schemas: tuple[Schema, ...]

    def can_read(self, number: int) -> bool:
        """Whether files that were written with this schema of the shard are read right as they are."""
        newest, older = self.schemas[-1], self.schemas[number]
        stored = {column.id: column for column in older.columns}
        return all(self.names.get(column.name) == column.id for column in older.columns) and all(
            _reads(stored.get(column.id), column, self.format) for column in newest.shown.columns
        )

    @property
    def copied(self) -> pa.Schema:
        """The columns as copies have them: with values as parts have them, but unsigned numbers, which are shown."""
        data = self.schemas[-1].shown.data
        return pa.schema([one.with_type(_WIDER.get(str(one.type), one.type)) for one in data])

    @property
    def has_unsigned(self) -> bool:
        return self.copied != self.schemas[-1].shown.data

    def by_ids(self, schema: pa.Schema) -> pa.Schema:
        """The same columns, called by their ids."""
        return pa.schema([field.with_name(id_) for id_, field in zip(self.ids, schema, strict=True)])


def _reads(stored: Column | None, column: Column, format_: str) -> bool:
    if stored is None:
        return column.default is None
    if format_ == "iceberg" and "uint" in stored.type:
        return False
    if stored.type == column.type:
        return True
    return not ("timestamp" in column.type or "uint" in stored.type)  # within nested ones, too


def columns_of(table: str, schemas: Sequence[Schema], format_: str, known: Mapping[str, str]) -> Columns:
    """The columns as a format says them; `known` are the names, with ids, that are published already.

    A name stays whose it is for as long as files are published that have it. Raises Unpublishable that names columns
    which the format cannot say.
    """
    newest = schemas[-1].shown
    if format_ == "delta" and (columns := evolved(schemas)):
        raise Unpublishable(
            f"table {table} cannot be published as delta: columns were renamed, widened, dropped or reordered, or have "
            f"defaults ({', '.join(columns)}), and its readers find columns by the names that files have. Nothing was "
            "published; publish it as iceberg, or copy it into a table that has its present columns from the beginning",
            table=table, columns=columns, as_=format_,
        )  # fmt: skip
    refused = {str(one.name): one.type for one in newest.columns if any(kind in one.type for kind in _MISSING[format_])}
    refused |= {
        one.name: one.type for one in newest.columns if "<" in one.type and ("uint" in one.type or "]" in one.type)
    }
    if refused:
        named = ", ".join(f"{name} ({kind})" for name, kind in refused.items())
        raise Unpublishable(
            f"table {table} cannot be published as {format_}, which has no type for its columns {named}. Nothing was "
            "published; make a rendition or a table with other types of them",
            table=table, columns=tuple(refused), as_=format_,
        )  # fmt: skip
    names = dict(known)
    for column in schemas[-1].columns:
        names.setdefault(column.id, column.id)
    for schema in reversed(schemas):
        for column in schema.columns:
            names.setdefault(column.name, column.id)
    if lost := [str(one.name) for one in newest.columns if names[one.id] != one.id]:
        raise Unpublishable(
            f"table {table} cannot be published as {format_} beside what is published of it: {', '.join(lost)} are the "
            "names of other columns there. Nothing was published; withdraw that, and publish again",
            table=table, columns=tuple(lost), as_=format_,
        )  # fmt: skip
    shown = pa.schema([pa.field(one.name, _plain(one, format_)) for one in newest.columns])
    return Columns(format_, shown, tuple(one.id for one in newest.columns), names, tuple(schemas))


def _plain(column: Column, format_: str) -> pa.DataType:
    if format_ == "delta" and column.type.startswith(("fixed_size", UUID)):
        return pa.binary()
    return _WIDER.get(column.type, column.field.type)
