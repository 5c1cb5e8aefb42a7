"""Appliers: they copy what transactions wrote from the WAL to the tables. See `tidying` for what comes after.

Any number of them may be at it. What they append is definite: it is what the WAL has. So whoever is first at a table
wins, and the others add what lies beyond. Idle tables are not touched.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from persist_lib.errors import NotFound, ShardFinished, UpperMismatch
from persist_lib.kernel.columns import at_time
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.storage.records import CollectionRecord
from persist_lib.storage.tables.view import View, needs_settling

if TYPE_CHECKING:
    from persist_lib.storage.tables.wal_line import WalLine


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
                line.tail.drop(table, wal_upper)  # it is dropped: nobody can read it
            continue
        if only is not None and table != only:
            continue
        try:
            found = apply_table(line, line.view_of(record), deadline)
        except (NotFound, ShardFinished):
            continue  # dropped meanwhile
        if found is not None:
            done.append(record.name)
            count += found
    return Applied(tuple(done), count, wal_upper)


def _tables(line: WalLine) -> dict[str, CollectionRecord | None]:
    """The tables that have something in the tail; None for one that is gone for certain."""
    found = line.tail.tables()
    records = {record.id: record for record in line.tables()}
    if not records.keys() >= set(found):
        # SUBTLE: the tail may be newer than the catalog that is known. One that is read now is newer than the tail.
        line.look_at_catalog()
        records = {record.id: record for record in line.tables()}
    return {table: records.get(table) for table in found}


def apply_table(line: WalLine, view: View, deadline: Deadline) -> int | None:
    """Bring one table up to the WAL's upper that is known, as far as its renditions are ready. None: nothing to do."""
    with line.lock:
        wal_upper = line.upper
        timeline = view.timeline()
        pieces = []
        for span in timeline.spans[-2:]:
            upper = view.upper(span)
            end = wal_upper if span.end is None else min(span.end, wal_upper)
            if upper >= end or upper < span.start:
                continue  # complete, or still being copied
            first = line.tail.first_from(view.id, upper)
            is_needed = (first is not None and first < end) or span.end is not None or needs_settling(span, upper)
            if is_needed:
                entries = [e for e in line.tail.of(view.id, upper - 1, end - 1) if not e.is_mark]
                pieces.append((span, upper, end, entries))
    if not pieces:
        return None
    # SUBTLE: the promise first. Else a handover below could lose what is appended here.
    known = view.promise(wal_upper, max(0.001, deadline.remaining_s()))
    count = 0
    for span, lower, end, entries in pieces:
        now = known.at(end - 1)
        if now.command != span.command:
            return None  # handed over in the meantime: look again
        write = view.writer(span.rendition)
        empty = empty_table(write.schema.updates)
        rows = pa.concat_tables([empty, *(at_time(e.rows(write.schema), e.time) for e in entries)])
        with suppress(UpperMismatch):  # a copier is not that far, or another applier is further
            write.append(rows, lower, end, timeout=max(0.001, deadline.remaining_s()))
            count += rows.num_rows
    return count
