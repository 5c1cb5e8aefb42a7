"""Finds the bad lines of a block exactly: a line is good if it parses alone, into one row.

A block that parses whole, into as many rows as it has lines, is good. Only of one that does not are lines looked at:
first those that a quick look suspects, each by itself, then the others by halves of halves. The parser alone decides;
a suspicion only saves time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Parse = Callable[[Sequence[bytes]], pa.Table]
"""Makes one row of each line, or raises Refused."""
Suspect = Callable[[Sequence[bytes]], Iterable[int]]

ODD = "it does not make one row: a quote is not closed, or there is a line end inside"


class Refused(Exception):
    """Lines do not parse. The text says why, in words for the one who made the file."""


class Sifted(NamedTuple):
    """The rows of the good lines, which of the lines they are, and why the others are bad."""

    table: pa.Table
    lines: npt.NDArray[np.int64]
    bad: dict[int, str]


def sift(parse: Parse, suspect: Suspect, lines: Sequence[bytes], empty: pa.Table) -> Sifted:
    """Parse the good lines, and say why the others are bad."""
    everything = list(range(len(lines)))
    bad: dict[int, str] = {}
    table = _attempt(parse, lines, everything)
    if isinstance(table, pa.Table):
        return Sifted(table, np.arange(len(lines)), bad)
    for index in sorted(set(suspect(lines))):
        found = _attempt(parse, lines, [index])
        if not isinstance(found, pa.Table):
            bad[index] = str(found)
    tables: list[pa.Table] = []
    rows: list[int] = []
    rest = [index for index in everything if index not in bad]
    waiting = [rest] if rest else []
    while waiting:
        some = waiting.pop()
        found = _attempt(parse, lines, some)
        if isinstance(found, pa.Table):
            tables.append(found)
            rows += some
        elif len(some) == 1:
            bad[some[0]] = str(found)
        else:
            middle = len(some) // 2
            waiting += [some[middle:], some[:middle]]
    table = pa.concat_tables(tables) if tables else empty
    return Sifted(table, np.array(rows, np.int64), dict(sorted(bad.items())))


def _attempt(parse: Parse, lines: Sequence[bytes], indices: Sequence[int]) -> pa.Table | Refused:
    some = lines if len(indices) == len(lines) else [lines[index] for index in indices]
    try:
        table = parse(some)
    except Refused as refused:
        return refused
    if table.num_rows != len(some):
        return Refused(f"{len(some)} lines make {table.num_rows} rows" if len(some) > 1 else ODD)
    return table
