"""Adding columns to a collection: to its renditions' shards and, of a table with a WAL, to all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from persist_lib.catalog.catalog import Contents
from persist_lib.catalog.metadata_shard import at_once
from persist_lib.catalog.records import LAYER, CollectionRecord, CommandRecord, RenditionRecord, schema_of
from persist_lib.catalog.wal import EVOLVED, append_of, has_wal, wal_shard
from persist_lib.catalog.wal import SCHEMA as WAL
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.formats import MEMBERS, least_to_follow
from persist_lib.core.state import State
from persist_lib.errors import Indeterminate, SchemaMismatch, ShardFinished, UpperMismatch
from persist_lib.relation.writer import append_together
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import evolve_schema
from persist_lib.shard.commit import Wanted


def older_columns(client: Client, contents: Contents, rendition: RenditionRecord) -> list[Schema]:
    """What the columns of a rendition were before some were added, as those know who read the renditions before it."""
    for record in reversed(contents.renditions_of(rendition.collection)):
        if record.state == "live" and record.columns == rendition.columns:
            schemas = client.inspect(record.names[0]).state.schemas
            if rendition.columns in schemas:
                return list(schemas[: schemas.index(rendition.columns)])
    return []


def add_columns(client: Client, name: str, schema: Schema, number: int | None = None) -> None:
    """Give a shard a schema, as the one with this number, unless it has it. Other processes may be first.

    Without a number: unless it has had it at any time. A column that is renamed back gives a schema that was
    there before, and so does a process that comes late with a former evolution.
    """

    def is_done() -> bool:
        return _has(client.inspect(name).state, schema, number)

    if not is_done():
        try:
            evolve_schema(client.machine(name), schema, number)
        except SchemaMismatch:
            if not is_done():
                raise


def _has(state: State, schema: Schema, number: int | None) -> bool:
    return schema in state.schemas if number is None else len(state.schemas) > number


def evolving(contents: Contents, command: CommandRecord) -> list[RenditionRecord]:
    """The renditions to which a command adds columns."""
    found = (contents.renditions.get((command.collection, number)) for number in command.asked["renditions"])
    return [record for record in found if record is not None]


def refuse_older_programs(
    client: Client, collection: CollectionRecord, renditions: Sequence[RenditionRecord], schema: Schema
) -> None:
    """Write a table's shards, and its WAL, in a format that programs which do not know the schema refuse.

    They would apply rows of the WAL without the columns that they do not know, and retract rows without these. So this
    comes before any column is said to come, as such a program also finishes what the catalog says is pending.
    """
    states = [client.inspect(name).state for record in renditions for name in record.names]
    least = max([MEMBERS, *(least_to_follow(state.schemas[-1], schema) for state in states)])
    wal = [wal_shard(str(collection.timeline))] if has_wal(collection) else []
    for name in (*wal, *(name for record in renditions for name in record.names)):
        client.machine(name).try_commit(lambda _state, _now: c.Upgrade(least))


def evolve(client: Client, contents: Contents, command: CommandRecord, deadline: Deadline) -> None:
    """Add columns to the shards of renditions.

    The first shard of each comes last. Its schema is the collection's for clients that open it.
    """
    schema, collection = schema_of(command.asked["schema"]), contents.collections[command.collection]
    if has_wal(collection):
        names = [name for record in evolving(contents, command) for name in record.names]
        numbers = command.asked.get("numbers", {})
        _evolve_with_wal(client, collection, {name: numbers.get(name) for name in names}, schema, deadline)
        return

    def add(name: str) -> None:
        with suppress(ShardFinished):  # dropped since, by processes that were faster
            add_columns(client, name, schema, command.asked.get("numbers", {}).get(name))

    for record in evolving(contents, command):
        at_once(client.runtime, add, record.names[1:])
        add(record.names[0])


class _First(Exception):
    """Another process has added the columns, or taken the shard away."""


def _evolve_with_wal(
    client: Client, collection: CollectionRecord, names: Mapping[str, int | None], schema: Schema, deadline: Deadline
) -> None:
    """Add columns to all shards, and put the mark, in one transaction: each process has them from one time on.

    SUBTLE: a process that has read the mark and then reads a shard finds the columns there, so that no applier, and no
    reader of what the WAL has, goes beyond the mark in the older ones.
    """

    def is_done(name: str, state: State) -> bool:
        return state.is_finished() or _has(state, schema, names[name])

    def add(name: str, state: State, _now: int) -> c.EvolveSchema:
        if is_done(name, state):
            raise _First
        return c.EvolveSchema(len(state.schemas) - 1, schema)

    with client.open_writer(wal_shard(str(collection.timeline)), WAL, layer=LAYER) as write:
        while True:
            states = {name: client.inspect(name).state for name in names}
            lacking = [name for name, state in states.items() if not is_done(name, state)]
            if not lacking:
                return
            if deadline.has_passed():
                raise deadline.gave_up(f"table {collection.name!r}", "as others always changed it first")
            lower = write.fetch_upper()
            marking = append_of(write, collection, lower, lower.time or 0, EVOLVED)
            beside = [Wanted(client.machine(name), partial(add, name)) for name in lacking]
            with suppress(UpperMismatch, Indeterminate, _First):  # twice does no harm
                append_together([marking], client.consensus, client.machine, deadline, None, beside)
