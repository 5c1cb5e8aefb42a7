"""What a survey remembers in the location, and what becomes of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.format.survey_cache import PREFIX, decode_memory
from persist_lib.location import open_location
from persist_lib.location.api import Blob
from persist_lib.location.wrap.around import AroundBlob, Operation
from persist_lib.testing import Outcome
from tests.unit.maintain.surveys import Meanwhile, asked, make, move, stored
from tests.worlds import Storm, World

MINUTE_S = 60
DAY_S = 86_400


def test_no_shard_can_be_called_like_its_memory() -> None:
    with persist.open("memory:") as client:
        for name in ("-survey", PREFIX, PREFIX.rstrip("/")):
            with pytest.raises(persist.InvalidName):
                client.machine(name)


def test_it_is_one_object_which_a_newer_one_replaces(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(5)))
    client.survey()
    (first,) = stored(world)
    client.survey(done={"scrub": ["s1"]})
    (second,) = stored(world)
    assert second > first
    assert decode_memory(world.inner.blob.get(second) or b"").looks == client.survey().looks  # type: ignore[union-attr]


def test_it_is_written_when_that_is_worth_it(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(40)))
    client.survey()
    before = stored(world)
    world.clock.advance(MINUTE_S)
    for n in range(19):
        move(client, f"s{n}")
        assert "set" not in asked(world, client.survey), "one look in a fresh process costs less than a PUT"
    assert stored(world) == before
    move(client, "s19")
    assert asked(world, client.survey)["set"] == 1, "twenty do not"
    move(client, "s0")
    assert "set" not in asked(world, client.survey)
    world.clock.advance(11 * MINUTE_S)
    assert asked(world, client.survey)["set"] == 1, "nor does one, once the memory is old"
    world.clock.advance(60 * MINUTE_S)
    assert "set" not in asked(world, client.survey), "nothing has changed"


def test_it_is_written_again_if_it_is_deleted(world: World) -> None:
    client = world.client()
    make(client, "s")
    client.survey()
    for key in stored(world):
        world.inner.blob.delete(key)
    assert asked(world, client.survey)["set"] == 1
    assert "head" not in asked(world, world.client().survey)


def test_a_clock_that_was_set_back_does_not_hide_it(world: World) -> None:
    client = world.client()
    make(client, "s")
    world.clock.advance(100 * DAY_S)
    client.survey()
    (first,) = stored(world)
    world.clock.advance(-100 * DAY_S)
    client.survey(done={"scrub": ["s"]})
    (second,) = stored(world)
    assert second > first
    assert world.client().survey().due("scrub") == []


@pytest.mark.parametrize("spoil", [
    lambda data: data[:-1] + bytes((data[-1] ^ 1,)),
    lambda data: data[:4] + bytes((data[4] + 1,)) + data[5:],
    lambda data: b"",
    lambda data: b"something else",
])  # fmt: skip
def test_damaged_or_of_another_release_it_costs_one_look(world: World, spoil: Callable[[bytes], bytes]) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(25)))
    found = client.survey()
    (key,) = stored(world)
    data = world.inner.blob.get(key) or b""
    world.inner.blob.delete(key)
    world.inner.blob.set(key, spoil(data))
    fresh = world.client()
    assert asked(world, fresh.survey)["head"] == 25
    assert fresh.survey().looks.keys() == found.looks.keys()
    assert len(stored(world)) == 1
    assert "head" not in asked(world, world.client().survey), "it is mended"


def test_by_other_settings_it_costs_one_look_and_what_was_done_stays_done(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(25)))
    client.survey(done={"scrub": [f"s{n}" for n in range(25)]})
    for config in (
        persist.Config(compaction_weight=0.9), persist.Config(compaction_advance=0.9), persist.Config(rollup_every=7)
    ):  # fmt: skip
        other = world.client(config)
        assert other.survey(most=0).waiting == 25
        assert asked(world, other.survey)["head"] == 25
        assert other.survey().due("scrub") == []
    assert sorted(other.survey().due("census")) == sorted(f"s{n}" for n in range(25))
    assert "head" not in asked(world, world.client(persist.Config(rollup_every=7, read_threads=2)).survey)


def test_two_processes_do_not_forget_what_the_other_one_did(world: World) -> None:
    one, two = world.client(), world.client()
    make(world.client(), "a", "b", "c")
    for client in (one, two):
        client.survey()
    one.survey(done={"scrub": ["a"]})
    assert two.survey().due("scrub") == ["b", "c"], "a client that has looks of its own learns it as well"
    two.survey(done={"scrub": ["b"], "orphans": ["a"]})
    assert one.survey().due("scrub") == ["c"]
    assert one.survey().due("orphans") == ["b", "c"]


def test_what_another_process_wrote_in_the_meantime_is_kept(world: World) -> None:
    make(world.client(), "a", "b", "c")
    two = world.client()
    two.survey()
    one = persist.open(
        replace(world.inner, consensus=Meanwhile(world.inner.consensus, lambda: two.survey(done={"scrub": ["a"]}))),
        runtime=world.clock.runtime(5),
    )
    world.clients.append(one)
    one.survey(done={"scrub": ["b"]})
    assert world.client().survey().due("scrub") == ["c"]


class _Gone(AroundBlob):
    """An object is gone when it is got: each time, or once."""

    def __init__(self, inner: Blob, times: int) -> None:
        super().__init__(inner)
        self.times = times

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind == "get" and operation.key.startswith(PREFIX) and self.times:
            self.times -= 1
            return None
        return call()


@pytest.mark.parametrize("times", [1, 99])
def test_an_object_that_is_gone_before_it_is_read_was_replaced(world: World, times: int) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(25)))
    client.survey()
    location = replace(world.inner, blob=_Gone(world.inner.blob, times))
    fresh = persist.open(location, runtime=world.clock.runtime(5))
    world.clients.append(fresh)
    assert fresh.survey(most=0).waiting == (0 if times == 1 else 25)
    assert fresh.survey().waiting == 0


def test_a_read_only_client_surveys_and_writes_nothing(world: World) -> None:
    writer = world.client()
    make(writer, *(f"s{n}" for n in range(30)))
    reader = world.client(read_only=True)
    kinds = asked(world, lambda: reader.survey(done={"scrub": ["s1"]}))
    assert not {"set", "delete_many"} & kinds.keys()
    assert "s1" not in reader.survey().due("scrub"), "it knows by itself"
    assert stored(world) == []
    writer.survey(done={"scrub": ["s2"]})
    assert len(world.client(read_only=True).survey().due("scrub")) == 29


@pytest.mark.parametrize("kinds", [("set",), ("list",), ("get",), ("delete_many",), ("set", "list", "get")])
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.LOST_UNKNOWN])
def test_without_its_memory_the_survey_works_and_says_so_once(
    world: World, caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...], outcome: Outcome
) -> None:
    make(world.client(), *(f"s{n}" for n in range(30)))
    world.client().survey()
    storm = Storm(outcome, *kinds)
    client = world.client(plan=storm)
    storm.blows = True
    with caplog.at_level(logging.INFO, "persist.survey"):
        for _ in range(3):
            found = client.survey(done={"scrub": ["s1"]})
            assert (len(found.looks), found.waiting, found.unread) == (30, 0, {})
            assert "s1" not in found.due("scrub")
    assert len([record for record in caplog.records if record.name == "persist.survey"]) == 1
    assert caplog.records[-1].levelname == "INFO"


def test_a_full_disk_is_no_failure_of_the_survey(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(AroundBlob):
        def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
            if operation.kind == "set" and operation.key.startswith(PREFIX):
                raise persist.DiskFull("no room", path=str(tmp_path), free=0)
            return call()

    location = open_location(f"file:{tmp_path}/x", create=True)
    with persist.open(replace(location, blob=Full(location.blob))) as client, caplog.at_level(logging.INFO):
        make(client, "s")
        assert list(client.survey().looks) == ["s"]
        assert [record.levelname for record in caplog.records if record.name == "persist.survey"] == ["INFO"]


def test_a_forked_child_surveys_as_well(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/x") as client:
        make(client, *(f"s{n}" for n in range(20)))
        client.survey()
        if (child := os.fork()) == 0:
            try:
                make(client, "t")
                found = client.survey(done={"scrub": ["s1"]})
                os._exit(0 if len(found.looks) == 21 and "s1" not in found.due("scrub") else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found = client.survey()
        assert (len(found.looks), "s1" in found.due("scrub")) == (21, False)
