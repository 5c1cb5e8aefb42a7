"""Whether the constraints of a schema hold at every time of an append, by the contents of the keys that it touches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import Flags, Rows, at_time, integers, joined
from persist_lib.kernel.consolidate import I64_MAX, consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import adjacent_ties, columns_in_order, take
from persist_lib.schema.schema import DIFF, TIME, Schema

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
