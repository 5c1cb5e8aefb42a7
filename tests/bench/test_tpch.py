"""The rows of `bench.tpch` are functions of their keys, fit together, and go and come once."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from bench import tpch


def test_a_row_is_the_same_whichever_others_are_made_with_it():
    numbers = tpch.initial(0.002)
    assert tpch.orders(numbers).slice(100, 50).equals(tpch.orders(numbers[100:150]))
    some = np.array([7, 2_999, 12])
    keys = set(tpch.order_keys(some).tolist())
    whole = [row for row in tpch.lineitems(numbers).to_pylist() if row["l_orderkey"] in keys]
    assert sorted(whole, key=str) == sorted(tpch.lineitems(some).to_pylist(), key=str)


def test_orders_cost_what_their_lineitems_cost_and_have_one_to_seven_of_them():
    numbers = tpch.initial(0.001)
    total: dict[int, Decimal] = {}
    lines: dict[int, list[int]] = {}
    for row in tpch.lineitems(numbers).to_pylist():
        total[row["l_orderkey"]] = total.get(row["l_orderkey"], Decimal()) + row["l_extendedprice"]
        lines.setdefault(row["l_orderkey"], []).append(row["l_linenumber"])
    assert {row["o_orderkey"]: row["o_totalprice"] for row in tpch.orders(numbers).to_pylist()} == total
    assert all(found == list(range(1, len(found) + 1)) for found in lines.values())
    assert {len(found) for found in lines.values()} == set(range(1, 8))


def test_what_a_refresh_takes_away_was_there_and_goes_once():
    first = set(tpch.initial(0.002).tolist())
    there = set(first)
    gone: set[int] = set()
    for turn in range(1, 200):
        refresh = tpch.refresh(0.002, turn)
        assert len(refresh.new) == len(refresh.gone) == 3
        assert not there & set(refresh.new.tolist())
        assert set(refresh.gone.tolist()) <= first - gone
        gone |= set(refresh.gone.tolist())
        there |= set(refresh.new.tolist())


def test_there_is_nothing_left_to_delete_after_all_is_gone():
    tpch.refresh(0.002, 1000)
    with pytest.raises(ValueError, match="3000 orders"):
        tpch.refresh(0.002, 1001)
