"""Tables as bytes and back, with their schema: what is kept in a cell of another table, or sent to a task."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa


def packed(table: pa.Table, compression: Literal["lz4", "zstd"] | None = None) -> bytes:
    """A table as bytes. Equal tables that are cut into the same pieces are equal bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def unpacked(data: bytes) -> pa.Table:
    """The table of `packed`. Raises ArrowInvalid for other bytes."""
    return pa.ipc.open_stream(data).read_all()


__all__ = ["packed", "unpacked"]
