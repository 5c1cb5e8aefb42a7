"""Filling a rendition that is to follow, and judging it: copies, rebuilds by many processes, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from persist_lib.arguments import parse_flag, parse_integer, shown
from persist_lib.errors import InvalidUsage
from persist_lib.storage import judging
from persist_lib.storage.commanding import Commanding
from persist_lib.storage.comparing import Comparison, compare_renditions
from persist_lib.storage.copying import Copied, Progress, Reading, Transform, copy_step
from persist_lib.storage.describing import timeline_of
from persist_lib.storage.judging import Judging
from persist_lib.storage.reader import CollectionReader
from persist_lib.storage.rebuilding import Rebuild, begin
from persist_lib.storage.records import CollectionRecord, RenditionRecord
from persist_lib.storage.small import out_of_time
from persist_lib.times import TimeLike

PAUSE_S = 0.05
"""Between two looks at what there is to copy."""


class Filling(Commanding):
    """The calls that bring a rendition up to the one that it is to follow, and compare the two."""

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

        A copy that fell so far behind that history was given up cannot go on: SinceViolation. Make another one then.
        """
        self._writable("copy_rendition")
        to_end, deadline = parse_flag(to_end, "to_end"), self._deadline(timeout)
        check_transform(transform)
        old, new, collection = self._copy_of(name, rendition)
        reading = Reading(progress)
        with self._copier(collection, new) as reader:
            while True:
                copied = copy_step(reader, old, new, transform, deadline, reading)
                if copied.is_complete or (not to_end and copied.goal <= copied.upper):
                    return copied
                if deadline.has_passed():
                    raise out_of_time(f"collection {name!r}", deadline, f"the copy is at {copied.upper}")
                if copied.goal <= copied.upper:
                    deadline.pause(PAUSE_S)

    @contextmanager
    def begin_rebuild(self, name: str, rendition: int, *, transform: str | None = None) -> Iterator[Rebuild | None]:
        """Begin or resume the first copy of a large rendition by many processes; None if it is there already.

        `jobs/rebuild.py` is the program that does so on Spark. `transform` names a function, as `module:function`.
        """
        self._writable("begin_rebuild")
        old, new, collection = self._copy_of(name, rendition)
        with self._copier(collection, new) as reader:
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
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        timeline = timeline_of(self.client, collection, new)
        old = timeline.last.rendition if to is None else self._of(contents, collection, parse_integer(to, "to", 1))
        unit = new.columns.times
        with CollectionReader(self.client, collection, unit, None, f"compare rendition {new.number}") as reader:
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
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        timeline = timeline_of(self.client, collection, new)
        old = timeline.last.rendition if to is None else self._of(contents, collection, parse_integer(to, "to", 1))
        owner = f"compare rendition {new.number}"
        with (
            CollectionReader(self.client, collection, new.columns.times, None, owner) as reader,
            judging.begin(reader, old, new, as_of, deadline, keep=keep) as begun,
        ):
            yield begun

    def _copier(self, collection: CollectionRecord, new: RenditionRecord) -> CollectionReader:
        owner = f"copy to rendition {new.number}"
        return CollectionReader(self.client, collection, new.columns.times, None, owner)

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


def check_transform(transform: object) -> None:
    """Raise InvalidUsage for what is no function."""
    if transform is not None and not callable(transform):
        raise InvalidUsage(f"transform must be a function of a pyarrow.Table: got {shown(transform)}")
