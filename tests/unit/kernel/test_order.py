"""Text is ordered by as few bits as tell its values apart, and just as Python orders bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.kernel import order
from persist_lib.kernel.columns import BLOCK
from persist_lib.kernel.order import sort_order

WORDS = st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=50)


@given(WORDS, st.integers(1, 7))
def test_squeezing_words_is_squeezing_each_of_them(words: list[int], width: int) -> None:
    squeezed = order._squeeze(np.array(words, np.uint64), width)
    assert squeezed.tolist() == [order._squeezed(word, width) for word in words]


def test_squeezing_goes_block_by_block() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 64, 2 * BLOCK + 5, dtype=np.uint64)
    squeezed = order._squeeze(words, 4)
    assert squeezed[-5:].tolist() == [order._squeezed(int(word), 4) for word in words[-5:]]


@given(WORDS, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.integers(1, 64))
def test_narrowing_keeps_the_order(words: list[int], mask: int, base: int, room: int) -> None:
    array = np.array([word & mask | base for word in words], np.uint64)
    before = array.copy()
    narrow, bits = order._narrow(array, room)
    assert bits == 0 or int(narrow.max()).bit_length() <= bits
    assert (array == before).all(), "the words of a column are not to be changed"
    distinct = sorted(set(array.tolist()))
    assert [narrow.tolist()[array.tolist().index(word)] for word in distinct] == sorted(set(narrow.tolist()))


ALPHABETS = ["0123456789", "abcdef", "abcdefghijklmnopqrstuvwxyz", "aB", "\x00\x7f", "0123456789éß☃", "@`\x00 "]


@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("rows", [3, 500, 70_000])
def test_two_columns_of_text_are_ordered_as_pairs_of_bytes(alphabet: str, rows: int) -> None:
    random = np.random.default_rng(rows)

    def texts(longest: int) -> list[str]:
        lengths = random.integers(0, longest + 1, rows)
        letters = random.integers(0, len(alphabet), int(lengths.sum()))
        flat = "".join(alphabet[letter] for letter in letters)
        ends = np.cumsum(lengths)
        return [flat[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]

    columns = [texts(12), texts(3), random.integers(0, 5, rows).tolist()]
    arrays = [pa.array(columns[0]), pa.array(columns[1]), pa.array(columns[2], pa.uint64())]
    rows_in_order, ties = sort_order(arrays)
    keys = [(a.encode(), b.encode(), c) for a, b, c in zip(*columns, strict=True)]
    expected = sorted(range(rows), key=keys.__getitem__)
    assert rows_in_order.tolist() == expected  # which also says that it is stable
    assert ties.tolist() == [keys[a] == keys[b] for a, b in itertools.pairwise(expected)]


TEXTS = st.none() | st.sampled_from(["", "a", "b", "a\0", "é", "a" * 7, "a" * 8 + "b", "a" * 300, "a" * 300 + "b"])


@given(st.lists(st.tuples(TEXTS, TEXTS, st.none() | st.integers(0, 3)), min_size=2, max_size=9))
def test_few_rows_are_ordered_as_many_are(rows: list[tuple[str | None, str | None, int | None]]) -> None:
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), KINDS, strict=True)]
    few = sort_order(columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "FEW", 0)
        many = sort_order(columns)
        patch.setattr(order, "SAMPLE", 2)  # of which only one row is looked at, so that the first digit seems enough
        by_first_digit = sort_order(columns)
        by_numbers = sort_order([*columns[2:], *columns[:2]])
        patch.undo()
        numbers_first = sort_order([*columns[2:], *columns[:2]])
    assert [each.tolist() for each in few] == [each.tolist() for each in many]
    assert [each.tolist() for each in few] == [each.tolist() for each in by_first_digit]
    assert [each.tolist() for each in numbers_first] == [each.tolist() for each in by_numbers]


KINDS = (pa.string(), pa.binary(), pa.int64())


def test_many_ties_in_few_groups_leave_too_little_room_beside_the_places() -> None:
    """Groups, places and a wide second column do not fit into one word together."""
    random = np.random.default_rng(3)
    rows = 200_000
    first = random.integers(0, 1 << 63, rows // 2, dtype=np.uint64).repeat(2)
    second = random.integers(0, 1 << 64, rows, dtype=np.uint64)
    found, _ = sort_order([pa.array(first), pa.array(second)])
    assert found.tolist() == np.lexsort((second, first)).tolist()


@pytest.mark.parametrize("column", [[1, 2, 3], ["a", "b", "c"], [[1], [], [2, 3]]], ids=["int", "text", "list"])
@pytest.mark.parametrize("places", [[3], [0, -1], [1, 2, 1 << 40]])
def test_places_where_there_is_no_row_are_refused_and_no_memory_is_read_there(
    column: list[object], places: list[int]
) -> None:
    table = pa.table({"a": column})
    assert order.take(table, np.array([2, 0, 2])).column("a").to_pylist() == [column[at] for at in (2, 0, 2)]
    with pytest.raises(IndexError, match="there are 3 rows, and places"):
        order.take(table, np.array(places))
