"""Forgetting the deleted keys that a table has kept for its span. Any process may do so, at any time, again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.describe import Do, Step
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.records import CollectionRecord, KeptDeletes, RenditionRecord, TimelineRecord
from persist_lib.errors import ShardFinished
from persist_lib.relation.deleted_keys import AT, DELETED_AT, FLOOR, floor_of, forget
from persist_lib.relation.row_selection import RowSelection
from persist_lib.runtime.ambient import Deadline
from persist_lib.timeline.wal_timeline import WalLine
from persist_lib.times import Times

MOST = 100_000
"""How many are forgotten in one commit."""
OWNER = "tend"


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
        wanted = RowSelection.of(rule.marks, filter=_old(now - kept.span_ms))
        overdue = line.contents(marks, as_of, wanted, deadline).slice(0, MOST)
        if not overdue.num_rows:
            return False
        floor = line.contents(marks, as_of, floor_of(rule.marks), deadline)
        changes = forget(rule.marks, rule.column, overdue, floor, now)
        line.try_commit([(marks, changes)], as_of, deadline)
    return True


def _old(before_ms: int) -> pc.Expression:
    return (pc.field(FLOOR) == 0) & (pc.field(DELETED_AT) < pa.scalar(before_ms, AT))
