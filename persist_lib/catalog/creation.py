"""Making renditions of a collection, changing their columns, and giving them up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from persist_lib.arguments import parse_flag, parse_integer
from persist_lib.catalog.catalog import Changes, Contents, setting
from persist_lib.catalog.collection_arguments import MOST_SHARDS, check_uncounted, parse_hash_columns, parse_rendition
from persist_lib.catalog.collection_status import timeline_of
from persist_lib.catalog.command_log import Commanding
from persist_lib.catalog.deleted_keys import check_columns
from persist_lib.catalog.describe import Description, Evolved, RenditionDescription, Tended
from persist_lib.catalog.evolution import refuse_older_programs
from persist_lib.catalog.records import CollectionRecord, CommandRecord, RenditionRecord, schema_form, schema_of
from persist_lib.catalog.renditions import Timeline, handed_over_at, is_copied
from persist_lib.catalog.wal import check_together
from persist_lib.errors import HandoverRefused, InvalidUsage, NotFound
from persist_lib.schema.evolution import adopted, changes_between, fresh, is_prefix, place_of
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.admin import check_evolves


class Making(Commanding):
    """The calls that make a rendition and give one up, and that change columns."""

    def make_rendition(
        self,
        name: str,
        *,
        shards: int | None = None,
        schema: Schema | None = None,
        copy: bool = False,
        hash_columns: Sequence[str] | None = None,
        command: str | None = None,
        timeout: float | None = None,
    ) -> RenditionDescription:
        """Make a rendition of a collection, empty: what is not given is as in the active one. Nobody reads it yet.

        With `copy` it is to become a copy of the active rendition (see `copy_rendition`). Without, it is written
        independently, by writers that open it by its number, until it is handed over to. Raises NotFound.
        """
        self._writable("make_rendition")
        copy = parse_flag(copy, "copy")
        _, collection = self._subject(name, command)
        if schema is not None:
            schema = check_schema(schema)
        if shards is not None:
            shards = parse_integer(shards, "shards", 1, MOST_SHARDS)
        if hash_columns is not None:
            hash_columns = parse_hash_columns(hash_columns)
        asked: dict[str, Any] = {
            "name": name, "schema": None if schema is None else schema_form(schema), "shards": shards,
            "hash_columns": hash_columns, "copy": copy,
        }  # fmt: skip

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            current = contents.collections[collection.id]
            renditions = contents.renditions_of(collection.id)
            active = timeline_of(self.client, current, renditions[0]).last.rendition
            # What the catalog says of it has the columns that were added since the handover.
            active = contents.renditions.get((collection.id, active.number), active)
            is_same = schema is None or place_of(schema, [active.columns]) is not None
            columns = active.columns if schema is None or is_same else fresh(schema)
            if columns.times != active.columns.times:
                raise InvalidUsage(
                    f"collection {name!r} has {_unit(active.columns)}, and a rendition of it must have the same: got "
                    f"{_unit(columns)}",
                    collection=name,
                )
            for marks in contents.marks_of(current):
                check_columns(current, contents.renditions[(marks.id, 1)].columns, columns)
            hashed = active.hash_columns if hash_columns is None and columns.key == active.columns.key else hash_columns
            wanted = parse_rendition(self.client, columns, shards or active.shards, active.mode, hashed)
            made = msgspec.structs.replace(
                wanted, collection=collection.id, number=current.made + 1, command=record.id,
                copies=active.number if copy else None,
            )  # fmt: skip
            record = msgspec.structs.replace(record, asked={**record.asked, "rendition": made.number}, pending=True)
            return setting(msgspec.structs.replace(current, made=made.number), made), record

        record = self._command("make rendition", collection.id, asked, intent, command, timeout)
        return self._rendition_of(self._described(record), record.asked["rendition"])

    def drop_rendition(
        self,
        name: str,
        rendition: int,
        *,
        dry_run: bool = False,
        command: str | None = None,
        timeout: float | None = None,
    ) -> Tended:
        """Give up a rendition that is not the collection at any time that can still be read.

        Its shards go when nobody reads them: the answer says what was done, and for whom the rest waits. With `dry_run`
        nothing is changed, and the answer says what would be. Raises NotFound, and HandoverRefused when the rendition
        is needed.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("drop_rendition")
        contents, collection = self._subject(name, None if dry_run else command)
        rendition = parse_integer(rendition, "rendition", 1)

        def given_up(contents: Contents) -> RenditionRecord:
            found = self._of(contents, collection, rendition)
            timeline = timeline_of(self.client, collection, found)
            if any(span.rendition.number == rendition for span in timeline.spans):
                raise HandoverRefused(
                    f"collection {name!r}: rendition {rendition} is the collection at times that can still be read. It "
                    "goes by itself once history before its end is given up. Nothing was changed",
                    collection=name, rendition=rendition,
                )  # fmt: skip
            return msgspec.structs.replace(found, state="dropping")

        if dry_run:
            given_up(contents)
            return self._tended(timeout, collection.id, dry_run=True, given_up=rendition)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            return setting(given_up(contents)), record

        asked = {"name": name, "rendition": rendition}
        self._command("drop rendition", collection.id, asked, intent, command, timeout)
        return self._tended(timeout, collection.id)

    @abstractmethod
    def _tended(
        self, timeout: float | None, only: str | None, *, dry_run: bool = False, as_if_dropped: bool = False,
        given_up: int | None = None,
    ) -> Tended:  # fmt: skip
        """As `maintenance.tend`, with the timelines of tables."""

    def _rendition_of(self, description: Description, number: int) -> RenditionDescription:
        found = next((rendition for rendition in description.renditions if rendition.number == number), None)
        if found is not None:
            return found
        raise NotFound(
            f"collection {description.name!r} has no rendition {number} any more: it was made, and dropped since",
            collection=description.name, rendition=number,
        )  # fmt: skip

    def evolve(
        self,
        name: str,
        schema: Schema,
        *,
        dry_run: bool = False,
        command: str | None = None,
        timeout: float | None = None,
    ) -> Evolved:
        """Change the columns, as `Table.evolve` does: `schema` is the newest one so changed.

        Readers, listeners and writers that are open go on in their columns; those that are opened from now on have the
        new ones. A change by key in the old columns is refused where the row that it replaces has something in the new
        ones. Renditions that have the same columns get them, too. Where `schema` is what the collection has, nothing is
        changed. With `dry_run` nothing is changed either, and the answer says what would be.

        A table of a timeline is changed in the newest columns from then on, by all processes: with a WAL, from the time
        of a mark in that. Programs of the release before refuse it then, and its timeline's other tables with a WAL.

        Raises SchemaMismatch for any other schema, InvalidUsage while a copy of the collection is under way, which
        would be made in the old columns, and on a store without transactions for a table with a WAL; and NotFound.
        """
        dry_run, schema = parse_flag(dry_run, "dry_run"), check_schema(schema)
        if not dry_run:
            self._writable("evolve")
        contents, collection = self._subject(name, None if dry_run else command)

        def asked_of(contents: Contents) -> dict[str, Any]:
            current = contents.collections[collection.id]
            evolved = self._evolved(contents, current, schema)
            more = {"added": list(evolved.added), "renditions": list(evolved.renditions)}
            names = [
                name for number in evolved.renditions for name in contents.renditions[(collection.id, number)].names
            ]
            numbers = {name: len(self.client.inspect(name).state.schemas) for name in names}
            return {**more, "schema": schema_form(evolved.schema), "numbers": numbers}

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            found = asked_of(contents)
            if collection.timeline is not None:
                renditions = [contents.renditions[(collection.id, number)] for number in found["renditions"]]
                refuse_older_programs(self.client, collection, renditions, schema_of(found["schema"]))
            is_pending = bool(found["renditions"])
            return {}, msgspec.structs.replace(record, asked={**record.asked, **found}, pending=is_pending)

        asked = {"name": name, "schema": schema_form(schema.whole)}
        if dry_run:
            return _answer(asked_of(contents))
        return _answer(self._command("evolve", collection.id, asked, intent, command, timeout).asked)

    def _evolved(self, contents: Contents, collection: CollectionRecord, schema: Schema) -> Evolved:
        renditions = contents.renditions_of(collection.id)
        timeline = timeline_of(self.client, collection, renditions[0])
        active = timeline.last.rendition.number
        first = timeline.last.rendition.names[0]
        version = self.client.inspect(first)
        older = version.state.schemas[-1]
        newer = adopted(older, schema)
        check_uncounted(newer)
        if (collection.keep_deletes or collection.marks_of) and not is_prefix(older, newer):
            raise InvalidUsage(
                f"table {collection.name!r} keeps deleted keys, and then columns can be added that may be null and "
                "have no default. Nothing was changed. Stop keeping them first, or copy the table into another one",
                collection=collection.name,
            )  # fmt: skip
        check_together(self.client, collection, "an evolution of its columns")
        for record in renditions:
            self._check_not_copied(collection, record, timeline)
        same = [record.number for record in renditions if record.state == "live" and record.columns == older]
        # The active one comes last. Clients that open the collection have the new columns once all shards have them.
        numbers = sorted({*same, active}, key=lambda number: number == active)
        if newer != older:
            check_evolves(first, version, newer)
        changes = changes_between(older, newer)
        return Evolved(newer, changes, tuple(numbers) if newer != older else ())

    def _check_not_copied(self, collection: CollectionRecord, record: RenditionRecord, timeline: Timeline) -> None:
        """Who copies it may have begun before, and would leave out what the new columns have."""
        if record.copies is None or record.state == "dropping":
            return
        start = handed_over_at(timeline, record)
        if record.begun and start is None:
            return  # it was the collection, at times that are given up
        if not is_copied(self.client, record, start):
            raise InvalidUsage(
                f"collection {collection.name!r}: rendition {record.number} is a copy in the present columns, and is "
                "not complete. Nothing was changed; hand over to it and finish it (copy_rendition with to_end=True), "
                "or drop it, and add the columns then",
                collection=collection.name, rendition=record.number,
            )  # fmt: skip


def _unit(schema: Schema) -> str:
    return "plain integers as times" if schema.times is None else f"times of a clock in {schema.times}"


def _answer(found: dict[str, Any]) -> Evolved:
    return Evolved(schema_of(found["schema"]).shown, tuple(found["added"]), tuple(found["renditions"]))
