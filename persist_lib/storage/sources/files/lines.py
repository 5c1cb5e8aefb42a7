"""Lines as messages: cut out of a file's bytes by numpy, a table for each few MiB."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.config import MIB
from persist_lib.kernel.columns import array_of
from persist_lib.storage.sources.files.contents import PIECE, Contents

LONGEST = 16 * MIB
"""The longest line that is given whole, in bytes. Of a longer one the beginning is given, with its problem."""
KEPT = 1024
TOO_LONG = f"the line is longer than {LONGEST:,} bytes"
BOM = b"\xef\xbb\xbf"
_END = 10


def tables(contents: Contents, start: int, end: int) -> Iterator[pa.Table]:
    """The lines that start in `[start, end)`; `end` is a line's end. Offsets are addresses; line ends are left out."""
    at, rest = start, b""
    is_skipping = False
    while at + len(rest) < end:
        piece = contents.range(at + len(rest), min(end, at + len(rest) + PIECE))
        if not piece:
            break
        data = rest + piece
        if is_skipping:
            gone = data.find(b"\n") + 1
            is_skipping = gone == 0
            at, data = at + (gone or len(data)), data[gone or len(data) :]
        last = data.rfind(b"\n") + 1
        if last:
            yield table_of(data[:last], at)
        at, rest = at + last, data[last:]
        if len(rest) > LONGEST:
            yield _too_long(rest, at)
            at, rest, is_skipping = at + len(rest), b"", True
    if rest:
        yield table_of(rest + b"\n", at)


def table_of(data: bytes, at: int) -> pa.Table:
    """Whole lines, the last one with its end too, as messages."""
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == _END)
    starts = np.concatenate([[0], ends[:-1] + 1])
    without = array[array != _END]
    offsets = np.concatenate([[0], ends - np.arange(len(ends))]).astype(np.int32)
    values = pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(without)])
    if at == 0 and data.startswith(BOM):
        values = pa.concat_arrays([pa.array([values[0].as_py()[len(BOM) :]], pa.binary()), values[1:]])
    problems = pa.nulls(len(ends), pa.string())
    if int((ends - starts).max()) > LONGEST:
        # SUBTLE: whether a line is too long must not depend on how the pieces were cut.
        is_long = pa.array(ends - starts > LONGEST)
        values = pc.if_else(is_long, pc.binary_slice(values, 0, KEPT), values)
        problems = pc.if_else(is_long, TOO_LONG, problems)
    return _messages(starts + at, values, problems)


def _too_long(rest: bytes, at: int) -> pa.Table:
    return _messages(np.array([at]), pa.array([rest[:KEPT]], pa.binary()), pa.array([TOO_LONG]))


def _messages(addresses: np.ndarray, values: pa.Array, problems: pa.Array) -> pa.Table:
    return pa.table(
        [array_of(addresses.astype(np.uint64)), values, problems],
        schema=pa.schema([pa.field("address", pa.uint64(), False), ("value", pa.binary()), ("problem", pa.string())]),
    )
