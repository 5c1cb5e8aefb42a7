"""A set of keys: which ranges of encoded keys hold one of them, and which rows of a sorted table have one.

Keys are compared as everything is ordered (`kernel.order`), so that they are equal exactly if their encoded bytes are:
NaN is found, -0.0 is not 0.0, and null is a key like any other where the column allows it.

Also what a change by key amounts to, and whether the constraints of a schema hold after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import DiffOverflow, InvalidUsage
from persist_lib.kernel.columns import Flags, Rows, array_of, at_time, integers, joined, plain
from persist_lib.kernel.consolidate import FEW, I64_MAX, I64_MIN, consolidate
from persist_lib.kernel.keys import encode_row, slice_sorted
from persist_lib.kernel.order import adjacent_ties, columns_in_order, sort_order, take
from persist_lib.kernel.search import equal_ranges
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, Schema


class Keys:
    """Distinct keys in canonical order. `table` has the key columns and nothing else."""

    __slots__ = ("_encoded", "_schema", "table")

    def __init__(self, schema: Schema, table: pa.Table) -> None:
        self.table = table
        self._schema = schema
        self._encoded = _Encoded(schema, table)

    @classmethod
    def of(cls, schema: Schema, table: pa.Table) -> Keys:
        """The keys of any rows, in any order, each of them once."""
        table = table.select(schema.key_names)
        table = pa.table([plain(column) for column in table.columns], schema=table.schema)
        return cls(schema, table if table.num_rows < 2 else take(table, distinct(table.columns)))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def in_range(self, lower: bytes | None, upper: bytes | None) -> Keys:
        """Those of them whose encoding is in `[lower, upper)`; None is no bound."""
        return Keys(self._schema, slice_sorted(self._schema, self.table, lower, upper))

    def between(self, least: bytes, most: bytes) -> Keys:
        """Those of them that rows with these bounds (both inclusive, perhaps cut short) can have."""
        start, end = bisect_left(self._encoded, least), bisect_right(self._encoded, most)
        return Keys(self._schema, self.table.slice(start, max(0, end - start)))

    def any_between(self, least: bytes, most: bytes) -> bool:
        """Whether rows with these bounds can have one of them."""
        start = bisect_left(self._encoded, least)
        return start < len(self) and self._encoded[start] <= most

    def find(self, table: pa.Table) -> Rows:
        """The rows of a table in canonical order that have one of these keys, in order."""
        starts, ends = self._places(table)
        counts = ends - starts
        before = np.cumsum(counts) - counts
        return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))

    def found_in(self, table: pa.Table) -> Flags:
        """For each of these keys whether a table in canonical order has it."""
        starts, ends = self._places(table)
        return starts < ends

    def _places(self, table: pa.Table) -> tuple[Rows, Rows]:
        """For each key, where its rows in the table start and end."""
        names = self._schema.key_names
        if table.num_rows <= FEW and len(self) <= FEW:
            rows = [encode_row(self._schema, table, at) for at in range(table.num_rows)]
            found = [(bisect_left(rows, key), bisect_right(rows, key)) for key in self._encoded]
            return np.array([start for start, _ in found], np.int64), np.array([end for _, end in found], np.int64)
        wanted = [joined(column) for column in self.table.columns]
        return equal_ranges([plain(table.column(name)) for name in names], wanted, len(names))


def distinct(columns: Sequence[pa.Array | pa.ChunkedArray]) -> Rows:
    """The first row of each distinct combination of values, in canonical order."""
    arrays = [joined(column) for column in columns]
    ties, order = adjacent_ties(arrays), None
    if ties is None:
        order, ties = sort_order(arrays)
    firsts = np.flatnonzero(np.concatenate([[True], ~ties]))
    return firsts if order is None else order[firsts]


class _Encoded(Sequence[bytes]):
    """The encoded keys of a table, each made when it is first looked at: a search looks at few, the same ones first."""

    def __init__(self, schema: Schema, table: pa.Table) -> None:
        self._schema, self._table = schema, table
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        found = self._known.get(index)
        if found is None:
            found = self._known[index] = encode_row(self._schema, self._table, index)
        return found


SHOWN = 5
"""Keys that a message names."""


class Counts(NamedTuple):
    """How many keys got their first row, another row, kept what they had, and lost all they had.

    `late` are those whose change was left out, as a later one is there (tables that keep deleted keys).
    """

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    late: int = 0


def one_row_each(schema: Schema, rows: pa.Table) -> pa.Table:
    """The distinct rows, in canonical order, each with `_diff` 1. Raises InvalidUsage if two rows differ for a key."""
    rows = pa.table([joined(column) for column in rows.columns], schema=rows.schema)
    if rows.num_rows > 1:
        rows = take(rows, distinct(rows.columns))
        ties = adjacent_ties([joined(rows.column(name)) for name in schema.key_names])
        if ties is None or ties.any():
            raise _twice(schema, rows, np.flatnonzero(ties) if ties is not None else np.zeros(1, np.int64))
    return rows.append_column(DIFF_FIELD, array_of(np.ones(rows.num_rows, np.int64)))


def replacing(schema: Schema, old: pa.Table, new: pa.Table) -> pa.Table:
    """The changes that make `new` of `old`, consolidated. Of what is in both nothing is in the answer."""
    diffs = integers(old.column(DIFF))
    if diffs.size and diffs.min() == I64_MIN:
        data = old.slice(int(diffs.argmin()), 1).drop_columns([DIFF]).to_pylist()[0]
        raise DiffOverflow(
            f"{data} has the multiplicity {I64_MIN}, and no one update can retract that; add to it first",
            data=data, total=I64_MIN,
        )  # fmt: skip
    retracted = old.set_column(old.num_columns - 1, DIFF_FIELD, array_of(-diffs))
    return consolidate(schema, pa.concat_tables([retracted, new]))


def count_upserted(keys: Keys, old: pa.Table, changes: pa.Table) -> Counts:
    """What an upsert does to each of the keys, by their contents before it and the changes."""
    had, changed = keys.found_in(old), keys.found_in(changes)
    updated = int((had & changed).sum())
    return Counts(int(changed.sum()) - updated, updated, len(keys) - int(changed.sum()), 0)


def count_deleted(keys: Keys, old: pa.Table) -> Counts:
    """What a delete does to each of the keys, by their contents before it."""
    deleted = int(keys.found_in(old).sum())
    return Counts(0, 0, len(keys) - deleted, deleted)


def _twice(schema: Schema, rows: pa.Table, at: Rows) -> InvalidUsage:
    twice = distinct(take(rows.select(schema.key_names), at).columns)
    keys = take(rows.select(schema.key_names), at[twice[:SHOWN]]).to_pylist()
    more = f" and {len(twice) - SHOWN} others" if len(twice) > SHOWN else ""
    return InvalidUsage(
        f"an upsert has one row for each key, and there are different rows for {shown(keys)}{more}. Which of them is "
        "meant only the caller can say: keep one of each. Nothing was written",
        problem="key twice", keys=keys, count=len(twice),
    )  # fmt: skip


NAMED = 10
"""Rows of a violation that an error names."""


class Violation(NamedTuple):
    """A constraint that would not hold at `time`: how many keys or rows break it then, and the first few rows."""

    constraint: str
    time: int
    breaks: int
    rows: list[dict[str, Any]]


def touched(schema: Schema, updates: pa.Table) -> tuple[Keys, pa.Table]:
    """The keys whose contents have to be known to check these updates, and the updates that have them.

    Adding to rows never makes a multiplicity negative, so without `unique` only keys with a retraction count.
    """
    if schema.unique:
        return Keys.of(schema, updates), updates
    keys = Keys.of(schema, take(updates, np.flatnonzero(integers(updates.column(DIFF)) < 0)))
    return keys, take(updates, keys.find(updates))


def find_violation(schema: Schema, old: pa.Table, updates: pa.Table) -> Violation | None:
    """The first violation, in time; None if all constraints hold.

    `old` is the contents of the touched keys before all updates, `updates` is in canonical order and consolidated.
    """
    if not updates.num_rows:
        return None
    # Nothing is before time 0, so the contents can have that time: they come before all updates of their data.
    both = consolidate(schema, pa.concat_tables([at_time(old, 0), updates]))
    times = integers(both.column(TIME))
    first = _first_bad_times(schema, both, times)
    if not first:
        return None
    constraint = min(first, key=lambda name: (first[name], name != "non_negative"))
    time = first[constraint]
    then = consolidate(schema, take(both, np.flatnonzero(times <= time)).drop_columns([TIME]))
    rows, count = _breaking(schema, then, constraint)
    return Violation(constraint, time, count, take(then, rows[:NAMED]).to_pylist())


def _first_bad_times(schema: Schema, both: pa.Table, times: npt.NDArray[np.uint64]) -> dict[str, int]:
    """For each constraint that does not hold, the first time at which it does not."""
    diffs = integers(both.column(DIFF))
    if len(diffs) * max(abs(int(diffs.min())), abs(int(diffs.max()))) > I64_MAX:
        diffs = diffs.astype(object)  # exact, whatever the sums are
    columns = columns_in_order(schema, both)[:-1]
    multiplicities = _running(diffs, _groups(columns))
    bad = {"non_negative": multiplicities < 0}
    if schema.unique:
        groups = _groups([joined(both.column(name)) for name in schema.key_names])
        order = np.lexsort((times, groups))
        by_key, then = groups[order], times[order]
        rows = _running(diffs[order], by_key)
        ends = np.append((by_key[1:] != by_key[:-1]) | (then[1:] != then[:-1]), True)
        several = np.zeros(len(times), np.bool_)
        several[order] = ends & (rows > 1).astype(np.bool_)
        bad["unique"] = several | (multiplicities < 0) | (multiplicities > 1)
    return {name: int(times[bad[name].astype(np.bool_)].min()) for name in schema.constraints if bad[name].any()}


def _groups(columns: list[pa.Array]) -> Rows:
    """The number of each row's group: rows that follow one another and are equal in these columns."""
    ties = adjacent_ties(columns)
    if ties is None:
        raise InvalidUsage("the rows of a check are not in order")  # a caller within the library made a mistake
    groups: Rows = np.cumsum(np.concatenate([[False], ~ties]))
    return groups


def _running(diffs: npt.NDArray[Any], groups: Rows) -> npt.NDArray[Any]:
    """The sum up to each row of its group."""
    sums = np.cumsum(diffs)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    before = sums[starts] - diffs[starts]
    sizes = np.diff(starts, append=len(groups))
    return sums - np.repeat(before, sizes)


def _breaking(schema: Schema, then: pa.Table, constraint: str) -> tuple[Rows, int]:
    """The rows of the contents that break a constraint, and how many of them (or of keys) there are."""
    diffs = integers(then.column(DIFF))
    if constraint == "non_negative":
        rows = np.flatnonzero(diffs < 0)
        return rows, len(rows)
    groups = _groups([joined(then.column(name)) for name in schema.key_names])
    breaks: Flags = (np.bincount(groups) > 1) | (np.bincount(groups, diffs != 1) > 0)
    return np.flatnonzero(breaks[groups]), int(breaks.sum())
