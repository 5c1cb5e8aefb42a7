"""Mending a source: what was decoded wrongly is decoded again from the messages that it kept, at their times.

A recipe is another way to decode. Of each collection that depends on it a rendition is made from NAME/raw, beside the
instances that run, and compared. The handover of the output decides; that of the errors follows, at the same time.
From there on instances decode by the recipe. One that does not know of it yet writes nothing: see `running`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from persist_lib.catalog.comparing import Comparison
from persist_lib.errors import HandoverRefused, InvalidUsage, NotFound, TimedOut
from persist_lib.kernel.multiplicity import built
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.sources.bindings import Marks, Window
from persist_lib.sources.collection import Following, followed
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import ERRORS, RAW, raw_of
from persist_lib.sources.records import Recipe, SourceRecord, changed, in_unit, mend_command
from persist_lib.sources.running import PASSING, Ingestion, Progress
from persist_lib.sources.targets import Target

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.sources.sources import Sources

ROLES = ("output", "errors")
"""What depends on a recipe, in the order in which they are handed over."""
PAUSE_S = 0.05


class Mended(msgspec.Struct, frozen=True):
    """A recipe that was tried: the renditions made by it, up to where, and what they would change beside the present.

    `output` and `errors` are what `Controller.compare` answers of the two collections, None where it cannot.
    """

    renditions: dict[str, int]
    time: int
    output: Comparison | None
    errors: Comparison | None


class Beside(Ingestion):
    """An instance beside those that run, which alone promise, hold, and tell the upstream."""

    def _settle(self, window: Window, deadline: Deadline) -> None: ...

    def _move_holds(self, time: int) -> None: ...

    def _tell(self) -> None: ...

    def _progress(self, time: int, _marks: Marks, messages: int, errors: int) -> Progress:
        return Progress(time, messages, errors, {}, 0, messages == 0)


class Mending(Beside):
    """Fills the renditions of a recipe from the messages that were kept. Any number may be at it.

    With `until`, the time of a handover to them, it fills what is before that, in the former decoding: an instance that
    died may have left less in one collection than in another, or less than it had promised.
    """

    def __init__(self, controller: Controller, record: SourceRecord, owner: str, until: int | None = None) -> None:
        recipe = recipe_of(record)
        self._renditions = recipe.renditions if until is None else {}
        raw = controller.catalog.fetch().collections[record.collections["raw"]].name
        self._raw = Following(controller, record.name, followed(controller, raw), raw, owner, until=until)
        super().__init__(controller, recipe.applied(record) if until is None else record, owner, self._raw)

    def _opened(self) -> Following:
        self._reader = self._raw
        return self._raw

    def _writing(self) -> dict[str, Target]:
        if not self._targets:
            for role in ROLES:
                id_ = self.record.collections[role]
                self._targets[role] = Target(self._controller, id_, self._owner, self._renditions.get(role))
        return self._targets

    def _parts(self, window: Window) -> Iterable[tuple[Window, pa.Table]]:
        """The messages of a window as they were kept, in the order of times, partitions and addresses."""
        found = self._raw.updates(window.start, window.end)
        found = built(found, f"what source {self.record.name!r} kept")
        places = found.group_by(["partition", "address"]).aggregate([])
        if self.record.meaning.rows.by_key and places.num_rows < found.num_rows:
            raise InvalidUsage(
                f"source {self.record.name!r}: several messages have one address, and in which order they came is not "
                "kept. So they cannot be decoded again with an envelope for which that matters"
            )
        return [(window, found)]

    def _move_holds(self, time: int) -> None:
        for target in self._writing().values():
            target.let_go(max(0, time - 1))
        self._raw.let_go(max(0, time - 1))


class Ahead(Beside):
    """Keeps messages ahead of what is decoded of them: it writes NAME/raw alone, which depends on no recipe.

    Instances promise the output up to where they are about to write it, so what is filled from raw would never
    be beyond the earliest handover, if raw did not go beyond that.
    """

    def _mint(self, deadline: Deadline) -> None:
        self._clock.mint(lambda _: {}, deadline)

    def _writing(self) -> dict[str, Target]:
        if not self._targets:
            self._targets["raw"] = Target(self._controller, self.record.collections["raw"], self._owner)
        return self._targets

    def _made(self, messages: pa.Table, _window: Window, _deadline: Deadline) -> dict[str, pa.Table]:
        raw = raw_of(messages) if messages.num_rows else RAW.updates.empty_table()
        return {"raw": raw, "errors": ERRORS.updates.empty_table()}


def recipe_of(record: SourceRecord) -> Recipe:
    """The recipe that is tried. Raises NotFound."""
    if record.mending is None:
        raise NotFound(f"source {record.name!r} is not being mended: say first how to decode it", source=record.name)
    return record.mending


def declare(
    sources: Sources, record: SourceRecord, decoding: Decoding | None, meaning: Meaning | None, schema: Schema | None,
    decoded: Schema | None, deadline: Deadline,
) -> SourceRecord:  # fmt: skip
    """Say how messages are to be decoded, and make the renditions; or find that said and done.

    Raises InvalidUsage where there is nothing to mend by, or something else is being tried.
    """
    if "raw" not in record.collections:
        raise InvalidUsage(
            f"source {record.name!r} did not keep its messages, so they cannot be decoded again. Sources with keep_raw "
            "do; without it, declare another source and read all of it again",
            source=record.name,
        )
    given = Recipe(
        number=0, decoding=decoding or record.decoding, meaning=meaning or record.meaning,
        schema=record.schema if schema is None else in_unit(check_schema(schema), "ms"),
        decoded=record.decoded if decoded is None else check_schema(decoded),
    )  # fmt: skip
    is_given = any(one is not None for one in (decoding, meaning, schema, decoded))
    if is_given:
        _check(sources.controller, record, given)

    def decide(now: SourceRecord) -> SourceRecord:
        if now.mending is None:
            if not is_given:
                recipe_of(now)  # raises
            return changed(now, mends=now.mends + 1, mending=msgspec.structs.replace(given, number=now.mends + 1))
        same = msgspec.structs.replace(now.mending, number=0, renditions={}, decided=False)
        if is_given and same != given:
            raise InvalidUsage(
                f"source {record.name!r} is being mended in another way: renditions {now.mending.renditions}. Hand "
                "over to these or give them up first. Nothing was changed",
                source=record.name,
            )
        return now

    sources.declared.update(record, decide, deadline, gone=f"the source {record.name!r} was dropped in between")
    record = sources.declared.find(record.name)
    recipe = recipe_of(record)
    if len(recipe.renditions) == len(ROLES):
        return record
    names, made = names_by_role(sources.controller, record), {}
    for role in ROLES:
        columns = given.schema if role == "output" and schema is not None else None
        command = mend_command(record, recipe.number, role)
        made[role] = sources.controller.make_rendition(names[role], schema=columns, command=command).number

    def remember(now: SourceRecord) -> SourceRecord:
        return changed(now, mending=msgspec.structs.replace(recipe_of(now), renditions=made))

    _update(sources, record, deadline, remember)
    return sources.declared.find(record.name)


def _update(
    sources: Sources, record: SourceRecord, deadline: Deadline, change: Callable[[SourceRecord], SourceRecord]
) -> None:
    """Change a source as long as the recipe of `record` is tried. Nothing where it was finished, or given up."""
    number = recipe_of(record).number

    def while_tried(now: SourceRecord) -> SourceRecord:
        return change(now) if now.mending is not None and now.mending.number == number else now

    sources.declared.update(record, while_tried, deadline)


def _check(controller: Controller, record: SourceRecord, recipe: Recipe) -> None:
    """Raise InvalidUsage for a recipe that cannot be, or is no other one."""
    as_mended = recipe.applied(record)
    if as_mended == record:
        raise InvalidUsage(
            f"source {record.name!r} is decoded so already. A function that was corrected needs another name: "
            "instances that still have the old one must be told apart",
            source=record.name,
        )
    if others := sorted(set(record.collections) - {*ROLES, "raw"}):
        raise InvalidUsage(
            f"source {record.name!r} also keeps {', '.join(others)}, which cannot be made again yet. Declare another "
            "source and read all of it again",
            source=record.name,
        )
    if not recipe.meaning.keep_raw:
        raise InvalidUsage("a source that keeps its messages must continue to: say keep_raw=True")
    as_mended.pipeline()
    raw = controller.describe(names_by_role(controller, record)["raw"])
    if raw.since.time:
        raise InvalidUsage(
            f"collection {raw.name!r} has given up its history before {raw.schema.show(raw.since)}, so not all "
            "messages have the times at which they came. To mend a source, keep that without retention",
            source=record.name,
        )


def names_by_role(controller: Controller, record: SourceRecord) -> dict[str, str]:
    """The names that the collections of a source have now."""
    contents = controller.catalog.fetch()
    return {role: contents.collections[id_].name for role, id_ in record.collections.items()}


def fill(mending: Ingestion, deadline: Deadline, beyond: int = 0) -> int:
    """Take a step, which is all that is there when it begins, and more until `beyond` is passed. Answers up to where.

    Each window may take as long as the deadline has left.
    """
    while True:
        try:
            found = mending.step(deadline.left_s())
            if found.time > beyond:
                return found.time
        except PASSING:
            if deadline.has_passed():
                raise
        if deadline.has_passed():
            why = "as its messages are still being decoded again. The same call continues where this one ended"
            raise deadline.gave_up(f"source {mending.record.name!r}", why)
        deadline.pause(PAUSE_S)


def judged(controller: Controller, record: SourceRecord, time: int, deadline: Deadline) -> Mended:
    """What the renditions of a recipe would change."""
    recipe, names = recipe_of(record), names_by_role(controller, record)
    found: list[Comparison | None] = []
    for role in ROLES:
        try:
            found.append(
                controller.compare(names[role], recipe.renditions[role], timeout=deadline.left_s())
            )  # fmt: skip
        except InvalidUsage:  # another key, or nothing is there yet
            found.append(None)
    return Mended(dict(recipe.renditions), time, found[0], found[1])


def finish(sources: Sources, record: SourceRecord, deadline: Deadline) -> int:
    """Hand over to what was decided on, and decode by it from now on. The next call finishes it. Answers the time."""
    controller, recipe, names = sources.controller, recipe_of(record), names_by_role(sources.controller, record)
    commands = {role: f"{mend_command(record, recipe.number, role)}.follows" for role in ROLES}
    owner = f"mend {record.name}"[:100]
    with closing(Mending(controller, record, owner)) as mending, closing(Ahead(controller, record, owner)) as ahead:
        while True:
            fill(ahead, deadline)
            fill(mending, deadline)
            try:
                at = controller.hand_over(
                    names["output"], recipe.renditions["output"], command=commands["output"], timeout=deadline.left_s()
                )
                break
            except (HandoverRefused, TimedOut):  # an instance is further, or has promised to be
                if deadline.has_passed():
                    raise
                deadline.pause(PAUSE_S)
        fill(mending, deadline, at)
    # Both collections are level before the errors follow, and no instance decodes by the recipe before that.
    with closing(Mending(controller, record, owner, until=at)) as before:
        fill(before, deadline, at - 1)
    controller.hand_over(
        names["errors"], recipe.renditions["errors"], at=at, command=commands["errors"], timeout=deadline.left_s()
    )

    _update(sources, record, deadline, lambda now: recipe.applied(now, mended=recipe.number, mending=None))
    return at


def decide(sources: Sources, record: SourceRecord, deadline: Deadline) -> SourceRecord:
    """Say that the recipe is the one from now on. It is never taken back."""
    number = recipe_of(record).number

    gone = f"source {record.name!r}: the mending was given up, or finished, in between"

    def decided(now: SourceRecord) -> SourceRecord:
        if now.mending is None or now.mending.number != number:
            raise NotFound(gone)
        return changed(now, mending=msgspec.structs.replace(now.mending, decided=True))

    sources.declared.update(record, decided, deadline, gone=gone)
    return sources.declared.find(record.name)


def give_up(sources: Sources, record: SourceRecord, deadline: Deadline) -> None:
    """Drop the renditions of a recipe. Raises HandoverRefused where they were decided on."""
    recipe, names = recipe_of(record), names_by_role(sources.controller, record)
    if recipe.decided:
        raise HandoverRefused(
            f"source {record.name!r}: it was decided to hand over to {recipe.renditions}. Nothing was changed; repeat "
            "the handover to finish it",
            source=record.name,
        )
    for role, number in recipe.renditions.items():
        command = f"{mend_command(record, recipe.number, role)}.dropped"
        sources.controller.drop_rendition(names[role], number, command=command, timeout=deadline.left_s())

    _update(sources, record, deadline, lambda now: changed(now, mending=None))
