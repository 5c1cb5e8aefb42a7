"""Many collections, and collections of many shards: how many requests they take, and that nothing has a limit."""

from __future__ import annotations

from collections import Counter

import pytest

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.catalog.catalog import SCHEMA as CATALOG
from persist_lib.ids import CATALOG as NAME
from tests.renditions import Told, check, write
from tests.worlds import SCHEMA, World

CONFIG = persist.Config(inline_bytes=0, rollup_every=1 << 30)
"""Each batch is an object, so that whoever looks through the batches makes requests; and no rollup is in between."""


def requests_of(world: World, controller: Controller, name: str, shards: int = 1) -> Counter[str]:
    world.requests.clear()
    controller.create(name, SCHEMA, shards=shards)
    return Counter(request.kind for request in world.requests)


def test_a_create_takes_as_many_requests_however_many_collections_there_are(world: World) -> None:
    controller = world.client(CONFIG).controller()
    requests_of(world, controller, "first")
    few = requests_of(world, controller, "few")
    for number in range(60):
        controller.create(f"n{number}", SCHEMA)
    assert requests_of(world, controller, "many") == few
    assert few.total() <= 31, few  # three of them: whether a shard has the name, before and once it is listed


def test_a_create_takes_eight_requests_a_shard_and_a_description_one(world: World) -> None:
    controller = world.client().controller()
    requests_of(world, controller, "first")
    one, many = requests_of(world, controller, "one"), requests_of(world, controller, "many", shards=41)
    # To see that there is none, twice (2 requests each), to make it, to set its hold, and to describe it.
    assert many.total() - one.total() == 40 * 7, (one, many)
    world.requests.clear()
    controller.describe("many")
    assert world.count() <= 41 + 6, Counter(request.kind for request in world.requests)


def test_a_write_and_a_change_by_key_look_at_each_shard_few_times(world: World) -> None:
    controller, told = world.client().controller(), Told()
    controller.create("c", SCHEMA, shards=40, mode="compare_and_append")
    write(controller, told, range(2))
    with controller.open_writer("c") as writer:
        writer.upsert([{"id": 1, "word": "a"}])
        for call in (
            lambda: writer.upsert([{"id": 1, "word": "b"}]),
            lambda: writer.append_now([{"id": 9, "word": "c"}]),
        ):
            world.requests.clear()
            call()
            assert world.count() <= 40 + 8, Counter(request.kind for request in world.requests)
    check(controller, told, 0, 1)


def test_a_client_closes_more_handles_than_python_nests_calls(world: World) -> None:
    client = world.client()
    handles = [client.open_writer("s", SCHEMA) for _ in range(2_500)]
    handles[7].compare_and_append([], 0, 1)
    client.close()
    with pytest.raises(persist.LeaseExpired, match="was closed"):
        handles[7].compare_and_append([], 1, 2)
    assert world.client().inspect("s").state.writers == {}, "the one that was registered is retired"


def test_a_catalog_that_somebody_else_has_written_to_is_damage(world: World) -> None:
    controller = world.client().controller()
    controller.create("c", SCHEMA)
    row = {
        "kind": "collection",
        "id": next(iter(controller.catalog.fetch().collections)),
        "body": '{"id":"x","name":"y"}',
    }
    with controller.client.open_writer(NAME, CATALOG, layer="catalog") as write:
        write.append_now([row])
    for reading in (controller, world.client().controller()):
        with pytest.raises(persist.InvariantViolated, match="is there twice"):
            reading.list()


def test_a_row_is_taken_away_as_it_is_stored_however_another_release_would_write_it(world: World) -> None:
    controller = world.client().controller()
    controller.create("c", SCHEMA)
    [(key, row)] = [(key, row) for key, row in controller.catalog.fetch().rows.items() if key[0] == "collection"]
    of = {"kind": key[0], "id": key[1]}
    with controller.client.open_writer(NAME, CATALOG, layer="catalog") as write:
        write.append_now([{**of, "body": row.body, "_diff": -1}, {**of, "body": row.body.replace(":", ": ")}])
    controller.rename("c", "d")
    for reading in (controller, world.client().controller()):
        assert reading.list() == ["d"]
    with controller.client.open_reader(NAME) as read:
        kinds = Counter(one["kind"] for one in read.snapshot(diff=True).to_pylist())
    assert kinds["collection"] == 1
