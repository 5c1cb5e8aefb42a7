"""Which tables keep deleted keys, so that late changes do not bring them back: decided by the catalog, as all else is.

The keys are rows of a table of their own, on the same timeline, which is made, dropped and kept with the first one.
"""

from __future__ import annotations

import datetime as dt

import msgspec

from persist_lib.arguments import parse_flag, shown
from persist_lib.catalog.catalog import Changes, Contents, setting
from persist_lib.catalog.collection_arguments import parse_rendition
from persist_lib.catalog.collection_status import describe
from persist_lib.catalog.command_log import Commanding
from persist_lib.catalog.describe import Description
from persist_lib.catalog.records import (
    OF_DELETES,
    OF_PLACES,
    VERSION,
    CollectionRecord,
    CommandRecord,
    KeptDeletes,
    RenditionRecord,
    marks_name,
    minted,
)
from persist_lib.catalog.wal import has_wal
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage
from persist_lib.relation.deleted_keys import marks_schema
from persist_lib.schema.schema import Schema
from persist_lib.times import Times

Span = int | str | dt.timedelta | None
KeepDeletes = tuple[str, int | str | dt.timedelta] | None
"""The column by which changes are ordered, and for how long a deleted key is remembered (ms, or a duration)."""


class KeepingDeletes(Commanding):
    """The call that sets it."""

    def set_keep_deletes(
        self, name: str, column: str | None, span: Span = None, *, dry_run: bool = False, command: str | None = None,
        timeout: float | None = None,
    ) -> Description:  # fmt: skip
        """Remember the deleted keys of a table for `span` from now on, by the value of a column; None: no more.

        `column` orders the changes of a key, as `Table.set_keep_deletes` says. `span` is a number of milliseconds or a
        duration. What is set already may be set again, with another span as well; for another column it has to be
        ended first, which forgets all deleted keys. The table is on a timeline with a WAL. Programs of the release
        before cannot read this catalog from then on. Raises InvalidUsage and NotFound.
        """
        if not parse_flag(dry_run, "dry_run"):
            self._writable("set_keep_deletes")
        contents, collection = self._subject(name, command)
        wanted = parse_span(column, span)
        asked = {"name": name, "column": column, "span_ms": wanted}

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            current = contents.collections[collection.id]
            had = current.keep_deletes
            if column is None or wanted is None:
                if had is None:
                    return {}, record
                ended = msgspec.structs.replace(current, keep_deletes=None, v=OF_PLACES if current.epoch else VERSION)
                asked = {**record.asked, "marks": had.marks}
                return setting(ended), msgspec.structs.replace(record, asked=asked, pending=True, v=OF_DELETES)
            if not has_wal(current):
                on = "a collection" if current.timeline is None else "a timeline without a WAL"
                raise no_carrier(current.name, on)
            schema = describe(self.client, contents, current).schema
            if not schema.whole.all_plain:
                raise InvalidUsage(
                    f"table {current.name!r} has columns that were renamed, widened or dropped, or have defaults, and "
                    "such a table cannot keep deleted keys. Nothing was changed; copy it into a new table",
                    table=current.name,
                )
            kept = parse_keeping(current.name, schema, column, wanted)
            if had is not None:
                if had.column != column:
                    raise InvalidUsage(
                        f"table {current.name!r} keeps deleted keys by the column {had.column!r}. Nothing was changed; "
                        "to do so by another one, end it first: set_keep_deletes(None), which forgets all of them",
                        table=current.name, column=had.column,
                    )  # fmt: skip
                return setting(
                    msgspec.structs.replace(current, keep_deletes=msgspec.structs.replace(had, span_ms=wanted))
                ), record
            current, marks, first = keeping(self.client, current, kept, record)
            for one in contents.renditions_of(current.id):
                check_columns(current, kept.marks, one.columns)
            asked = {**record.asked, "marks": marks.id}
            record = msgspec.structs.replace(record, asked=asked, pending=True, v=OF_DELETES)
            return setting(current, marks, first), record

        if dry_run:
            intent(contents, CommandRecord(id="", what="keep deletes", collection="", asked=asked, number=0))
            return describe(self.client, contents, collection)
        return self._described(self._command("keep deletes", collection.id, asked, intent, command, timeout))


class Keeping(msgspec.Struct, frozen=True):
    """What was asked for: the column, the span in ms, and the columns of the deleted keys."""

    column: str
    span_ms: int
    marks: Schema


def keeping(
    client: Client, collection: CollectionRecord, kept: Keeping, command: CommandRecord
) -> tuple[CollectionRecord, CollectionRecord, RenditionRecord]:
    """The records of a table that keeps deleted keys, of the table that has them, and of that one's rendition."""
    id_ = minted(client.runtime.entropy())
    made = msgspec.structs.replace(
        parse_rendition(client, kept.marks, 1, "append", None), collection=id_, command=command.id
    )
    marks = CollectionRecord(
        id=id_, name=marks_name(id_), kind="table", retention=collection.retention, timeline=collection.timeline,
        command=command.id, marks_of=collection.id, v=OF_DELETES,
    )  # fmt: skip
    rule = KeptDeletes(kept.column, kept.span_ms, id_)
    return msgspec.structs.replace(collection, keep_deletes=rule, v=OF_DELETES), marks, made


def parse_kept(keep_deletes: object) -> tuple[str, int]:
    """The column and the span in ms of `keep_deletes=`. Raises InvalidUsage."""
    if not isinstance(keep_deletes, (tuple, list)) or len(keep_deletes) != 2:
        raise InvalidUsage(
            "keep_deletes is the column by which changes are ordered, and for how long a deleted key is remembered, as "
            f'in ("seq", "7 days"): got {shown(keep_deletes)}'
        )
    return keep_deletes[0], parse_span(*keep_deletes) or 0


def parse_keeping(table: str, schema: Schema, column: str, span_ms: int) -> Keeping:
    """What keeping deleted keys is for a table. Raises InvalidUsage where it cannot be."""
    return Keeping(column, span_ms, marks_schema(table, schema, column))


def parse_span(column: object, span: object) -> int | None:
    """For how long a deleted key is remembered, in ms; None where there is no column. Raises InvalidUsage."""
    if column is None and span is None:
        return None
    if column is None:
        raise InvalidUsage("a span goes with the column by which changes are ordered: without one, no keys are kept")
    return Times("ms", lambda: 0).distance(span, "the span for which a deleted key is remembered")


def check_columns(collection: CollectionRecord, marks: Schema, columns: Schema) -> None:
    """Raise InvalidUsage unless a rendition with these columns can keep these deleted keys."""
    kept = collection.keep_deletes
    if kept is not None and (
        kept.column not in columns.names or marks_schema(collection.name, columns, kept.column) != marks
    ):
        raise InvalidUsage(
            f"table {collection.name!r} keeps deleted keys by the column {kept.column!r}, so that each rendition of it "
            f"has the same key columns, and that one: got {columns}. Nothing was changed; end that first, by "
            "set_keep_deletes(None), or drop the rendition",
            table=collection.name, column=kept.column,
        )  # fmt: skip


def no_carrier(name: str, kind: str) -> InvalidUsage:
    """The error for a table that cannot change together with its deleted keys."""
    promote = "promote(timeline=...) lets it join one, in place"
    advice = promote if kind != "a timeline without a WAL" else "make a table on one that has a WAL, and write it there"
    return InvalidUsage(
        f"table {name!r} is on {kind}, and deleted keys are kept by transactions over two tables, which takes a "
        f"timeline with a WAL. Nothing was changed; {advice}",
        table=name,
    )  # fmt: skip
