"""Values of plans: what a rule's retention is in times, prices by name, and that a plan has each shard once."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core.cost import FREE, S3_LIST, parse_prices
from persist_lib.core.plan.retention import distance_of
from persist_lib.core.plan.written import Plan, ShardPlan, parse_plan
from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo


@pytest.mark.parametrize(
    ("by_rule", "times", "distance"),
    [(5, None, 5), (5, "ms", 5), ("2 s", "ms", 2_000), ("2 s", None, None), ("last 3", "ms", None)],
)
def test_a_rules_retention_is_a_distance_where_times_have_a_unit(by_rule, times, distance):
    assert distance_of(by_rule, times) == distance


def test_prices_have_a_name_or_are_said():
    assert (parse_prices("s3"), parse_prices("free")) == (S3_LIST, FREE)
    assert parse_prices('{"egress_gib": 0.09}') == msgspec.structs.replace(S3_LIST, egress_gib=0.09)
    with pytest.raises(InvalidUsage, match=r"prices are 's3', .* or a JSON object of put"):
        parse_prices("s4")


@pytest.mark.parametrize("names", [("orders",), ("orders", "sums"), ("orders", "sums", "orders")])
def test_a_plan_has_each_shard_once(names):
    plan = Plan(tuple(ShardPlan(name, SeqNo(3), 0, (), "", {}) for name in names))
    text = msgspec.json.encode(plan)
    if len({*names}) == len(names):
        assert parse_plan(text) == plan
    else:
        with pytest.raises(InvalidUsage, match="orders more than once"):
            parse_plan(text)
    with pytest.raises(InvalidUsage):
        parse_plan(text.replace(b'"kind":"', b'"kind":"another '))
