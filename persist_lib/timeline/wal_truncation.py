"""Giving up what a WAL has and the tables have too, and the deleted keys that a table has kept for its span.

Any process may do so, at any time, again. The rows up to a time are retracted before the hold moves there, so a
WAL whose hold is at its newest time has nothing left to give up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.collection_status import expiry_steps
from persist_lib.catalog.describe import Do, Step
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.records import HOLD, LAYER, CollectionRecord, KeptDeletes, RenditionRecord, TimelineRecord
from persist_lib.catalog.wal import SCHEMA, wal_shard
from persist_lib.client import Client
from persist_lib.errors import HoldConflict, Indeterminate, ShardFinished, SinceViolation, UpperMismatch
from persist_lib.kernel.columns import at_time, integers
from persist_lib.kernel.keyset import replacing
from persist_lib.relation.deleted_keys import AT, DELETED_AT, FLOOR, floor_of, forget
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.registration import store_time
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF
from persist_lib.timeline.wal_apply import Behind, Lag, apply, fetch_lag
from persist_lib.timeline.wal_timeline import WalLine
from persist_lib.times import Times

MOST = 100_000
"""How many are forgotten in one commit."""


def forgetting_steps(
    catalog: Catalog, record: TimelineRecord, deadline: Deadline, only: str | None
) -> Iterator[tuple[Step, Do]]:
    """What there is to forget for the table with this id, or for all tables of a timeline, and how to do it.

    Marks that are in the WAL alone are not looked at: they are applied before, and none is old.
    """
    contents = catalog.fetch()
    for owner in contents.collections.values():
        kept, marks = owner.keep_deletes, contents.marks_of(owner)
        if owner.timeline != record.id or only not in (None, owner.id) or kept is None or not marks:
            continue
        if owner.state == marks[0].state == "live":
            count = _overdue(catalog, contents.renditions_of(marks[0].id)[0], kept)
            if count:
                keys = f"{count:,} deleted key{'' if count == 1 else 's'}"
                why = f"they were kept for {Times('ms', lambda: 0).show_distance(kept.span_ms)}"
                yield Step(owner.name, "forget", keys, why), partial(_forget, catalog, record, owner, deadline)


def _overdue(catalog: Catalog, rendition: RenditionRecord, kept: KeptDeletes) -> int:
    """How many marks were kept for the span, of those that are in their shard."""
    client, (shard,) = catalog.client, rendition.names
    if not client.machine(shard).fetch().state.upper.time:  # nothing is there yet, or it was dropped
        return 0
    reader = unheld(client, shard, rendition.columns)
    with reader.snapshot(columns=[], diff=True, filter=_old(client.consensus.now() - kept.span_ms)) as found:
        return int(found.count())


def _forget(catalog: Catalog, record: TimelineRecord, owner: CollectionRecord, deadline: Deadline) -> None:
    line = WalLine(catalog, record, OWNER)
    try:
        while line.again(lambda: _forget_some(line, owner, deadline), deadline) and not deadline.has_passed():
            pass
    except ShardFinished:
        pass  # dropped since
    finally:
        line.close()


def _forget_some(line: WalLine, owner: CollectionRecord, deadline: Deadline) -> bool:
    """Forget some marks, in one commit. Whether there may be more."""
    line.look()
    view = line.view_of(owner)
    with line.at_newest(view, deadline) as as_of:
        view = line.current(view, view.schema)
        kept, keeping = view.record.keep_deletes, line.keeping(view, view.schema)
        if kept is None or keeping is None:
            return False
        (rule, marks), now = keeping, line.client.consensus.now()
        wanted = Asked(filter=_old(now - kept.span_ms)).of(rule.marks)
        overdue = line.contents(marks, as_of, wanted, deadline).slice(0, MOST)
        if not overdue.num_rows:
            return False
        floor = line.contents(marks, as_of, floor_of(rule.marks), deadline)
        changes = forget(rule.marks, rule.column, overdue, floor, now)
        line.try_commit([(marks, changes)], as_of, deadline)
    return True


def _old(before_ms: int) -> pc.Expression:
    return (pc.field(FLOOR) == 0) & (pc.field(DELETED_AT) < pa.scalar(before_ms, AT))


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
    """Retract rows that are there as of a time: also later, if no other process retracted any of them in between."""
    changes = replacing(SCHEMA, rows, rows.slice(0, 0))
    while not deadline.has_passed():
        upper = as_of + 1
        machine = write.machine
        time = store_time(f"shard {write.shard}", upper, machine.consensus.now(), machine.runtime.clock_ms())
        try:
            write.compare_and_append(at_time(changes, time), upper, time + 1)
        except Indeterminate:
            return False  # perhaps they are gone: it is read again
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


OWNER = "tend"


def timeline_steps(
    catalog: Catalog, record: TimelineRecord, deadline: Deadline, *, only: str | None = None, dry_run: bool = False
) -> Generator[tuple[Step, Do], None, None]:
    """What there is to do for the table with this id, or for all tables of a timeline and its WAL; and how to do it.

    The next step is found when the one before was done. A dry run says what would be done if all of them were.
    """
    lag = fetch_lag(catalog, record)
    every = catalog.latest().collections
    its = {only, *(one.id for one in every.values() if one.marks_of == only)}
    wanted = [behind for behind in lag.tables if only is None or behind.id in its]
    if wanted:
        line = WalLine(catalog, record, OWNER)
        try:
            for behind in wanted:
                yield _applying(behind, lag), partial(_apply, line, behind, deadline)
        finally:
            line.close()
    yield from forgetting_steps(catalog, record, deadline, only)
    if only is None:
        yield from expiry_steps(catalog.client, f"timeline {record.name}", [wal_shard(record.id)])
        yield from _tidying(catalog, record, lag, deadline, is_dry=dry_run, is_moved=bool(wanted))


def _applying(behind: Behind, lag: Lag) -> Step:
    if not behind.is_ready:
        return Step(behind.table, "wait", "its WAL", "its newest rendition is still being copied: finish that first")
    show = SCHEMA.show
    if not behind.commits:
        what = f"nothing up to {show(lag.upper)}"
        return Step(behind.table, "apply", what, f"a handover at {show(behind.first)} has to be complete")
    what = f"{_count(behind.commits, 'commit')} up to {show(lag.upper)}"
    return Step(behind.table, "apply", what, f"they are in the WAL alone since {show(behind.first)}")


def _apply(line: WalLine, behind: Behind, deadline: Deadline) -> None:
    if behind.is_ready:
        line.again(lambda: apply(line, deadline, behind.id), deadline)


def _tidying(
    catalog: Catalog, record: TimelineRecord, lag: Lag, deadline: Deadline, *, is_dry: bool, is_moved: bool
) -> Iterator[tuple[Step, Do]]:
    if is_dry:
        if all(behind.is_ready for behind in lag.tables):
            lag = lag._replace(done=lag.rows, keep=lag.upper - 1)
    elif is_moved:
        lag = fetch_lag(catalog, record)
    if lag.is_due():
        what = _count(lag.done, "row") if lag.done else "history"
        up_to = SCHEMA.show(max(0, lag.keep))
        yield (
            Step(f"timeline {record.name}", "tidy", f"{what} of its WAL", f"its tables have all that is up to {up_to}"),
            partial(_tidy, catalog, record, deadline),
        )


def _tidy(catalog: Catalog, record: TimelineRecord, deadline: Deadline) -> None:
    with catalog.client.open_writer(wal_shard(record.id), SCHEMA, layer=LAYER) as write:
        tidy(catalog, record, deadline, lambda: write)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
