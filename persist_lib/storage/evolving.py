"""Adding columns to a collection: to all shards of its renditions, while readers and writers go on."""

from __future__ import annotations

import msgspec

from persist_lib.arguments import parse_flag
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import at
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.storage.catalog import Changes, Contents
from persist_lib.storage.commanding import Commanding
from persist_lib.storage.copying import handed_over_at
from persist_lib.storage.describe import Evolved
from persist_lib.storage.describing import timeline_of
from persist_lib.storage.records import CollectionRecord, CommandRecord, RenditionRecord, schema_form
from persist_lib.storage.timeline import Timeline
from persist_lib.storage.upper import meet


class Evolving(Commanding):
    """The call that adds columns."""

    def evolve(
        self,
        name: str,
        schema: Schema,
        *,
        dry_run: bool = False,
        command: str | None = None,
        timeout: float | None = None,
    ) -> Evolved:
        """Add value columns at the end, all nullable: `schema` is the newest one with them. Older rows have null there.

        Readers, listeners and writers that are open go on in their columns; those that are opened from now on have the
        new ones. A change by key in the old columns is refused where the row that it replaces has something in the new
        ones. Renditions that have the same columns get them, too. Where `schema` is what the collection has, nothing is
        changed. With `dry_run` nothing is changed either, and the answer says what would be.

        Raises SchemaMismatch for any other schema, InvalidUsage while a copy of the collection is under way, which
        would be made in the old columns, and for tables; and NotFound.
        """
        dry_run, schema = parse_flag(dry_run, "dry_run"), check_schema(schema)
        if not dry_run:
            self._writable("evolve")
        contents, collection = self._subject(name, None if dry_run else command)

        def asked_of(contents: Contents) -> dict[str, object]:
            current = contents.collections[collection.id]
            evolved = self._evolved(contents, current, schema)
            return {"added": list(evolved.added), "renditions": list(evolved.renditions)}

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            found = asked_of(contents)
            return {}, msgspec.structs.replace(record, asked={**record.asked, **found}, pending=bool(found["added"]))

        asked = {"name": name, "schema": schema_form(schema)}
        if dry_run:
            return _answer(schema, asked_of(contents))
        return _answer(schema, self._command("evolve", collection.id, asked, intent, command, timeout).asked)

    def _evolved(self, contents: Contents, collection: CollectionRecord, schema: Schema) -> Evolved:
        renditions = contents.renditions_of(collection.id)
        timeline = timeline_of(self.client, collection, renditions[0])
        active = timeline.last.rendition.number
        older = self.client.inspect(timeline.last.rendition.names[0]).state.schemas[-1]
        older.check_additive(schema)
        if collection.kind == "table":
            raise InvalidUsage(
                f"{collection.name!r} is a table, whose columns cannot be added to. Nothing was changed",
                collection=collection.name,
            )
        for record in renditions:
            self._check_not_copied(collection, record, timeline)
        same = [record.number for record in renditions if record.state == "live" and record.columns == older]
        # SUBTLE: the active one comes last. Whoever opens the collection has the new columns once all shards have them.
        numbers = sorted({*same, active}, key=lambda number: number == active)
        added = tuple(column.name for column in schema.value[len(older.value) :])
        return Evolved(schema, added, tuple(numbers) if added else ())

    def _check_not_copied(self, collection: CollectionRecord, record: RenditionRecord, timeline: Timeline) -> None:
        """SUBTLE: who copies it may have begun before, and would leave out what the new columns have."""
        if record.copies is None or record.state == "dropping":
            return
        start = handed_over_at(timeline, record)
        if record.begun and start is None:
            return  # it was the collection, at times that are given up
        if start is None or meet(self.client, record.names) < at(start):
            raise InvalidUsage(
                f"collection {collection.name!r}: rendition {record.number} is a copy in the present columns, and is "
                "not complete. Nothing was changed; hand over to it and finish it (copy_rendition with to_end=True), "
                "or drop it, and add the columns then",
                collection=collection.name, rendition=record.number,
            )  # fmt: skip


def _answer(schema: Schema, found: dict[str, object]) -> Evolved:
    return Evolved(schema, tuple(found["added"]), tuple(found["renditions"]))  # type: ignore[arg-type]
