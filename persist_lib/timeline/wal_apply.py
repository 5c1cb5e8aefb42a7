"""Appliers, which copy what transactions wrote from the WAL to the tables, and how far the tables are behind.

Any number of appliers may be at it. What they append is definite: it is what the WAL has. So whoever is first at a
table wins, and the others add what lies beyond. Idle tables are not touched. `wal_truncation` is for what comes after.

How far tables are behind is read without a lease, and changes nothing. SUBTLE: the WAL is read first, then the tables.
What is committed in between is beyond what was read of the WAL; so all rows up to `keep` are in their tables, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.effects import is_held_back
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.records import HOLD, CollectionRecord, TimelineRecord
from persist_lib.catalog.renditions import Renditions, Span, meet
from persist_lib.catalog.wal import DROPPED, SCHEMA, wal_shard
from persist_lib.errors import NotFound, ShardFinished, SinceViolation, UpperMismatch
from persist_lib.kernel.columns import at_time, integers
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.timeline.view import View, needs_settling
from persist_lib.timeline.wal_cache import Entry

if TYPE_CHECKING:
    from persist_lib.timeline.wal_timeline import WalLine

ATTEMPTS = 10
"""How often a WAL is read again because it was tidied since."""


class Behind(NamedTuple):
    """A table that has not got all of what was committed to it.

    `commits` of them, of `size` bytes in the WAL, the oldest at `first`, are in the WAL alone; the table itself is
    complete before `upper`. `is_ready` is False while its rendition is being copied, which comes first.
    """

    id: str
    table: str
    upper: int
    commits: int
    size: int
    first: int
    is_ready: bool


class Lag(NamedTuple):
    """A timeline's WAL: its `upper`, the tables that are behind it, and what it holds.

    Of its `rows`, which have `size` bytes, `done` are in their tables, and can go. `keep` is the time up to which that
    is so of all rows; `since` is from when on the WAL keeps history, if `is_held_back` more than anybody needs.
    """

    timeline: str
    upper: int = 0
    tables: tuple[Behind, ...] = ()
    rows: int = 0
    size: int = 0
    done: int = 0
    keep: int = -1
    since: int = -1
    is_held_back: bool = False

    @property
    def unapplied(self) -> int:
        """The bytes that are in the WAL alone."""
        return sum(behind.size for behind in self.tables)

    @property
    def first(self) -> int | None:
        """The time of the oldest commit that is in the WAL alone."""
        return min((behind.first for behind in self.tables), default=None)

    def waits_ms(self, now: int) -> int:
        """For how long the oldest commit that is in the WAL alone has been there, by the store's clock, in ms."""
        return 0 if self.first is None else max(0, now - self.first)

    def is_due(self) -> bool:
        """Whether the WAL has something to give up."""
        return self.done > 0 or self.since < self.keep or self.is_held_back


def fetch_lag(catalog: Catalog, record: TimelineRecord) -> Lag:
    """How far the tables of a timeline in WAL mode are behind. One request where all is done."""
    client, shard = catalog.client, wal_shard(record.id)
    version = client.machine(shard).try_fetch()
    if version is None:
        return Lag(record.name)  # being made
    state = version.state
    upper, hold = state.upper.time or 0, state.holds.get(HOLD)
    since = -1 if hold is None else hold.since.time or 0
    if upper <= 1 or since >= upper - 1:  # rows go before the hold moves beyond them
        is_behind = hold is not None and is_held_back(state, hold.since)
        return Lag(record.name, upper, keep=upper - 1, since=since, is_held_back=is_behind)
    as_of, rows = _rows(catalog, shard)
    contents = catalog.fetch()
    keep, behind = as_of, []
    for table in pc.unique(rows.column("table")).to_pylist():
        collection = contents.collections.get(table)
        if collection is None or collection.state == "dropping":
            continue
        mine = rows.filter(pc.equal(rows.column("table"), table))
        if (dropped := _dropped(mine)) is not None:  # the mark is needed until the catalog says so too
            keep = min(keep, dropped - 1)
        with suppress(NotFound):  # dropped since
            for found, needed in _behind(catalog, collection, mine):
                behind.append(found)
                keep = min(keep, needed - 1)
    times = integers(rows.column("at"))
    return Lag(
        record.name, as_of + 1, tuple(sorted(behind, key=lambda one: one.table)), rows.num_rows,
        int(pc.sum(rows.column("size")).as_py() or 0), int(np.count_nonzero(times <= keep)), keep, since,
    )  # fmt: skip


def _rows(catalog: Catalog, shard: str) -> tuple[int, pa.Table]:
    """The newest time of the WAL, and its rows as of then: the sizes of what is in them, not that itself."""
    reader = unheld(catalog.client, shard, SCHEMA)
    for attempt in range(ATTEMPTS):
        try:
            with reader.snapshot(diff=True) as snapshot:
                found = [_sized(table) for table in snapshot.batches()]
        except SinceViolation:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return snapshot.as_of, pa.concat_tables([_sized(SCHEMA.contents.empty_table()), *found])
    raise AssertionError  # pragma: no cover


def _sized(table: pa.Table) -> pa.Table:
    sizes = pc.cast(pc.binary_length(table.column("rows")), pa.int64())
    return table.select(["at", "table", "chunk"]).append_column("size", sizes)


def _dropped(rows: pa.Table) -> int | None:
    marks = integers(rows.column("at"))[integers(rows.column("chunk")) == DROPPED]
    return int(marks.min()) if len(marks) else None


def _behind(catalog: Catalog, collection: CollectionRecord, rows: pa.Table) -> list[tuple[Behind, int]]:
    """What a table lacks of its rows, by rendition, and from when on it needs what the WAL has.

    A rendition that was handed over, or to, has to come up to the handover, or beyond: also where it lacks no rows.
    """
    renditions = Renditions(catalog.client, collection.shard, "ms", collection.name)
    found = []
    for span in renditions.fetch().spans[-2:]:
        upper = meet(catalog.client, span.rendition.names).time
        if upper is None:
            continue  # closed: it is being dropped
        missing = _missing(rows, span, upper)
        times, size = integers(missing.column("at")), int(pc.sum(missing.column("size")).as_py() or 0)
        starts = []
        if missing.num_rows:
            starts.append((int(times.min()), upper))
        if span.end is not None and upper < span.end:
            starts.append((span.end, span.end))
        elif needs_settling(span, upper):
            starts.append((span.start, span.start))
        if starts:
            first, needed = (min(each) for each in zip(*starts, strict=True))
            commits, is_ready = len(np.unique(times)), upper >= span.start
            found.append((Behind(collection.id, collection.name, upper, commits, size, first, is_ready), needed))
    return found


def _missing(rows: pa.Table, span: Span, upper: int) -> pa.Table:
    """The rows from `upper` on, at the times at which the rendition is the table: a copy gets older ones elsewhere."""
    times, chunks = integers(rows.column("at")), integers(rows.column("chunk"))
    is_missing = (times >= max(upper, span.start)) & (chunks >= 0)
    if span.end is not None:
        is_missing &= times < span.end
    return rows.filter(pa.array(is_missing))


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
        # The tail may be newer than the catalog that is known. One that is read now is newer than the tail.
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
