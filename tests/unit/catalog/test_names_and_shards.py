"""The names of layers' shards are kept, and a shard and a collection do not share one; layers' shards refuse others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import persist_lib as persist
from tests.worlds import SCHEMA, World


@pytest.fixture
def client() -> Iterator[persist.Client]:
    world = World()
    yield world.client()
    world.close()


@pytest.mark.parametrize(
    "name",
    ["_catalog", "_catalog.sources", "streams.list", "streams.lock", f"c{7:016x}.renditions", f"c{7:016x}.r1.s0",
     f"c{7:016x}.r12.kept", f"tw{7:016x}.wal"],
)  # fmt: skip
def test_the_name_of_a_layers_shard_is_refused_before_anything_is_made(client: persist.Client, name: str) -> None:
    with pytest.raises(persist.InvalidName, match="is kept for what stands on shards"):
        client.open_shard(name, SCHEMA)
    assert client.shards() == []
    client.controller().create("c", SCHEMA)  # as nothing is in its way


def test_a_shard_and_a_collection_do_not_share_a_name(client: persist.Client) -> None:
    client.open_writer("orders", SCHEMA).close()
    controller = client.controller()
    controller.create("other", SCHEMA)
    for make in (lambda: controller.create("orders", SCHEMA), lambda: controller.rename("other", "orders")):
        with pytest.raises(persist.NameTaken, match="there is a shard 'orders'"):
            make()
    with pytest.raises(persist.NameTaken, match="there is a collection 'other'"):
        client.open_writer("other", SCHEMA)
    client.finish("orders")
    controller.rename("other", "orders")
    client.open_writer("other", SCHEMA).close()


def test_no_shard_of_a_layer_takes_a_foreign_append(client: persist.Client) -> None:
    controller = client.controller()
    controller.create("c", SCHEMA, shards=2)
    with controller.tables() as tables:
        tables.create("t", persist.Schema(key={"id": "int64 not null"}, unique=True), mode="wal")
    names = client.shards()
    assert {name.rpartition(".")[2] for name in names} >= {"_catalog", "renditions", "s0", "s1", "wal"}
    for name in names:
        schema = client.inspect(name).state.schemas[-1]
        with client.open_writer(name, schema, layer="events") as write, pytest.raises(persist.OfLayer):
            write.advance_upper((client.inspect(name).state.upper.time or 0) + 1)
        with pytest.raises(persist.InvalidName):
            client.open_writer(name, schema)
    with controller.open_writer("c") as write:
        write.append([], 0, 1)
