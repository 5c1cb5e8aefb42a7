"""The sums over tables of updates: the one place where what was read is added up."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from persist_lib.core.sums import Sums, total
from persist_lib.kernel.fingerprint import diff_sum_of, diffs_of, fingerprint_of, hash_rows
from persist_lib.schema.schema import Schema


def add_up(schema: Schema, tables: Iterable[pa.Table]) -> Sums:
    """The sums over all updates of `tables`, in bounded memory. They hold the schema's columns and `_diff`."""
    return total(sums_of(schema, table) for table in tables)


def sums_of(schema: Schema, table: pa.Table | pa.RecordBatch) -> Sums:
    """The sums over the updates of one table."""
    diffs = diffs_of(table)
    return Sums(table.num_rows, diff_sum_of(diffs), fingerprint_of(hash_rows(schema, table), diffs))
