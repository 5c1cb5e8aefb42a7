"""Appliers: they copy what transactions wrote from the WAL to the tables, and give up what is copied.

Any number of them may be at it. What they append is definite: it is what the WAL has. So whoever is first at a table
wins, and the others add what lies beyond. Idle tables are not touched.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from persist_lib.errors import HoldConflict, Indeterminate, NotFound, ShardFinished, SinceViolation, UpperMismatch
from persist_lib.frontier import at
from persist_lib.kernel.by_key import replacing
from persist_lib.kernel.columns import at_time
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.storage.effects import HOLD
from persist_lib.storage.records import CollectionRecord
from persist_lib.storage.tables.view import View, needs_settling
from persist_lib.storage.wal import SCHEMA

if TYPE_CHECKING:
    from persist_lib.storage.tables.wal_line import WalLine

MOST_BYTES = 32 << 20
"""What is retracted of a WAL at once."""


class Applied(NamedTuple):
    """What a pass did: the tables that it brought further, the updates that they got, and the WAL's upper."""

    tables: tuple[str, ...]
    updates: int
    upper: int


def apply(line: WalLine, deadline: Deadline) -> Applied:
    """Bring all tables that have something in the WAL up to the WAL's upper."""
    line.look()
    wal_upper = line.upper
    done, count = [], 0
    for table, record in _tables(line).items():
        if record is None:
            with line.lock:
                line.tail.drop(table, wal_upper)  # it is dropped: nobody can read it
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
    known = view.promise(wal_upper, deadline.left_s())
    count = 0
    for span, lower, end, entries in pieces:
        now = known.at(end - 1)
        if now.command != span.command:
            return None  # handed over in the meantime: look again
        write = view.writer(span.rendition)
        empty = empty_table(write.schema.updates)
        rows = pa.concat_tables([empty, *(at_time(e.rows(write.schema), e.time) for e in entries)])
        with suppress(UpperMismatch):  # a copier is not that far, or another applier is further
            write.append(rows, lower, end, timeout=deadline.left_s())
            count += rows.num_rows
    return count


def tidy(line: WalLine, deadline: Deadline) -> int:
    """Give up what is in the tables: let go of the WAL's history, and retract its rows. Answers how many rows.

    SUBTLE: the WAL's upper is read first, then the tables'. What is committed in between is at or beyond the WAL's
    upper, and so beyond the hold. All rows up to the hold are in their tables, for ever.
    """
    line.look()
    keep = line.upper - 1
    for table, record in _tables(line).items():
        if record is None:
            continue
        try:
            view = line.view_of(record)
        except NotFound:
            continue
        for span in view.timeline().spans[-2:]:
            upper = view.upper(span)
            first = line.tail.first_from(table, upper)
            if first is not None and (span.end is None or first < span.end):
                keep = min(keep, upper - 1)
    hold = line.client.inspect(line.shard).state.holds.get(HOLD)
    if hold is not None and hold.since < at(max(keep, 0)):
        with suppress(SinceViolation, HoldConflict):  # another process has moved it further
            line.client.set_hold(line.shard, HOLD, keep)
    return _retract(line, keep, deadline)


def _retract(line: WalLine, to: int, deadline: Deadline) -> int:
    """Retract the rows of the WAL with times up to `to`, or as many of them as can be held in memory."""
    with line.client.open_reader(line.shard, SCHEMA, purpose="tidy") as reader:
        while to >= 0:
            upper = reader.fetch_upper().time or 0
            found = [empty_table(SCHEMA.contents)]
            for table in reader.snapshot(upper - 1, key_to=[to + 1]).batches():
                found.append(table)
                if sum(table.nbytes for table in found) > MOST_BYTES:
                    break
            rows = pa.concat_tables(found)
            if not rows.num_rows:
                return 0
            time = max(upper, line.client.consensus.now())
            try:
                line.writer().compare_and_append(
                    at_time(replacing(SCHEMA, rows, rows.slice(0, 0)), time), upper, time + 1
                )
            except (UpperMismatch, Indeterminate):
                if deadline.has_passed():
                    return 0
            else:
                return int(rows.num_rows)
    return 0
