"""The timelines of a catalog: made with their first table, found by their names and by their tables, and kept open."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from persist_lib.catalog.catalog import Catalog, Changes, Contents, setting
from persist_lib.catalog.records import TableMode, TimelineRecord, parse_collection_name
from persist_lib.catalog.wal import make_wal, minted_timeline
from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.timeline.direct_timeline import YoloLine
from persist_lib.timeline.timeline import Line
from persist_lib.timeline.wal_timeline import WalLine

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


class Timelines:
    """The timelines that one process uses. Safe to use from several threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lines: dict[str, Line] = {}

    def records(self) -> list[TimelineRecord]:
        return sorted(self._catalog.fetch().timelines.values(), key=lambda record: record.name)

    def line(self, name: str) -> Line:
        """The timeline of this name. Raises InvalidUsage where there is none."""
        name = parse_collection_name(name)
        if name in self._lines:
            return self._lines[name]
        record = _named(self._catalog.fetch(), name)
        if record is None:
            names = [record.name for record in self.records()]
            raise InvalidUsage(
                f"there is no timeline {name!r}: there are {names}. One is created with its first table", timeline=name
            )
        if record.mode == "wal" and not self._catalog.client.read_only:
            make_wal(self._catalog.client, record.id)  # who began it may have died
        return self._open(record)

    def of_table(self, name: str) -> TimelineRecord:
        """The timeline of a table. Raises NotFound, and InvalidUsage for a collection."""
        contents = self._catalog.fetch()
        record = contents.find(name)
        if record.timeline is None:
            raise InvalidUsage(
                f"{name!r} is a collection, and no table: read it with controller.open_reader", table=name
            )
        return contents.timelines[record.timeline]

    def with_table(self, name: str, act: Callable[[Line], T]) -> T:
        """Do something with the timeline of a table: the one that is known, or the one that it is on by now."""
        name = parse_collection_name(name)
        known = self._catalog.fetch(0).named(name)
        if known is not None and known.timeline is not None:
            try:
                return act(self._open(self._catalog.fetch(0).timelines[known.timeline]))
            except InvalidUsage:  # perhaps the table that now has this name is on another timeline
                if self._catalog.fetch().find(name).timeline == known.timeline:
                    raise
        return act(self._open(self.of_table(name)))

    def make(self, name: str, mode: TableMode | None, deadline: Deadline) -> TimelineRecord:
        """The timeline of this name, which is made if it is not there; with its WAL, before any table is on it."""

        def decide(contents: Contents) -> tuple[Changes, TimelineRecord]:
            if (known := _named(contents, name)) is not None:
                return {}, known
            made = mode or "yolo"
            record = TimelineRecord(id=minted_timeline(client.runtime.entropy(), made), name=name, mode=made)
            return setting(record), record

        client = self._catalog.client
        record = self._catalog.change(decide, deadline)
        if mode is not None and record.mode != mode:
            raise InvalidUsage(
                f"timeline {name!r} is in {record.mode} mode, for all of its tables: leave mode= out, or name another "
                "timeline=",
                timeline=name, mode=mode,
            )  # fmt: skip
        if record.mode == "wal":
            make_wal(client, record.id)
        return record

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _open(self, record: TimelineRecord) -> Line:
        return self._lines.setdefault(record.name, line_of(self._catalog, record, ""))


def line_of(catalog: Catalog, record: TimelineRecord, owner: str) -> Line:
    """The timeline of a record, by itself: what it has open is the caller's to close."""
    return (WalLine if record.mode == "wal" else YoloLine)(catalog, record, owner)


def _named(contents: Contents, name: str) -> TimelineRecord | None:
    return next((record for record in contents.timelines.values() if record.name == name), None)
