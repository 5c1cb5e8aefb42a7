"""Arrow columns as numpy words: what ordering, hashing and key encoding have in common.

A column becomes a sequence of u64 words such that comparing its words one after the other (and, for types of varying
length, the lengths last) orders rows as the contract says: integers naturally, floats by the total order of their
bits, text and binary by bytes. Two values have the same words and length exactly when their bits are equal. Nothing
here depends on chunking, offsets, dictionary encoding, what lies under nulls, or the machine's byte order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.errors import Corrupt
from persist_lib.kernel.nested import STRINGS, bodies, is_nested
from persist_lib.schema.schema import TIME_FIELD

U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TOP_BIT = np.uint64(1 << 63)
WORD = 8
BLOCK = 1 << 15
# Arrow's default pool gives memory back to the system at once, and a merge that allocates and frees windows
# then spends a sixth of its time on page faults. What the kernel copies is allocated from the C heap.
POOL = pa.system_memory_pool()
# KEEP[n] keeps the n leading bytes of a big-endian word.
KEEP = np.array([0] + [(1 << 64) - (1 << (64 - 8 * n)) for n in range(1, 9)], dtype=np.uint64)


def joined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array; dictionaries stay, and become one."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks, POOL) if column.num_chunks else pa.array([], column.type)


def one_batch(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """The rows as one record batch, without a copy where they are in one piece."""
    if isinstance(rows, pa.RecordBatch):
        return rows
    batches = rows.to_batches()
    return batches[0] if len(batches) == 1 else pa.record_batch(list(map(joined, rows.columns)), schema=rows.schema)


def plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array without dictionary encoding."""
    array = joined(column)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def plain_table(table: pa.Table) -> pa.Table:
    """The table without dictionary encoding."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            decoded = pa.field(field.name, field.type.value_type, field.nullable)
            table = table.set_column(index, decoded, plain(table.column(index)))
    return table


def unpack_bits(buffer: pa.Buffer, offset: int, length: int) -> Flags:
    """`length` bits of an Arrow bitmap, from bit `offset`."""
    first = offset // 8
    raw = np.frombuffer(buffer, np.uint8)[first : (offset + length + 7) // 8]
    return np.unpackbits(raw, count=offset % 8 + length, bitorder="little")[offset % 8 :].view(np.bool_)


def array_of(values: npt.NDArray[Any]) -> pa.Array:
    """A numpy array of integers as Arrow, without a copy.

    `pa.array` would import pandas for it, which takes longer than many a command.
    """
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def is_same(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables of the same columns certainly have the same rows in the same order; quick, and never wrong.

    Arrow takes 0.0 and -0.0 for equal. Here they are different values, so that tables with floats may be the
    same although this says False.
    """
    return not any(map(has_floats, one.schema.types)) and one.equals(other)


def has_floats(kind: pa.DataType) -> bool:
    """Whether values of this type are floats or hold some."""
    return pa.types.is_floating(kind) or any(has_floats(kind.field(at).type) for at in range(kind.num_fields))


def at_time(contents: pa.Table, time: int) -> pa.Table:
    """Rows of `schema.contents`, or of a projection of it, as updates at one time."""
    times = array_of(np.full(contents.num_rows, time, np.uint64))
    return contents.add_column(contents.num_columns - 1, TIME_FIELD, times)


def integers(column: pa.Array | pa.ChunkedArray, null: int = 0) -> npt.NDArray[Any]:
    """A column of integers as numpy, `null` for nulls; unlike `to_numpy`, it does not import pandas.

    Dates and times are as Arrow stores them.
    """
    array = joined(column)
    sign = "u" if pa.types.is_unsigned_integer(array.type) else "i"
    values = fixed(array, f"<{sign}{array.type.bit_width // 8}")
    valid = validity(array)
    return values if valid is None else np.where(valid, values, null)


def mask_of(flags: Flags) -> pa.Array:
    """A numpy array of booleans as Arrow."""
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, pa.py_buffer(np.packbits(flags, bitorder="little"))])


def validity(array: pa.Array) -> Flags | None:
    """Which rows are not null; None when none is null."""
    if array.null_count == 0:
        return None
    buffer = array.buffers()[0]
    if buffer is None:  # the null type, which no schema allows
        return np.zeros(len(array), np.bool_)
    return unpack_bits(buffer, array.offset, len(array))


def present(array: pa.Array) -> Flags:
    """Which rows are not null, also where all are."""
    return np.ones(len(array), np.bool_) if (valid := validity(array)) is None else valid


def fixed(array: pa.Array, dtype: str) -> npt.NDArray[Any]:
    """The values of a fixed-width array, without a copy; what is under nulls is undefined."""
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype, count=array.offset + len(array))[array.offset :]


