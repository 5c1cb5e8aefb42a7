"""How far the tables of a timeline are behind its WAL: what is in the WAL alone, and what the WAL can give up.

It is read without a lease, and changes nothing. SUBTLE: the WAL is read first, then the tables. What is committed in
between is beyond what was read of the WAL; so all rows up to `keep` are in their tables, for ever.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.effects import is_held_back
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.names import HOLD
from persist_lib.catalog.records import CollectionRecord, TimelineRecord
from persist_lib.catalog.renditions import Renditions, Span, meet
from persist_lib.catalog.wal import DROPPED, SCHEMA, wal_shard
from persist_lib.errors import NotFound, SinceViolation
from persist_lib.kernel.columns import integers
from persist_lib.timeline.view import needs_settling

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
