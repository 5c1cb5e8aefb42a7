"""A table that a running source reads from now on, beside those that it was declared with.

The record comes last, and at once: from then on instances know of the table. The next one that looks copies it, at a
place of the log that nothing was bound beyond, and binds the log up to just there, then the table. See
docs/design/0283-tables-that-come-later.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persist_lib.catalog.records import OF_JOINED, parse_collection_name
from persist_lib.errors import NameTaken, NotFound
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.kinds import Declared, hold, taken
from persist_lib.sources.records import SourceRecord, changed, first_of, in_unit

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller


def add_table(
    controller: Controller, declared: Declared, record: SourceRecord, table: str, schema: Schema | None,
    deadline: Deadline,
) -> None:  # fmt: skip
    """Let a source read one more table. What an earlier call of this left is used."""
    client, unit = controller.client, record.schema.times
    schema = None if schema is None else in_unit(check_schema(schema), unit)
    if table in record.tables:
        if schema not in (None, record.tables[table]):
            raise NameTaken(
                f"source {record.name!r} has the table {table} already, with other columns: {record.tables[table]}. "
                "Nothing was changed; leave out the schema",
                source=record.name,
            )
        return
    output = record.reader.with_table(table).outputs()[table]
    name = parse_collection_name(f"{record.name}/{output}")
    command, there = f"{record.id}.{table}", controller.catalog.fetch().named(name)
    if there is not None and there.command != command:
        raise taken(name)
    derived, known = record.reader.join(client, record, table, schema)
    schema = in_unit(derived, unit)
    made = controller.create(
        name, schema, shards=record.shards, mode="append", retention=record.retention, command=command,
        timeout=deadline.left_s(),
    )  # fmt: skip
    mine = changed(record, collections={table: made.id})
    hold(controller, mine, is_new=True)
    Choices(client, mine.choices_of(table)).create(record.fence)

    gone = f"the source {record.name!r} was dropped or reset in between"

    def added(now: SourceRecord) -> SourceRecord:
        if table in now.tables:
            return now
        if now.state == "dropping":
            raise NotFound(gone, source=record.name)
        tables = {**now.tables, table: schema}
        return changed(
            now, v=max(now.v, OF_JOINED, known.version), reader=now.reader.with_table(table), tables=tables,
            schema=first_of(tables), known={**now.known, table: known}, collections={**now.collections, table: made.id},
            joined=(*now.joined, table),
        )  # fmt: skip

    declared.update(record, added, deadline, gone=gone)
