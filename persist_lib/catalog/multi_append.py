"""Staged definite appends: tasks write parts for whole times, and the appends of several collections are one commit.

What is appended is identical whoever makes it, so whoever loses to another writer need not try again: it is there. Who
died before its commit left nothing but garbage.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist_lib.catalog.committing import send_all
from persist_lib.catalog.parallel import states_of
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.staging import CollectionStage, CollectionStaged, by_shard
from persist_lib.catalog.writer import CollectionWriter, promise
from persist_lib.frontier import at
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.append_many import Append
from persist_lib.relation.stage import LEASE_S
from persist_lib.relation.staged_commit import Prepared, discard
from persist_lib.relation.staging import prepare
from persist_lib.runtime.ambient import Deadline


def open_stage(writer: CollectionWriter, start: int, end: int, deadline: Deadline) -> CollectionStage | None:
    """A stage for rows with times in `[start, end)`, which this promises. Close it at the end.

    None unless one rendition is the collection at these times, is whole, and is complete up to `start` exactly: then
    somebody has begun to write them, and the rows have to be compared with theirs.
    """
    over = promise(writer, end, timeout=deadline.left_s()).over(start, end)
    if len(over) != 1:
        return None
    rendition = over[0][2].rendition
    if any(state.upper != at(start) for state in states_of(writer.client, rendition.names)):
        return None
    return writer._stage_of(rendition, LEASE_S, start, end)


Staging = tuple[CollectionWriter, RenditionRecord, Sequence[CollectionStaged]]


def append_staged(stagings: Sequence[Staging], start: int, end: int, deadline: Deadline) -> None:
    """Append what was staged for the times `[start, end)` to all shards of all these collections.

    That is one transaction, where the store has any; else each shard by itself, so that a reader of one collection may
    be ahead of another's for a while. Raises UpperMismatch when another writer was first in a shard; without
    transactions some of it may be there then.
    """
    bounds = at(start), at(end)
    prepared: dict[str, Prepared] = {}
    appends: list[Append] = []
    try:
        with Spending() as spent:
            for writer, rendition, staged in stagings:
                for name, parts in by_shard(staged, rendition.names).items():
                    write = writer._place(name)
                    prepared[name] = prepare(write, parts, None, bounds, None, deadline, spent, everything=False)
                    appends.append(Append(write, prepared[name], start, end))
    except Exception:
        discard(prepared)
        raise
    first = stagings[0][0]
    send_all(first.client, appends, deadline, first.client.runtime.token(), set(), together=first.has_transactions)
