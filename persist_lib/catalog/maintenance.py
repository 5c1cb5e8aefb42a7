"""Looking after collections and tables: the duty of this layer. Any process may take each step, at any time, again.

What it moves and takes away is decided by frontiers alone: a rendition goes when no time at which it was the collection
can be read any more, and a dropped collection when it has no reader and no hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

import msgspec

from persist_lib.catalog.catalog import Catalog, Changes, Contents, setting, without
from persist_lib.catalog.collection_status import expiry_steps, holders, timeline_of
from persist_lib.catalog.copies import HOLDS, hold_name
from persist_lib.catalog.describe import Do, Step, Tended
from persist_lib.catalog.effects import is_held_back, settle
from persist_lib.catalog.publications import publication_steps
from persist_lib.catalog.records import HOLD, LAYER, CollectionRecord, RenditionRecord, TimelineRecord
from persist_lib.catalog.renditions import Timeline, handed_over_at, is_copied, meet, schema_for, upper_of
from persist_lib.core.holds import newest_time
from persist_lib.core.plan.retention import distance_of
from persist_lib.core.state import NAMED, State
from persist_lib.errors import HoldConflict, NotFound, Paused, PersistError, ShardFinished, SinceViolation, StillRead
from persist_lib.frontier import Antichain, at
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.each import Each
from persist_lib.times import Times

GIVES_UP = frozenset({"move hold", "close", "release", "finish", "forget"})
UNPLANNED = "a person decides, by a plan"


TimelineSteps = Callable[..., Generator[tuple[Step, Do], None, None]]
"""`wal_truncation.timeline_steps`, as tables stand on collections."""


class Asking(NamedTuple):
    """How collections are to be looked after.

    With `dry_run` nothing is changed. With `heeds_pauses`, what is paused waits, and its step says for whom. With
    `planned`, steps of collections that give something up wait unless they are exactly among these (`Step.exactly`).
    `as_if_dropped` says what would be done once it is dropped, `given_up` once this rendition of it is given up.
    """

    dry_run: bool = False
    as_if_dropped: bool = False
    given_up: int | None = None
    heeds_pauses: bool = False
    planned: Collection[Sequence[str]] | None = None


def tend(
    catalog: Catalog, deadline: Deadline, timeline_steps: TimelineSteps, only: str | None = None,
    asked: Asking = Asking(),  # noqa: B008 - it cannot be changed
) -> Tended:  # fmt: skip
    """Look after the collection with this id and its deleted keys, or after all, and then after the WALs of tables.

    One that cannot be looked after stops none of the others: at the end an error of the gravest failure's kind names
    all of them, with what was done in its field `done`.
    """
    dry_run, as_if_dropped, given_up, heeds_pauses, planned = asked
    done: list[Step] = []
    tried = Each[None]()
    contents = catalog.fetch()
    allowed = {tuple(one) for one in planned or ()}

    def take(step: Step, do: Do, _name: str = "") -> None:
        done.append(step if dry_run else _taken(step, do))

    def one(found: CollectionRecord) -> None:
        collection = msgspec.structs.replace(found, state="dropping") if as_if_dropped else found
        try:
            number = given_up if found.id == only else None
            for step, do in _Tending(catalog, collection, deadline, dry_run=dry_run, given_up=number).steps():
                if planned is None or not step.gives_up or step.exactly in allowed:
                    take(step, do)
                else:  # what follows looks at what is there, and so finds that it was not taken
                    done.append(msgspec.structs.replace(step, action="wait", reason=f"{step.action}: {UNPLANNED}"))
        except (NotFound, ShardFinished):
            now = catalog.fetch().collections.get(found.id)
            if now is not None and now.state == found.state:
                raise  # it is not because another process dropped it, or took away what was left, meanwhile

    def timeline(record: TimelineRecord) -> None:
        with closing(timeline_steps(catalog, record, deadline, only=only, dry_run=dry_run)) as steps:
            for step, do in steps:  # what cannot be applied stays in the WAL, and is found there again
                tried.add([f"{step.action} {step.collection}"], partial(take, step, do), PersistError)

    wanted = {
        found.name if found.state == "live" else f"{found.name} ({id_})": found
        for id_, found in sorted(contents.collections.items())
        if only in (None, id_, found.marks_of)
    }
    tried.add(_free(catalog, wanted, done) if heeds_pauses else wanted, lambda name: one(wanted[name]), PersistError)
    if not as_if_dropped:
        timelines = sorted(catalog.fetch().timelines.values(), key=lambda record: record.name)
        lines = {f"timeline {record.name}": record for record in timelines if record.mode == "wal"}
        tried.add(
            _free(catalog, lines, done) if heeds_pauses else lines, lambda name: timeline(lines[name]), PersistError
        )
    for error in tried.failed.values() if only is not None else ():
        raise error
    tried.check("tending: {} of them", Tended(tuple(done)))
    return Tended(tuple(done))


def _taken(step: Step, do: Do) -> Step:
    try:
        do()
    except Paused as paused:
        return msgspec.structs.replace(step, action="wait", reason=paused.says)
    return step


def _free(
    catalog: Catalog, records: Mapping[str, CollectionRecord] | Mapping[str, TimelineRecord], done: list[Step]
) -> list[str]:  # fmt: skip
    """Those that are not paused. Of the others, a step is `done` that says why they wait."""
    may_begin, free = catalog.client.machine(catalog.shard).may_begin, list[str]()
    for name, record in records.items():
        try:
            may_begin(record.name, "collections")
            free.append(name)
        except Paused as paused:
            done.append(Step(record.name, "wait", "upkeep", paused.says))
    return free


class _Tending:
    """Looking after one collection."""

    def __init__(
        self, catalog: Catalog, collection: CollectionRecord, deadline: Deadline, *, dry_run: bool,
        given_up: int | None = None,
    ) -> None:  # fmt: skip
        self._catalog, self._client, self._deadline = catalog, catalog.client, deadline
        self._collection, self._is_dry, self._given_up = collection, dry_run, given_up

    def steps(self) -> Iterator[tuple[Step, Do]]:
        """Each step, and how to take it. The next one is found when that was done."""
        collection = self._collection
        for command in self._catalog.fetch().pending(collection.id):
            yield (
                self._step("settle", f"{command.what} ({command.id})", "its process did not finish it"),
                partial(settle, self._catalog, command, self._deadline),
            )
        names = [name for record in self._catalog.fetch().renditions_of(collection.id) for name in record.every]
        yield from expiry_steps(self._client, collection.name, [collection.shard, *names])
        contents = self._catalog.fetch()
        if not self._is_dry:  # it may have been dropped by a command that was settled
            self._collection = collection = contents.collections.get(collection.id, collection)
        renditions = [
            msgspec.structs.replace(record, state="dropping") if record.number == self._given_up else record
            for record in contents.renditions_of(collection.id)
        ]
        if collection.state == "dropping":
            yield from self._take_away(renditions)
            return
        if contents.pending(collection.id) or collection.id not in contents.collections:  # a dry run, or a drop
            return
        timeline = self._timeline(renditions)
        yield from self._promise(timeline)
        yield from self._move_holds(renditions)
        yield from publication_steps(self._client, contents, collection, self._timeline(renditions), renditions)
        yield from self._drop_renditions(renditions)

    def _promise(self, timeline: Timeline) -> Iterator[tuple[Step, Do]]:
        upper = upper_of(self._client, timeline)
        if timeline.upper < upper and not upper.is_top():
            show = timeline.last.rendition.columns.show
            reason = f"its data is there up to {show(upper)}, so that readers who may not write can read it"
            yield self._step("promise", show(upper), reason), partial(self._advance, timeline, upper)

    def _move_holds(self, renditions: list[RenditionRecord]) -> Iterator[tuple[Step, Do]]:
        timeline = self._timeline(renditions)
        collection = self._collection
        # After a handover at a later time the promise is ahead of the data, of which history is kept.
        newest = (timeline.upper.meet(upper_of(self._client, timeline)).time or 1) - 1
        yield from self._keep(collection.shard, timeline)
        yield from self._follow_named(renditions, timeline)
        if (kept := self._kept(timeline)) is not None:
            distance, reason = kept
            yield from self._move(collection.shard, max(0, newest - distance), reason, timeline)
            timeline = self._timeline(renditions)
        for record in renditions:
            if record.state != "live" or _is_over(record, timeline):
                continue
            target, reason = _hold_of(record, timeline, meet(self._client, record.names))
            for name in record.names:
                yield from self._keep(name, timeline)
                yield from self._move(name, target, reason, timeline)
        yield from self._release_copies()

    def _kept(self, timeline: Timeline) -> tuple[int, str] | None:
        """How many times of history are kept, and why: as the collection says, else as a rule does, by a time."""
        collection, columns = self._collection, timeline.last.rendition.columns
        if collection.retention is not None:
            return collection.retention, f"history of {collection.retention} times is kept"
        # Deleted keys are kept as their table is, so that both can be restored to as many times.
        owner = self._catalog.fetch().collections.get(collection.marks_of, collection)
        said = self._client.rules_of(owner.name).get("retention")
        distance = None if said is None else distance_of(said.value, columns.times)
        if said is None or distance is None:
            return None
        return distance, f"{said.source} keeps history of {Times(columns.times, int).show_distance(distance)}"

    def _keep(self, shard: str, timeline: Timeline) -> Iterator[tuple[Step, Do]]:
        """Set the hold of a shard that has none: its maker died, or a person took it away."""
        state = self._client.inspect(shard).state
        if HOLD in state.holds or state.is_finished():
            return

        def keep() -> None:
            with suppress(SinceViolation, ShardFinished, HoldConflict):
                self._client.set_hold(shard, HOLD, state.since, expected=None)

        show = timeline.last.rendition.columns.show
        what = f"{shard} to {show(state.since)}"
        yield self._step("move hold", what, "nothing keeps its history", follows=True), keep

    def _follow_named(self, renditions: list[RenditionRecord], timeline: Timeline) -> Iterator[tuple[Step, Do]]:
        """Let history go that was kept for readers by a member's name: who is left of them has a lease on the member.

        Readers of the collection have leases there, too. They hold no less in the rendition shard.
        """
        shard = self._collection.shard
        if (named := self._client.inspect(shard).state.holds.get(NAMED)) is None:
            return
        states = [self._client.inspect(place).state for record in renditions for place in record.places]
        sinces = [reader.since for state in states for reader in state.readers.values()]
        if not sinces:
            yield (
                self._step("release", f"hold {NAMED}", "no reader is left by a shard's name"),
                partial(self._release, NAMED),
            )
        elif named.since < (to := min(sinces)):
            show = timeline.last.rendition.columns.show
            yield (
                self._step("move hold", f"{NAMED} to {show(to)}", "no reader by a shard's name needs more"),
                partial(self._downgrade, shard, NAMED, to),
            )

    def _downgrade(self, shard: str, hold: str, to: Antichain) -> None:
        with suppress(SinceViolation, ShardFinished, HoldConflict):  # another process has moved it further
            self._client.downgrade_hold(shard, hold, to)

    def _release_copies(self) -> Iterator[tuple[Step, Do]]:
        """Release the holds of copies that are complete, or given up.

        SUBTLE: first the holds, then the catalog. A rendition is there before its copy begins and has a hold; by what
        was read before, one that began since would be taken for one that is gone.
        """
        holds = self._held()
        renditions = self._catalog.fetch().renditions_of(self._collection.id) if holds else []
        for record in renditions:
            if record.state != "dropping" and hold_name(record) in holds:
                start = handed_over_at(self._timeline([record]), record)
                if not is_copied(self._client, record, start):
                    holds.remove(hold_name(record))
        yield from self._release_all(holds, "nothing is left to copy")

    def _held(self, *others: str) -> list[str]:
        """The holds of copies on the rendition shard, and these others."""
        state = self._state(self._collection.shard)
        holds = state.holds if state is not None else ()
        return sorted(hold for hold in holds if hold.startswith(HOLDS) or hold in others)

    def _release_all(self, holds: list[str], reason: str) -> Iterator[tuple[Step, Do]]:
        for hold in holds:
            yield self._step("release", f"hold {hold}", reason), partial(self._release, hold)

    def _release(self, hold: str) -> None:
        with suppress(HoldConflict, ShardFinished):
            self._client.release_hold(self._collection.shard, hold)

    def _move(self, shard: str, target: int, reason: str, timeline: Timeline) -> Iterator[tuple[Step, Do]]:
        """Move a shard's hold to `target`, if it is not there; and since with it, where none is behind."""
        state = self._client.inspect(shard).state
        hold = state.holds.get(HOLD)
        if hold is None:
            return
        # Where a shard is behind (a rendition that follows later), the hold waits for it, and moves then.
        to = max(hold.since, at(target).meet(newest_time(state)))
        show = timeline.last.rendition.columns.show
        if hold.since < to or is_held_back(state, to):
            follows = shard != self._collection.shard  # a rendition's; its collection cannot be read before that
            yield (
                self._step("move hold", f"{shard} to {show(to)}", reason, follows=follows),
                partial(self._downgrade, shard, HOLD, to),
            )
        # The rendition shard's since is the collection's: who reads that reads the others.
        if shard == self._collection.shard and (others := holders(state, to, but=HOLD)):
            why = f"history before {show(to)} is kept by {', '.join(others)}"
            yield self._step("wait", shard, why), _nothing

    def _drop_renditions(self, renditions: list[RenditionRecord]) -> Iterator[tuple[Step, Do]]:
        timeline = self._timeline(renditions)
        for record in renditions:
            if record.state == "live" and _is_over(record, timeline):
                show = record.columns.show
                reason = f"the collection can only be read from {show(timeline.since)} on, and this ended before"
                yield (self._step("close", f"rendition {record.number}", reason), partial(self._mark, record))
                yield from self._finish(record)
            elif record.state == "dropping":
                yield from self._finish(record)

    def _mark(self, record: RenditionRecord) -> None:

        def decide(contents: Contents) -> tuple[Changes, None]:
            current = contents.renditions.get((record.collection, record.number))
            if current is None or contents.pending(record.collection):
                return {}, None
            if any(span.rendition.number == record.number for span in self._timeline([current]).spans):
                return {}, None
            return setting(msgspec.structs.replace(current, state="dropping")), None

        self._catalog.change(decide, self._deadline)

    def _finish(self, record: RenditionRecord) -> Iterator[tuple[Step, Do]]:
        """Take away a rendition's shards, if they have no reader, and then its row."""
        current = self._catalog.fetch().renditions.get((record.collection, record.number))
        if not self._is_dry and (current is None or current.state != "dropping"):
            return
        for name in record.every:
            yield from self._end(name, "no reader can need this rendition any more")
        if self._is_dry or all(self._is_gone(name) for name in record.every):
            yield (
                self._step("forget", f"rendition {record.number}", "nothing is left of it"),
                (lambda: self._catalog.change(lambda _: (without(record), None), self._deadline)),
            )

    def _take_away(self, renditions: list[RenditionRecord]) -> Iterator[tuple[Step, Do]]:
        """What is left of a dropped collection, the rendition shard first: no reader can begin after that."""
        shard, names = self._collection.shard, [name for record in renditions for name in record.every]
        dropped = "the collection was dropped"
        for name in (shard, *names):
            state = self._state(name)
            if state is not None and not state.upper.is_top():
                yield self._step("close", name, f"{dropped}: no more writes"), partial(self._close, name)
        yield from self._release_all(self._held(NAMED), dropped)
        yield from self._end(shard, dropped)
        if not self._is_dry and not self._is_gone(shard):
            return
        for name in names:
            yield from self._end(name, dropped)
        if self._is_dry or all(map(self._is_gone, names)):
            yield (
                self._step("forget", self._collection.name, "nothing is left of it"),
                (
                    lambda: self._catalog.change(
                        lambda _: (without(self._collection, *renditions), None), self._deadline
                    )
                ),
            )

    def _end(self, name: str, reason: str) -> Iterator[tuple[Step, Do]]:
        """Release the layer's own hold and make the shard a tombstone, if no reader and no other hold needs it."""
        state = self._state(name)
        if state is None or state.is_finished():
            return
        if others := [*holders(state, but=HOLD), *(f"pin {pin}" for pin in sorted(state.pins))]:
            yield self._step("wait", name, f"still read or held by {', '.join(others)}"), _nothing
            return

        def end() -> None:
            with suppress(HoldConflict, ShardFinished):
                self._client.release_hold(name, HOLD)
            with suppress(StillRead, ShardFinished, NotFound):  # a reader has come meanwhile: next time
                self._client.finish(name)

        yield self._step("finish", name, reason), end

    def _close(self, name: str) -> None:
        schema = self._client.inspect(name).state.schemas[-1]
        with suppress(ShardFinished), self._client.open_writer(name, schema, layer=LAYER) as write:
            write.finish()

    def _advance(self, timeline: Timeline, upper: Antichain) -> None:
        schema = schema_for(timeline.last.rendition.columns.times)
        with suppress(ShardFinished), self._client.open_writer(self._collection.shard, schema, layer=LAYER) as write:
            write.advance_upper(upper)

    def _timeline(self, renditions: list[RenditionRecord]) -> Timeline:
        return timeline_of(self._client, self._collection, renditions[0])

    def _state(self, name: str) -> State | None:
        version = self._client.machine(name).try_fetch()
        return None if version is None else version.state

    def _is_gone(self, name: str) -> bool:
        state = self._state(name)
        return state is None or state.is_finished()

    def _step(self, action: str, subject: str, reason: str, *, follows: bool = False) -> Step:
        """A step. It `follows` if what it frees cannot be read already."""
        gives_up = action in GIVES_UP and not follows
        return Step(self._collection.name, action, subject, reason, gives_up)  # type: ignore[arg-type]


def _nothing() -> None:
    """What is done to wait."""


def _is_over(record: RenditionRecord, timeline: Timeline) -> bool:
    """Whether the rendition was the collection, and is so at no time that can still be read."""
    return record.begun and all(span.rendition.number != record.number for span in timeline.spans)


def _hold_of(record: RenditionRecord, timeline: Timeline, upper: Antichain) -> tuple[int, str]:
    """From which time on a rendition's shards keep their history, and why.

    It may be behind what would be right by now, never ahead. A rendition that is to follow is kept from the
    promise on, as a handover is never before that, and at its newest time, as it is compared there. One that was
    handed over to is kept from just before that on: a copy of it may have begun with its contents then.
    """
    starts = [span.start for span in timeline.spans if span.rendition.number == record.number]
    if not starts:
        newest = (timeline.upper.meet(upper).time or 1) - 1
        return newest, "it can follow at the promise at the earliest, and is compared as of now"
    return max(timeline.since, starts[0] - 1), "the collection can only be read from there on"
