"""Finding, making and listing the tables of a location."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from persist_lib.catalog.catalog import Catalog, Contents, has_shard
from persist_lib.catalog.metadata_shard import at_once
from persist_lib.catalog.records import parse_collection_name
from persist_lib.core.holds import is_table, layer_of
from persist_lib.core.refusals import OfLayer
from persist_lib.errors import NameTaken, NotAllowed, NotFound, SchemaMismatch
from persist_lib.ids import KEPT, check_not_kept, parse_shard_id
from persist_lib.schema.evolution import known_among, place_of
from persist_lib.schema.schema import Schema, check_schema, with_times
from persist_lib.table.carrier import Carrier
from persist_lib.table.carriers import CollectionCarrier, ShardCarrier, TimelineCarrier

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.catalog.records import CollectionRecord
    from persist_lib.client import Client
    from persist_lib.timeline.tables import Tables


def open_carrier(client: Client, name: str, schema: Schema | None, tables: Callable[[], Tables]) -> Carrier:
    """Open what carries the table of this name; make it if it is not there and `schema` is given.

    A new one is made on a shard or, where there was a shard of that name, which stays finished for good, or is another
    table's by now, on a collection. `tables` gives the client's own tables of timelines.
    """
    parse_collection_name(name)
    wanted = () if schema is None else (check_schema(schema), with_times(schema, "ms"))
    while True:
        if _stands_alone(client, name):
            return _of_shard(client, name, wanted)
        controller = client.controller()
        contents = controller.catalog.fetch()
        if (record := _listed(controller, name, contents)) is not None:
            return _of_catalog(controller, record, wanted, tables)
        if not wanted or contents.renamed(name) is not None:
            raise _not_there(client, name, contents)
        make_table(client, name, wanted[-1])


def open_promoted(client: Client, tables: Callable[[], Tables], collection: str, schema: Schema) -> Carrier:
    """Open the collection with this id, which a shard is a member of, in columns that it has, or had before.

    Raises NotFound where it was dropped.
    """
    controller = client.controller()
    contents = controller.catalog.fetch()
    record = contents.collections.get(collection)
    if record is not None and not client.read_only and controller.catalog.latest().pending(collection):
        with client.even_if_paused():
            controller.tend(record.name)  # its promotion is decided, and not yet said
        contents = controller.catalog.fetch()
        record = contents.collections.get(collection)
    if record is None or record.state == "dropping":
        raise _not_there(client, collection, contents)
    return _of_catalog(controller, record, (schema,), tables)


def find_record(client: Client, name: str) -> CollectionRecord | None:
    """What the catalog says of the table of this name; None for a shard, which comes first. Raises NotFound."""
    if _stands_alone(client, parse_collection_name(name)):
        return None
    with client.controller() as controller:
        contents = controller.catalog.fetch()
        if (record := _listed(controller, name, contents)) is None:
            raise _not_there(client, name, contents)
    return record


def make_table(client: Client, name: str, schema: Schema) -> None:
    """Make a table on a shard or, where there is or was a shard of that name, on a collection.

    Another process may be first. Raises NameTaken where the catalog has another collection of that name.
    """
    machine = client.machine(name)
    check_not_kept(machine.shard, "")
    known = machine.known or machine.try_fetch()
    if known is None or not (known.state.is_finished() or known.state.member):
        client.open_writer(name, schema).close()
        return
    with suppress(NameTaken):
        client.controller().create(name, schema, mode="compare_and_append")


def _stands_alone(client: Client, name: str) -> bool:
    try:
        return has_shard(client, name)
    except NotAllowed:  # the shard may be of a table that was renamed, and this client may use the one named so now
        with client.controller() as controller:
            if controller.catalog.fetch().named(name) is None:
                raise
    return False


def _listed(controller: Controller, name: str, contents: Contents) -> CollectionRecord | None:
    found = contents.named(name)
    is_raised = found is not None and any(one.what == "join" for one in contents.pending(found.id))
    if found is not None and (found.state == "making" or is_raised) and not controller.client.read_only:
        with controller.client.even_if_paused():
            controller.tend(name)  # who began that may have died
        found = controller.catalog.fetch().named(name)
    return found


def _of_catalog(
    controller: Controller, record: CollectionRecord, wanted: Sequence[Schema], tables: Callable[[], Tables]
) -> Carrier:
    name = record.name
    carrier = TimelineCarrier(tables(), name) if record.kind == "table" else CollectionCarrier(controller, name)
    if wanted and place_of(carrier.schema, wanted) is None:
        carrier.close()
        schemas = controller.client.inspect(controller.describe(name).active.shards[0]).state.schemas
        carrier.schema = _one_of(name, wanted, schemas)
    return carrier


def _of_shard(client: Client, name: str, wanted: Sequence[Schema]) -> Carrier:
    """A shard as a table, in one of the schemas that are wanted, by default in its newest one."""
    check_not_kept(parse_shard_id(name), "")
    machine = client.machine(name)
    state = machine.state  # as `has_shard` has just read it
    if not is_table(state):
        raise machine.refused(OfLayer(layer_of(state)))
    return ShardCarrier(client, name, _one_of(name, wanted or state.schemas[-1:], state.schemas))


def _one_of(name: str, wanted: Sequence[Schema], schemas: Sequence[Schema]) -> Schema:
    """The wanted schema that a table has, or had before columns were added. Raises SchemaMismatch."""
    for schema in wanted:
        if (known := known_among(schema, schemas)) is not None:
            return known
    raise SchemaMismatch(
        f"table {name!r} has the schema {schemas[-1]}, and not {wanted[0]}. Nothing was changed. Open it without a "
        "schema, or give the new one another name",
        table=name, expected=wanted[0], actual=schemas[-1],
    )  # fmt: skip


def _not_there(client: Client, name: str, contents: Contents) -> NotFound:
    now = contents.renamed(name)
    advice = "tables() lists them. Give a schema to make it"
    if now is not None:
        advice = f"it was renamed, and is {now!r} now. `persist create {name}` makes a new one of the former name"
    return NotFound(f"there is no table {name!r} in {client.url}: {advice}", table=name, renamed=now)


def tables_in(client: Client) -> list[str]:
    """The names of all tables of a location, sorted. Costs a list, and a read of each shard not known yet."""
    names = [name for name in client.shards() if not KEPT.fullmatch(name)]
    states = at_once(client.runtime, lambda name: client.machine(name).fetch().state, names)
    lone = {n for n, state in zip(names, states, strict=True) if not state.is_finished() and is_table(state)}
    catalog = Catalog(client)
    try:
        found = set(catalog.fetch().names())
    finally:
        catalog.close()
    return sorted(lone | found)
