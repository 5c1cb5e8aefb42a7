"""What each append of a simulation was about, what its writer heard, and so what a table may hold.

Of an append that was acknowledged everything counts, of one that was refused nothing, and of one whose outcome is not
known all of it or nothing. So each distinct row has a least and a greatest multiplicity, whatever the schema is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from persist_lib.testing.model import Row, Update

Outcome = Literal["acknowledged", "refused", "unknown"]


class Entry:
    """One append: its changes by row, and the times `[lower, upper)` that it completed, as far as they are known.

    What several processes append alike is `shared`: it may be there whatever one of them heard.
    """

    def __init__(self, changes: Counter[Row], bounds: tuple[int, int] | None, *, is_shared: bool) -> None:
        self.changes, self.bounds, self.is_shared = changes, bounds, is_shared
        self.outcome: Outcome = "unknown"


class Ledger:
    """The appends of all processes, by their number."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def begin(
        self, updates: Iterable[Update], bounds: tuple[int, int] | None = None, *, is_shared: bool = False
    ) -> Entry:  # fmt: skip
        """Note what is about to be appended. Its outcome is unknown until it is set."""
        changes: Counter[Row] = Counter()
        for data, _, diff in updates:
            changes[data] += diff
        self.entries.append(Entry(changes, bounds, is_shared=is_shared))
        return self.entries[-1]

    @property
    def outcomes(self) -> Counter[str]:
        """How many appends ended how."""
        return Counter(entry.outcome for entry in self.entries if not entry.is_shared)

    def problems(self, contents: Counter[Row], as_of: int | None = None) -> list[str]:
        """What is wrong with contents: with all that was written, or with those as of a time.

        As of a time only appends whose times are all complete by then must be there. Others may be, in part.
        """
        least: Counter[Row] = Counter()
        most: Counter[Row] = Counter()
        for entry in self.entries:
            if entry.outcome == "refused":
                continue
            is_sure = entry.outcome == "acknowledged" and (
                as_of is None or (entry.bounds is not None and entry.bounds[1] <= as_of + 1)
            )
            for row, diff in entry.changes.items():
                least[row] += diff if is_sure else min(0, diff)
                most[row] += diff if is_sure else max(0, diff)
        wrong = []
        for row in least.keys() | contents.keys():
            if not least[row] <= contents[row] <= most[row]:
                between = f"{least[row]} and {most[row]}" if least[row] < most[row] else f"{most[row]}"
                wrong.append(f"{row} is there {contents[row]} times, and not {between}")
        return sorted(wrong)

    def parts(self, contents: Counter[Row]) -> list[str]:
        """Which appends are there in part. Only rows that one append alone is about say so."""
        about: Counter[Row] = Counter(row for entry in self.entries for row in entry.changes)
        wrong = []
        for number, entry in enumerate(self.entries):
            own = [row for row in entry.changes if about[row] == 1 and entry.changes[row]]
            there = [row for row in own if contents[row]]
            if there and len(there) != len(own):
                wrong.append(f"append {number} is there in part: {len(there)} of {len(own)} rows")
        return wrong

    def overlaps(self, contents: Counter[Row]) -> list[str]:
        """Which appends that are there completed the same times."""
        about: Counter[Row] = Counter(row for entry in self.entries for row in entry.changes)
        spans = sorted(
            entry.bounds
            for entry in self.entries
            if entry.bounds is not None and any(about[row] == 1 and contents[row] for row in entry.changes)
        )
        return [f"{left} and {right} overlap" for left, right in pairwise(spans) if left[1] > right[0]]
