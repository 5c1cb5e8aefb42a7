"""Cuts streams of bytes into blocks of whole lines. A line belongs to the chunk in which its first byte is.

So chunks need not know where lines end: a chunk skips to the first line that starts in it, and reads its last line to
the end, beyond its own. Each line is in exactly one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persist_lib.config import MIB

LONGEST_LINE = 16 * MIB
"""The longest line that is parsed, in bytes."""
TEXT_BYTES = 1024
"""How much of a bad line is kept."""
NEWLINE = 10


@dataclass(frozen=True)
class Block:
    """Whole lines. `offset` is that of the first byte in the file, `line` that of the first line in the chunk, from 0.

    A block with a `problem` is one line that is not parsed, of which `data` is the beginning.
    """

    data: bytes
    offset: int
    line: int
    problem: str | None = None

    @cached_property
    def lines(self) -> int:
        """How many line ends there are, where the last line counts without one."""
        if self.problem is not None:
            return 1
        # Ten times faster than `bytes.count`, where line ends are dense.
        ends = int(np.count_nonzero(np.frombuffer(self.data, np.uint8) == NEWLINE))
        return ends + (not self.data.endswith(b"\n") and bool(self.data))


class Line(NamedTuple):
    """One line without its end. `offset` is in the file; `line` is counted from 0 in the chunk."""

    text: bytes
    offset: int
    line: int


def cut(pieces: Iterable[bytes], at: int, start: int, end: int | None, longest: int = LONGEST_LINE) -> Iterator[Block]:
    """Yield the lines that start in `[start, end)`. `pieces` begin at the offset `at`: start - 1, or 0 for start 0."""
    buffer, line = b"", 0
    is_skipping = start > at
    for piece in pieces:
        buffer += piece
        if is_skipping:
            gone = buffer.find(b"\n") + 1
            if not gone:
                at, buffer = at + len(buffer), b""
                continue
            at, buffer, is_skipping = at + gone, buffer[gone:], False
            if end is not None and at >= end:
                return
        last = -1
        if end is not None and at + len(buffer) >= end:
            last = buffer.find(b"\n", max(0, end - 1 - at))
        is_last = last >= 0
        last = last if is_last else buffer.rfind(b"\n")
        if last >= 0:
            block = Block(buffer[: last + 1], at, line)
            yield block
            if is_last:
                return
            at, line, buffer = at + last + 1, line + block.lines, buffer[last + 1 :]
        if len(buffer) > longest:
            yield Block(buffer[:TEXT_BYTES], at, line, f"the line is longer than {longest:,} bytes")
            at, line, buffer, is_skipping = at + len(buffer), line + 1, b"", True
    if buffer:
        yield Block(buffer, at, line)


def cut_records(pieces: Iterable[bytes], quote: int, longest: int = LONGEST_LINE) -> Iterator[Block]:
    """Yield blocks of a whole file in which quoted values may hold line ends: a record ends outside of quotes."""
    buffer, at, line = b"", 0, 0
    for piece in pieces:
        buffer += piece
        ends = record_ends(buffer, quote)
        if len(ends):
            last = int(ends[-1]) + 1
            block = Block(buffer[:last], at, line)
            yield block
            at, line, buffer = at + last, line + block.lines, buffer[last:]
        while len(buffer) > longest:
            gone = buffer.find(b"\n") + 1 or len(buffer)
            yield Block(
                buffer[:gone][:TEXT_BYTES], at, line, f"a quote opens here that is not closed within {longest:,} bytes"
            )
            at, line, buffer = at + gone, line + 1, buffer[gone:]
            if len(ends := record_ends(buffer, quote)):
                break
    if buffer:
        yield Block(buffer, at, line)


def record_ends(data: bytes, quote: int) -> npt.NDArray[np.int64]:
    """Where lines end outside of quotes: after an even number of quotes."""
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == NEWLINE)
    quotes = np.flatnonzero(array == quote)
    return ends[np.searchsorted(quotes, ends) % 2 == 0] if len(quotes) else ends


def split(block: Block, quote: int | None = None, blank: bytes = b" \t\r") -> list[Line]:
    """The lines of a block that have more than the bytes in `blank`; with a `quote`, its records."""
    data = block.data
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == NEWLINE) if quote is None else record_ends(data, quote)
    starts = np.concatenate([[0], ends + 1])
    if starts[-1] == len(data):
        starts = starts[:-1]
    else:
        ends = np.concatenate([ends, [len(data)]])
    numbers = np.arange(len(starts))
    if quote is not None:
        numbers = np.searchsorted(np.flatnonzero(array == NEWLINE), starts)
    found = []
    for start, end, number in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True):
        text = data[start:end].removesuffix(b"\r")
        if text.strip(blank):
            found.append(Line(text, block.offset + start, block.line + number))
    return found
