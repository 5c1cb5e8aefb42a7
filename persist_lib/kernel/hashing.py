"""H for a few rows, value by value: the same hash as `fingerprint`'s, without the fixed cost of numpy calls.

A small append has one row or so, and some 300 microseconds for everything. A test holds both to the same answer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import add
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from persist_lib.kernel.columns import U64, comparable, joined, plain, words_of
from persist_lib.kernel.converting import as_at_first, converted
from persist_lib.kernel.nested import STRINGS, is_nested
from persist_lib.schema.evolution import fill
from persist_lib.schema.schema import Column, Schema
from persist_lib.schema.types import parse_type

LONG = 256  # bytes; longer values are hashed by xxh3, as their words would be visited one by one
EMPTY = 0x2545F4914F6CDD1D  # what a row of nulls starts from
M1, M2, M3 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
TOP = 1 << 63

Value = Callable[[object, int], int]


@lru_cache(maxsize=4096)
def seed_of(name: str, role: str) -> int:
    """Where a column's hash starts."""
    return xxhash.xxh3_64_intdigest(f"{role}\0{name}".encode())


def hash_few(schema: Schema, batch: pa.RecordBatch | pa.Table) -> list[int]:
    """H of every row."""
    totals = [EMPTY] * batch.num_rows
    present = batch.schema.names
    for role, columns in (("key", schema.key), ("value", schema.value)):
        for column in columns:
            if column.name in present:
                values = joined(batch.column(column.name))
                hashes = contributions(column, values, role, lambda array, seed: _hashing(array.type)(array, seed))
                totals = list(map(add, totals, hashes.tolist() if isinstance(hashes, np.ndarray) else hashes))
    return [finish(total & MASK) for total in totals]


Hashing = Callable[[pa.Array, int], Iterable[int]]


def contributions(column: Column, values: pa.Array, role: str, hashed: Hashing) -> Any:
    """What each value of a column adds to H, given what hashes values of a type.

    A value that the column's first type has is hashed as that; and the default contributes 0, as null does without one.
    """
    seed = seed_of(column.id, role)
    if not column.first_type and column.default is None:
        return hashed(values, seed)
    found = _hashed_as_first(column, values, seed, hashed)
    if column.default is None:
        return found
    return found - _hashed_as_first(column, fill(column, 1), seed, hashed)[0]


def _hashed_as_first(column: Column, values: pa.Array, seed: int, hashed: Hashing) -> U64:
    values = plain(values)
    if is_nested(values.type):
        return _words64(hashed(as_at_first(values, parse_type(column.first_type)), seed))
    hashes = _words64(hashed(values, seed))
    if not column.first_type:
        return hashes
    narrow, fits = converted(values, parse_type(column.first_type))
    first = _words64(hashed(narrow, seed))
    return first if fits is None else np.where(fits, first, hashes)


def _words64(hashes: Any) -> U64:
    return hashes if isinstance(hashes, np.ndarray) else np.array(list(hashes), np.uint64)


@lru_cache(maxsize=1024)
def _hashing(kind: pa.DataType) -> Hashing:
    """How the values of a type are hashed: looked up once, as asking Arrow costs more than hashing a value."""
    if pa.types.is_dictionary(kind):
        hashing = _hashing(kind.value_type)
        return lambda array, seed: hashing(array.dictionary_decode(), seed)
    if is_nested(kind):
        return lambda array, seed: _each(hash_bytes)(comparable(array), seed)
    if pa.types.is_string(kind):
        return _each(lambda value, seed: hash_bytes(value.encode(), seed))
    if (
        pa.types.is_binary(kind)
        or kind == STRINGS
        or (pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind))
    ):
        return _each(hash_bytes)
    if pa.types.is_signed_integer(kind):
        return _each(lambda value, seed: finish((value + TOP) ^ seed))
    if pa.types.is_unsigned_integer(kind) or pa.types.is_boolean(kind):
        return _each(lambda value, seed: finish(value ^ seed))
    return _words


def _each(hashed: Callable[[Any, int], int]) -> Hashing:
    return lambda array, seed: [0 if value is None else hashed(value, seed) for value in array.to_pylist()]


def _words(array: pa.Array, seed: int) -> Iterable[int]:
    words = words_of(array)
    states = [word ^ seed for word in words.word(0).tolist()]
    for index in range(1, words.width):
        states = [stir(state, word) for state, word in zip(states, words.word(index).tolist(), strict=True)]
    valid = [True] * len(states) if words.valid is None else words.valid.tolist()
    return (finish(state) if is_valid else 0 for state, is_valid in zip(states, valid, strict=True))


def hash_bytes(raw: bytes, seed: int) -> int:
    """The hash of one text or binary value."""
    state = (len(raw) * M3 + seed) & MASK
    if len(raw) > LONG:
        return finish(state ^ xxhash.xxh3_64_intdigest(raw))
    count = -(-len(raw) // 8)
    for word in struct.unpack(f">{count}Q", raw.ljust(8 * count, b"\0")):
        state = stir(state, word)
    return finish(state)


def stir(state: int, word: int) -> int:
    """Take in one word: a bijection of the state for each word, and of the word for each state."""
    state = ((state ^ word) * M3) & MASK
    return state ^ (state >> 32)


def finish(state: int) -> int:
    """Every bit of the input changes every bit of the output with a probability of about one half."""
    state = ((state ^ (state >> 30)) * M1) & MASK
    state = ((state ^ (state >> 27)) * M2) & MASK
    return state ^ (state >> 31)
