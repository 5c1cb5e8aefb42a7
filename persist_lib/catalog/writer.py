"""The writer of a collection: what the writer of a shard can, across shards and handovers.

Appends that `append_async` accepts wait in an outbox, and are written as if they were made one by one. Any other call
comes after those that were accepted before it.

Staged definite appends of several collections are one commit (`append_staged`). What is appended is identical whichever
process makes it, so one that loses to another writer need not try again. One that dies before its commit leaves only
garbage.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from persist_lib.catalog.committing import HandedOver, send_all
from persist_lib.catalog.metadata_shard import states_of
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.renditions import Timeline
from persist_lib.catalog.staging import CollectionStage, CollectionStaged, CollectionStaging, by_shard
from persist_lib.catalog.writing import Written
from persist_lib.errors import LeaseExpired, UpperMismatch
from persist_lib.frontier import at
from persist_lib.ids import parse_token
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.registration import parse_bounds
from persist_lib.relation.stage import LEASE_S
from persist_lib.relation.staged_commit import Prepared, discard
from persist_lib.relation.staging import prepare
from persist_lib.relation.writer import Append, WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema

__all__ = ["CollectionWriter", "Written"]


class CollectionWriter(CollectionStaging):
    """Writes one collection. Its methods are those of a shard's writer, as far as the collection's mode has them.

    Safe to use from several threads. Close it before its client: that writes what `append_async` accepted.
    """

    def __repr__(self) -> str:
        return f"CollectionWriter({self.collection.name!r})"

    def append(
        self, updates: object, lower: object, new_upper: object, *, timeout: float | None = None,
        token: bytes | None = None,
    ) -> Written:  # fmt: skip
        """Append those updates with times in `[lower, new_upper)` that the collection does not have yet.

        For writers that write identical data: the first at a time wins, and the others add what lies beyond.
        Each shard is appended to by itself; a call that was killed in between is finished by the next one, of any
        writer. Raises UpperMismatch when there is a gap before `lower`. A `token` names what is appended to each shard,
        as in a shard's `append`.
        """
        self._check_verb("append")
        times = self._times()
        low, upper = parse_bounds(lower, new_upper, times)
        known = None if token is None else parse_token(token)

        def append(deadline: Deadline) -> Written:
            table = self._bring(self._checked(updates, low, upper, times), (low, upper), deadline)
            with Spending() as spent:
                self._append_definite(table, low, upper, deadline, known)
                return Written(upper, table.num_rows, known or b"", spent.cost)

        return self._in_turn(timeout, append)

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Written:
        """Advance upper to `new_upper` without writing updates, from wherever upper is now."""
        self._check_open()
        upper = self._times().frontier(new_upper, "new_upper")

        def advance(deadline: Deadline) -> Written:
            with Spending() as spent:
                while (reached := self.fetch_upper()) < upper:
                    if self.mode == "append" or self._only is not None:
                        self._advance_each(reached, upper, deadline)
                        self._check_time(deadline, "others are at it")
                        continue
                    try:
                        self._commit(empty_table(self.schema.updates), reached, upper, deadline, None, None)
                    except (UpperMismatch, LeaseExpired):  # whose writer is registered again
                        self._check_time(deadline, "others were first")
                return Written(self.fetch_upper(), 0, b"", spent.cost)

        return self._in_turn(timeout, advance)


def append_on(
    write: CollectionWriter, basis: str, updates: pa.Table, lower: int, upper: int, *, timeout: float, token: bytes
) -> bytes:
    """Append as `compare_and_append` does, if the collection is still the rendition of the handover `basis`.

    Raises UpperMismatch otherwise, as what was made of the contents of one rendition may not fit another.
    """
    write._check_verb("compare_and_append")

    def append(deadline: Deadline) -> bytes:
        return write._commit(updates, at(lower), at(upper), deadline, token, None, basis)

    try:
        return write._in_turn(timeout, append)
    except HandedOver as error:
        moved = UpperMismatch("it was handed over", expected=at(lower), actual=write._timeline().upper)
        raise write._mismatch(at(lower), moved) from error


def promise(write: CollectionWriter, upper: int, *, timeout: float | None = None) -> Timeline:
    """See to it that no handover can be before `upper`, and return the timeline then.

    For definite writers whose rows depend on which rendition is the collection. They are about to append up to there:
    a promise is for ever, and readers wait for what is promised.
    """
    write._check_verb("append")

    def promised(deadline: Deadline) -> Timeline:
        write._promise(at(upper), deadline)
        return write._timeline()

    return write._in_turn(timeout, promised)


def place_of(write: CollectionWriter, shard: str) -> WriteHandle:
    """A writer's handle of one shard."""
    return write._place(shard)


def fetch_schema(write: CollectionWriter) -> Schema:
    """The collection's newest columns, of which a writer's are the first: read from the location."""
    rendition = write._only or write._timeline().last.rendition
    return write.client.machine(rendition.names[0]).fetch().state.schemas[-1]


def open_stage(writer: CollectionWriter, start: int, end: int, deadline: Deadline) -> CollectionStage | None:
    """A stage for rows with times in `[start, end)`, which this promises. Close it at the end.

    None unless one rendition is the collection at these times, is whole, and is complete up to `start` exactly: then
    another process has begun to write them, and the rows have to be compared with theirs.
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
