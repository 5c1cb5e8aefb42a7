"""In a location with one of every layer above shards, no shard lets anything else append to it.

The state machine refuses: what is tried here is the command itself, which no check of a client comes before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import persist_lib as persist
from jobs.compare import compare
from persist_lib import pending_area, streams
from persist_lib.core import commands as c
from persist_lib.core.holds import layer_of
from persist_lib.core.state import MARK
from persist_lib.events import open_store
from persist_lib.events.api import Opening
from persist_lib.events.stores.persist import PersistRecords
from persist_lib.ids import WriterId, format_writer_id
from persist_lib.sources import Files, Registry
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.schema_registry import Schemas
from persist_lib.testing import Rival
from tests.unit.pending_area.areas import NAME, Area
from tests.worlds import SCHEMA, World, row

MORE = [{"id": 1, "word": "more"}]
LAST_WORDS = {"renditions", "s0", "kept", "wal", "bindings", "choices", "schemas", "unsealed", "notes", "lock", "list"}
"""How the names of the shards of layers end, for those that have an end of their own."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    """A client of a location with one of every layer."""
    with persist.open(tmp_path / "data") as client:
        yield client


def one_of_every_layer(client: persist.Client, folder: Path) -> None:
    controller = client.controller()
    controller.create("c", SCHEMA, shards=2)
    with controller.open_writer("c") as write:
        write.append([row(1)], 0, 1)
    new = controller.make_rendition("c", copy=True).number
    controller.copy_rendition("c", new)
    compare(controller, "c", new, keep=True)
    with controller.tables() as tables:
        tables.create("t", persist.Schema(key={"id": "int64 not null"}, unique=True), mode="wal")
    (folder / "files").mkdir()
    (folder / "1.avsc").write_text('"long"')
    sources = controller.sources()
    sources.create("s", Files(place=str(folder / "files"), format="jsonl"), SCHEMA)
    id_ = next(name for name in client.shards() if name.endswith(".bindings")).removesuffix(".bindings")
    Choices(client, f"{id_}.choices").create(b"1")
    schemas = Schemas(client, f"{id_}.schemas", Registry(place=str(folder)))
    schemas.learn([1], client.runtime.deadline(10))
    schemas.close()
    with streams.open(client) as runtime:
        runtime.create_or_load("stream", SCHEMA)
    with open_store(rf"persist:file\:{folder}/data:log") as store, store.writer() as write:
        write.write(1, b"one").result(60)
    pending_area.create(client, "area", SCHEMA).close()


def foreign(client: persist.Client, shard: str, layer: str = "") -> WriterId:
    fresh = format_writer_id(client.runtime.entropy())
    client.machine(shard).commit(lambda _state, now: c.RegisterWriter(fresh, "ingest", now + 60_000, "", layer))
    return fresh


def test_every_shard_of_every_layer_refuses_an_id_that_appends_for_something_else(
    client: persist.Client, tmp_path: Path
) -> None:
    one_of_every_layer(client, tmp_path)
    names = client.shards()
    assert {name.rpartition(".")[2] for name in names} >= LAST_WORDS | {"_catalog", "sources", "stream", "area", "log"}
    assert {layer_of(client.inspect(name).state) for name in names} == {
        "catalog", "collection", "source", "stream", "events", "pending",
    }  # fmt: skip
    let_in = []
    for name in names:
        state = client.inspect(name).state
        for layer in {"", "collection" if layer_of(state) != "collection" else "stream"}:
            try:
                foreign(client, name, layer)
            except persist.OfLayer as error:
                assert error.layer == layer_of(state)  # noqa: PT017 - all of them are tried
            else:
                let_in.append((name, layer))
        with pytest.raises((persist.OfLayer, persist.InvalidName)):
            client.open_writer(name, state.schemas[-1]).advance_upper((state.upper.time or 0) + 1)
    assert let_in == []


@pytest.mark.parametrize("what", ["pending area", "stream", "event log"])
def test_whoever_is_let_in_while_a_shard_is_being_made_is_put_out_again(world: World, what: str) -> None:
    """A rival tries to get an id on each new shard before each request, and to append by it at the end."""
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    ids: dict[str, WriterId] = {}

    def act() -> None:
        rival.before_next(act)
        for name in other.shards():
            if name not in ids or ids[name] not in other.inspect(name).state.writers:  # it was put out: once more
                with suppress(persist.OfLayer):
                    ids[name] = foreign(other, name)

    rival.before_next(act)
    match what:
        case "pending area":
            pending_area.create(client, "area", SCHEMA)
        case "stream":
            streams.open(client).create_or_load("stream", SCHEMA)
        case _:
            PersistRecords(client, "log", Opening(runtime=client.runtime, create=True)).claim("me")
    live = {name for name, id_ in ids.items() if id_ in other.inspect(name).state.writers}
    assert ids.keys() > live
    assert {name for name in live if not name.startswith("streams.")} == set()


def test_an_area_of_an_earlier_release_is_let_be_until_it_is_absorbed(world: World) -> None:
    area = Area(world)
    area.client.release_hold(NAME, MARK)  # as it was before
    write = world.client().open_writer(NAME, SCHEMA)
    write.append_now(MORE)
    area.absorb()
    assert layer_of(area.client.inspect(NAME).state) == "", "a shard without anything pending is not taken"
    area.put("a", 0, 3)
    assert area.absorb(dry_run=True).batches == 1
    write.append_now(MORE)
    assert area.absorb().upper == persist.at(3)
    with pytest.raises(persist.OfLayer, match="belongs to a pending area"):
        write.append_now(MORE)
    area.put("a", 3, 6)
    assert area.absorb().upper == persist.at(6)
