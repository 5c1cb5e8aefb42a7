"""Giving up what a WAL has and the tables have too, so that it stays small. Anybody may do so, at any time.

SUBTLE: the rows up to a time are retracted before the hold moves there, so a WAL whose hold is at its newest time has
nothing left to give up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa

from persist_lib.client import Client
from persist_lib.errors import HoldConflict, Indeterminate, SinceViolation, UpperMismatch
from persist_lib.kernel.by_key import replacing
from persist_lib.kernel.columns import at_time, integers
from persist_lib.relation.next_time import store_time
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF
from persist_lib.storage.catalog import Catalog
from persist_lib.storage.effects import HOLD
from persist_lib.storage.records import TimelineRecord
from persist_lib.storage.small import unheld
from persist_lib.storage.tables.lag import fetch_lag
from persist_lib.storage.wal import SCHEMA, wal_shard

MOST_BYTES = 32 << 20
"""What is retracted of a WAL at once."""


def tidy(catalog: Catalog, record: TimelineRecord, deadline: Deadline, writer: Callable[[], WriteHandle]) -> int:
    """Retract the rows of a WAL that are in their tables, and let go of its history. Answers how many rows."""
    client, shard, count = catalog.client, wal_shard(record.id), 0
    while (lag := fetch_lag(catalog, record)).done:
        with suppress(SinceViolation):  # another one tidies, and is further
            count += _retract(client, shard, lag.keep, deadline, writer())
        if deadline.has_passed():
            return count
    if lag.is_due():
        with suppress(SinceViolation, HoldConflict):  # another one has moved it further
            client.downgrade_hold(shard, HOLD, lag.keep)
    return count


def _retract(client: Client, shard: str, to: int, deadline: Deadline, write: WriteHandle) -> int:
    """Retract the rows with times up to `to`, some at a time."""
    reader, count = unheld(client, shard, SCHEMA), 0
    while not deadline.has_passed():
        found, size = [empty_table(SCHEMA.contents)], 0
        with reader.snapshot(key_to=[to + 1], diff=True) as snapshot:
            for table in snapshot.batches():
                found.append(table)
                size += table.nbytes
                if size > MOST_BYTES:
                    break
        rows = pa.concat_tables(found)
        if not rows.num_rows:
            break
        if _retracted(reader, rows, snapshot.as_of, to, deadline, write):
            count += rows.num_rows
    return count


def _retracted(reader: ReadHandle, rows: pa.Table, as_of: int, to: int, deadline: Deadline, write: WriteHandle) -> bool:
    """Retract rows that are there as of a time: also later, if nobody else retracted any of them in between."""
    changes = replacing(SCHEMA, rows, rows.slice(0, 0))
    while not deadline.has_passed():
        upper = as_of + 1
        machine = write.machine
        time = store_time(f"shard {write.shard}", upper, machine.consensus.now(), machine.runtime.clock_ms())
        try:
            write.compare_and_append(at_time(changes, time), upper, time + 1)
        except Indeterminate:
            return False  # perhaps they are gone: it is read anew
        except UpperMismatch:
            with reader.changes(as_of) as since:
                for table in since.batches():
                    is_gone = (integers(table.column(DIFF)) < 0) & (integers(table.column("at")) <= to)
                    if is_gone.any():
                        return False
            as_of = since.to
        else:
            return True
    return False
