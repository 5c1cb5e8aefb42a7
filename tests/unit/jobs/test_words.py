"""Spark's pages say which shard a job works on, and which keys each task has."""

from __future__ import annotations

import itertools
from datetime import date

import persist_lib as persist
from jobs.words import MOST_RANGES, range_of, ranges
from persist_lib.core.plan.requests import MergeTask
from persist_lib.kernel.keys import encode_key

SCHEMA = persist.Schema({"name": "string", "day": "date32"}, {"v": "int64"})


def task(lower: bytes | None, upper: bytes | None) -> MergeTask:
    return MergeTask("orders", "u", (), (SCHEMA,), 0, 0, lower, upper, 1, 1)


def test_a_range_is_told_by_its_keys() -> None:
    ant, bee = encode_key(SCHEMA, ["ant", date(2024, 5, 1)]), encode_key(SCHEMA, ["bee"])
    assert range_of(task(None, None)) == "all keys of orders"
    assert range_of(task(None, bee)) == "[first, ('bee',))"
    assert range_of(task(ant, bee)) == "[('ant', datetime.date(2024, 5, 1)), ('bee',))"
    assert range_of(task(ant, None)) == "[('ant', datetime.date(2024, 5, 1)), last)"


def test_keys_that_are_no_text_or_long_are_shown_as_far_as_it_goes() -> None:
    assert range_of(task(b"\x01\xc3", None)) == "[01c3, last)"
    long = range_of(task(encode_key(SCHEMA, ["x" * 500]), None))
    assert len(long) < 80
    assert long.endswith("…, last)")


def test_many_ranges_are_listed_up_to_a_hundred() -> None:
    edges = [None, *(encode_key(SCHEMA, [f"{n:04d}"]) for n in range(150)), None]
    listed = ranges([task(a, b) for a, b in itertools.pairwise(edges)]).split("\n")
    assert len(listed) == MOST_RANGES + 1
    assert listed[1] == "task 1: [('0000',), ('0001',))"
    assert listed[-1] == "and 51 more"
