"""Cutting sorted runs into key ranges of about equal bytes, from what is known of where their bytes lie."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Stretch(NamedTuple):
    """Some bytes of a run, all of whose keys are in `[lower, upper]`. Both bounds are encoded and inclusive."""

    lower: bytes
    upper: bytes
    size: int


def cut_evenly(stretches: Sequence[Stretch], n: int) -> list[bytes]:
    """At most n - 1 ascending keys that cut the stretches into ranges of about equal bytes.

    Only a stretch's lower bound can be a cut. The bytes of a stretch count evenly for all of these bounds that it
    spans: stretches that are known in detail, as of a large part, show where the keys of the others lie.
    """
    edges = sorted({stretch.lower for stretch in stretches})
    if n < 2 or len(edges) < 2:
        return []
    change = [0.0] * (len(edges) + 1)
    for lower, upper, size in stretches:
        first = bisect_left(edges, lower)
        end = max(first + 1, bisect_right(edges, upper))
        change[first] += size / (end - first)
        change[end] -= size / (end - first)
    weights = accumulate(change[:-1])
    before = [0.0, *accumulate(weights)]  # before[k]: the bytes below edges[k]
    cuts: list[bytes] = []
    last = 0
    for number in range(1, n):
        place = _nearest(before, before[-1] * number / n)
        if last < place < len(edges):
            cuts.append(edges[place])
            last = place
    return cuts


def _nearest(ascending: Sequence[float], target: float) -> int:
    above = bisect_left(ascending, target)
    if above == 0 or above == len(ascending):
        return above
    return above if ascending[above] - target <= target - ascending[above - 1] else above - 1
