"""Tables without rows."""

from __future__ import annotations

import pyarrow as pa


def empty_table(schema: pa.Schema) -> pa.Table:
    """A table of these columns, without rows.

    `schema.empty_table()` makes arrays of empty lists, and for a list pyarrow imports pandas where it is
    installed. The first read of a process would wait a second for that.
    """
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
