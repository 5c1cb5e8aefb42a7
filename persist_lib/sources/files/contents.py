"""What is in a file, unpacked: bytes by offset, and digests by which the same bytes are known again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from persist_lib.config import MIB
from persist_lib.convert.lines.decompression import DamagedFile, same_size, unpacked
from persist_lib.convert.lines.line_blocks import LONGEST_LINE as LONGEST
from persist_lib.convert.lines.line_blocks import TEXT_BYTES, cut
from persist_lib.kernel.columns import array_of
from persist_lib.sources.files.folders import Opened
from persist_lib.sources.protocol import Mark

PIECE = 4 * MIB
FIRST = 64 << 10
HEAD = 1024
TAIL = 4096
NEWLINE = b"\n"
DAMAGED = "!"
"""What the check of a mark ends with behind which nothing in the file can be found any more."""


class Contents:
    """The bytes of a plain file."""

    is_whole = True
    """Whether it ends where its writer ended; False for a packed file that was cut or is damaged."""
    damage = ""
    """Why it is not whole."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.size: int | None = opened.size

    def range(self, start: int, end: int) -> bytes:
        """Bytes `[start, end)`, cut at the end."""
        return self._opened.range(start, end)

    def first(self, count: int) -> bytes:
        """Its first bytes, at most `FIRST`. They are kept where reading them again would cost much."""
        return self.range(0, count)

    def keep(self, address: int) -> None:
        """Bytes from there on will be asked for, in any order."""


class Packed(Contents):
    """The bytes of a packed file, unpacked from its beginning as they are asked for.

    It keeps what was unpacked of the last range, so that to read further costs nothing. To go back unpacks it all.
    """

    def __init__(self, opened: Opened, packing: str) -> None:
        super().__init__(opened)
        self.size = None
        self._packing = packing
        self._head, self._kept = b"", 0
        self._begin()

    def keep(self, address: int) -> None:
        self._kept = max(0, address - TAIL)

    def reopen(self, opened: Opened) -> None:
        """Continue with the same file, opened again."""
        self._opened = opened

    def _begin(self) -> None:
        self._pieces: Iterator[bytes] = unpacked(same_size(self._stored()), self._packing)
        self._window, self._at = bytearray(), 0
        self.is_whole = True

    def _stored(self) -> Iterator[bytes]:
        for start in range(0, self._opened.size, PIECE):
            yield self._opened.range(start, start + PIECE)

    def range(self, start: int, end: int) -> bytes:
        if start < self._at:
            self._begin()
        while self._at + len(self._window) < end and (self.size is None or self._at + len(self._window) < self.size):
            try:
                piece = next(self._pieces, None)
            except DamagedFile as error:
                piece, self.is_whole, self.damage = None, False, str(error)
            if piece is None:
                self.size = self._at + len(self._window)
                break
            self._window += piece
            gone = min(self._kept - self._at, len(self._window))
            if gone > PIECE:
                del self._window[:gone]
                self._at += gone
        return bytes(self._window[max(0, start - self._at) : max(0, end - self._at)])

    def first(self, count: int) -> bytes:
        if not self._head:
            self._head = self.range(0, FIRST)
        return self._head[:count]


def check_of(contents: Contents, address: int) -> str:
    """The text by which the bytes before an offset are known again: a digest of the first ones and of the last ones.

    Empty where there are fewer bytes than that.
    """
    tail = contents.range(max(0, address - TAIL), address)
    if len(tail) < min(TAIL, address):
        return ""
    head = contents.first(HEAD)[:address]
    return xxhash.xxh3_64_hexdigest(head + b"\0" + tail, seed=address)


def end_of(contents: Contents) -> Mark:
    """Where a file ends, and how what is before that is known again. A packed one is unpacked as a whole."""
    size = contents.size or 0
    while contents.size is None and (piece := contents.range(size, size + PIECE)):
        size += len(piece)
        contents.keep(size)
    return Mark(size, check_of(contents, size))


def line_end(contents: Contents, start: int, limit: int, *, may_grow: bool) -> int:
    """The end of the last whole line in `[start, limit)`; of the first one after it, if none ends in there.

    Without `may_grow` the end of the file ends a line too. `start` if there is no whole line.
    """
    high = limit if contents.size is None else min(limit, contents.size)
    at = high
    while at > start:  # backwards
        low = max(start, at - PIECE)
        data = contents.range(low, at)
        if len(data) < at - low:
            high = low + len(data)
        if (found := data.rfind(NEWLINE)) >= 0:
            end = low + found + 1
            break
        at = low
    else:
        end = start
    is_end = contents.size is not None and high >= contents.size
    if is_end and contents.is_whole and not may_grow:
        return max(start, contents.size or 0)
    if end > start or is_end:
        return end
    at = max(start, high)
    while data := contents.range(at, at + PIECE):  # one long line: forwards to its end
        if (found := data.find(NEWLINE)) >= 0:
            return at + found + 1
        at += len(data)
    return at if not may_grow and contents.is_whole and at > start else start


TOO_LONG = f"the line is longer than {LONGEST:,} bytes"
BOM = b"\xef\xbb\xbf"
_END = 10


def tables(contents: Contents, start: int, end: int) -> Iterator[pa.Table]:
    """The lines that start in `[start, end)`; `end` is a line's end. Offsets are addresses; line ends are left out."""
    for block in cut(_pieces(contents, start, end), start, start, None, LONGEST):
        if block.problem is None:
            yield table_of(block.data if block.data.endswith(NEWLINE) else block.data + NEWLINE, block.offset)
        else:
            yield _messages(np.array([block.offset]), pa.array([block.data], pa.binary()), pa.array([TOO_LONG]))


def _pieces(contents: Contents, at: int, end: int) -> Iterator[bytes]:
    while at < end and (piece := contents.range(at, min(end, at + PIECE))):
        yield piece
        at += len(piece)


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
        # Whether a line is too long must not depend on how the pieces were cut.
        is_long = pa.array(ends - starts > LONGEST)
        values = pc.if_else(is_long, pc.binary_slice(values, 0, TEXT_BYTES), values)
        problems = pc.if_else(is_long, TOO_LONG, problems)
    return _messages(starts + at, values, problems)


def _messages(addresses: np.ndarray, values: pa.Array, problems: pa.Array) -> pa.Table:
    return pa.table(
        [array_of(addresses.astype(np.uint64)), values, problems],
        schema=pa.schema([pa.field("address", pa.uint64(), False), ("value", pa.binary()), ("problem", pa.string())]),
    )
