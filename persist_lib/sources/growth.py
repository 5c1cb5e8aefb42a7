"""Columns that a source takes though they came after it was made: its output gets them, then what is declared of it.

A table of PostgreSQL has got them, or the schemas that messages of Avro were written with.

The output is evolved first, so older rows read as what the table has in them: null, or the default that the column came
with. An instance that dies in between leaves an output that has the columns, which the next one finds. One that does
not know them yet decodes nothing that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from persist_lib.errors import Determinate, InvalidUsage, SchemaChanged, SchemaMismatch
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.sources.decoding import WHAT_TO_DO as OF_MESSAGES
from persist_lib.sources.postgres.columns import WHAT_TO_DO
from persist_lib.sources.records import OUTPUT, SourceRecord, changed

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.sources.kinds import Declared


class Added(NamedTuple):
    """A column of a table: its number there, its type, and what rows have in it that are older."""

    name: str
    number: int
    type: str
    default: Any


class Growth(NamedTuple):
    """Columns that a table has and that are not known yet: they are there by a place of its log; and its rows' file.

    Of messages: their fields, of the one output. Each message says itself which it has, so there is no place.
    """

    table: str
    columns: tuple[Added, ...]
    file: int = 0
    there: int = 0


def of_messages(columns: Mapping[str, str]) -> Growth:
    """What fields of messages add to an output: null in rows that are older."""
    return Growth(OUTPUT, tuple(Added(name, 0, kind, None) for name, kind in columns.items()))


def grow(controller: Controller, declared: Declared, record: SourceRecord, growth: Growth, deadline: Deadline) -> None:
    """Let a source take columns. Any number may be at it. Raises SchemaChanged for those that it cannot take.

    Determinate while its output cannot be changed.
    """
    if growth.columns:
        _evolve(controller, record.part(growth.table), growth, deadline)

    def grown(whole: SourceRecord) -> SourceRecord:
        now = whole.part(growth.table)
        if now.decoding.takes_fields:
            lacking = [one for one in growth.columns if one.name not in now.schema.names]
            return changed(now, schema=_with(now, now.schema, lacking))
        if now.table is None:
            return whole
        new = [one for one in growth.columns if one.name not in now.table.columns]
        numbers = {one.name: one.number for one in new}
        table = msgspec.structs.replace(now.table, columns={**now.table.columns, **numbers}, file=growth.file)
        added = {**now.decoding.added, **dict.fromkeys(numbers, growth.there)}
        decoding = msgspec.structs.replace(now.decoding, added=added)
        part = changed(now, schema=_with(now, now.schema, new), decoding=decoding, table=table)
        return whole.with_part(growth.table, part)

    declared.update(record, grown, deadline)


def _evolve(controller: Controller, record: SourceRecord, growth: Growth, deadline: Deadline) -> None:
    name = controller.catalog.fetch().collections[record.collections["output"]].name
    newest = controller.describe(name).schema
    have = {column.name: column for column in newest.columns}
    wanted = _with(record, record.schema, growth.columns)
    lacking = []
    for one in growth.columns:
        mine, there = next(column for column in wanted.columns if column.name == one.name), have.get(one.name)
        if there is None:
            lacking.append(one)
        elif (there.type, there.default) != (mine.type, mine.default):
            raise _cannot(record, one, f"the output has another one of that name: {there}")
    if not lacking:
        return
    try:
        controller.evolve(name, _with(record, newest, lacking), timeout=deadline.left_s())
    except (InvalidUsage, SchemaMismatch) as error:
        raise Determinate(
            f"source {record.name!r}: there are new columns, and the output cannot get them now: {error.message}",
            source=record.name,
        ) from error  # fmt: skip


def _with(record: SourceRecord, schema: Schema, columns: Any) -> Schema:
    for one in columns:
        defaults = {} if one.default is None else {one.name: one.default}
        try:
            schema = schema.add({one.name: one.type}, defaults)
        except InvalidUsage as error:
            raise _cannot(record, one, error.message) from error
    return schema


def _cannot(record: SourceRecord, column: Added, why: str) -> SchemaChanged:
    whose, what_to_do = ("messages", OF_MESSAGES) if record.table is None else ("table", WHAT_TO_DO)
    return SchemaChanged(
        f"source {record.name!r}: the new column {column.name!r} of its {whose} cannot be taken: {why}. {what_to_do}",
        where=column.name,
    )  # fmt: skip
