"""Dropping all streams of a location, for development: when it is allowed, what it leaves, and repeating it."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib import streams
from persist_lib.streams import lifecycle, lock
from persist_lib.streams.lifecycle import wipe
from persist_lib.streams.lock import WriterLock
from persist_lib.streams.stream_list import Catalog
from persist_lib.testing import Rival
from tests.streaming import SCHEMA, all_of, start, update
from tests.worlds import World


def fill(world: World) -> None:
    runtime = start(world)
    for name in ("a", "b"):
        write, _ = runtime.create_or_load(name, SCHEMA)
        write.write([update(1, 5)]).result()
        write.seal(3).result()
    runtime.stop()


def encoding(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(lock, "ENCODING", number)
    monkeypatch.setattr(lifecycle, "ENCODING", number)


def test_what_an_older_encoding_wrote_is_refused_unless_a_wipe_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world)
    before = {name: world.bytes(name) for name in world.client().shards()}
    encoding(monkeypatch, 2)
    with pytest.raises(persist.NewerFormat, match="wipe_older"):
        start(world)
    assert {name: world.bytes(name) for name in world.client().shards()} == before
    runtime = start(world, wipe_older=True)
    assert runtime.list() == []
    write, read = runtime.create_or_load("a", SCHEMA)
    assert read.record.sealed == "a.2"  # a shard's name is never used twice
    write.write([update(7, 5)]).result()
    assert all_of(read) == {(7, "w", 5): 1}
    runtime.stop()
    client = world.client()
    assert client.inspect("a").state.is_finished()
    assert client.inspect("b.unsealed").state.is_finished()
    assert streams.fetch_lock(client).encoding == 2  # type: ignore[union-attr]
    again = start(world, wipe_older=True)  # nothing is older any more
    assert [one.name for one in again.list()] == ["a"]


def test_what_a_newer_encoding_wrote_is_never_wiped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding(monkeypatch, 2)
    fill(world)
    before = {name: world.bytes(name) for name in world.client().shards()}
    encoding(monkeypatch, 1)
    for options in ({}, {"wipe_older": True}):
        with pytest.raises(persist.NewerFormat, match="encoding 2"):
            start(world, **options)  # type: ignore[arg-type]
    assert {name: world.bytes(name) for name in world.client().shards()} == before


def test_a_wipe_that_stopped_half_way_is_finished_by_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world)
    encoding(monkeypatch, 2)
    for place in range(1, 40):
        rival = Rival(world.inner.consensus)
        for _ in range(place):
            rival.before_next(lambda: None)

        def stop() -> None:
            raise KeyboardInterrupt

        rival.before_next(stop)
        try:
            start(world, wipe_older=True, reentrance_id="x", rival=rival)
        except KeyboardInterrupt:
            world.clients.pop()
        if rival.waiting:
            break
    assert place > 5
    runtime = start(world, wipe_older=True, reentrance_id="x")
    assert runtime.list() == []
    assert all(runtime.client.inspect(name).state.is_finished() for name in ("a", "a.unsealed", "b", "b.unsealed"))
    runtime.create_or_load("a", SCHEMA)


def test_a_stream_that_is_still_read_is_dropped_and_its_shard_left_until_the_next_wipe(world: World) -> None:
    fill(world)
    client = world.client()
    reading = client.open_reader("a")
    client.set_hold("b", "dashboard", 0)
    taken = WriterLock(client, "", "")
    taken.take(wipes=True)
    done = wipe(client, Catalog(client), taken)
    assert (done.dropped, done.left) == ((), ("a", "b"))
    reading.close()
    client.release_hold("b", "dashboard")
    assert wipe(client, Catalog(client), taken).dropped == ("a", "b")
    taken.release()
    assert start(world).list() == []


def test_a_wipe_of_a_predecessor_is_refused_at_each_step(world: World) -> None:
    for place in range(40):
        world = World()
        fill(world)
        rival = Rival(world.inner.consensus)
        client = world.client(rival=rival)
        taken = WriterLock(client, "same", "")
        taken.take(wipes=True)
        new: list[streams.Streams] = []
        for _ in range(place):
            rival.before_next(lambda: None)
        rival.before_next(lambda world=world, new=new: new.append(start(world, reentrance_id="same")))  # type: ignore[misc]
        try:
            wipe(client, Catalog(client), taken)
        except persist.Fenced:
            assert new
        if rival.waiting:
            break
        for one in new[0].list():  # what the newer runtime knows of is not dropped behind its back
            write, _ = new[0].create_or_load(one.name, SCHEMA)
            write.seal(50).result()
        world.close()
    assert place > 5
