"""About how many bytes an update takes in memory, where only the schema is known."""

from __future__ import annotations

import pyarrow as pa

from persist_lib.schema.schema import Schema

TEXT_BYTES = 16
"""The assumed size of a value of varying length."""


def row_bytes(schema: Schema) -> int:
    """About how many bytes an update of this schema takes."""
    return sum(_width(field.type) for field in schema.updates)


def _width(kind: pa.DataType) -> int:
    try:
        return -(-int(kind.bit_width) // 8)
    except ValueError:
        return TEXT_BYTES
