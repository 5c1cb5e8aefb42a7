"""The reference model: a shard is a plain list of updates, and everything else follows from it by definition.

Slow and obvious on purpose. Values are Python values; floats count by their bits, as in a shard.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.schema.schema import DIFF, TIME

Row = tuple[Any, ...]
"""The values of one row, key columns first; floats are their bits."""
Update = tuple[Row, int, int]
"""Data, time, diff."""


class Model:
    """The reference model of a shard: the updates appended so far, and upper. A shard must behave exactly like it."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.upper = MINIMUM
        self.produced: dict[str, int] = {}

    def append(self, updates: Iterable[Update], lower: Antichain, upper: Antichain) -> None:
        """Do what an acknowledged `compare_and_append` does. AssertionError if `lower` is not upper."""
        if lower != self.upper:
            raise AssertionError(f"acknowledged at {lower}, but upper was {self.upper}")
        self.updates += updates
        self.upper = upper

    def append_produced(
        self, updates: Iterable[Update], lower: Antichain, upper: Antichain, producer: tuple[str, int]
    ) -> None:
        """Do what an acknowledged `compare_and_append` of a producer does. AssertionError if it has that number."""
        name, sequence = producer
        if sequence <= self.produced.get(name, -1):
            raise AssertionError(f"{name} appended {sequence} after {self.produced[name]}")
        self.append(updates, lower, upper)
        self.produced[name] = sequence

    def append_rest(self, updates: Iterable[Update], lower: Antichain, upper: Antichain) -> None:
        """Do what an acknowledged `append` does: add only the times that are not complete yet."""
        if lower > self.upper:
            raise AssertionError(f"acknowledged at {lower}, beyond upper {self.upper}")
        self.updates += [update for update in updates if self.upper.is_before(update[1])]
        self.upper = self.upper.join(upper)

    def contents(self, as_of: int) -> Counter[Row]:
        """The multiset as of a time: each distinct row with its multiplicity, which may be negative."""
        return summed((data, diff) for data, time, diff in self.updates if time <= as_of)

    def between(self, lower: int, upper: Antichain) -> Counter[tuple[Row, int]]:
        """What a listener gets for times in `[lower, upper)`: (data, time) with the sum of its diffs."""
        return summed(
            ((data, time), diff) for data, time, diff in self.updates if lower <= time and upper.has_passed(time)
        )


def summed(pairs: Iterable[tuple[Any, int]]) -> Counter[Any]:
    """Sums by key, without zeros."""
    total: Counter[Any] = Counter()
    for key, diff in pairs:
        total[key] += diff
    return Counter({key: diff for key, diff in total.items() if diff})


def rows_of(table: pa.Table) -> list[Row]:
    """The rows of a table without `_time` and `_diff`."""
    names = [name for name in table.column_names if name not in {TIME, DIFF}]
    columns = [[_exact(value) for value in table.column(name).to_pylist()] for name in names]
    return list(zip(*columns, strict=True)) if columns else [() for _ in range(table.num_rows)]


def contents_of(table: pa.Table) -> Counter[Row]:
    """The multiset in a table of rows; or in one with `_diff`. AssertionError if a row is twice in that, or 0 times."""
    rows = rows_of(table)
    if DIFF not in table.column_names:
        return Counter(rows)
    diffs = table.column(DIFF).to_pylist()
    found = Counter(dict(zip(rows, diffs, strict=True)))
    if len(found) != len(rows) or 0 in diffs:
        twice = [row for row, count in Counter(rows).items() if count > 1]
        raise AssertionError(f"a snapshot has each distinct data once, and not 0 times: {twice or diffs}")
    return found


def updates_of(table: pa.Table) -> list[Update]:
    """The updates of a table with `_time` and `_diff`. Times are integers, also where they are a clock."""
    times = table.column(TIME)
    times = times.cast(pa.int64()) if pa.types.is_timestamp(times.type) else times
    return list(zip(rows_of(table), times.to_pylist(), table.column(DIFF).to_pylist(), strict=True))


def updates_from(names: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> list[Update]:
    """The updates of rows given as dicts; `names` are the data columns, `_diff` is 1 if left out."""
    names = list(names)
    return [(tuple(_exact(row.get(n)) for n in names), row[TIME], row.get(DIFF, 1)) for row in rows]


def _exact(value: object) -> object:
    if isinstance(value, dict):
        return tuple((name, _exact(inner)) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_exact, value))
    return ("float", struct.pack("<d", value)) if isinstance(value, float) else value
