"""What a commit does to each stream: without any store."""

from __future__ import annotations

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.frontier import at
from persist_lib.streams.committer import check_since
from persist_lib.streams.stream_state import Op, Step, plan
from tests.streaming import SCHEMA


def updates(*times: int) -> pa.Table:
    rows = [{"id": time, "_time": time, "_diff": 1} for time in times]
    return pa.Table.from_pylist(rows, schema=SCHEMA.updates)


def test_of_several_calls_the_furthest_frontiers_count() -> None:
    ops = [Op("s", since=at(5)), Op("s", upper=at(9)), Op("s", since=at(3)), Op("s", upper=at(8))]
    (step,) = plan(ops, {"s": at(1)}).values()
    assert (step.lower, step.upper, step.since) == (at(1), at(9), at(5))


def test_a_seal_takes_what_is_before_it_and_leaves_the_rest_unsealed() -> None:
    (step,) = plan(
        [Op("s", table=updates(1, 5)), Op("s", table=updates(4, 6)), Op("s", upper=at(5))], {"s": at(0)}
    ).values()
    assert [row["_time"] for table in step.direct() for row in table.to_pylist()] == [1, 4]
    assert [row["_time"] for table in step.fresh() for row in table.to_pylist()] == [5, 6]


@pytest.mark.parametrize(("since", "is_legal"), [(4, True), (5, False), (6, False)])
def test_since_stays_before_the_frontier_of_what_is_sealed(since: int, is_legal: bool) -> None:
    steps = {"s": Step(at(5), at(5), since=at(since))}
    if is_legal:
        check_since(steps)
    else:
        with pytest.raises(persist.InvalidUsage, match=r"is sealed up to .5. only"):
            check_since(steps)
