"""What is new, and who is at work: told of all sources for few requests."""

from __future__ import annotations

from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate
from persist_lib.sources import Collection, Files, Sources, look
from persist_lib.sources.alerts import Memory
from persist_lib.sources.files.reader import LineFiles
from tests.unit.sources.test_health import report
from tests.unit.sources.test_running import SCHEMA, Place, row


def states(place: Place, memory: Memory | None = None) -> dict[str, str]:
    sources = Sources(place.world.client().controller())
    try:
        return {one.source: one.state for one in look(sources, {} if memory is None else memory)}
    finally:
        sources.close()


def test_what_is_new_is_asked_of_the_upstream_and_what_is_bound_of_the_location(place: Place) -> None:
    memory: Memory = {}
    assert states(place, memory) == {}
    place.create()
    assert states(place, memory) == {"s": "none"}
    place.write("a.jsonl", row(1))
    assert states(place, memory) == {"s": "new"}
    instance = place.sources.open("s")
    place.world.clock.advance(1)
    instance._mint(place.sources.client.runtime.deadline(10))
    instance.close()
    for one in (memory, {}):
        assert states(place, one) == {"s": "new"}, "it is bound, and not durable yet"
    place.catch_up()
    for one in (memory, {}):
        place.world.clock.advance(60)
        states(place, one)
        place.world.clock.advance(60)
        assert states(place, one) == {"s": "none"}
    place.sources.pause("s")
    assert states(place, memory) == {"s": "paused"}


def test_an_instance_at_work_is_seen_until_it_is_not(place: Place) -> None:
    place.create()
    place.write("a.jsonl", row(1))
    one = report(place, "x")
    memory: Memory = {}
    for _ in range(4):
        one.say("running", "")
        assert states(place, memory) == {"s": "at work"}
        place.world.clock.advance(30)
    assert states(place, memory) == {"s": "new"}
    assert states(place) == {"s": "at work"}, "who remembers nothing waits for five minutes"
    place.world.clock.advance(300)
    assert states(place) == {"s": "new"}
    one.close()


def test_a_source_over_a_collection_is_new_where_there_are_updates(place: Place) -> None:
    place.controller.create("in", SCHEMA, mode="compare_and_append")
    with place.controller.open_writer("in") as write:
        place.sources.create("derived", Collection("in"), SCHEMA)
        memory: Memory = {}
        assert states(place, memory) == {"derived": "none"}
        write.advance_upper(5)
        assert states(place, memory) == {"derived": "none"}, "time went on, and nothing came"
        write.upsert([row(1)])
        assert states(place, memory) == {"derived": "new"}
        place.sources.run("derived", until_idle=True)
        place.world.clock.advance(60)
        states(place, memory)
        place.world.clock.advance(60)
        assert states(place, memory) == {"derived": "none"}


def test_an_upstream_that_cannot_be_asked_is_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise Determinate("the bucket is away")

    place.create()
    monkeypatch.setattr(LineFiles, "high_watermarks", fails)
    (found,) = look(place.sources, {})
    assert (found.state, found.says) == ("unread", "Determinate: the bucket is away")


def test_a_tick_does_not_read_again_what_has_not_moved(place: Place) -> None:
    costs = {}
    for count in (3, 30):
        for n in range(len(place.sources.list()), count):
            place.sources.create(f"s{n}", Files(place=str(place.folder), format="jsonl"), SCHEMA)
        memory: Memory = {}
        states(place, memory)
        place.world.clock.advance(30)
        client = place.world.client(persist.Config())
        sources = Sources(client.controller())
        before = len(place.world.requests)
        assert {one.state for one in look(sources, memory)} == {"none"}
        costs[count] = len(place.world.requests) - before
        sources.close()
    assert costs[30] <= costs[3] + 30, costs
