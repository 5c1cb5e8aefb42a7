"""Counting what lies in pending areas, by listings alone: no object is read, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np

from persist_lib.arguments import check_type
from persist_lib.client import Client
from persist_lib.core.cost import Cost
from persist_lib.errors import NotFound
from persist_lib.format.paths import pending_prefix
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.ids import NAME, PENDING
from persist_lib.location.wrap.around import listed, next_page
from persist_lib.location.wrap.spending import charged
from persist_lib.pending_area.late import known_of
from persist_lib.pending_area.listing import Others, read_listing
from persist_lib.pending_area.sweeping import chain_of
from persist_lib.runtime.each import Each


class WriterCensus(msgspec.Struct, frozen=True):
    """The batches of one writer: how many, their updates and bytes, and the times `[lower, upper)` that they span.

    `late` are those whose times the shard has already; they wait to be discarded or deleted.
    """

    writer: str
    batches: int
    late: int
    updates: int
    size: int
    lower: int
    upper: int


class PendingCensus(msgspec.Struct, frozen=True):
    """What lies in a pending area. `upper` is the merged one, `reaches` how far batches continue it without a gap."""

    shard: str
    upper: Antichain = MINIMUM
    reaches: Antichain = MINIMUM
    batches: int = 0
    size: int = 0
    writers: tuple[WriterCensus, ...] = ()
    endless: Others = Others()
    foreign: Others = Others()
    cost: Cost = Cost()


@charged
def census(client: Client, name: str) -> PendingCensus:
    """Count what lies in a collection's pending area, a thousand batches a request. Raises NotFound."""
    client = check_type(client, Client, "client", 'persist.open("file:./data")')
    machine = client.machine(name)
    state = machine.fetch().state
    listing = read_listing(machine.shard, listed(machine.blob, pending_prefix(machine.shard)))
    rows, upper = listing.rows, state.upper
    found = []
    is_late = np.ones(len(rows), bool) if upper.time is None else rows["upper"] <= np.uint64(upper.time)
    for number, writer in enumerate(listing.writers):
        own = rows["writer"] == number
        some = rows[own]
        if not len(some):
            continue
        totals = int(some["count"].sum()), int(some["size"].sum())
        spans = int(some["lower"].min()), int(some["upper"].max())
        found.append(WriterCensus(writer, len(some), int(is_late[own].sum()), *totals, *spans))
    reaches = upper
    if upper.time is not None:
        chain = chain_of(listing.contents(np.flatnonzero(~is_late)), upper.time)
        reaches = Antichain(chain[-1].upper) if chain else upper
    found.sort(key=lambda one: one.writer)
    return PendingCensus(
        machine.shard, upper, reaches, len(rows), int(rows["size"].sum()), tuple(found), listing.endless,
        listing.foreign,
    )  # fmt: skip


def pending_collections(client: Client) -> Iterator[str]:
    """The names under which something is pending, also of shards that are not there (any more).

    Costs one request for each where the store lists in pages, else one for all.
    """
    client = check_type(client, Client, "client", 'persist.open("file:./data")')
    blob, prefix, after = client.blob, f"{PENDING}/", ""
    told: set[str] = set()
    while True:
        page = next_page(blob, prefix, after)
        names = [entry.key.removeprefix(prefix).partition("/")[0] for entry in page.entries]
        fresh = sorted({name for name in names if NAME.fullmatch(name)} - told)
        yield from fresh
        told.update(fresh)
        if page.is_last or not page.entries:
            return
        # Behind all keys of the last one. SUBTLE: names are not in the order of keys, as `-` and `.` precede `/`.
        after = max(page.entries[-1].key, f"{prefix}{names[-1]}/\U0010ffff")


def due_collections(client: Client) -> Each[bool]:
    """Of each collection with something pending: whether an absorption would find something to do, by listings alone.

    Batches that are garbage already, or adopted, count for nothing. A name without a shard has nothing to do. One that
    cannot be looked at stops none of the others.
    """
    return Each[bool]().add(pending_collections(client), partial(_is_due, client))


def _is_due(client: Client, name: str) -> bool:
    try:
        machine = client.machine(name)
        state = machine.fetch().state
    except NotFound:
        return False
    listing = read_listing(machine.shard, listed(machine.blob, pending_prefix(machine.shard)), known_of(state))
    late = len(listing.late(state.upper))
    beyond = listing.contents(np.flatnonzero(listing.rows["upper"] > np.uint64(state.upper.time or 0)))
    goes_on = state.upper.time is not None and bool(chain_of(beyond, state.upper.time))
    return bool(late or goes_on or (state.is_finished() and len(listing)))
