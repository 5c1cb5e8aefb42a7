"""Streams of a client that is open already: `db.stream`, the short way to what `streams.open` gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import streams
from tests.streaming import SCHEMA, all_of, update
from tests.worlds import World


@pytest.fixture
def db(tmp_path: Any) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data") as db:
        yield db


def in_child(run: Callable[[], object]) -> int:
    """What a forked child comes to: 0, or 1 if it raised."""
    if (child := os.fork()) == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - the parent asks what became of it
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_stream_is_written_by_its_door_and_read_as_a_table(db: persist.Client) -> None:
    write, read = db.stream("s", SCHEMA, reentrance_id="gateway")
    write.write([update(1, 3), update(2, 12)])
    write.seal(10).result()
    assert db.table("s").read().to_pylist() == [{"id": 1, "word": "w"}]
    assert len(all_of(read)) == len(all_of(db.stream("s"))) == 2
    other, _ = db.stream("t", SCHEMA)
    assert other.runtime.epoch == write.runtime.epoch == 1, "one runtime for all streams of a client"
    write.runtime.multi_write([streams.Write(write, [update(3, 20)]), streams.Seal(other, 5)]).result()
    assert db.tables() == ["s", "t"]


def test_what_was_accepted_is_there_when_the_client_is_closed_and_the_lock_is_free(tmp_path: Any) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url) as db:
        write, _ = db.stream("s", SCHEMA, reentrance_id="gateway")
        later = write.write([update(1, 3)])
    assert later.done()
    with persist.open(url) as db:
        lock = streams.fetch_lock(db)
        assert lock is not None
        assert not lock.instance
        write, read = db.stream("s", SCHEMA)
        assert len(all_of(read)) == 1
        with pytest.raises(persist.InvalidUsage, match="another client"):
            db.stream("s", SCHEMA, reentrance_id="gateway")


def test_errors_are_those_of_the_long_way(world: World) -> None:
    db, other = world.client(), world.client()
    with pytest.raises(persist.NotFound, match="no stream 's'"):
        db.stream("s")
    assert db.shards() == [], "to read makes nothing"
    write, _ = db.stream("s", SCHEMA, reentrance_id="a", owner="first")
    with pytest.raises(persist.Locked, match="first"):
        other.stream("s", SCHEMA)
    with pytest.raises(persist.SchemaMismatch):
        db.stream("s", persist.Schema(key={"id": "int64 not null"}, value={"word": "int64"}))
    db.table("lone", SCHEMA)
    with pytest.raises(persist.NameTaken):
        db.stream("lone", SCHEMA)
    with pytest.raises(persist.InvalidUsage, match=r"'a'.*'b'"):
        db.stream("s", SCHEMA, reentrance_id="b")
    with pytest.raises(persist.InvalidUsage, match="give the stream's schema"):
        db.stream("s", owner="first")  # type: ignore[call-overload]
    with pytest.raises(persist.InvalidUsage, match="may write"):
        world.client(read_only=True).stream("s", SCHEMA)
    newer, _ = other.stream("s", SCHEMA, reentrance_id="a")
    with pytest.raises(persist.Fenced):
        write.write([update(1, 3)]).result()
    with pytest.raises(persist.Fenced):
        db.stream("s", SCHEMA)
    newer.write([update(1, 3)]).result()
    newer.runtime.stop()
    write.runtime.stop()
    again, _ = db.stream("s", SCHEMA)
    assert again.runtime.epoch == 3, "after a stop the client opens another one"
    again.write([update(2, 3)]).result()


def test_an_error_of_the_block_is_raised_as_it_is_and_what_failed_with_it_is_its_note(tmp_path: Any) -> None:
    url = f"file:{tmp_path}/data"
    with pytest.raises(ValueError, match="mine") as caught, persist.open(url) as db:  # noqa: PT012 - the block is it
        write, _ = db.stream("s", SCHEMA, reentrance_id="a")
        with persist.open(url) as other:
            other.stream("s", SCHEMA, reentrance_id="a")
            write.write([update(1, 3)])
            raise ValueError("mine")
    assert "Fenced" in caught.value.__notes__[0]


def test_a_program_that_reads_takes_no_lock_and_may_write_later(world: World) -> None:
    with streams.open(world.client(), reentrance_id="a") as runtime:
        runtime.create_or_load("s", SCHEMA)[0].write([update(1, 3)]).result()
        db = world.client()
        read = db.stream("s")
        assert runtime.epoch == 1
        with pytest.raises(persist.Locked):
            db.stream("s", SCHEMA)
        assert len(all_of(read)) == 1
    db.stream("s", SCHEMA)[0].write([update(2, 3)]).result()
    assert len(all_of(read)) == len(all_of(db.stream("s"))) == 2


def test_threads_that_open_streams_at_once_share_one_runtime(db: persist.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        writers = [write for write, _ in pool.map(lambda number: db.stream(f"s{number % 3}", SCHEMA), range(24))]
    assert {write.runtime.epoch for write in writers} == {1}
    for write in writers:
        write.write([update(1, 3)]).result()


def test_a_forked_child_reads_and_writes_nothing_and_leaves_the_parent_its_lock(db: persist.Client) -> None:
    write, read = db.stream("s", SCHEMA)
    write.write([update(1, 3)]).result()

    def child() -> None:
        with pytest.raises(persist.Fenced, match="parent"):
            db.stream("s", SCHEMA)
        for one in (read, db.stream("s")):
            assert len(all_of(one)) == 1
        db.close()

    before = streams.fetch_lock(db)
    for stop in (child, write.runtime.stop, write.runtime.close):
        with write.runtime._shared.loading, read._lock, db._streams[""]._opening:  # as other threads may
            assert in_child(stop) == 0
        assert streams.fetch_lock(db) == before
    write.write([update(2, 3)]).result()
    write.seal(10).result()
