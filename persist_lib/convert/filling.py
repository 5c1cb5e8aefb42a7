"""What a writer fills in where a row does not say a column: when it was written, or an id of its own.

A `Filling` is made once for each call that writes. So all rows of a call have the same time, and what is filled in is
data from then on: it is hashed, stored and sent again as it is, and a call that is repeated with its token finds what
the first one wrote. Ids are UUIDs of version 7 (RFC 9562): a time in milliseconds, and 74 bits of which no two are the
same but by a chance of one in 2**70. Those of one call rise row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Column
from persist_lib.schema.types import parse_type
from persist_lib.schema.widening import NOW, NUMBER

_STEP_BITS, _LOW_BITS, _HIGH_BITS = 32, 62, 12
"""Ids of one call differ by up to 2**32 in their low 62 bits, which begin in the lower half: room for 2**29 rows."""
_DIGITS = [place for place in range(36) if place not in {8, 13, 18, 23}]


class Bits(Protocol):
    """Random bits."""

    def getrandbits(self, k: int, /) -> int: ...


Numbers = Callable[[Column, int], int]
"""The first of so many numbers in a row, which no other call gets."""


class Ambient(Protocol):
    """What a runtime has of the clock and of chance."""

    @property
    def clock_ms(self) -> Callable[[], int]: ...
    @property
    def random(self) -> Bits: ...


class Filling:
    """Fills columns of the rows of one call."""

    def __init__(self, runtime: Ambient, numbers: Numbers | None = None) -> None:
        self._runtime, self._numbers = runtime, numbers
        self._low = -1
        self._high = 0

    @cached_property
    def now_ms(self) -> int:
        """When the call was made, by this machine's clock, in milliseconds since 1970."""
        return self._runtime.clock_ms()

    def values(self, column: Column, count: int) -> pa.Array:
        """So many values for a column that has a `fill`."""
        kind = parse_type(column.type)
        if column.fill == NOW:
            return pa.repeat(_moment(self.now_ms, kind), count)
        if column.fill == NUMBER:
            return self._counted(column, count)
        ids = self._ids(count)
        found = pa.Array.from_buffers(pa.binary(16), count, [None, pa.py_buffer(ids.tobytes())])
        return uuid_texts(found) if pa.types.is_string(kind) else found

    def _counted(self, column: Column, count: int) -> pa.Array:
        if self._numbers is None:
            raise InvalidUsage(
                f"column {column.name!r} counts up, which only writers of a table of one shard can do: give all rows a "
                "value, or make the column a uuid with the default uuid()",
                problem="identity", column=column.name,
            )  # fmt: skip
        first = self._numbers(column, count) if count else 0
        numbers = np.arange(count, dtype=np.int64) + np.int64(first)
        return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(numbers)])

    def into(self, column: Column, values: pa.Array | pa.ChunkedArray, missing: npt.NDArray[np.bool_]) -> pa.Array:
        """The values of a column, filled where they are missing."""
        if missing.all():
            return self.values(column, len(missing))
        new, own = np.flatnonzero(missing), values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        places = np.arange(len(values))
        places[new] = len(values) + np.arange(len(new))
        indices = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])
        return pc.take(pa.concat_arrays([*own, self.values(column, len(new))]), indices)

    def _ids(self, count: int) -> npt.NDArray[np.void]:
        if self._low < 0:
            self._low = self._runtime.random.getrandbits(_LOW_BITS - 1)
            self._high = (self.now_ms & 0xFFFF_FFFF_FFFF) << 16 | 7 << 12 | self._runtime.random.getrandbits(_HIGH_BITS)
        steps = self._runtime.random.getrandbits(_STEP_BITS * count) if count else 0
        drawn = np.frombuffer(steps.to_bytes(4 * count, "big"), np.uint32).astype(np.uint64) + np.uint64(1)
        low = np.uint64(self._low) + np.cumsum(drawn)
        self._low = int(low[-1]) if count else self._low
        words = np.empty((count, 2), ">u8")
        words[:, 0], words[:, 1] = self._high, low | np.uint64(1 << 63)
        return words.view("V16").reshape(count)


def uuid_texts(ids: pa.FixedSizeBinaryArray) -> pa.Array:
    """The usual texts of ids of 16 bytes each: `018f…-….`"""
    count = len(ids)
    whole = pc.fill_null(ids, bytes(16)) if ids.null_count else ids
    values = bytes(whole.buffers()[1])[16 * whole.offset : 16 * (whole.offset + count)]
    texts = np.full((count, 36), ord("-"), np.uint8)
    texts[:, _DIGITS] = np.frombuffer(values.hex().encode(), np.uint8).reshape(count, 32)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(36)
    found = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(texts)])
    return pc.if_else(ids.is_valid(), found, None) if ids.null_count else found


def _moment(now_ms: int, kind: pa.DataType) -> pa.Scalar:
    """The moment, or its day, in UTC; cut to the unit of the type."""
    if pa.types.is_date32(kind):
        return pa.scalar(now_ms // 86_400_000, pa.int32()).cast(kind)
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
    return pa.scalar(now_ms * per_second // 1000, pa.int64()).cast(kind)


def check_added(column: str, missing: npt.NDArray[np.bool_], diffs: npt.NDArray[np.int64]) -> None:
    """Raise InvalidUsage where a row that takes away lacks what a writer fills: it would be the value of no row."""
    wrong = np.flatnonzero(missing & (diffs < 0))
    if wrong.size:
        raise InvalidUsage(
            f"column {column!r} is filled in for rows that are added, and {wrong.size} rows that are taken away lack "
            f"it, first row {int(wrong[0])}. Give them the value that the rows there have",
            problem="missing column", column=column, row=int(wrong[0]),
        )  # fmt: skip
