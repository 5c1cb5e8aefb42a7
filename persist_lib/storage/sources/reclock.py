"""Reclocking: messages get the times that bindings say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persist_lib.storage.sources.bindings import Bound, Step
from persist_lib.storage.sources.protocol import START, Mark

Estimate = Callable[[str, int, int], int]


class Window(NamedTuple):
    """Whole times `[start, end)`, and what was bound in them. `before` are the marks as of just before `start`."""

    start: int
    end: int
    before: Mapping[str, Mark]
    steps: tuple[Step, ...]

    def ranges(self) -> dict[str, tuple[Mark, Mark]]:
        """From where to where to read each partition, in the order of their names."""
        last: dict[str, Mark] = {}
        for step in self.steps:
            last |= step.marks
        return {partition: (self.before.get(partition, START), last[partition]) for partition in sorted(last)}

    def halves(self) -> tuple[Window, Window]:
        """Two windows of the same times, one after the other. It has to have two steps at least."""
        middle = len(self.steps) // 2
        first, second = self.steps[:middle], self.steps[middle:]
        between = dict(self.before)
        for step in first:
            between |= step.marks
        at = second[0].time
        return Window(self.start, at, self.before, first), Window(at, self.end, between, second)

    def times_of(self, partition: str, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The time of each message: the first at which its address is covered."""
        steps = [(step.marks[partition].address, step.time) for step in self.steps if partition in step.marks]
        bounds = np.array([address for address, _ in steps], np.uint64)
        times = np.array([time for _, time in steps], np.uint64)
        return times[np.searchsorted(bounds, addresses, side="right")]


def windows(bound: Bound, start: int, most_bytes: int, estimate: Estimate) -> Iterator[Window]:
    """Cut `[start, bound.upper)` into windows of about `most_bytes` of messages, at least one time each."""
    before = dict(bound.start)
    some: list[Step] = []
    marks, size = dict(before), 0
    for step in bound.steps:
        weight = sum(
            estimate(partition, marks.get(partition, START).address, mark.address)
            for partition, mark in step.marks.items()
        )
        if some and size + weight > most_bytes:
            yield Window(start, step.time, before, tuple(some))
            start, before, some, size = step.time, dict(marks), [], 0
        some.append(step)
        marks |= step.marks
        size += weight
    if start < bound.upper:
        yield Window(start, bound.upper, before, tuple(some))


def in_order(times: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
    """The order of the messages of all partitions, given one after the other: by time, then as they were given."""
    return np.argsort(np.concatenate(times), kind="stable") if times else np.array([], np.int64)
