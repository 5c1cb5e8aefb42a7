"""How often a read looks at the log: once, also where it opens a reader first, and never at what was there before."""

from __future__ import annotations

import gc
from collections import Counter
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.shard.machine import RECENT_S, as_one_call
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True)


def made(world: World) -> persist.Table:
    """A table that another client writes."""
    table = world.client().table("t", SCHEMA)
    table.append([{"id": 1, "n": 1}])
    return table


def kinds(world: World) -> Counter[str]:
    found = Counter(request.kind for request in world.requests if request.kind in LOOKS)
    world.requests.clear()
    return found


LOOKS = ("head", "scan", "compare_and_set")
OPENED = Counter(head=1, scan=1)
REGISTERED = Counter(compare_and_set=1)


def number(table: persist.Table) -> object:
    return table.read().to_pylist()[0]["n"]


def test_a_new_client_looks_as_it_opens_the_table_and_its_reader_tells_of_the_rest(world: World) -> None:
    made(world)
    world.requests.clear()
    with world.client() as client:
        table = client.table("t")
        assert kinds(world) == OPENED
        assert number(table) == 1
        assert kinds(world) == REGISTERED, "the command shows that what was seen is the newest"
        assert number(table) == 1
        assert kinds(world) == Counter(scan=1)
        del table
        gc.collect()
    assert kinds(world) == REGISTERED, "a reader whose table was dropped is retired once"


def test_a_client_that_only_reads_looks_once_for_each_read(world: World) -> None:
    made(world)
    world.requests.clear()
    with world.client(read_only=True) as client:
        table = client.table("t")
        assert kinds(world) == OPENED
        for _ in range(2):
            assert number(table) == 1
            assert kinds(world) == Counter(scan=1)


@pytest.mark.parametrize("read_only", [True, False])
def test_whatever_was_written_before_a_read_began_is_in_it(world: World, read_only: bool) -> None:
    other = made(world)
    with world.client(read_only=read_only) as client:
        table = client.table("t")
        for n in range(2, 6):
            other.upsert([{"id": 1, "n": n}])
            assert number(table) == n, "by a reader that is opened for it, and by one that is open"
        with client.open_reader("t") as reader:
            other.upsert([{"id": 1, "n": 6}])
            with reader.snapshot() as found:
                assert found.to_pylist()[0]["n"] == 6, "opening it was another call"


def test_a_look_that_is_not_recent_is_not_relied_on(world: World) -> None:
    other = made(world)
    with world.client() as client:
        table = client.table("t")
        world.clock.sleep(RECENT_S + 0.1)
        other.upsert([{"id": 1, "n": 2}])
        world.requests.clear()
        assert number(table) == 2
        assert kinds(world) == Counter(scan=1, compare_and_set=1), "no race is lost"


def test_a_read_waits_for_a_time_by_looks_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other, passes = made(world), world.clock.sleep
    upper = other.describe().upper.time
    assert upper is not None

    def sleep(seconds: float) -> None:
        passes(seconds)
        if other.describe().upper.time == upper:
            other.append([{"id": 2, "n": 2}])

    monkeypatch.setattr(world.clock, "sleep", sleep)
    with world.client(read_only=True) as client:
        assert client.table("t").read(upper + 5, timeout=60).count() == 1, "the other row came after that"
    assert other.count() == 2


def test_changes_of_a_collection_after_a_time_to_come_wait_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by = world.client()
    made_by.controller().create("c", SCHEMA, mode="compare_and_append")
    writer, passes = made_by.controller().open_writer("c"), world.clock.sleep
    writer.compare_and_append([], 0, 5)

    def sleep(seconds: float) -> None:
        passes(seconds)
        if writer.fetch_upper() == persist.at(5):
            writer.compare_and_append([{"id": 2, "n": 2, "_time": 6}], 5, 8)

    monkeypatch.setattr(world.clock, "sleep", sleep)
    with world.client() as client, client.table("c").changes(5, timeout=60) as found:
        assert (found.to, found.to_pylist()) == (5, [])
    assert writer.fetch_upper() == persist.at(8)


def test_of_one_call_the_newest_is_of_any_moment_since_it_began(world: World) -> None:
    other = made(world)
    with world.client() as client:
        machine = client.machine("t")
        found = machine.fetch()
        other.upsert([{"id": 1, "n": 2}])

        def within() -> None:
            newer = machine.newest()
            assert newer.seqno > found.seqno, "what was seen before the call began may be old"
            other.upsert([{"id": 1, "n": 3}])
            assert machine.newest() is newer
            assert as_one_call(machine.newest).seqno > newer.seqno, "one within it is a call of its own"
            machine.forget()
            assert machine.newest().seqno > newer.seqno

        as_one_call(within)
        other.upsert([{"id": 1, "n": 4}])
        assert machine.newest().seqno > found.seqno + 2, "outside of a call it is that of now"
        assert as_one_call(machine.newest) is machine.known


class Held:
    """A log whose answers to the scans of another thread come once they are let go."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.was_asked, self.may_answer = inner, Event(), Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def scan(self, *arguments: Any) -> Any:
        answer = self.inner.scan(*arguments)
        if current_thread() is not main_thread():
            self.was_asked.set()
            assert self.may_answer.wait(30)
        return answer


def test_a_look_of_another_thread_is_of_when_it_was_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = made(world)
    with world.client() as client:
        machine = client.machine("t")
        before, held = machine.fetch(), Held(machine.consensus)
        monkeypatch.setattr(machine, "consensus", held)
        thread = Thread(target=machine.fetch)
        thread.start()
        assert held.was_asked.wait(30)
        other.upsert([{"id": 1, "n": 2}])

        def within() -> None:
            held.may_answer.set()
            thread.join()
            assert machine.known == before
            assert machine.newest().seqno > before.seqno, "that answer was made before the call began"

        as_one_call(within)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_read_of_a_collection_looks_once_at_its_renditions_and_at_each_shard(world: World, shards: int) -> None:
    made_by = world.client()
    made_by.controller().create("c", SCHEMA, shards=shards, mode="compare_and_append")
    other = made_by.table("c")
    other.append([{"id": 1, "n": 1}])
    with world.client() as client:
        table = client.table("c")
        for n in range(2, 4):
            other.upsert([{"id": 1, "n": n}])
            world.requests.clear()
            assert number(table) == n
            asked = Counter(request.key for request in world.requests if request.kind in LOOKS)
            assert len(asked) == shards + 1
            assert set(asked.values()) == {1}
        catalog = client.controller().catalog
        world.requests.clear()
        assert catalog.fetch().named("c")
        assert kinds(world) == Counter(scan=1)
    with world.client(read_only=True) as client:
        world.requests.clear()
        assert client.controller().catalog.fetch().named("c")
        assert kinds(world) == OPENED, "opening and reading it is one look"
