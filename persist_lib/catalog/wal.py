"""The write-ahead log of a timeline: a shard in which each transaction over its tables is one append.

Its rows are (at, table, chunk) -> rows: the commit's time, the table's minted id, and a part of what the transaction
changes in that table, as an Arrow stream in the table's columns with `_diff`. A chunk below 0 is a mark: from that time
on the table is another rendition, is gone, or has more columns. A row is retracted once it is applied, so who reads
changes of this shard looks at what was added alone.
"""

from __future__ import annotations

from contextlib import suppress

from persist_lib.catalog.records import HOLD, LAYER, CollectionRecord
from persist_lib.client import Client
from persist_lib.errors import HoldConflict, Indeterminate, InvalidUsage, ShardFinished, SinceViolation, UpperMismatch
from persist_lib.frontier import Antichain
from persist_lib.relation.writer import Append, WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema

SCHEMA = Schema(
    key={"at": "uint64 not null", "table": "string not null", "chunk": "int64 not null"},
    value={"rows": "binary not null"}, times="ms",
)  # fmt: skip
HANDED_OVER = -1
DROPPED = -2
EVOLVED = -3
"""From this time on rows may have more columns. All that is before it is null in them, so nothing that was read of the
table is another one now."""


def minted_timeline(entropy: int, mode: str) -> str:
    """The id of a new timeline, which tells its mode."""
    return f"t{mode[0]}{entropy:016x}"


def has_wal(collection: CollectionRecord) -> bool:
    """Whether it is a table that is written through a WAL."""
    return collection.timeline is not None and collection.timeline.startswith("tw")


def wal_shard(timeline: str) -> str:
    """The shard that is the WAL of a timeline."""
    return f"{timeline}.wal"


def make_wal(client: Client, timeline: str) -> None:
    """Make the WAL of a timeline: it has a hold from the beginning, and its first time is complete. May be repeated."""
    shard = wal_shard(timeline)
    known = client.machine(shard).try_fetch()
    if known is not None and HOLD in known.state.holds and known.state.upper.time:
        return
    with client.open_writer(shard, SCHEMA, layer=LAYER) as write:
        with suppress(HoldConflict, ShardFinished, SinceViolation):
            client.set_hold(shard, HOLD, 0, expected=None)
        write.advance_upper(1)


def mark_of(table: str, what: int, time: int) -> dict[str, object]:
    """The row that says that a table is another one from this time on."""
    return {"at": time, "table": table, "chunk": what, "rows": b"", "_time": time}


def mark(client: Client, collection: CollectionRecord, what: int, deadline: Deadline) -> int:
    """Append a mark at the WAL's upper, and return its time. Transactions that began before it are refused."""
    with client.open_writer(wal_shard(str(collection.timeline)), SCHEMA, layer=LAYER) as write:
        while True:
            time = write.fetch_upper().time or 0
            try:
                write.compare_and_append([mark_of(collection.id, what, time)], time, time + 1)
            except (UpperMismatch, Indeterminate):  # twice does no harm
                if deadline.has_passed():
                    raise deadline.gave_up(f"table {collection.name!r}", "as others committed first") from None
            else:
                return time


def check_together(client: Client, collection: CollectionRecord, what: str) -> None:
    """Raise InvalidUsage for a table with a WAL where Consensus has no transactions, before anything is decided.

    `what` is what changes the table and its WAL at once.
    """
    if not has_wal(collection) or client.read_only:
        return
    try:
        client.consensus.compare_and_set_many({})
    except InvalidUsage as error:
        raise InvalidUsage(
            f"table {collection.name!r} is on a timeline with a WAL, and {what} changes several shards at once, which "
            f"takes a Consensus with transactions: {error.message}. Nothing was changed. Its rows can be changed here, "
            "by statements and transactions",
            collection=collection.name,
        ) from error


def append_of(
    write: WriteHandle, collection: CollectionRecord, lower: Antichain, time: int, what: int = HANDED_OVER
) -> Append:  # fmt: skip
    """The part of a handover that is in the WAL: its upper moves past the handover's time in the same transaction.

    So a reader at that time or later reads the WAL after the handover, and sees it. So with columns that are added.
    """
    return Append(write, [mark_of(collection.id, what, time)], lower, time + 1)
