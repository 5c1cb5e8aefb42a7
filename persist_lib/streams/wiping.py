"""Dropping all streams of a location, for development: what is there can be made again.

Each step can be repeated: a wipe that was killed is finished by the next one. Shards that somebody still reads are
left, and dropped by a later wipe.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from persist_lib.arguments import parse_text
from persist_lib.client import Client
from persist_lib.errors import HoldConflict, NotFound, ShardFinished, StillRead
from persist_lib.streams.catalog import Catalog, Record
from persist_lib.streams.fencing import HOLD, fence
from persist_lib.streams.lock import WriterLock, fetch_lock

DROPPED = "-"
"""What the name of a dropped stream begins with in the list. So a new stream can have its name at once."""
RETENTION_HOLD = "retention"


class Wiped(msgspec.Struct, frozen=True):
    """The sealed shards that a wipe dropped, and those that are `left` because somebody still reads them."""

    dropped: tuple[str, ...]
    left: tuple[str, ...]


def wipe(client: Client, catalog: Catalog, lock: WriterLock) -> Wiped:
    """Drop all streams. The lock must be taken. Raises Fenced, at any step, when another runtime took it since."""
    records = catalog.fetch()
    deadline = client.runtime.deadline(client.config.timeout_s)
    gone = {DROPPED + one.sealed: msgspec.structs.replace(one, dropped=True) for one in records.values()}
    to: dict[str, Record | None] = {name: None for name, record in records.items() if not record.dropped}
    catalog.change(to | gone, [lock.row()], deadline)
    finished = {name for name, record in gone.items() if _finished(client, record, lock)}
    # Only now nothing is of an older encoding. What is left because it is still read is a shard as any other.
    deadline = client.runtime.deadline(client.config.timeout_s)
    catalog.change(dict.fromkeys(finished), [lock.row(wiped=True)], deadline)
    dropped, left = ({gone[name].sealed for name in names} for names in (finished, gone.keys() - finished))
    return Wiped(tuple(sorted(dropped)), tuple(sorted(left)))


def wipe_all(client: Client, *, reentrance_id: str = "") -> Wiped:
    """Drop all streams of a client's location, whatever their encoding. For development: nothing brings them back.

    Raises Locked when a runtime writes them, unless it has this reentrance id: then that is fenced off. NewerFormat
    when a newer release wrote them, and NotFound where there were never any streams. Repeat it after any other failure,
    and for what is `left`.
    """
    if fetch_lock(client) is None:
        raise NotFound(f"there are no streams in {client.url}, so there is nothing to drop", url=client.url)
    lock, catalog = WriterLock(client, parse_text(reentrance_id, "reentrance_id", 200), "wipe"), Catalog(client)
    lock.take(wipes=True)
    try:
        return wipe(client, catalog, lock)
    finally:
        catalog.close()
        lock.release()


def _finished(client: Client, record: Record, lock: WriterLock) -> bool:
    """Whether both shards of a stream are finished for good."""
    with suppress(ShardFinished):
        fence(client, record, lock)
    done = [_finish(client, name, hold) for name, hold in ((record.sealed, HOLD), (record.unsealed, ""))]
    return all(done)


def _finish(client: Client, name: str, hold: str) -> bool:
    state = client.machine(name).fetch().state
    if state.is_finished():
        return True
    if state.readers or state.holds.keys() - {hold, RETENTION_HOLD}:
        return False
    for one in state.holds:
        with suppress(HoldConflict):
            client.release_hold(name, one)
    try:
        client.finish(name)
    except StillRead:  # somebody opened a reader at this moment
        return False
    except ShardFinished:
        pass
    return True
