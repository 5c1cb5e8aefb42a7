"""Finding keys in a part: in the row groups that can hold one, by their key columns, before anything else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from persist_lib.format.parquet import PartFile
from persist_lib.kernel.columns import Rows
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import take

Prefetch = Callable[[Iterable[tuple[int, int]]], None]
"""Fetches byte ranges of the object at once."""


class _Hit(NamedTuple):
    """A row group that holds some of the keys: in which rows, and the key columns of those."""

    group: int
    rows: Rows
    keys: pa.Table


def find_rows(file: PartFile, keys: Keys, prefetch: Prefetch | None = None, *, use_threads: bool = True) -> pa.Table:
    """The rows of a part that have one of the keys, in canonical order, with the columns that the file was opened for.

    `prefetch` is called with the bytes that are about to be read: first the key columns of the row groups that can
    hold a key, then the other columns of those that do.
    """
    names, rest = file.key_columns()
    chosen = [
        (group, within) for group, (least, most) in enumerate(file.bounds) if len(within := keys.between(least, most))
    ]
    _ahead(prefetch, file, [group for group, _ in chosen], names)
    hits: list[_Hit] = []
    for group, within in chosen:
        table = file.read_group(group, names, use_threads=use_threads)
        if (rows := within.find(table)).size:
            hits.append(_Hit(group, rows, take(table, rows)))
    _ahead(prefetch, file, [hit.group for hit in hits], rest)
    found = [_whole(hit, file.read_group(hit.group, rest, use_threads=use_threads)) for hit in hits]
    return file.conformed(found)


def _ahead(prefetch: Prefetch | None, file: PartFile, groups: Sequence[int], names: Sequence[str]) -> None:
    if prefetch is not None and groups:
        prefetch(file.column_ranges(groups, names))


def _whole(hit: _Hit, rest: pa.Table) -> pa.Table:
    """The rows of a hit with all columns; `rest` has the other columns of the whole row group."""
    taken = take(rest, hit.rows)
    fields = [*hit.keys.schema, *taken.schema]
    return pa.table([*hit.keys.columns, *taken.columns], schema=pa.schema(fields))
