"""The transactions by which a shard becomes a member of a collection, and a collection joins a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from persist_lib.catalog.records import LAYER, CollectionRecord, RenditionRecord, schema_form
from persist_lib.catalog.renditions import schema_for
from persist_lib.catalog.wal import SCHEMA as WAL
from persist_lib.catalog.wal import append_of, has_wal, make_wal, wal_shard
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.formats import EVOLVED, MEMBERS
from persist_lib.core.members import inheritance
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.errors import Refused, ShardFinished, UpperMismatch
from persist_lib.frontier import TOP, at
from persist_lib.ids import SeqNo
from persist_lib.relation.writer import append_together
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.evolution import evolved
from persist_lib.shard.commit import Machine, Wanted, try_commit_all


def adopt(
    client: Client, collection: CollectionRecord, rendition: RenditionRecord, deadline: Deadline
) -> dict[str, object] | str:
    """Make a shard the member that the rendition is of, and let the rendition shard, which is there, take over from it.

    Answers the columns and the retention that it had then, or why it can never be. A reason must hold for ever,
    as another process may be at the same. So the rendition shard is closed before it is one: what adopts moves its
    upper in the same transaction, and finds it closed.
    """
    shard, kept = client.machine(rendition.places[0]), client.machine(collection.shard)
    kept.try_commit(lambda _state, _now: c.Upgrade(MEMBERS))
    while True:
        version, made = shard.fetch(), kept.fetch().state
        if version.state.member == rendition.member:
            return {"schema": schema_form(version.state.schemas[-1]), "retention": version.state.retention}
        found = apply(version.state, SeqNo(version.seqno + 1), c.Adopt(rendition.member, SeqNo(version.seqno + 1)))
        if not isinstance(found, State) or made.upper.is_top():
            if _is_closed(client, collection, rendition):
                return "it was refused before" if isinstance(found, State) else shard.refused(found).message
        elif deadline.has_passed():
            raise deadline.gave_up(f"table {collection.name!r}", "as others always changed it first")
        else:
            _commit(client, collection, (shard, kept), rendition, deadline)


def _commit(
    client: Client, collection: CollectionRecord, shards: tuple[Machine, Machine], rendition: RenditionRecord,
    deadline: Deadline,
) -> None:  # fmt: skip
    """Try the transaction once. Whether it was committed, the state of the shard says."""
    (shard, kept), token = shards, client.runtime.token()

    def adopting(_state: State, _now: int) -> c.Adopt:
        return c.Adopt(rendition.member, SeqNo(shard.version.seqno + 1))

    def inheriting(state: State, _now: int) -> c.Inherit:
        # Of the same version of the shard from which the other one was just made, in the same turn.
        return inheritance(shard.state, token, state.upper)

    wanted = (Wanted(shard, adopting), Wanted(kept, inheriting))
    if has_wal(collection):
        _commit_with_mark(client, collection, (shard,), wanted, 0, deadline, token)
    else:
        try_commit_all(wanted, deadline, token)


def join(
    client: Client, collection: CollectionRecord, renditions: Sequence[RenditionRecord], active: int, least: int,
    deadline: Deadline,
) -> str:  # fmt: skip
    """Make all shards of a collection members of its next epoch, and append the mark to the timeline's WAL.

    `collection` is what it will be, `active` the number of the rendition that is written, and `least` the time from
    which on it is. Answers why it can never be; empty once it is. That holds for ever, as what is closed stays so.
    """
    former = {name: one.member if one.places else "" for one in renditions for name in one.names}
    written = [client.machine(name) for one in renditions if one.number == active for name in one.names]
    while True:
        found = {name: client.machine(name).fetch() for name in former}
        if all(found[place.shard].state.member == collection.member for place in written):
            return ""
        if any(place.state.upper.is_top() for place in written):
            return "it was closed for writing"
        if deadline.has_passed():
            raise deadline.gave_up(f"table {collection.name!r}", "as others always changed it first")
        wanted = [
            Wanted(client.machine(name), partial(_to_next_epoch, client.machine(name), collection.member, former[name]))
            for name, version in found.items()
            if not version.state.is_finished()  # nothing can read that rendition any more
        ]
        _commit_with_mark(client, collection, written, wanted, least, deadline, client.runtime.token())


def claim_member(client: Client, name: str, member: str) -> None:
    """Make a new shard of a collection a member from the beginning on. May be repeated."""
    shard = client.machine(name)
    shard.try_commit(lambda _state, _now: c.Upgrade(MEMBERS))
    while not (found := shard.fetch().state).member and not found.is_finished():
        shard.try_commit(partial(_to_next_epoch, shard, member, ""))


def _to_next_epoch(shard: Machine, member: str, former: str, _state: State, _now: int) -> c.Adopt:
    return c.Adopt(member, SeqNo(shard.version.seqno + 1), former)


def _commit_with_mark(
    client: Client, collection: CollectionRecord, places: Sequence[Machine], wanted: Sequence[Wanted], least: int,
    deadline: Deadline, token: bytes,
) -> None:  # fmt: skip
    """Try the transaction once, with the mark in the WAL from which on a table is on a timeline: from `least` or later.

    SUBTLE: at or beyond both uppers. Else a read of the timeline would leave out what was written before, or a
    transaction that read before would overwrite it.
    """
    make_wal(client, str(collection.timeline))  # the timeline may be made with the table
    if any(evolved(place.state.schemas) for place in places):  # a program that knows no ids would apply by names
        client.machine(wal_shard(str(collection.timeline))).try_commit(lambda _state, _now: c.Upgrade(EVOLVED))
    with client.open_writer(wal_shard(str(collection.timeline)), WAL, layer=LAYER) as write:
        lower = write.fetch_upper()
        time = max(lower.time or 0, least, *(place.state.upper.time or 0 for place in places))
        marking = append_of(write, collection, lower, time)

        def in_time(one: Wanted, state: State, now: int) -> c.Command:
            if one.machine in places and at(time) < state.upper:
                raise _Overtaken
            return one.build(state, now)

        beside = [Wanted(one.machine, partial(in_time, one)) for one in wanted]
        with suppress(Refused, _Overtaken):
            append_together([marking], client.consensus, client.machine, deadline, token, beside)


class _Overtaken(Exception):
    """The shard was written beyond the time at which it was to join the timeline."""


def _is_closed(client: Client, collection: CollectionRecord, rendition: RenditionRecord) -> bool:
    """Whether nothing can be adopted any more, after this: the rendition shard is closed where it was made."""
    try:
        with (
            client.open_writer(collection.shard, schema_for(rendition.columns.times), layer=LAYER) as write,
            suppress(UpperMismatch),  # it was adopted, or is closed, by a process that was faster
        ):
            write.compare_and_append([], 1, TOP)
    except ShardFinished:
        return True
    return client.machine(collection.shard).fetch().state.upper.is_top()