@dataclass(frozen=True, slots=True)
class FixedWords:
    """A column of fixed width, at most two words a row. Words of nulls are 0."""

    valid: Flags | None
    words: tuple[U64, ...]

    @property
    def width(self) -> int:
        """How many words the widest value has."""
        return len(self.words)

    @property
    def lengths(self) -> None:
        """All values are equally long."""
        return None

    def word(self, index: int, rows: Rows | None = None) -> U64:
        """The word at `index` of the chosen rows, or of all."""
        words = self.words[index]
        return words if rows is None else words.take(rows)


@dataclass(frozen=True, slots=True)
class ByteWords:
    """A column of byte strings: values are `data[start : start + length]`. Nulls have length 0."""

    valid: Flags | None
    data: npt.NDArray[np.uint8]  # at least 8 bytes long
    starts: Rows
    lengths: Rows
    longest: int
    shortest: int

    @property
    def width(self) -> int:
        """How many words the longest value has."""
        return -(-self.longest // WORD)

    def word(self, index: int, rows: Rows | None = None) -> U64:
        """Bytes `[8 * index, 8 * index + 8)` of the chosen rows, big-endian, zero beyond a value's end."""
        count = len(self.starts) if rows is None else len(rows)
        if count <= BLOCK:
            return self._word(index, slice(None) if rows is None else rows)
        # In blocks, so that what is in between stays in the cache.
        words = np.empty(count, np.uint64)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            words[block] = self._word(index, block if rows is None else rows[block])
        return words

    def without(self, count: int) -> ByteWords:
        """The column without the first `count` bytes of each value, all of which are that long."""
        if count == 0:
            return self
        lengths = self.lengths - count
        return ByteWords(
            self.valid, self.data, self.starts + count, lengths, self.longest - count, self.shortest - count
        )

    def _word(self, index: int, rows: Rows | slice) -> U64:
        skip = index * WORD
        if isinstance(rows, slice) and self.longest == self.shortest >= WORD and self.valid is None:
            return self._evenly(skip, rows)
        starts, lengths = self.starts[rows], self.lengths[rows]
        at = starts + skip if skip else starts
        words = self._load(at)
        if self.shortest < skip + WORD:
            words &= KEEP.take(lengths - skip, mode="clip")
        return words

    def _evenly(self, skip: int, rows: slice) -> U64:
        """Words of values that are equally long, so that they lie at equal distances: copied, which beats gathering."""
        starts = self.starts[rows]
        if starts.size < 2:
            distance = WORD
        else:
            distance = int(starts[1] - starts[0])
        # The last word ends with the value; what is too much of it is shifted out.
        over = max(0, skip - (self.longest - WORD))
        begin = int(starts[0]) + skip - over if starts.size else 0
        view = np.ndarray((starts.size,), "<u8", self.data, begin, (distance,))
        words: U64 = view.astype(np.uint64).byteswap(inplace=True)  # a copy: the column itself is not to be touched
        return words << np.uint64(8 * over) if over else words

    def _load(self, at: Rows) -> U64:
        last = len(self.data) - WORD
        every = np.ndarray(shape=(last + 1,), dtype="<u8", buffer=self.data, strides=(1,))
        if at.size == 0 or int(at.max()) <= last:
            return _swap(every[at])
        # The last values end less than a word before the end of the buffer. Load the last whole word instead,
        # and shift; what lies wholly beyond the end is cleared by the caller, as it is beyond the value's length.
        over = np.maximum(at - last, 0)
        return _swap(every[at - over] >> (np.minimum(over, 7) * 8).astype(np.uint64))


Words = FixedWords | ByteWords


def _swap(little: npt.NDArray[Any]) -> U64:
    return little.astype(np.uint64, copy=False).byteswap(inplace=True)


def comparable(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array whose values compare as its own do: nested ones as bytes, others as they are."""
    array = joined(column)
    return bodies(array, flat_bodies) if is_nested(array.type) else array


def flat_bodies(array: pa.Array) -> pa.Array | npt.NDArray[Any]:
    """Values that hold no others as `nested` wants them."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return array.cast(STRINGS)
    if pa.types.is_boolean(kind):
        return unpack_bits(array.buffers()[1], array.offset, len(array))
    if pa.types.is_decimal(kind):
        return np.stack(_fixed_words(array), axis=1).astype(">u8").view(f"V{kind.byte_width}")[:, 0]
    if pa.types.is_fixed_size_binary(kind):
        return fixed(array, f"V{kind.byte_width}")
    return _sortable_bits(array)


def _sortable_bits(array: pa.Array) -> npt.NDArray[Any]:
    """Numbers as unsigned integers of their own width that compare as they do.

    Floats in the total order of IEEE: -NaN < -inf < … < -0.0 < 0.0 < … < inf < NaN.
    """
    width = array.type.bit_width
    bits = fixed(array, f"<u{width // 8}")
    if pa.types.is_unsigned_integer(array.type):
        return bits
    sign = bits.dtype.type(1 << (width - 1))
    if not pa.types.is_floating(array.type):
        return bits ^ sign
    # Minus zero or all ones: of negative numbers all bits change, of others the sign.
    return bits ^ ((bits.view(f"<i{width // 8}") >> (width - 1)).view(bits.dtype) | sign)


def words_of(column: pa.Array | pa.ChunkedArray) -> Words:
    """The words of one column."""
    array = comparable(column)
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _ranks(array)
    valid = validity(array)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _bytes(array, valid, fixed_offsets(array, "<i4"), array.buffers()[2])
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _bytes(array, valid, fixed_offsets(array, "<i8"), array.buffers()[2])
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        first, width = array.offset, kind.byte_width
        offsets = np.arange(first * width, (first + len(array) + 1) * width, width, dtype=np.int64)
        return _bytes(array, valid, offsets, array.buffers()[1])
    words = _fixed_words(array)
    if valid is not None:
        words = tuple(np.where(valid, word, np.uint64(0)) for word in words)
    return FixedWords(valid, words)


def _ranks(array: pa.DictionaryArray) -> FixedWords:
    """A dictionary-encoded column by the ranks of its values: in order among these rows, and only among them."""
    codes, of_value = integers(array.indices), ranks_of(plain(array.dictionary))
    known = array.is_valid()
    valid: Flags | None = unpack_bits(known.buffers()[1], known.offset, len(known))
    if valid is not None and valid.all():
        valid = None
    if valid is not None:
        codes = np.where(valid, codes, 0)
    words = of_value.take(codes) if len(of_value) else np.zeros(len(array), np.uint64)
    return FixedWords(valid, (words if valid is None else np.where(valid, words, np.uint64(0)),))


def ranks_of(values: pa.Array) -> U64:
    """The place of each value among the distinct ones, by bytes; 0 for nulls."""
    distinct = comparable(values).dictionary_encode()
    by_bytes = integers(pc.array_sort_indices(distinct.dictionary))
    ranks = np.zeros(len(by_bytes) + 1, np.uint64)
    ranks[by_bytes] = np.arange(len(by_bytes), dtype=np.uint64)
    return ranks.take(integers(distinct.indices, null=len(by_bytes)))


def fixed_offsets(array: pa.Array, dtype: str) -> Rows:
    """The offsets of a variable-length array, one more than it has rows."""
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(len(array) + 1, np.int64)
    end = array.offset + len(array) + 1
    return np.frombuffer(buffer, dtype, count=end)[array.offset :].astype(np.int64)


def _bytes(array: pa.Array, valid: Flags | None, offsets: Rows, buffer: pa.Buffer | None) -> ByteWords:
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.frombuffer(buffer, np.uint8)[first:last] if buffer is not None and last > first else np.empty(0, np.uint8)
    if data.size < WORD:
        data = np.concatenate([data, np.zeros(WORD, np.uint8)])
    lengths = np.diff(offsets)
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    longest, shortest = (int(lengths.max()), int(lengths.min())) if len(array) else (0, 0)
    return ByteWords(valid, data, offsets[:-1] - first, lengths, longest, shortest)


def _fixed_words(array: pa.Array) -> tuple[U64, ...]:
    kind = array.type
    if pa.types.is_boolean(kind):
        return (unpack_bits(array.buffers()[1], array.offset, len(array)).astype(np.uint64),)
    if pa.types.is_decimal(kind):
        count = kind.byte_width // WORD
        each = fixed(_split(array, count), "<u8").reshape(-1, count)
        lower = [np.ascontiguousarray(each[:, place]) for place in reversed(range(count - 1))]
        return each[:, count - 1] ^ TOP_BIT, *lower
    bits = kind.bit_width
    if pa.types.is_floating(kind) or pa.types.is_unsigned_integer(kind):
        return (_sortable_bits(array).astype(np.uint64, copy=False),)
    return (fixed(array, f"<i{bits // 8}").astype(np.int64, copy=False).view(np.uint64) ^ TOP_BIT,)


def _split(array: pa.Array, count: int) -> pa.Array:
    """An array of `count` words a value seen as that many times more 8-byte integers."""
    buffers = array.buffers()
    return pa.Array.from_buffers(pa.uint64(), count * len(array), [None, buffers[1]], offset=count * array.offset)


def packed(table: pa.Table, compression: Literal["lz4", "zstd"] | None = None) -> bytes:
    """A table as bytes. Equal tables that are cut into the same pieces are equal bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def unpacked(data: bytes) -> pa.Table:
    """The table of `packed`. Raises Corrupt for other bytes."""
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)  # offsets that point elsewhere would be followed
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise Corrupt(f"packed rows do not decode: {error}", key="rows", actual=str(error)) from error
    return table
