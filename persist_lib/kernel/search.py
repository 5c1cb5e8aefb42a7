"""Searching rows in canonical order for others that are in order: where the rows equal to each of these lie.

Only the first digit of the rows is made of all of them, or those of the key where many rows are wanted. Each further
one narrows the ranges that are left, and is made of the few rows that a search in them looks at. Columns behind the key
are only looked at where the key is the same. So neither side is sorted, whatever the types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.kernel.columns import (
    POOL,
    U64,
    ByteWords,
    Flags,
    Rows,
    Words,
    array_of,
    comparable,
    present,
    ranks_of,
    words_of,
)
from persist_lib.kernel.order import DEEP, Digit, length_digit, pack, shared_prefix, validity_digit

DENSE: Final = 16
"""Where there are this many rows for one that is wanted, or fewer, all of the key is made of all rows."""
SPARSE: Final = 128
"""Where there are this many texts for one that is wanted, or more, not even the first digit is made of all rows."""


class _Both(NamedTuple):
    """One digit of both sides."""

    rows: Digit
    wanted: Digit

    def every(self, _: Rows | None = None) -> U64:
        """The digit of all wanted rows, then of all rows."""
        return np.concatenate([self.wanted(None), self.rows(None)])


def equal_ranges(rows: Sequence[pa.Array], wanted: Sequence[pa.Array], keys: int) -> tuple[Rows, Rows]:
    """For each wanted row, where the rows that equal it start and end: where they would be, if there are none.

    Both sides are columns of the same types, without dictionaries, in canonical order; the first `keys` of them mostly
    tell rows apart. Where few texts are wanted, no digit is made of all rows.
    """
    count = len(wanted[0])
    if not count or not len(rows[0]):
        return np.zeros(count, np.int64), np.zeros(count, np.int64)
    digits = list(_digits(rows[:keys], wanted[:keys], is_sorted=True))
    low, high = np.zeros(count, np.int64), np.full(count, len(rows[0]), np.int64)
    if count * SPARSE <= len(rows[0]) and not pa.types.is_primitive(rows[0].type):
        _narrow(digits, low, high)
    elif digits:  # otherwise all keys are the same
        used, codes, sought = 1, digits[0].rows(None), digits[0].wanted(None)
        if len(digits) > 1 and count * DENSE > len(rows[0]):
            both, used = pack([digit.every for digit in digits], None, 64)
            codes, sought = both[count:], both[:count]
        low = np.searchsorted(codes, sought)
        if (codes[1:] == codes[:-1]).any():
            high = np.searchsorted(codes, sought, "right")
        else:
            high = low + (codes.take(low, mode="clip") == sought)
        _narrow(digits[used:], low, high)
    if len(rows) > keys and (same := np.flatnonzero(low < high)).size:
        # Ranges are the same or have no row in common. Their rows are laid end to end.
        starts, place = np.unique(low[same], return_inverse=True)
        counts = np.zeros(len(starts), np.int64)
        counts[place] = (high - low)[same]
        before = np.cumsum(counts) - counts
        some = array_of(np.repeat(starts - before, counts) + np.arange(int(counts.sum())))
        ours = [comparable(pc.take(column, some, memory_pool=POOL)) for column in rows[keys:]]
        theirs = [comparable(pc.take(column, array_of(same), memory_pool=POOL)) for column in wanted[keys:]]
        first, last = before[place], (before + counts)[place]
        _narrow(_digits(ours, theirs, is_sorted=False), first, last)
        low[same], high[same] = low[same] + first - before[place], low[same] + last - before[place]
    return low, high


def _narrow(digits: Iterable[_Both], low: Rows, high: Rows) -> None:
    """Narrow the range of each wanted row, in place, to the rows that are equal to it in these digits."""
    for digit in digits:
        left = np.flatnonzero(low < high)
        if not left.size:
            return
        words, starts, ends = digit.wanted(left), low[left], high[left]
        if int((ends - starts).max()) == 1:  # one look tells both
            found = digit.rows(starts)
            low[left], high[left] = starts + (found < words), ends - (found > words)
        else:
            low[left] = starts = _search(digit.rows, words, starts, ends, np.less)
            high[left] = _ends(digit.rows, words, starts, ends)


def _ends(digit: Digit, words: U64, starts: Rows, ends: Rows) -> Rows:
    """Where the rows end that have the word, of ranges in which none is below it. Mostly there is one row or none."""
    found = starts.copy()
    for _ in range(2):
        there = np.flatnonzero(found < ends)
        there = there[digit(found[there]) == words[there]]
        if not there.size:
            return found
        found[there] += 1
    found[there] = _search(digit, words[there], found[there], ends[there], np.less_equal)
    return found


def _search(digit: Digit, words: U64, low: Rows, high: Rows, is_below: Callable[[U64, U64], Flags]) -> Rows:
    """The first row of each range whose digit is not below the word there."""
    low, high = low.copy(), high.copy()
    while (left := np.flatnonzero(low < high)).size:
        middle = (low[left] + high[left]) // 2
        below = is_below(digit(middle), words[left])
        low[left[below]] = middle[below] + 1
        high[left[~below]] = middle[~below]
    return low


def _digits(rows: Sequence[pa.Array], wanted: Sequence[pa.Array], *, is_sorted: bool) -> Iterator[_Both]:
    """The digits of `kernel.order`, such that those of one side can be compared with those of the other."""
    for ours, theirs in zip(rows, wanted, strict=True):
        one, other = words_of(ours), words_of(theirs)
        if is_sorted and isinstance(one, ByteWords) and isinstance(other, ByteWords):
            shared = shared_prefix([ours, theirs])
            one, other = one.without(shared), other.without(shared)
        is_sorted = False
        if one.valid is not None or other.valid is not None:
            yield _Both(*(validity_digit(present(side)) for side in (ours, theirs)))
        width = max(one.width, other.width)
        for index in range(min(width, DEEP)):
            yield _Both(_word(one, index, len(ours)), _word(other, index, len(theirs)))
        if width > DEEP:
            yield _ranks(ours, theirs)
        elif isinstance(one, ByteWords) and isinstance(other, ByteWords):
            spans = {one.longest, one.shortest, other.longest, other.shortest}
            if len(spans) > 1:
                yield _Both(length_digit(one.lengths), length_digit(other.lengths))


def _word(words: Words, index: int, count: int) -> Digit:
    """A word; zeros beyond the longest value of its side."""
    if index >= words.width:
        return lambda rows: np.zeros(count if rows is None else len(rows), np.uint64)
    return lambda rows: words.word(index, rows)


def _ranks(ours: pa.Array, theirs: pa.Array) -> _Both:
    """Long values by their place among all of both sides."""
    ranks = cache(lambda: ranks_of(pa.concat_arrays([theirs, ours])))

    def digit(rows: Rows | None, start: int, end: int) -> U64:
        return ranks()[start:end] if rows is None else ranks()[start:end][rows]

    count, every = len(theirs), len(theirs) + len(ours)
    return _Both(lambda rows: digit(rows, count, every), lambda rows: digit(rows, 0, count))
