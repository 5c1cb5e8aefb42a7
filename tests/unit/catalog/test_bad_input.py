"""What the controller and writers of collections are asked wrongly: each is refused, and changes nothing.

The names of layers' shards are kept, and a shard and a collection do not share one; layers' shards refuse others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import persist_lib as persist
from persist_lib.errors import InvalidName
from persist_lib.frontier import at
from tests.renditions import Told, check, create, write
from tests.worlds import SCHEMA, World, row

BAD: dict[str, Any] = {
    "no name": lambda c: c.create("", SCHEMA),
    "name of another type": lambda c: c.create(3, SCHEMA),
    "bytes as a name": lambda c: c.describe(b"c"),
    "schema of another type": lambda c: c.create("x", {"id": "int64"}),
    "no shards": lambda c: c.create("x", SCHEMA, shards=0),
    "too many shards": lambda c: c.create("x", SCHEMA, shards=1025),
    "half a shard": lambda c: c.create("x", SCHEMA, shards=1.5),
    "truth as a number": lambda c: c.create("x", SCHEMA, shards=True),
    "another mode": lambda c: c.create("x", SCHEMA, mode="merge"),
    "mode of another type": lambda c: c.create("x", SCHEMA, mode=["append"]),
    "hash of a value": lambda c: c.create("x", SCHEMA, hash_columns=["word"]),
    "hash of text": lambda c: c.create("x", SCHEMA, hash_columns="id"),
    "hash of nothing": lambda c: c.create("x", SCHEMA, hash_columns=[]),
    "hash of one twice": lambda c: c.create("x", SCHEMA, hash_columns=["id", "id"]),
    "hash of a number": lambda c: c.make_rendition("c", hash_columns=[1]),
    "retention before": lambda c: c.create("x", SCHEMA, retention=-1),
    "a duration of integers": lambda c: c.create("x", SCHEMA, retention="7 days"),
    "an empty command": lambda c: c.create("x", SCHEMA, command=""),
    "a command with a space": lambda c: c.create("x", SCHEMA, command="a b"),
    "a timeout of text": lambda c: c.alter("c", retention=1, timeout="1"),
    "times of a clock": lambda c: c.make_rendition("c", schema=persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")),
    "no such rendition": lambda c: c.hand_over("c", 9),
    "rendition of text": lambda c: c.hand_over("c", "2"),
    "a flag of another type": lambda c: c.hand_over("c", 2, force="yes"),
    "the end of all times": lambda c: c.hand_over("c", 2, at=2**64 - 1, force=True),
    "a time before all": lambda c: c.hand_over("c", 2, at=-1),
    "the active rendition": lambda c: c.hand_over("c", 1),
    "dropping what is needed": lambda c: c.drop_rendition("c", 1),
    "copying no copy": lambda c: c.copy_rendition("c", 2),
    "a transformation of text": lambda c: c.copy_rendition("c", 3, transform="upper"),
    "the layer's own hold": lambda c: c.set_hold("c", "collection", 0),
    "a copy's hold": lambda c: c.set_hold("c", "copy-r2", 0),
    "a hold that is not there": lambda c: c.release_hold("c", "mine"),
    "an owner of another type": lambda c: c.open_reader("c", owner=3),
    "a name that is taken": lambda c: c.create("c", SCHEMA),
    "renamed to itself": lambda c: c.rename("c", "c"),
    "no such collection": lambda c: c.open_writer("orders"),
    "another verb": lambda c: c.open_writer("c").append([], 0, 1),
    "no bounds": lambda c: c.open_writer("c").compare_and_append([], 1, 1),
    "a time ahead": lambda c: c.open_writer("c").compare_and_append([row(1, "x", 9)], 2, 3),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_bad_input_is_refused_and_changes_nothing(world: World, call: Any) -> None:
    told, controller = Told(), create(world.client(), shards=np.int64(2))
    write(controller, told, range(2))
    controller.make_rendition("c")
    controller.make_rendition("c", copy=True)
    before = controller.catalog.fetch()._replace(upper=at(0))
    with pytest.raises(persist.PersistError) as found:
        call(controller)
    assert len(str(found.value)) > 30
    after = controller.catalog.fetch()._replace(upper=at(0))
    assert after == before
    check(controller, told, 0, 1)


def test_names_with_slashes_and_numbers_of_numpy(world: World) -> None:
    controller: Any = world.client().controller()
    controller.create("a/b.c-1", SCHEMA, shards=np.int32(2), retention=np.int64(3))
    assert controller.make_rendition("a/b.c-1", shards=np.uint8(3)).number == 2
    assert controller.hand_over("a/b.c-1", np.int64(2), at=np.int64(7), force=True) == 7
    with pytest.raises(InvalidName):
        controller.create("a//b", SCHEMA)


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
