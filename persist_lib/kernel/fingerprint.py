"""The content fingerprint: proof that compaction neither lost, invented nor changed anything.

    F = sum(diff * H(key, value))  mod 2**64

Times do not enter, so advancing them changes nothing; equal data is added up, so consolidating changes nothing; it is
additive, so the fingerprint of two batches is the sum of both. `H` depends on each column's id, its role (key or
value) and the bits of its value, and on nothing else: not on chunks, slices, dictionaries, other columns' order, the
process, or the machine. What rows have that do not say a column contributes nothing: null, or its default if it has
one. So a new column changes no fingerprint. Nor does a wider type: a value that the column's first type has is hashed
as that; within nested values, number by number (`nested`).

`H` finalises the sum of the column hashes with a non-linear mix. Without it, values swapped between two rows
would cancel out. It is 64 bits and not keyed: it finds faults, not forgers.

This definition is durable: fingerprints are stored in states for ever. The golden values in the tests pin it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import xxhash

from persist_lib.kernel.columns import U64, ByteWords, Rows, Words, integers, words_of
from persist_lib.kernel.hashing import EMPTY, LONG, M1, M2, M3, contributions, hash_few
from persist_lib.schema.schema import DIFF, Schema

BLOCK = 1 << 15  # rows hashed at a time, so that the intermediate columns stay in the cache
FEW = 16  # rows that are hashed value by value, as a numpy call costs more than a value
_M1, _M2, _M3 = np.uint64(M1), np.uint64(M2), np.uint64(M3)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_EMPTY = np.uint64(EMPTY)


def hash_rows(schema: Schema, batch: pa.RecordBatch | pa.Table) -> U64:
    """H of every row. The batch holds the schema's columns (others are ignored); a missing one counts as null."""
    if batch.num_rows <= FEW:
        return np.array(hash_few(schema, batch), np.uint64)
    hashes = [_hash_block(schema, block) for block in _blocks(batch)]
    return hashes[0] if len(hashes) == 1 else np.concatenate(hashes) if hashes else np.empty(0, np.uint64)


def fingerprint(schema: Schema, batch: pa.RecordBatch | pa.Table) -> int:
    """F of a batch that has a `_diff` column."""
    return fingerprint_of(hash_rows(schema, batch), diffs_of(batch))


def fingerprint_of(hashes: U64, diffs: U64) -> int:
    """F from the rows' hashes and diffs (as u64, modulo 2**64)."""
    return int((hashes * diffs).sum(dtype=np.uint64))


def diffs_of(batch: pa.RecordBatch | pa.Table) -> U64:
    """The diffs modulo 2**64, as `fingerprint_of` and prefix sums by time want them."""
    return integers(batch.column(DIFF)).view(np.uint64)


def diff_sum_of(diffs: U64) -> int:
    """The sum of diffs modulo 2**64, as a signed 64-bit integer."""
    return int(diffs.sum(dtype=np.uint64).astype(np.int64))


def _blocks(batch: pa.RecordBatch | pa.Table) -> Iterator[pa.RecordBatch]:
    for chunk in batch.to_batches() if isinstance(batch, pa.Table) else (batch,):
        for start in range(0, chunk.num_rows, BLOCK):
            yield chunk.slice(start, BLOCK)


def _hash_block(schema: Schema, block: pa.RecordBatch) -> U64:
    total = np.full(block.num_rows, _EMPTY)
    present = set(block.schema.names)
    for role, columns in (("key", schema.key), ("value", schema.value)):
        for column in columns:
            if column.name in present:
                total += contributions(column, block.column(column.name), role, _hash_column)
    return _finish(total)


def _hash_column(column: pa.Array, start: int) -> U64:
    seed = np.uint64(start)
    if pa.types.is_dictionary(column.type):
        return _hash_dictionary(column, start)
    words = words_of(column)
    hashes = _hash_bytes(words, seed) if isinstance(words, ByteWords) else _hash_fixed(words, seed)
    if words.valid is not None:
        hashes[~words.valid] = 0
    return hashes


def _hash_dictionary(column: pa.DictionaryArray, seed: int) -> U64:
    """Every distinct value once. A null is a null index, or an index of a null."""
    distinct = _hash_column(column.dictionary, seed)
    index = column.indices
    codes = integers(index)
    hashes = distinct.take(codes) if len(distinct) else np.zeros(len(column), np.uint64)
    if index.null_count:
        hashes[index.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _hash_fixed(words: Words, seed: np.uint64) -> U64:
    state = words.word(0) ^ seed
    for index in range(1, words.width):
        _stir(state, words.word(index))
    return _finish(state)


def _hash_bytes(words: ByteWords, seed: np.uint64) -> U64:
    state = words.lengths.view(np.uint64) * _M3
    state += seed
    short = words.lengths <= LONG
    for index in range(min(words.width, LONG // 8)):
        skip = 8 * index
        if words.shortest > skip and words.longest <= LONG:
            _stir(state, words.word(index))
        else:
            rows = np.flatnonzero((words.lengths > skip) & short)
            some = state[rows]
            _stir(some, words.word(index, rows))
            state[rows] = some
    if words.longest > LONG:
        rows = np.flatnonzero(~short)
        state[rows] ^= _hash_long(words, rows)
    return _finish(state)


def _hash_long(words: ByteWords, rows: Rows) -> U64:
    """One call a value, which is worth it for long ones."""
    data = words.data.data
    spans = zip(words.starts[rows].tolist(), words.lengths[rows].tolist(), strict=True)
    return np.array([xxhash.xxh3_64_intdigest(data[start : start + length]) for start, length in spans], np.uint64)


def _stir(state: U64, word: U64) -> None:
    """Take in one word: a bijection of the state for each word, and of the word for each state."""
    state ^= word
    state *= _M3
    state ^= state >> _S32


def _finish(state: U64) -> U64:
    """Every bit of the input changes every bit of the output with a probability of about one half."""
    state ^= state >> _S30
    state *= _M1
    state ^= state >> _S27
    state *= _M2
    state ^= state >> _S31
    return state
