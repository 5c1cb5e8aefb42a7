"""Handing over: another rendition becomes the collection from a time on."""

from __future__ import annotations

import msgspec

from persist_lib.arguments import parse_flag, parse_integer
from persist_lib.errors import HandoverRefused, InvalidUsage, TimedOut
from persist_lib.frontier import MAX_TIME, at
from persist_lib.runtime.ambient import Deadline
from persist_lib.storage.at_once import states_of
from persist_lib.storage.catalog import Changes, Contents
from persist_lib.storage.copying import Transform
from persist_lib.storage.describe import HandoverPlan
from persist_lib.storage.describing import timeline_of
from persist_lib.storage.effects import handover_time, wal_upper
from persist_lib.storage.filling import PAUSE_S, Filling, check_transform
from persist_lib.storage.records import CollectionRecord, CommandRecord, RenditionRecord
from persist_lib.storage.timeline import Renditions, Timeline
from persist_lib.storage.upper import meet, upper_of
from persist_lib.storage.wal import check_handover, has_wal
from persist_lib.storage.writer import CollectionWriter
from persist_lib.times import TimeLike, Times, Unit


class Handovers(Filling):
    """The calls that hand over, and say beforehand what that would do."""

    def hand_over(
        self,
        name: str,
        rendition: int,
        *,
        at: TimeLike | None = None,
        force: bool = False,
        advance: bool = False,
        transform: Transform | None = None,
        wait: bool = False,
        dry_run: bool = False,
        command: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Make a rendition the collection from a time on, and return that time.

        Nothing before it changes. `at` is the time (default: the earliest possible); it must not be promised already.
        Refused are a rendition that was given up, one that is the collection already, and one whose data does not reach
        beyond the time, unless `force` is true: readers would wait for it. With `dry_run` nothing is changed, and the
        answer is the time at which it would happen now; `plan_handover` says more.

        Readers see it once upper has passed the time. With `advance` this call sees to that: it finishes the copy, with
        `transform` as in `copy_rendition`, and where writers exclude one another it then advances upper past the time.
        With `wait` it returns when readers see it. Both go on within `timeout`, in seconds; after TimedOut the handover
        is decided, and the same call with the same `command` goes on.

        Raises HandoverRefused, TimedOut, and NotFound.
        """
        force, dry_run = parse_flag(force, "force"), parse_flag(dry_run, "dry_run")
        advance, wait = parse_flag(advance, "advance"), parse_flag(wait, "wait")
        if advance and at is not None:
            raise InvalidUsage(
                "advance=True is for a handover at the earliest time, as nobody could write before a later one any "
                "more: leave out at=, or say wait=True, which waits for the writers to come there"
            )
        check_transform(transform)
        if transform is not None and not advance:
            raise InvalidUsage("transform= is for advance=True, which finishes the copy")
        if not dry_run:
            self._writable("hand_over")
        rendition, deadline = parse_integer(rendition, "rendition", 1), self._deadline(timeout)
        contents, collection = self._subject(name, None if dry_run else command)
        schema = contents.renditions_of(collection.id)[0].columns
        start = None if at is None else Times(schema.times, self.client.consensus.now).as_of(at, "at")
        if dry_run:
            return self._checked(contents, collection, rendition, start, force=force)[2]

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            last = self._checked(contents, collection, rendition, start, force=force)[1].last
            asked = {**record.asked, "expects": last.command, "follows": last.rendition.number}
            return {}, msgspec.structs.replace(record, asked=asked, pending=True)

        asked = {"name": name, "rendition": rendition, "at": start}
        record = self._command("hand over", collection.id, asked, intent, command, timeout)
        if record.refused:
            raise HandoverRefused(
                f"collection {name!r}: rendition {rendition} was not handed over to: {record.refused}. Nothing was "
                "changed",
                collection=name, rendition=rendition,
            )  # fmt: skip
        time = int(record.answer["at"])
        if advance:
            self._advance(collection, rendition, time, transform, deadline)
        if wait:
            self._wait_until_seen(collection, rendition, time, schema.times, deadline)
        return time

    def plan_handover(
        self, name: str, rendition: int, *, at: TimeLike | None = None, force: bool = False
    ) -> HandoverPlan:
        """What `hand_over` with these arguments would do now, or why it would be refused. Changes nothing.

        Raises NotFound, and InvalidUsage for wrong arguments.
        """
        force, rendition = parse_flag(force, "force"), parse_integer(rendition, "rendition", 1)
        contents, collection = self._find(name)
        new = self._of(contents, collection, rendition)
        timeline = timeline_of(self.client, collection, new)
        start = None if at is None else Times(new.columns.times, self.client.consensus.now).as_of(at, "at")
        refused = ""
        try:
            self._checked(contents, collection, rendition, start, force=force)
        except HandoverRefused as error:
            refused = error.message
        upper = meet(self.client, new.names)
        return HandoverPlan(
            rendition, timeline.last.rendition.number,
            handover_time(timeline, start, wal_upper(self.client, collection)), new.columns,
            upper_of(self.client, timeline), upper, is_copy=new.copies is not None, refused=refused,
        )  # fmt: skip

    def _checked(
        self, contents: Contents, collection: CollectionRecord, rendition: int, start: int | None, *, force: bool
    ) -> tuple[RenditionRecord, Timeline, int]:
        """The rendition, what it would follow, and when. Raises HandoverRefused."""
        check_handover(self.client, collection)
        new, name = self._of(contents, collection, rendition), collection.name
        show = new.columns.show
        timeline = timeline_of(self.client, collection, new)
        if timeline.last.rendition.number == rendition:
            raise HandoverRefused(
                f"collection {name!r}: rendition {rendition} is the collection already, since "
                f"{show(timeline.last.start)}. Nothing was changed",
                collection=name, rendition=rendition,
            )  # fmt: skip
        time = handover_time(timeline, start, wal_upper(self.client, collection))
        self._check_time(name, new, timeline, time)
        self._check_copy(name, new, timeline)
        if start is not None and has_wal(collection) and start != time:
            raise HandoverRefused(
                f"table {name!r}: transactions are committed and read up to {show(time)} already, so a "
                "handover cannot be before that",
                collection=name, at=start, earliest=time,
            )  # fmt: skip
        self._check_reach(name, new, time, force=force)
        return new, timeline, time

    def _advance(
        self, collection: CollectionRecord, rendition: int, time: int, transform: Transform | None, deadline: Deadline
    ) -> None:
        """See to it that readers see a handover: its rendition has all that was before, and upper is past the time."""
        contents = self.catalog.fetch()
        current, new = contents.collections.get(collection.id), contents.renditions.get((collection.id, rendition))
        if current is None or current.state == "dropping" or new is None or new.state == "dropping":
            return  # it is gone, or a later handover has followed long since
        if new.copies is not None:
            self.copy_rendition(current.name, rendition, transform=transform, to_end=True, timeout=deadline.left_s())
        if new.mode == "compare_and_append" and current.kind == "collection":
            with CollectionWriter(self.client, current, new.columns.times, None) as write:
                write.advance_upper(time + 1, timeout=deadline.left_s())

    def _wait_until_seen(
        self, collection: CollectionRecord, rendition: int, time: int, unit: Unit | None, deadline: Deadline
    ) -> None:
        renditions = Renditions(self.client, collection.shard, unit, collection.name)
        while not (upper := upper_of(self.client, renditions.fetch())).has_passed(time):
            if deadline.has_passed():
                show = Times(unit, self.client.consensus.now).show
                raise TimedOut(
                    f"collection {collection.name!r} is handed over to rendition {rendition} at {show(time)}, and "
                    f"readers do not see it yet, as after {deadline.timeout_s:g} s upper is {show(upper)}. They will "
                    "once writers have come that far; to wait longer, repeat the call with the same command",
                    timeout_s=deadline.timeout_s, at=time, upper=upper,
                )  # fmt: skip
            deadline.pause(PAUSE_S)

    def _check_time(self, name: str, new: RenditionRecord, timeline: Timeline, time: int) -> None:
        show, earliest = new.columns.show, at(handover_time(timeline, None))
        if at(time) < earliest:
            raise HandoverRefused(
                f"collection {name!r}: the time {show(time)} is promised already: readers have relied on what is the "
                f"collection then. The earliest time is {show(earliest)}. Nothing was changed",
                collection=name, at=time, earliest=earliest,
            )  # fmt: skip
        if time >= MAX_TIME:
            raise InvalidUsage(f"a handover must be before the end of all times: got {time}", at=time)

    def _check_copy(self, name: str, new: RenditionRecord, timeline: Timeline) -> None:
        if new.copies is None:
            return
        why = ""
        if new.begun:
            why = f"rendition {new.number} was the collection before, and has nothing of what was written since"
        elif new.copies != timeline.last.rendition.number:
            why = (
                f"rendition {new.number} is a copy of rendition {new.copies}, and since "
                f"{new.columns.show(timeline.last.start)} rendition {timeline.last.rendition.number} is the collection"
            )
        if why:
            raise HandoverRefused(
                f"collection {name!r}: {why}. Nothing was changed; make a new rendition with copy=True",
                collection=name, rendition=new.number,
            )  # fmt: skip

    def _check_reach(self, name: str, new: RenditionRecord, time: int, *, force: bool) -> None:
        show = new.columns.show
        states = states_of(self.client, new.names)
        since, upper = max(state.since for state in states), min(state.upper for state in states)
        if at(time) < since:
            raise HandoverRefused(
                f"collection {name!r}: rendition {new.number} can only be read from {show(since)} on, which is after "
                f"{show(time)}. Nothing was changed; hand over at {show(since)} or later",
                collection=name, at=time, since=since,
            )  # fmt: skip
        if not force and new.copies is None and not upper.has_passed(time):
            raise HandoverRefused(
                f"collection {name!r}: rendition {new.number} has data up to {show(upper)} only, so that readers would "
                f"wait for it at {show(time)}. Nothing was changed; write it further, or say force=True",
                collection=name, at=time, upper=upper,
            )  # fmt: skip
