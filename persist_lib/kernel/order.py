"""The canonical order of updates: sorting, and finding out whether something is sorted and where rows are equal.

Rows are ordered by (key columns…, value columns…, `_time`), nulls first, by the words of `columns`. Sorting packs as
many leading words as fit into one u64 a row and sorts those; only rows that tie look at further words. Near-distinct
keys are thus decided by one integer sort, whatever their types, and runs laid end to end are merged by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from persist_lib.kernel.columns import (
    BLOCK,
    U64,
    ByteWords,
    Flags,
    Rows,
    Words,
    array_of,
    comparable,
    joined,
    ranks_of,
    words_of,
)
from persist_lib.kernel.gather import as_places, rows_of
from persist_lib.kernel.nested import is_nested
from persist_lib.schema.schema import TIME, Schema

Digit = Callable[[Rows | None], U64]
Spread = Callable[..., Iterator[Any]]
"""`map`, or the `map` of a pool."""

FEW = 64  # rows of which all words are sorted at once, as looking for those that tell apart takes longer
SAMPLE = 1 << 13  # rows that tell whether the first digit alone is worth sorting by; fewer are sorted by all
MERGED = 256  # rows of a run that is in order, on average, from which on runs are merged; shorter ones are sorted
DEEP = 32  # words of text compared one by one; what still ties is ranked by whole values


def columns_in_order(schema: Schema, table: pa.Table) -> list[pa.Array]:
    """The columns that order a table, the first one first; `_time` where it has one."""
    names = schema.names + ([TIME] if TIME in table.schema.names else [])
    return [joined(table.column(name)) for name in names]


def sort_updates(schema: Schema, table: pa.Table) -> pa.Table:
    """The table in canonical order; itself when it is already."""
    columns = columns_in_order(schema, table)
    if table.num_rows < 2 or adjacent_ties(columns) is not None:
        return table
    return take(table, sort_order(columns)[0])


def is_sorted(schema: Schema, table: pa.Table) -> bool:
    """Whether the table is in canonical order."""
    return table.num_rows < 2 or adjacent_ties(columns_in_order(schema, table)) is not None


def adjacent_ties(columns: Sequence[pa.Array], candidates: Rows | None = None) -> Flags | None:
    """For sorted rows, which equal the row after them (one flag fewer than rows); None when they are not sorted.

    Only `candidates` can tie with the next row, where these are given; that the rest is in order is taken for granted.
    """
    early, late = _apart(columns)
    ties = _adjacent_ties(early, candidates)
    if not late or ties is None or not ties.any():
        return ties
    places = _tied(ties)
    left = np.flatnonzero(ties[places[:-1]])
    found = _adjacent_ties(_late(late, places), left)
    if found is not None:
        ties[places[left]] = found[left]
    return None if found is None else ties


def _apart(columns: Sequence[pa.Array]) -> tuple[Sequence[pa.Array], Sequence[pa.Array]]:
    """The columns before the first nested one, and the others.

    Making bytes of nested values takes longer than all else, and mostly the columns before them tell rows apart. So the
    others are looked at in rows that tie in these.
    """
    count = next((at for at, column in enumerate(columns) if at and is_nested(column.type)), len(columns))
    return columns[:count], columns[count:]


def _late(columns: Sequence[pa.Array], rows: Rows) -> list[pa.Array]:
    """Those rows of columns, nested ones as bytes, which are made once."""
    chosen = as_places(rows, len(columns[0])) if columns else None
    return [comparable(rows_of(column, chosen)) for column in columns]


def _adjacent_ties(columns: Sequence[pa.Array], candidates: Rows | None) -> Flags | None:
    count = max(0, len(columns[0]) - 1)
    ties = np.zeros(count, np.bool_)
    left = candidates
    for digit in digits_of(columns):
        if left is not None and left.size == 0:
            break
        if left is None:
            word = digit(None)
            before, after = word[:-1], word[1:]
        else:
            both = digit(np.concatenate([left, left + 1]))
            before, after = both[: len(left)], both[len(left) :]
        if bool((before > after).any()):
            return None
        same = before == after
        left = np.flatnonzero(same) if left is None else left[same]
    ties[np.arange(count) if left is None else left] = True
    return ties


def sort_order(columns: Sequence[pa.Array], shared: int = 0) -> tuple[Rows, Flags]:
    """The rows in order, and which of them equal the one after them.

    All values of the first column start with the same `shared` bytes, which are then not looked at.
    """
    early, late = _apart(columns)
    order, ties = _sort_order(early, shared)
    if late and ties.any():
        places = _tied(ties)
        rows = order[places]
        group = array_of(_groups(ties, places))
        by, same = _sort_order([group, *_late(late, rows)])
        order[places] = rows[by]
        # Neighbours among the tied places that were one group are neighbours in the order, too.
        ties[places[:-1][~same]] = False
    return order, ties


def _sort_order(columns: Sequence[pa.Array], shared: int = 0) -> tuple[Rows, Flags]:
    making = digits_of(columns, shared)
    if columns and len(columns[0]) > SAMPLE and (first := next(making, None)) is not None:
        places = (len(columns[0]) - 1).bit_length()
        codes, bits = _narrow(first(None), 64 - places)
        if bits <= 64 - places and _tells_apart(codes):
            order, ordered = _sort_beside_places(codes, places)
            return _refined([first], making, 1, order, ordered[1:] == ordered[:-1])
        making = chain([first], making)
    digits = list(making)
    if not digits and columns:  # all rows are the same, as far as they are looked at
        return np.arange(len(columns[0])), np.ones(max(0, len(columns[0]) - 1), np.bool_)
    if columns and len(columns[0]) <= FEW:
        words = np.stack([digit(None) for digit in digits])
        order = np.lexsort(words[::-1])
        words = words.take(order, axis=1)
        return order, (words[:, 1:] == words[:, :-1]).all(axis=0)
    places = max(1, (len(columns[0]) - 1).bit_length()) if columns else 1
    codes, used = pack(digits, None, 64 - places)
    if used:
        order, ordered = _sort_beside_places(codes, places)
    else:
        codes, used = pack(digits, None, 64)
        order = np.argsort(codes, kind="stable")
        ordered = codes.take(order)
    return _refined(digits, iter(()), used, order, ordered[1:] == ordered[:-1])


def _refined(digits: list[Digit], more: Iterator[Digit], used: int, order: Rows, ties: Flags) -> tuple[Rows, Flags]:
    """The order by all digits, of rows that are in order by those that are used. `more` are made where rows tie."""
    if ties.any():
        digits += more
    while used < len(digits) and ties.any():
        used = _refine(digits, used, order, ties)
    return order, ties


def _tells_apart(word: U64) -> bool:
    """Whether a digit probably tells rows apart: of some rows at equal distances, and some side by side, it does."""
    apart = np.arange(SAMPLE // 2) * (len(word) // (SAMPLE // 2))
    sample = np.sort(word.take(np.union1d(apart, np.arange(SAMPLE // 2))))
    return not bool((sample[1:] == sample[:-1]).any())


def _sort_beside_places(codes: U64, places: int) -> tuple[Rows, U64]:
    """The order of codes that leave the top `places` bits free, and the codes in it.

    Each code takes its row's place along in the low bits, so that plain integers are sorted, which is several times as
    fast as sorting places by codes, and as stable. Runs that are in order, laid end to end, are merged.
    """
    shift = np.uint64(places)
    falls = np.count_nonzero(codes[1:] < codes[:-1])
    how: Literal["stable"] | None = "stable" if falls * MERGED <= len(codes) else None  # which finds runs
    both = np.sort((codes << shift) | np.arange(len(codes), dtype=np.uint64), kind=how)
    return (both & np.uint64((1 << places) - 1)).view(np.int64), both >> shift


def take(table: pa.Table, rows: Rows, spread: Spread = map) -> pa.Table:
    """The chosen rows of a table, column by column: `spread` is `map`, or that of a pool."""
    chosen = as_places(rows, table.num_rows)
    columns = spread(lambda column: rows_of(joined(column), chosen), table.columns)
    return pa.table(list(columns), schema=table.schema)


def digits_of(columns: Sequence[pa.Array], shared: int = 0) -> Iterator[Digit]:
    """What to compare, one u64 after the other: null or not, the words, and the length last."""
    for position, column in enumerate(columns):
        words = words_of(column)
        if position == 0 and isinstance(words, ByteWords):
            words = words.without(shared)
        if words.valid is not None:
            yield validity_digit(words.valid)
        if isinstance(words, ByteWords) and words.width > DEEP:
            for index in range(DEEP):
                yield _word_digit(words, index)
            yield _rank_digit(column)
            continue
        for index in range(words.width):
            yield _word_digit(words, index)
        if isinstance(words, ByteWords) and words.longest != words.shortest:
            yield length_digit(words.lengths)


def shared_prefix(columns: Sequence[pa.Array | pa.ChunkedArray]) -> int:
    """How many bytes all values of a text column start with, each of these pieces of it being sorted."""
    texts = all(pa.types.is_string(column.type) or pa.types.is_binary(column.type) for column in columns)
    if not texts or any(column.null_count for column in columns):
        return 0
    ends = [column[index].as_buffer().to_pybytes() for column in columns for index in (0, -1)]
    first, last = min(ends), max(ends)
    differing = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differing, min(len(first), len(last)))


def validity_digit(valid: Flags) -> Digit:
    """Null or not."""
    return lambda rows: (valid if rows is None else valid[rows]).astype(np.uint64)


def _word_digit(words: Words, index: int) -> Digit:
    return lambda rows: words.word(index, rows)


def length_digit(lengths: Rows) -> Digit:
    """How long values are, which tells apart those that are the start of one another."""
    return lambda rows: (lengths if rows is None else lengths[rows]).view(np.uint64)


def _rank_digit(column: pa.Array) -> Digit:
    # Ranks are comparable only among the rows of one call.
    return lambda rows: ranks_of(column if rows is None else column.take(array_of(rows)))


def pack(digits: Sequence[Digit], rows: Rows | None, room: int) -> tuple[U64, int]:
    """As many leading digits as fit into `room` bits; also how many of them are in there whole.

    A digit takes the bits by which its values differ at all. What does not fit gives its leading bits and is not
    counted, so that ties look at all of it again.
    """
    codes: U64 | None = None
    used = 0
    for digit in digits:
        word, bits = _narrow(digit(rows), room)
        used += bits <= room
        if bits > room:
            word, bits = word >> np.uint64(bits - room), room
        if codes is None:
            codes = word if bits else np.zeros(len(word), np.uint64)
        elif bits:
            codes = (codes << np.uint64(bits)) | word
        room -= bits
        if room == 0:
            break
    return np.empty(0, np.uint64) if codes is None else codes, used


def _narrow(word: U64, room: int) -> tuple[U64, int]:
    """The word without the leading bits (short of room: other ones, too) that all rows share, and what is left."""
    if word.size == 0:
        return word, 0
    least, most = int(word.min()), int(word.max())
    if least == most:
        return word, 0
    bits = (most - least).bit_length()
    if bits <= room:
        return (word - np.uint64(least) if least else word), bits
    varying = int(np.bitwise_or.reduce(word)) ^ int(np.bitwise_and.reduce(word))
    width = max(byte.bit_length() for byte in varying.to_bytes(8, "big"))
    if width < 8:
        word, least, most, varying = _squeeze(word, width), *(_squeezed(each, width) for each in (least, most, varying))
    # All rows have the same bits below the lowest one that varies, so that shifting `least` is exact, too.
    trailing = (varying & -varying).bit_length() - 1
    word = word >> np.uint64(trailing)
    word -= np.uint64(least >> trailing)
    return word, ((most >> trailing) - (least >> trailing)).bit_length()


_LANES = ((8, 0x0001000100010001), (16, 0x0000000100000001), (32, 1))
"""Bits in a lane, and a word with the lowest bit of every second lane."""


def _squeeze(word: U64, width: int) -> U64:
    """The `width` low bits of each byte, side by side. Where the others are the same in all rows, the order is kept.

    Text is mostly letters of one case, or digits: of each byte, four or five bits vary.
    """
    squeezed = word & np.uint64(0x0101010101010101 * ((1 << width) - 1))
    spare = np.empty(min(BLOCK, len(word)), np.uint64)
    for start in range(0, len(word), BLOCK):
        block = squeezed[start : start + BLOCK]
        high = spare[: len(block)]
        for lane, ones in _LANES:
            # Of two neighbouring lanes, each with `bits` at its low end, the upper one moves down to the lower one.
            bits = lane // 8 * width
            np.right_shift(block, np.uint64(lane - bits), out=high)
            high &= np.uint64(ones * (((1 << bits) - 1) << bits))
            block &= np.uint64(ones * ((1 << bits) - 1))
            block |= high
    return squeezed


def _squeezed(word: int, width: int) -> int:
    lanes = [byte & ((1 << width) - 1) for byte in word.to_bytes(8, "big")]
    return reduce(lambda packed, lane: packed << width | lane, lanes, 0)


def _refine(digits: Sequence[Digit], used: int, order: Rows, ties: Flags) -> int:
    """Order the rows that tie by the digits after `used`, in place; answers how many digits are used now."""
    places = _tied(ties)
    rows, group = order[places], _groups(ties, places)
    word = digits[used](rows)
    if not ((word[1:] != word[:-1]) & (group[1:] == group[:-1])).any():  # often all that ties is equal to the end
        return used + 1
    width = 64 - int(group[-1]).bit_length()
    beside = max(0, width - (len(rows) - 1).bit_length())
    left: list[Digit] = [lambda _: word, *digits[used + 1 :]]
    codes, now_used = pack(left, rows, beside)
    if now_used:
        by, ordered = _sort_beside_places((group << np.uint64(beside)) | codes, width - beside)
        same = ordered[1:] == ordered[:-1]
    else:
        by, same, now_used = _sort_in_groups(left, rows, group, width)
    order[places] = rows[by]
    # Neighbours among the tied places that were one group are neighbours in the order, too.
    ties[places[:-1][~same]] = False
    return used + now_used


def _tied(ties: Flags) -> Rows:
    """The places of rows that tie with the one before or behind."""
    tied = np.zeros(len(ties) + 1, np.bool_)
    tied[:-1] = ties
    tied[1:] |= ties
    return np.flatnonzero(tied)


def _groups(ties: Flags, places: Rows) -> U64:
    """The number of the group of each tied place: how often a tie ended before.

    A row starts a group unless it ties with the one before.
    """
    starts = ~np.concatenate([[False], ties])[places]
    return np.cumsum(starts).astype(np.uint64)


def _sort_in_groups(digits: Sequence[Digit], rows: Rows, group: U64, width: int) -> tuple[Rows, Flags, int]:
    """The order of the rows, group by group, which of them equal the next, and how many digits were looked at.

    `width` bits are free beside the group's number.
    """
    codes, used = pack(digits, rows, width)
    if used:
        combined = (group << np.uint64(width)) | codes
        by = np.argsort(combined, kind="stable")
        ordered = combined.take(by)
        return by, ordered[1:] == ordered[:-1], used
    # The next digit is too wide to share a word with the groups.
    word = digits[0](rows)
    by = np.lexsort((word, group))
    ordered, group = word.take(by), group.take(by)
    return by, (ordered[1:] == ordered[:-1]) & (group[1:] == group[:-1]), 1
