"""What the state says about some updates: rows, bounds, sums, digests. The same for objects and inline bytes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import msgspec
import pyarrow as pa

from persist_lib.kernel.columns import integers
from persist_lib.kernel.fingerprint import FEW, diff_sum_of, diffs_of, fingerprint_of, hash_rows
from persist_lib.kernel.hashing import hash_few
from persist_lib.kernel.keys import bounds
from persist_lib.schema.schema import DIFF, TIME, Schema

MASK = (1 << 64) - 1


class Description(msgspec.Struct, frozen=True):
    """What the state says about some updates, wherever they are stored. Sums of two are added modulo 2**64.

    Times are inclusive, `earliest` is how many updates are at the first of them.
    """

    rows: int
    key_lower: bytes
    key_upper: bytes
    time_lower: int
    time_upper: int
    diff_sum: int
    fingerprint: int
    earliest: int


class EncodedPart(msgspec.Struct, frozen=True):
    """Bytes to be stored, their digests, and what is in them."""

    data: bytes | memoryview
    schema_id: int
    digests: bytes
    said: Description

    @property
    def size(self) -> int:
        """How many bytes."""
        return len(self.data)


def join(said: Sequence[Description]) -> Description:
    """The description of updates that follow one another in order, from those of their pieces."""
    first = min(piece.time_lower for piece in said)
    return Description(
        rows=sum(piece.rows for piece in said),
        key_lower=said[0].key_lower,
        key_upper=said[-1].key_upper,
        time_lower=first,
        time_upper=max(piece.time_upper for piece in said),
        diff_sum=wrap_signed(sum(piece.diff_sum for piece in said)),
        fingerprint=sum(piece.fingerprint for piece in said) & MASK,
        earliest=sum(piece.earliest for piece in said if piece.time_lower == first),
    )


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
