"""Handing over: another rendition becomes the collection from a time on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from persist_lib.arguments import parse_flag, parse_integer, shown
from persist_lib.catalog import compare_task
from persist_lib.catalog.catalog import Changes, Contents
from persist_lib.catalog.collection_status import timeline_of
from persist_lib.catalog.command_log import Commanding
from persist_lib.catalog.compare_task import Judging
from persist_lib.catalog.comparing import Comparison, compare_renditions
from persist_lib.catalog.copies import Copied, Progress, Reading, Rebuild, Transform, begin, copy_step
from persist_lib.catalog.describe import HandoverPlan
from persist_lib.catalog.effects import handover_time, wal_upper
from persist_lib.catalog.metadata_shard import states_of
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import CollectionRecord, CommandRecord, RenditionRecord
from persist_lib.catalog.renditions import Renditions, Timeline, is_copied, meet, upper_of
from persist_lib.catalog.wal import check_together, has_wal
from persist_lib.catalog.writer import CollectionWriter
from persist_lib.catalog.writing import slack_of
from persist_lib.errors import HandoverRefused, InvalidUsage, TimedOut
from persist_lib.frontier import MAX_TIME, at
from persist_lib.runtime.ambient import Deadline
from persist_lib.times import TimeLike, Times, Unit

PAUSE_S = 0.05
"""Between two looks at what there is to copy."""


class Handovers(Commanding):
    """The calls that bring a rendition up to the one that it is to follow, compare the two, and hand over."""

    def copy_rendition(
        self,
        name: str,
        rendition: int,
        *,
        transform: Transform | None = None,
        to_end: bool = False,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Copied:
        """Bring a copy up to where the rendition is that it copies; again and again, while that is written.

        `transform` makes rows in the new columns of rows in the old ones; without one they are copied as they are. It
        must be a pure function of each row, and pass on `_time` and `_diff`. With `to_end`, the call goes on until the
        copy was handed over to and has all that was before; `timeout` is in seconds. `progress` is called with how many
        rows were read so far, and with how many there are to read in all, as far as is known.

        A copy that fell so far behind that history was given up cannot continue: SinceViolation. Make another one then.
        """
        self._writable("copy_rendition")
        to_end, deadline = parse_flag(to_end, "to_end"), self._deadline(timeout)
        check_transform(transform)
        old, new, collection = self._copy_of(name, rendition)
        reading = Reading(progress)
        with self._reader(collection, new, f"copy to rendition {new.number}") as reader:
            while True:
                copied = copy_step(reader, old, new, transform, deadline, reading)
                if copied.is_complete or (not to_end and copied.goal <= copied.upper):
                    return copied
                if deadline.has_passed():
                    raise deadline.gave_up(f"collection {name!r}", f"as the copy is at {copied.upper}")
                if copied.goal <= copied.upper:
                    deadline.pause(PAUSE_S)

    @contextmanager
    def begin_rebuild(self, name: str, rendition: int, *, transform: str | None = None) -> Iterator[Rebuild | None]:
        """Begin or resume the first copy of a large rendition by many processes; None if it is there already.

        `jobs/rebuild.py` is the program that does so on Spark. `transform` names a function, as `module:function`.
        """
        self._writable("begin_rebuild")
        old, new, collection = self._copy_of(name, rendition)
        with self._reader(collection, new, f"copy to rendition {new.number}") as reader:
            begun = begin(reader, old, new, transform)
            if begun is None:
                yield None
                return
            with begun:
                yield begun

    def compare(
        self,
        name: str,
        rendition: int,
        *,
        to: int | None = None,
        as_of: TimeLike | None = None,
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Comparison:
        """What a rendition would change: which rows appear, vanish and change as of a time, by column, with samples.

        It is compared to the rendition `to` (default: the active one), as of `as_of` (default: the newest time that
        both have). `progress` is called with the number of rows, of both, that are compared so far. Changes nothing,
        and takes bounded memory. Raises NotFound, TimedOut, SinceViolation, and InvalidUsage where the keys have other
        columns.
        """
        deadline = self._deadline(timeout)
        with self._sides(name, rendition, to) as (reader, old, new):
            return compare_renditions(reader, old, new, as_of, deadline, progress)

    @contextmanager
    def begin_comparison(
        self, name: str, rendition: int, *, to: int | None = None, as_of: TimeLike | None = None, keep: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Judging]:  # fmt: skip
        """Begin what `compare` does for a large collection, by many processes. `jobs/compare.py` does so on Spark.

        A rendition that was handed over to is compared at its handover. With `keep` the difference is kept for
        listeners that pass a handover, if it is exactly that one; it goes with the old rendition.
        """
        if keep := parse_flag(keep, "keep"):
            self._writable("begin_comparison with keep")
        deadline = self._deadline(timeout)
        with (
            self._sides(name, rendition, to) as (reader, old, new),
            compare_task.begin(reader, old, new, as_of, deadline, keep=keep) as begun,
        ):
            yield begun

    @contextmanager
    def _sides(
        self, name: str, rendition: int, to: int | None
    ) -> Iterator[tuple[RenditionReader, RenditionRecord, RenditionRecord]]:
        """A reader for a comparison, the rendition that is compared to, and the one that is compared."""
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        timeline = timeline_of(self.client, collection, new)
        old = timeline.last.rendition if to is None else self._of(contents, collection, parse_integer(to, "to", 1))
        with self._reader(collection, new, f"compare rendition {new.number}") as reader:
            yield reader, old, new

    def _reader(self, collection: CollectionRecord, new: RenditionRecord, owner: str) -> RenditionReader:
        return RenditionReader(self.client, collection, new.columns.times, None, owner)

    def _copy_of(self, name: str, rendition: object) -> tuple[RenditionRecord, RenditionRecord, CollectionRecord]:
        """The rendition that is copied, and its copy."""
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        if new.copies is None:
            raise InvalidUsage(
                f"collection {name!r}: rendition {new.number} is written independently. To copy, make a rendition with "
                "copy=True",
                collection=name, rendition=new.number,
            )  # fmt: skip
        return self._of(contents, collection, new.copies), new, collection

    @abstractmethod
    def _apply_wal(self, timeline: str, timeout: float) -> None:
        """Copy what is in the WAL of a timeline to its tables."""

    def hand_over(
        self, name: str, rendition: int, *, at: TimeLike | None = None, force: bool = False, advance: bool = False,
        transform: Transform | None = None, wait: bool = False, dry_run: bool = False, command: str | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Make a rendition the collection from a time on, and return that time.

        Nothing before it changes. `at` is the time (default: the earliest possible); it must not be promised already.
        Refused are a rendition that was given up, one that is the collection already, and one whose data does not reach
        beyond the time, unless `force` is true: readers would wait for it. With `dry_run` nothing is changed, and the
        answer is the time at which it would happen now; `plan_handover` says more.

        Readers see it once upper has passed the time. With `advance` this call sees to that: it finishes the copy, with
        `transform` as in `copy_rendition`, and where writers exclude one another it then advances upper past the time.
        With `wait` it returns when readers see it. Both go on within `timeout`, in seconds; after TimedOut the handover
        is decided, and the same call with the same `command` continues.

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
            why = f"rendition {rendition} was not handed over to: {record.refused}. Nothing was changed"
            raise _refused(name, why, rendition=rendition)
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
        check_together(self.client, collection, "a handover of it")
        new, name = self._of(contents, collection, rendition), collection.name
        show = new.columns.show
        timeline = timeline_of(self.client, collection, new)
        if timeline.last.rendition.number == rendition:
            since = show(timeline.last.start)
            why = f"rendition {rendition} is the collection already, since {since}. Nothing was changed"
            raise _refused(name, why, rendition=rendition)
        time = handover_time(timeline, start, wal_upper(self.client, collection))
        self._check_time(name, new, timeline, time)
        self._check_copy(name, new, timeline)
        if start is not None and has_wal(collection) and start != time:
            raise HandoverRefused(
                f"table {name!r}: transactions are committed and read up to {show(time)} already, so a "
                "handover cannot be before that",
                collection=name, at=start, earliest=time,
            )  # fmt: skip
        # Writers promise so far ahead of their data, again and again: one that is level never is beyond that.
        slack = slack_of(collection, new.columns) if new.mode == "compare_and_append" else 0
        self._check_reach(name, new, time, slack, force=force)
        return new, timeline, time

    def _advance(
        self, collection: CollectionRecord, rendition: int, time: int, transform: Transform | None, deadline: Deadline
    ) -> None:
        """See to it that readers see a handover: its rendition has all that was before, and upper is past the time."""
        contents = self.catalog.fetch()
        current, new = contents.collections.get(collection.id), contents.renditions.get((collection.id, rendition))
        if current is None or current.state == "dropping" or new is None or new.state == "dropping":
            return  # it is gone, or a later handover has followed long since
        if has_wal(current):  # what is in the WAL alone would never be copied
            self._apply_wal(contents.timelines[str(current.timeline)].name, deadline.left_s())
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
            why = f"the time {show(time)} is promised already: readers have relied on what is the collection then"
            why = f"{why}. The earliest time is {show(earliest)}. Nothing was changed"
            raise _refused(name, why, at=time, earliest=earliest)
        if time >= MAX_TIME:
            raise InvalidUsage(f"a handover must be before the end of all times: got {time}", at=time)

    def _check_copy(self, name: str, new: RenditionRecord, timeline: Timeline) -> None:
        last = timeline.last
        if not is_copied(self.client, last.rendition, last.start):
            start = new.columns.show(last.start)
            raise HandoverRefused(
                f"collection {name!r}: rendition {last.rendition.number} was handed over to, and lacks what was "
                f"written before {start} to the one that it copies. Nothing was changed; finish it first: "
                "copy_rendition(…, to_end=True)",
                collection=name, rendition=last.rendition.number,
            )  # fmt: skip
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
            why = f"{why}. Nothing was changed; make a new rendition with copy=True"
            raise _refused(name, why, rendition=new.number)

    def _check_reach(self, name: str, new: RenditionRecord, time: int, slack: int, *, force: bool) -> None:
        show = new.columns.show
        states = states_of(self.client, new.names)
        since, upper = max(state.since for state in states), min(state.upper for state in states)
        if at(time) < since:
            raise HandoverRefused(
                f"collection {name!r}: rendition {new.number} can only be read from {show(since)} on, which is after "
                f"{show(time)}. Nothing was changed; hand over at {show(since)} or later",
                collection=name, at=time, since=since,
            )  # fmt: skip
        if not force and new.copies is None and not upper.has_passed(max(0, time - slack)):
            raise HandoverRefused(
                f"collection {name!r}: rendition {new.number} has data up to {show(upper)} only, so that readers would "
                f"wait for it at {show(time)}. Nothing was changed; write it further, or say force=True",
                collection=name, at=time, upper=upper,
            )  # fmt: skip


def _refused(name: str, why: str, **fields: object) -> HandoverRefused:
    return HandoverRefused(f"collection {name!r}: {why}", collection=name, **fields)


def check_transform(transform: object) -> None:
    """Raise InvalidUsage for what is no function."""
    if transform is not None and not callable(transform):
        raise InvalidUsage(f"transform must be a function of a pyarrow.Table: got {shown(transform)}")
