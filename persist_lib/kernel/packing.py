"""Tables as bytes and back, with their schema: what is kept in a cell of another table, or sent to a task."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

from persist_lib.errors import Corrupt


def packed(table: pa.Table, compression: Literal["lz4", "zstd"] | None = None) -> bytes:
    """A table as bytes. Equal tables that are cut into the same pieces are equal bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def unpacked(data: bytes) -> pa.Table:
    """The table of `packed`. Raises Corrupt for other bytes."""
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)  # offsets that point elsewhere would be followed
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise Corrupt(f"packed rows do not decode: {error}", key="rows", actual=str(error)) from error
    return table


__all__ = ["packed", "unpacked"]
