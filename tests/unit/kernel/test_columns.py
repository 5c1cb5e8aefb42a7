"""Words are what Python says the bytes are, wherever values lie in their buffer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from persist_lib.kernel.columns import ByteWords, words_of

VALUES = [b"abcdefgh", b"xyz", b"", b"0123456789abcdef!", b"pq", b"r", b"\0", b"s"]


def expected(value: bytes, index: int) -> int:
    return int.from_bytes(value[8 * index : 8 * index + 8].ljust(8, b"\0"), "big")


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
@pytest.mark.parametrize("count", range(1, len(VALUES) + 1))
def test_words_are_the_bytes_of_the_values_up_to_the_very_end_of_the_buffer(kind, count):
    for start in range(count):
        some = VALUES[start:count]
        words = words_of(pa.array(VALUES[:count], pa.binary()).cast(kind).slice(start))
        assert isinstance(words, ByteWords)
        for index in range(words.width):
            assert words.word(index).tolist() == [expected(value, index) for value in some]


def test_words_behind_a_shared_prefix_are_those_of_what_is_left():
    values = [b"shared-1", b"shared-22", b"shared-333"]
    words = words_of(pa.array(values, pa.binary()))
    assert isinstance(words, ByteWords)
    assert words.without(7).word(0).tolist() == [expected(value[7:], 0) for value in values]


def test_a_dictionary_ranks_its_values_by_bytes_and_equal_ones_alike():
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None, 3], pa.int32()), ["b", "a", "b", None])
    words = words_of(array)
    assert words.word(0).tolist() == [1, 0, 1, 0, 0]
    assert words.valid is not None
    assert words.valid.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("length", range(7, 26))
@pytest.mark.parametrize("shared", [0, 1, 5])
def test_values_of_one_length_have_the_words_that_they_have_among_others(length: int, shared: int) -> None:
    rng = np.random.default_rng(length)
    values = [b"p" * shared + rng.bytes(length) for _ in range(40)]
    even, mixed = pa.array(values, pa.binary()), pa.array([*values, b"p" * (shared + 1)], pa.binary())
    before = even.to_pylist()
    for slice_ in (slice(0, 40), slice(3, 29), slice(39, 40), slice(0, 0)):
        ours = words_of(even[slice_.start : slice_.stop])
        theirs = words_of(mixed)
        assert isinstance(ours, ByteWords) and isinstance(theirs, ByteWords)  # noqa: PT018
        ours, theirs = ours.without(shared), theirs.without(shared)
        rows = np.arange(slice_.start, slice_.stop)
        for index in range(ours.width):
            assert ours.word(index).tolist() == theirs.word(index, rows).tolist()
    assert even.to_pylist() == before
