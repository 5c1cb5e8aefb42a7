"""An update that is given as rows: the key, and the columns that are to have other values. The others stay."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.arguments import did_you_mean
from persist_lib.convert.by_key import parse_rows
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.by_key import one_row_each
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import adjacent_ties, take
from persist_lib.schema.schema import Schema


class NewValues(NamedTuple):
    """Rows of `schema`, whose columns are the key and some of a table's value columns: one row a key, in order."""

    schema: Schema
    rows: pa.Table

    def keys(self) -> pa.Table:
        """The keys of the rows that change."""
        return self.rows.select(self.schema.key_names)

    def changed(self, old: pa.Table) -> pa.Table:
        """The rows of a table, which are in canonical order and have these keys, with the new values."""
        keys = [column.combine_chunks() for column in old.select(self.schema.key_names).columns]
        ties = adjacent_ties(keys)
        is_new = np.ones(old.num_rows, np.bool_)
        is_new[1:] = True if ties is None else ~ties
        found = take(self.rows, Keys.of(self.schema, old).find(self.rows))
        places = np.cumsum(is_new) - 1
        for column in self.schema.value:
            index = old.schema.get_field_index(column.name)
            old = old.set_column(index, old.schema.field(index), take(found.select([column.name]), places).column(0))
        return old


def new_values(table: str, schema: Schema, rows: pa.Table) -> NewValues:
    """Rows of a table's key and of some of its value columns. Raises InvalidUsage."""
    values = [column.name for column in schema.value]
    names = rows.column_names
    if unknown := [name for name in names if name not in schema.names]:
        meant = did_you_mean(unknown[0], schema.names)
        raise InvalidUsage(
            f"table {table!r} has no column {unknown[0]!r}. {meant}It has {schema.names}", table=table, columns=unknown
        )
    some = Schema(schema.key, [column for column in schema.value if column.name in names])
    if not some.value:
        raise InvalidUsage(
            f"table {table!r}: an update has the key columns, {schema.key_names}, and some of {values}, which change: "
            f"got {names}",
            table=table, columns=names,
        )  # fmt: skip
    return NewValues(some, one_row_each(some, parse_rows(some, rows)))
