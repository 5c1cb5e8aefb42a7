"""What collections are, how far they have come, and who keeps their history: read from the catalog and the shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from persist_lib.catalog.catalog import Contents
from persist_lib.catalog.describe import Capability, Description, Do, RenditionDescription, Step
from persist_lib.catalog.metadata_shard import states_of
from persist_lib.catalog.records import CollectionRecord, RenditionRecord
from persist_lib.catalog.renditions import Renditions, Timeline, upper_by
from persist_lib.client import Client
from persist_lib.core.leases import is_mark
from persist_lib.core.plan.upkeep import plan_expiry
from persist_lib.core.state import State
from persist_lib.frontier import Antichain, at
from persist_lib.maintain.garbage import expire
from persist_lib.times import Times


def timeline_of(client: Client, collection: CollectionRecord, rendition: RenditionRecord) -> Timeline:
    """Which rendition is the collection at which times. `rendition` is any of it."""
    return Renditions(client, collection.shard, rendition.columns.times, collection.name).fetch()


def describe(client: Client, contents: Contents, collection: CollectionRecord) -> Description:
    """What a collection is, and how far it has come."""
    renditions = contents.renditions_of(collection.id)
    timeline = timeline_of(client, collection, renditions[0])
    # A rendition may have been made, and handed over to, after the catalog was read.
    spanned = {span.rendition.number: span.rendition for span in timeline.spans}
    known = {record.number: record for record in renditions if record.state != "making"}
    begun = {number: msgspec.structs.replace(one, state="live", begun=True) for number, one in spanned.items()}
    numbered = {record.number: record for record in renditions} | begun | known
    renditions = [numbered[number] for number in sorted(numbered)]
    names = [name for record in renditions if record.state != "making" for name in record.names]
    states = dict(zip(names, states_of(client, names), strict=True))
    found = [_described(record, timeline, [states[n] for n in record.names if n in states]) for record in renditions]
    uppers = {one.number: one.upper for one in found}
    upper = upper_by(timeline, lambda rendition: uppers[rendition.number])
    active = next(rendition for rendition in found if rendition.active)
    pending = tuple(f"{command.what} ({command.id})" for command in contents.pending(collection.id))
    return Description(
        collection.name, collection.id, collection.kind, active.schema, active.mode, collection.retention,
        at(_since(timeline, found, upper)), upper, timeline.upper, tuple(found), pending,
    )  # fmt: skip


def capabilities(client: Client, contents: Contents, collection: CollectionRecord) -> list[Capability]:
    """Who may read a collection, and from when on, and who writes it."""
    state = client.inspect(collection.shard).state
    found = [Capability("hold", hold, "", collection.shard, entry.since) for hold, entry in sorted(state.holds.items())]
    found += [
        Capability("read", reader, entry.purpose, collection.shard, entry.since, entry.lease_until)
        for reader, entry in sorted(state.readers.items())
    ]
    renditions = [one for one in contents.renditions_of(collection.id) if one.state != "making"]
    shards = [shard for rendition in renditions for shard in rendition.names]
    return found + [
        Capability("write", id_, entry.owner, shard, None, entry.lease_until)
        for shard, state in zip(shards, states_of(client, shards), strict=True)
        for id_, entry in sorted(state.writers.items())
        if entry.purpose == "ingest"
    ]


def _described(record: RenditionRecord, timeline: Timeline, states: Sequence[State]) -> RenditionDescription:
    span = next((span for span in reversed(timeline.spans) if span.rendition.number == record.number), None)
    since = max((state.since for state in states), default=at(0))
    upper = min((state.upper for state in states), default=at(0))
    is_active = timeline.spans != () and timeline.last.rendition.number == record.number
    return RenditionDescription(
        record.number, tuple(record.names), (states[0].schemas[-1] if states else record.columns).shown,
        record.hash_columns, record.mode, record.copies, record.state, is_active,
        span.start if span else None, span.end if span else None, since, upper,
    )  # fmt: skip


def _since(timeline: Timeline, renditions: Sequence[RenditionDescription], upper: Antichain) -> int:
    """The least time from which on every time can be read, from the rendition that is the collection then."""
    sinces = {rendition.number: rendition.since.time or 0 for rendition in renditions}
    since = timeline.since
    for span in timeline.spans:
        if upper <= at(span.start):
            break  # it is handed over to later, and nothing of it can be read yet
        least = sinces.get(span.rendition.number, 0)
        if span.start < least and (span.end is None or since < span.end):  # else it has all from its handover on
            since = max(since, min(least, span.end) if span.end is not None else least)
    return since


def expiry_steps(client: Client, subject: str, shards: Sequence[str]) -> Iterator[tuple[Step, Do]]:
    """The leases that have ended on these shards, and how to retire their ids. Shards that are not there have none."""
    for name in shards:
        version = client.machine(name).try_fetch()
        if version is None or version.state.is_finished():
            continue
        if overdue := plan_expiry(version.state, client.consensus.now()):
            what = f"{name}: {', '.join(one.id for one in overdue)}"
            yield Step(subject, "expire", what, "their leases have ended"), partial(expire, client.machine(name))


def holders(state: State, before: Antichain | None = None, *, but: str = "") -> list[str]:
    """Who needs the shard (or its history before a time): readers with their purposes and leases, and holds."""

    def counts(since: Antichain) -> bool:
        return before is None or since < before

    show = Times("ms", lambda: 0).show
    readers = [
        f"{id_} ({f'{reader.purpose}, ' if reader.purpose else ''}until {show(Antichain(reader.lease_until))})"
        for id_, reader in sorted(state.readers.items())
        if counts(reader.since)
    ]
    holds = ((name, hold) for name, hold in sorted(state.holds.items()) if name != but and not is_mark(name, hold))
    return readers + [f"hold {name}" for name, hold in holds if counts(hold.since)]
