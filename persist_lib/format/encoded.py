"""What the state says about some updates: rows, bounds, sums, digests. The same for objects and inline bytes."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

import pyarrow as pa

from persist_lib.format.columns import integers
from persist_lib.format.fingerprint import FEW, diff_sum_of, diffs_of, fingerprint_of, hash_rows
from persist_lib.format.hashing import hash_few
from persist_lib.format.keys import bounds
from persist_lib.schema import DIFF, TIME, Schema

MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """Bytes to be stored and what the state will say about it.

    Times are inclusive, `earliest` is how many updates are at the first of them; sums are modulo 2**64.
    """

    data: bytes | memoryview
    rows: int
    schema_id: int
    digests: bytes
    key_lower: bytes
    key_upper: bytes
    time_lower: int
    time_upper: int
    diff_sum: int
    fingerprint: int
    earliest: int

    @property
    def size(self) -> int:
        """How many bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Description:
    """What the state says about some updates, wherever they are stored. Sums of two are added modulo 2**64."""

    rows: int
    key_lower: bytes
    key_upper: bytes
    time_lower: int
    time_upper: int
    diff_sum: int
    fingerprint: int
    earliest: int


def describe(schema: Schema, table: pa.Table | pa.RecordBatch) -> Description:
    """Describe sorted updates, of which there must be some."""
    if table.num_rows <= FEW:
        return _describe_few(schema, table)
    key_lower, key_upper = bounds(schema, table)
    times = integers(table.column(TIME))
    diffs, first = diffs_of(table), times.min()
    return Description(
        rows=table.num_rows,
        key_lower=key_lower,
        key_upper=key_upper,
        time_lower=int(first),
        time_upper=int(times.max()),
        diff_sum=diff_sum_of(diffs),
        fingerprint=fingerprint_of(hash_rows(schema, table), diffs),
        earliest=int((times == first).sum()),
    )


def _describe_few(schema: Schema, table: pa.Table | pa.RecordBatch) -> Description:
    """The same without numpy, whose calls cost more than a few values. A test holds both to the same answer."""
    key_lower, key_upper = bounds(schema, table)
    times, diffs = table.column(TIME).to_pylist(), table.column(DIFF).to_pylist()
    first = min(times)
    return Description(
        rows=len(times),
        key_lower=key_lower,
        key_upper=key_upper,
        time_lower=first,
        time_upper=max(times),
        diff_sum=wrap_signed(sum(diffs)),
        fingerprint=sum(map(mul, hash_few(schema, table), diffs)) & MASK,
        earliest=times.count(first),
    )


def wrap_signed(total: int) -> int:
    """A sum modulo 2**64 as a signed 64-bit integer."""
    return ((total + (1 << 63)) & MASK) - (1 << 63)
