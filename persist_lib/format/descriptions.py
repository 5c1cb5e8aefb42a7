"""What the state says about some updates: rows, bounds, sums, digests. The same for objects and inline bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul

import msgspec
import pyarrow as pa

from persist_lib.core.state import ValueBounds
from persist_lib.core.sums import MODULUS, Sums, total, wrap_signed
from persist_lib.format import value_bounds
from persist_lib.kernel.columns import integers
from persist_lib.kernel.fingerprint import FEW, diff_sum_of, diffs_of, fingerprint_of, hash_rows
from persist_lib.kernel.hashing import hash_few
from persist_lib.kernel.keys import bounds
from persist_lib.schema.schema import DIFF, TIME, Schema


def add_up(schema: Schema, tables: Iterable[pa.Table]) -> Sums:
    """The sums over all updates of `tables`, in bounded memory. They hold the schema's columns and `_diff`."""
    return total(sums_of(schema, table) for table in tables)


def sums_of(schema: Schema, table: pa.Table | pa.RecordBatch) -> Sums:
    """The sums over the updates of one table."""
    diffs = diffs_of(table)
    return Sums(table.num_rows, diff_sum_of(diffs), fingerprint_of(hash_rows(schema, table), diffs))


class Description(msgspec.Struct, frozen=True):
    """What the state says about some updates, wherever they are stored.

    Times are inclusive, `earliest` is how many updates are at the first of them.
    """

    sums: Sums
    key_lower: bytes
    key_upper: bytes
    time_lower: int
    time_upper: int
    earliest: int
    values: tuple[ValueBounds, ...] = ()


class EncodedPart(msgspec.Struct, frozen=True):
    """Bytes to be stored, their digests, and what is in them."""

    data: bytes | memoryview
    schema_id: int
    digests: bytes
    said: Description

    @property
    def size(self) -> int:
        return len(self.data)


def join(said: Sequence[Description]) -> Description:
    """The description of updates that follow one another in order, from those of their pieces."""
    first = min(piece.time_lower for piece in said)
    return Description(
        sums=total(piece.sums for piece in said),
        key_lower=said[0].key_lower,
        key_upper=said[-1].key_upper,
        time_lower=first,
        time_upper=max(piece.time_upper for piece in said),
        earliest=sum(piece.earliest for piece in said if piece.time_lower == first),
        values=value_bounds.join([piece.values for piece in said]),
    )


def describe(schema: Schema, table: pa.Table | pa.RecordBatch) -> Description:
    """Describe sorted updates, of which there must be some."""
    if table.num_rows <= FEW:  # without numpy, whose calls cost more than a few values
        few, diffs = table.column(TIME).to_pylist(), table.column(DIFF).to_pylist()
        hashes = hash_few(schema, table)
        sums = Sums(len(few), wrap_signed(sum(diffs)), sum(map(mul, hashes, diffs)) % MODULUS)
        first, last = min(few), max(few)
        return Description(sums, *bounds(schema, table), first, last, few.count(first))
    times, sums = integers(table.column(TIME)), sums_of(schema, table)
    first, last = int(times.min()), int(times.max())
    return Description(sums, *bounds(schema, table), first, last, int((times == first).sum()))


def describe_group(schema: Schema, table: pa.Table) -> Description:
    """The same of a row group of an object, with the bounds of its values."""
    return msgspec.structs.replace(describe(schema, table), values=value_bounds.bounds_of(schema, table))
