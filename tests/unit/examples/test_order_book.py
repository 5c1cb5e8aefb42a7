"""The generated order book: the same book in any pieces, well-formed, and told twice in different ways."""

from __future__ import annotations

import hashlib
import json

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.order_book import ORDERS, Book, generate

books = st.builds(Book, st.integers(0, 2**63 - 1), st.sampled_from([2, 10, 64, 100, 130]))
law = settings(max_examples=25, deadline=None)


def replayed(updates: pa.Table, as_of: int) -> dict[int, tuple[object, ...]]:
    """One update after the other; a retraction must find exactly what it retracts, an assertion nothing."""
    held: dict[int, tuple[object, ...]] = {}
    for order, *contents, time, diff in zip(*(column.to_pylist() for column in updates.columns), strict=True):
        if time > as_of:
            break
        if diff == -1:
            assert held.pop(order) == tuple(contents)
        else:
            assert (diff, order in held) == (1, False)
            held[order] = tuple(contents)
    return held


@law
@given(books, st.integers(0, 400), st.data())
def test_replaying_the_updates_gives_what_the_book_says_it_holds(book: Book, as_of: int, data: st.DataObject) -> None:
    updates = book.updates(0, as_of + 1)
    said = book.contents(as_of)
    rows = {order: tuple(contents) for order, *contents, _ in zip(*(c.to_pylist() for c in said.columns), strict=True)}
    assert replayed(updates, as_of) == rows
    assert said["order_id"].to_pylist() == sorted(rows)
    assert set(said["_diff"].to_pylist()) == {1}


@law
@given(books, st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 700), st.integers(1, 700))
def test_the_same_prefix_comes_whatever_the_size_of_the_appends_and_the_start(
    book: Book, updates: int, lower: int, size: int, other: int
) -> None:
    lower = lower % (book.end(updates) + 1)
    first, second = (list(generate(book, updates, lower=lower, updates_per_append=s)) for s in (size, other))
    for appends in (first, second):
        assert [low for low, _, _ in appends] == [lower, *(up for _, up, _ in appends)][: len(appends)]
        assert all(low < up and bounds(table) == (low, up - 1) for low, up, table in appends)
        assert appends[-1][1] == book.end(updates) if appends else lower == book.end(updates)
    whole = book.updates(lower, book.end(updates))
    for appends in (first, second):
        assert pa.concat_tables([ORDERS.updates.empty_table(), *(table for _, _, table in appends)]).equals(whole)


def bounds(table: pa.Table) -> tuple[int, int]:
    both = pc.min_max(table["_time"]).as_py()
    return both["min"], both["max"]


@law
@given(books, st.integers(0, 500), st.integers(1, 200))
def test_every_time_has_exactly_its_number_of_updates(book: Book, lower: int, times: int) -> None:
    table = book.updates(lower, lower + times)
    expected = [time for time in range(lower, lower + times) for _ in range(book.updates_per_time)]
    assert table["_time"].to_pylist() == expected
    assert table.schema == ORDERS.updates


@pytest.mark.slow
def test_no_two_updates_of_one_order_fall_on_one_time_and_cancel_out() -> None:
    for per_time in (2, 64, 100, 1000):
        updates = Book(3, per_time).updates(0, 200_000 // per_time)
        distinct = updates.group_by(["order_id", "state", "cents", "sku", "note", "_time"]).aggregate(
            [([], "count_all")]
        )
        assert len(distinct) == len(updates)


def test_a_book_has_every_kind_of_life_in_it() -> None:
    updates = Book(1).updates(0, 3000)
    states = {row["values"]: row["counts"] for row in pc.value_counts(updates["state"]).to_pylist()}
    assert set(states) == {"placed", "changed", "shipped", "cancelled"}
    assert min(states.values()) > 5_000
    changed = updates.filter(pc.equal(updates["_diff"], -1))
    late = changed.filter(pc.equal(changed["state"], "shipped"))
    assert len(late) > 3_000  # corrections of what had shipped
    placed = updates.group_by("order_id").aggregate([("_time", "min")])
    both = late.join(placed, "order_id")
    assert pc.max(pc.subtract(both["_time"], both["_time_min"])).as_py() > 900


def test_another_seed_is_another_book_and_the_same_seed_the_same_for_ever() -> None:
    assert not Book(1).updates(0, 10).equals(Book(2).updates(0, 10))
    # What a seed means must never change: a shard is filled in several runs, perhaps by several releases.
    said = json.dumps(Book(7).updates(2000, 2010).to_pylist(), sort_keys=True)
    assert (
        hashlib.sha256(said.encode()).hexdigest() == "b0d81119a49961fbd219305d4f9b8de09124a8e2c49358065ac50625f00147c7"
    )


@pytest.mark.parametrize(("seed", "per_time"), [(-1, 100), (2**63, 100), (1, 0), (1, 3), (1, -2)])
def test_numbers_that_make_no_book_are_refused(seed: int, per_time: int) -> None:
    with pytest.raises(ValueError, match="got"):
        Book(seed, per_time)
