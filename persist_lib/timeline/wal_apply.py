"""Appliers: they copy what transactions wrote from the WAL to the tables. See `tidying` for what comes after.

Any number of them may be at it. What they append is definite: it is what the WAL has. So whoever is first at a table
wins, and the others add what lies beyond. Idle tables are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from persist_lib.catalog.records import CollectionRecord
from persist_lib.errors import NotFound, ShardFinished, UpperMismatch
from persist_lib.kernel.columns import at_time
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.timeline.lag import fetch_lag
from persist_lib.timeline.view import View, needs_settling
from persist_lib.timeline.wal_cache import Entry

if TYPE_CHECKING:
    from persist_lib.timeline.wal_timeline import WalLine


ROUND_BYTES = 32 << 20
"""How much is appended to a table at once, about."""


class Applied(NamedTuple):
    """What a pass did: the tables that it brought further, the updates that they got, and the WAL's upper."""

    tables: tuple[str, ...]
    updates: int
    upper: int


def apply(line: WalLine, deadline: Deadline, only: str | None = None) -> Applied:
    """Bring the table with this id, or all tables, that have something in the WAL up to the WAL's upper."""
    line.look()
    wal_upper = line.upper
    done, count = [], 0
    for table, record in _tables(line).items():
        if record is None:
            with line.lock:
                line.tail.drop(table, wal_upper)  # it is dropped: it can never be read
            continue
        if only is not None and table != only:
            continue
        try:
            found = apply_table(line, line.view_of(record), deadline)
        except (NotFound, ShardFinished):
            continue  # dropped since
        if found is not None:
            done.append(record.name)
            count += found
    return Applied(tuple(done), count, wal_upper)


def _tables(line: WalLine) -> dict[str, CollectionRecord | None]:
    """The tables that may have something in the WAL alone; None for one that is gone for certain."""
    if line.tail.start <= line.floor:
        found = line.tail.tables()
    else:  # not all of it is in memory
        found = [behind.id for behind in fetch_lag(line.catalog, line.record).tables]
    records = {record.id: record for record in line.tables()}
    if not records.keys() >= set(found):
        # SUBTLE: the tail may be newer than the catalog that is known. One that is read now is newer than the tail.
        line.catalog.fetch()
        records = {record.id: record for record in line.tables()}
    return {table: records.get(table) for table in found}


def apply_table(line: WalLine, view: View, deadline: Deadline) -> int | None:
    """Bring one table up to the WAL's upper that is known, as far as its renditions are ready. None: nothing to do."""
    with line.lock:
        wal_upper = line.upper
        timeline = view.timeline()
        pieces = []
        for span in timeline.spans[-2:]:
            end = wal_upper if span.end is None else min(span.end, wal_upper)
            upper, entries = line.lacking(view, span, end - 1)
            if upper >= end or upper < span.start:
                continue  # complete, or still being copied
            if entries or span.end is not None or needs_settling(span, upper):
                pieces.append((span, upper, end, entries))
    if not pieces:
        return None
    # SUBTLE: the promise first. Else a handover below could lose what is appended here.
    known = view.promise(wal_upper, deadline)
    count = 0
    for span, start, end, entries in pieces:
        now = known.at(end - 1)
        if now.command != span.command:
            return None  # handed over in the meantime: look again
        write, lower = view.writer(span.rendition), start
        with suppress(UpperMismatch):  # a copier is not that far, or another applier is further
            for rows, upper in rounds(entries, write.schema, end):
                write.append(rows, lower, upper, timeout=deadline.left_s())
                count, lower = count + rows.num_rows, upper
    return count


def rounds(entries: Iterable[Entry], schema: Schema, end: int) -> Iterator[tuple[pa.Table, int]]:
    """What to append, some megabytes at a time, and up to where: always all that one transaction wrote."""
    pending, size, newest = [empty_table(schema.updates)], 0, -1
    for entry in entries:
        if size > ROUND_BYTES and entry.time > newest:
            yield pa.concat_tables(pending), newest + 1
            pending, size = [empty_table(schema.updates)], 0
        rows = at_time(entry.whole_rows(schema), entry.time)
        pending.append(rows)
        size, newest = size + rows.nbytes, entry.time
    yield pa.concat_tables(pending), end
