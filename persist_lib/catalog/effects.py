"""What a decided command does outside of the catalog: steps that may be repeated, by whoever comes next.

A command is decided by one append to the catalog, and pending from then on. Its steps are taken by the process that
decided it, or by the next one that looks. At the end the catalog says that it is done. So a process that is killed
between any two requests leaves a command that anybody can finish, and two processes that take the same steps at once do
what one would have done. At most one command of a collection is pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from persist_lib.catalog.adoption import adopt, claim_member, join
from persist_lib.catalog.catalog import Catalog, Changes, Contents, has_shard, setting, without
from persist_lib.catalog.collection_status import timeline_of
from persist_lib.catalog.evolution import add_columns, evolve, evolving, older_columns
from persist_lib.catalog.metadata_shard import append_once, at_once
from persist_lib.catalog.records import HOLD, LAYER, OF_PLACES, CollectionRecord, CommandRecord, RenditionRecord
from persist_lib.catalog.renditions import Renditions, Timeline, handed_over_at, is_copied, row_of, schema_for
from persist_lib.catalog.wal import DROPPED, HANDED_OVER, append_of, has_wal, mark, wal_shard
from persist_lib.catalog.wal import SCHEMA as WAL
from persist_lib.client import Client
from persist_lib.core.state import State
from persist_lib.errors import (
    HoldConflict,
    Indeterminate,
    NameTaken,
    NotAllowed,
    ShardFinished,
    SinceViolation,
    UpperMismatch,
)
from persist_lib.frontier import Antichain, at
from persist_lib.ids import CATALOG
from persist_lib.relation.writer import Append
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema

R = TypeVar("R", CollectionRecord, RenditionRecord)


def settle(catalog: Catalog, command: CommandRecord, deadline: Deadline) -> CommandRecord:
    """Take the steps of a pending command, and say in the catalog what came of it."""
    contents = catalog.latest()  # where others have finished it meanwhile, the steps do nothing
    current = contents.commands.get(command.id)
    if current is None or not current.pending:
        return current or command
    collection = contents.collections[current.collection]
    answer: dict[str, Any] = {}
    refused = ""
    match current.what:
        case "create" | "rename" if _is_a_shards(catalog.client, collection.name):
            refused = "there is a shard of that name"
        case "create":
            _make(catalog.client, contents, collection, *contents.marks_of(collection))
        case "promote":
            first = contents.renditions[(collection.id, 1)]
            begin(catalog.client, collection, first)
            adopted = adopt(catalog.client, collection, first, deadline)
            if isinstance(adopted, str):
                refused = adopted
            else:
                answer = adopted
        case "join":
            asked = current.asked
            refused = join(
                catalog.client, _joined(collection, current), contents.renditions_of(collection.id), asked["rendition"],
                asked["start"], deadline,
            )  # fmt: skip
        case "make rendition":
            made = contents.renditions[(collection.id, current.asked["rendition"])]
            make_shards(catalog.client, made, older_columns(catalog.client, contents, made), collection)
        case "evolve":
            evolve(catalog.client, contents, current, deadline)
        case "hand over":
            found = hand_over(catalog, contents, collection, current, deadline)
            if isinstance(found, str):
                refused = found
            else:
                answer = {"at": found}
                close(catalog.client, contents, collection, current, found)
        case "drop" | "keep deletes":  # of a table with a WAL
            _mark(catalog.client, contents, collection, current, deadline)
        case _:  # the others are done by the append that decides them
            pass
    return catalog.change(lambda now: _done(now, current, answer, refused), deadline, from_latest=True)


def _make(client: Client, contents: Contents, *collections: CollectionRecord) -> None:
    for one in collections:
        make_shards(client, contents.renditions[(one.id, 1)])
        begin(client, one, contents.renditions[(one.id, 1)])


def _mark(
    client: Client, contents: Contents, collection: CollectionRecord, command: CommandRecord, deadline: Deadline
) -> None:  # fmt: skip
    """Say in its WAL that a table is dropped, or keeps its deleted keys from now on, or does not any more."""
    if command.what == "drop":
        # The mark decides. Until then transactions commit to the table, and it is read; then neither.
        for one in (collection, *contents.marks_of(collection)):
            mark(client, one, DROPPED, deadline)
        return
    marks = contents.collections[command.asked["marks"]]
    if is_kept := command.asked["column"] is not None:
        _make(client, contents, marks)
    # The catalog says so already. Who has read it before this mark loses the race, and reads it again.
    mark(client, collection, HANDED_OVER, deadline)
    if not is_kept:
        mark(client, marks, DROPPED, deadline)


def _done(
    contents: Contents, command: CommandRecord, answer: dict[str, Any], refused: str
) -> tuple[Changes, CommandRecord]:
    known = contents.commands.get(command.id)
    if known is None or not known.pending:
        return {}, known or command
    finished = msgspec.structs.replace(known, pending=False, answer=answer, refused=refused)
    changes = setting(finished)
    collection = contents.collections.get(known.collection)
    if collection is not None and refused and known.what == "promote":
        # The shard is no member, so what is taken away must not find it among the renditions.
        first = contents.renditions[(collection.id, 1)]
        changes = {**setting(finished, msgspec.structs.replace(collection, state="dropping")), **without(first)}
    elif collection is not None and refused and known.what == "create":
        changes = setting(finished, *(_dropping(one) for one in (collection, *contents.marks_of(collection))))
    elif collection is not None and refused and known.what == "rename":
        was = known.asked["was"]
        back = was if contents.named(was) is None else collection.id  # others have its name by now
        changes = setting(finished, msgspec.structs.replace(collection, name=back))
    elif collection is not None and known.what in {"create", "promote"}:
        first = msgspec.structs.replace(contents.renditions[(collection.id, 1)], begun=True)
        if known.what == "promote":
            first = msgspec.structs.replace(first, schema=answer["schema"])
            collection = msgspec.structs.replace(collection, retention=answer["retention"])
        changes |= setting(_live(collection), _live(first))
        changes |= setting(*(one for marks in contents.marks_of(collection) for one in _begun(contents, marks)))
    elif collection is not None and known.what == "join" and not refused:
        # All of them, as one that is handed over to again is written by the WAL's appliers, too.
        modes = (msgspec.structs.replace(one, mode="append") for one in contents.renditions_of(collection.id))
        changes |= setting(_joined(collection, known), *modes)
    elif collection is not None and known.what == "make rendition":
        changes |= setting(_live(contents.renditions[(collection.id, known.asked["rendition"])]))
    elif collection is not None and known.what == "evolve":
        changes |= setting(
            *(msgspec.structs.replace(one, schema=known.asked["schema"]) for one in evolving(contents, known))
        )
    elif collection is not None and known.what in {"drop", "keep deletes"}:
        changes |= setting(*_marked(contents, collection, known))
    elif collection is not None and known.what == "hand over" and not refused:
        new = contents.renditions[(collection.id, known.asked["rendition"])]
        changes |= setting(msgspec.structs.replace(new, begun=True))
    return changes, finished


def _joined(collection: CollectionRecord, command: CommandRecord) -> CollectionRecord:
    return msgspec.structs.replace(
        collection, kind="table", timeline=command.asked["timeline"], epoch=collection.epoch + 1, v=OF_PLACES
    )


def _marked(
    contents: Contents, collection: CollectionRecord, command: CommandRecord
) -> Sequence[CollectionRecord | RenditionRecord]:
    """What changes once a table is dropped, or its deleted keys are kept, or not any more."""
    if command.what == "drop":
        return [_dropping(one) for one in (collection, *contents.marks_of(collection))]
    if (marks := contents.collections.get(command.asked["marks"])) is None:
        return []
    return _begun(contents, marks) if command.asked["column"] is not None else [_dropping(marks)]


def _dropping(collection: CollectionRecord) -> CollectionRecord:
    return msgspec.structs.replace(collection, state="dropping")


def _begun(contents: Contents, collection: CollectionRecord) -> tuple[CollectionRecord, RenditionRecord]:
    """The records of a collection whose first rendition it is now."""
    first = msgspec.structs.replace(contents.renditions[(collection.id, 1)], begun=True)
    return _live(collection), _live(first)


def _live(record: R) -> R:
    return msgspec.structs.replace(record, state="live") if record.state == "making" else record


def check_free(client: Client, name: str) -> None:
    """Raise NameTaken if the usual catalog has a collection of this name: then nothing is written to a shard of it.

    If this client may read it. Where the shard is there already, a collection that is just being given the name is
    refused it: one change of the catalog decides.

    SUBTLE: a shard is made, and then looks for a collection; a collection is listed, and then looks for a shard, before
    it is there. So one of both sees the other, whatever is first. A collection that is not there yet is refused.
    """
    try:
        if client.machine(CATALOG).try_fetch() is None:
            return
    except NotAllowed:  # a shard server gives this client no right to know what collections there are
        return
    catalog = Catalog(client)
    try:
        found = catalog.fetch().named(name)
        if found is not None and has_shard(client, name):
            deadline = client.runtime.deadline(client.config.timeout_s)
            with suppress(NotAllowed):
                for command in catalog.latest().pending(found.id):
                    if command.what in {"create", "rename", "promote"}:
                        settle(catalog, command, deadline)
            found = catalog.fetch().named(name)
    finally:
        catalog.close()
    if found is not None:
        raise NameTaken(
            f"there is a collection {name!r} in {client.url}, so no shard of that name is made or written: a name "
            "stands for one of both. Open the collection with client.controller(), or choose another name",
            collection=name, shard=name,
        )  # fmt: skip


def _is_a_shards(client: Client, name: str) -> bool:
    """Whether a collection may not have this name. Where this client may not look, its maker has."""
    with suppress(NotAllowed):
        return has_shard(client, name)
    return False


def make_shards(
    client: Client, rendition: RenditionRecord, older: Sequence[Schema] = (), collection: CollectionRecord | None = None
) -> None:
    """Make the rendition's shards, each with the hold that keeps its history, and with the earlier columns.

    `older` are those that became its own, oldest first: programs that have them continue after a handover to it. The
    shards are members if the collection has joined a timeline: those who wrote it before would write to them, too.
    """
    first, *added = (*older, rendition.columns)

    def make(name: str) -> None:
        with suppress(ShardFinished):  # made, and dropped since, by processes that were faster
            known = client.machine(name).try_fetch() if added else None
            is_made = known is not None and rendition.columns in known.state.schemas
            client.open_writer(name, rendition.columns if is_made else first, layer=LAYER).close()
            for schema in added:
                if not is_made:
                    add_columns(client, name, schema)
        _hold(client, name)
        if collection is not None and collection.epoch:
            claim_member(client, name, collection.member)

    at_once(client.runtime, make, rendition.names)


def begin(client: Client, collection: CollectionRecord, rendition: RenditionRecord) -> None:
    """Make the rendition shard, and say in it that this rendition is the collection from time 0 on."""
    schema = schema_for(rendition.columns.times)
    row = {**row_of(rendition, collection.command), "_time": 0}
    try:
        with client.open_writer(collection.shard, schema, layer=LAYER) as write:
            _hold(client, collection.shard)
            write.append([row], 0, 1)
    except (ShardFinished, UpperMismatch):
        pass  # made, and dropped since, by processes that were faster


def _hold(client: Client, shard: str) -> None:
    with suppress(HoldConflict, ShardFinished, SinceViolation):  # it is there already, or more has happened since
        client.set_hold(shard, HOLD, 0, expected=None)


def is_held_back(state: State, to: Antichain) -> bool:
    """Whether a shard's since is before `to` though nothing else keeps it there.

    Since only moves with a hold or reader that moves. Where the last one that was behind has gone, the hold is
    downgraded to where it is, and since follows.
    """
    readers = (reader.since for reader in state.readers.values())
    others = (other.since for name, other in state.holds.items() if name != HOLD)
    return state.since < min([to, *readers, *others])


def hand_over(
    catalog: Catalog, contents: Contents, collection: CollectionRecord, command: CommandRecord, deadline: Deadline
) -> int | str:
    """Append the handover, and answer its time; or a text that says why that can never happen.

    That append alone decides. It names the handover that it expects to follow. SUBTLE: a reason to refuse must hold for
    ever, as another process may be at the same command: a handover that was followed never is the newest again, and
    the promise never goes back.
    """
    new = contents.renditions[(collection.id, command.asked["rendition"])]
    renditions = Renditions(catalog.client, collection.shard, new.columns.times, collection.name)
    races = 0
    with catalog.client.open_writer(collection.shard, renditions.schema, layer=LAYER) as write:
        while True:
            timeline = renditions.fetch()
            for span in timeline.spans:
                if span.command == command.id:
                    return span.start
            if reason := _never(timeline, command):
                return reason
            lower = timeline.upper.time or 0
            wal = wal_upper(catalog.client, collection)
            start = handover_time(timeline, command.asked["at"], wal)
            if start != handover_time(timeline, command.asked["at"], 0) and command.asked["at"] is not None:
                return f"transactions were committed up to {start} meanwhile"
            old = timeline.last
            rows: list[dict[str, object]] = [
                {**row_of(old.rendition, old.command), "_time": start, "_diff": -1},
                {**row_of(new, command.id), "_time": start, "_diff": 1},
            ]
            try:
                if has_wal(collection):
                    # The upper of its WAL moves past it in one transaction: it is read up to that, whatever is promised
                    with catalog.client.open_writer(wal_shard(str(collection.timeline)), WAL, layer=LAYER) as log:
                        marking = append_of(log, collection, at(wal), start)
                        together = [Append(write, rows, lower, start + 1), marking]
                        catalog.client.compare_and_append_many(together)
                else:
                    append_once(write, rows, lower, start + 1, deadline)
            except (UpperMismatch, Indeterminate) as error:
                if isinstance(error, Indeterminate) and not has_wal(collection):
                    raise
                races += 1
            else:
                return start
            if deadline.has_passed():
                raise deadline.gave_up(f"collection {collection.name!r}", f"as others were first {races} times")


def wal_upper(client: Client, collection: CollectionRecord) -> int:
    """How far the WAL of a table has come; 0 for any other collection."""
    if not has_wal(collection):
        return 0
    return client.machine(wal_shard(str(collection.timeline))).fetch().state.upper.time or 0


def close(
    client: Client, contents: Contents, collection: CollectionRecord, command: CommandRecord, start: int
) -> None:  # fmt: skip
    """Say that nothing more comes to the old rendition before the handover, so that a copy of it can be finished.

    Only where writers exclude one another, and the handover is at once: nobody can be about to write before it then.
    Of a handover in the future the writers say so, when they first write beyond it. Never of a rendition that
    is still copied itself, as what it lacks would be left out for ever.
    """
    old = contents.renditions.get((collection.id, command.asked["follows"]))
    if old is None or old.mode != "compare_and_append" or command.asked["at"] is not None:
        return
    if old.copies is not None:
        began = handed_over_at(timeline_of(client, collection, old), old)
        if began is not None and not is_copied(client, old, began):
            return
    for name in old.names:
        with suppress(ShardFinished), client.open_writer(name, old.columns, layer=LAYER) as write:
            write.advance_upper(start)


def handover_time(timeline: Timeline, asked: int | None, wal: int = 0) -> int:
    """The time at which a handover would be: that asked for, or the earliest that changes nothing that was read.

    `wal` is the upper of the WAL, for a table that has one.
    """
    earliest = max(timeline.upper.time or 0, timeline.last.start + 1, wal)
    return earliest if asked is None else max(asked, wal)


def _never(timeline: Timeline, command: CommandRecord) -> str:
    """Why the handover can never happen; empty if it can."""
    if timeline.is_closed():
        return "the collection was dropped"
    if timeline.last.command != command.asked["expects"]:
        return (
            f"another handover was first: rendition {timeline.last.rendition.number} followed at {timeline.last.start}"
        )
    asked = command.asked["at"]
    if asked is not None and (at(asked) < timeline.upper or asked <= timeline.last.start):
        return f"the time {asked} is promised already: readers have relied on it. The earliest is {timeline.upper}"
    return ""
