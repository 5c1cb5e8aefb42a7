"""A copy that is given up leaves nothing behind that keeps history, or that a drop would wait for."""

from __future__ import annotations

import persist_lib as persist

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64"})


def test_a_dropped_copy_keeps_no_history_and_no_collection() -> None:
    with persist.open("memory:") as client, client.controller() as controller:
        controller.create("orders", SCHEMA, mode="compare_and_append", retention=0)
        with controller.open_writer("orders") as write:
            for cents in range(3):
                write.upsert([{"id": 1, "cents": cents}])
            controller.make_rendition("orders", shards=2, copy=True)
            controller.copy_rendition("orders", 2)
            assert [one.id for one in controller.capabilities("orders") if one.kind == "hold"] == [
                "collection", "copy-r2",
            ]  # fmt: skip
            controller.drop_rendition("orders", 2)
            assert [one.id for one in controller.capabilities("orders") if one.kind == "hold"] == ["collection"]
            write.upsert([{"id": 1, "cents": 9}])
            controller.tend("orders")
            assert controller.describe("orders").since == persist.at(3)


def test_a_collection_with_a_copy_under_way_is_dropped_at_once() -> None:
    with persist.open("memory:") as client, client.controller() as controller:
        controller.create("orders", SCHEMA, mode="compare_and_append")
        with controller.open_writer("orders") as write:
            write.upsert([{"id": 1, "cents": 1}])
        controller.make_rendition("orders", shards=2, copy=True)
        controller.copy_rendition("orders", 2)
        assert controller.drop("orders").waiting == ()
        assert controller.tend().steps == ()
