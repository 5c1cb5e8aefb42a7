"""Merged runs as parts: what a compaction writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from persist_lib.core.trace import GROUP_BYTES, GROUP_ROWS
from persist_lib.format.encoded import EncodedPart
from persist_lib.format.parquet import Describing, PartEncoder, groups_of
from persist_lib.kernel.merge import MERGE_BYTES, Run, merge_windows
from persist_lib.schema.schema import Schema

PART_BYTES = 128 << 20


def merge_to_parts(
    runs: Sequence[Run],
    schema: Schema,
    schema_id: int,
    *,
    advance_to: int | None = None,
    part_bytes: int = PART_BYTES,
    merge_bytes: int = MERGE_BYTES,
    window_rows: int | None = None,
) -> Iterator[EncodedPart]:
    """One run of parts of about `part_bytes` that stands for all the runs: what a compaction writes.

    A sum beyond 64 bits stays several updates, so that it only fails the reader that asks for it.
    """
    windows = merge_windows(
        runs, schema, advance_to=advance_to, merge_bytes=merge_bytes, window_rows=window_rows, on_overflow="split"
    )
    return parts_of(windows, schema, schema_id, part_bytes)


def parts_of(
    windows: Iterable[pa.Table], schema: Schema, schema_id: int, part_bytes: int, parallel: Describing = map
) -> Iterator[EncodedPart]:
    """One run of parts of about `part_bytes` from tables that follow one another in order and are consolidated."""
    encoder = PartEncoder(schema, schema_id)
    for table in gathered(windows, part_bytes):
        for group in groups_of(table):
            encoder.write(group, parallel)
            if encoder.size >= part_bytes:
                yield encoder.finish()
                encoder = PartEncoder(schema, schema_id)
    if encoder.rows:
        yield encoder.finish()


def gathered(windows: Iterable[pa.Table], part_bytes: int = PART_BYTES) -> Iterator[pa.Table]:
    """The same rows in tables of at least most of a row group, or of a part, however small the windows are.

    A row group a window would put every column of wide rows into every chunk of a part, so that leaving columns out
    saved nothing.
    """
    enough = min(GROUP_BYTES * 3 // 4, part_bytes)
    held: list[pa.Table] = []
    for window in windows:
        held.append(window)
        del window  # what is given away is not kept
        rows, size = sum(table.num_rows for table in held), sum(table.nbytes for table in held)
        if rows >= GROUP_ROWS or size >= enough:
            yield _taken(held)
    if held:
        yield _taken(held)


def _taken(held: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables(held).combine_chunks() if len(held) > 1 else held[0]
    held.clear()
    return table
