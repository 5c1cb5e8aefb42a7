"""How many bytes of a payload are copied on its way: none into LMDB, SQLite and the files, and none out of LMDB.

Counted by what Python allocates: a copy of a payload of 32 MiB is an allocation of 32 MiB. And the log of a `persist`
store is a collection: its events as of any event, by everything that reads shards.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from tests.eventlogs import store_of, write

SIZE = 32 << 20


def allocated(call: Callable[[], object]) -> int:
    """The most bytes that Python had allocated at once during a call, beyond what it had before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb"])
def test_a_payload_of_one_fragment_is_written_without_a_copy(kind: str, tmp_path: Path) -> None:
    payload = memoryview(bytearray(SIZE))
    with store_of(kind, tmp_path).writer() as writer:
        writer.write(1, b"first").result(60)
        copied = allocated(lambda: writer.write(2, payload).result(60))
    assert copied < 1 << 20, f"{copied / SIZE:.2f} of the payload"


def test_what_takes_bytes_alone_gets_those_of_the_caller(tmp_path: Path) -> None:
    payload = bytes(SIZE)
    with store_of("rock", tmp_path).writer() as writer:
        writer.write(1, b"first").result(60)
        copied = allocated(lambda: writer.write(2, payload).result(60))
    assert copied < 1 << 20, f"{copied / SIZE:.2f} of the payload"


def test_reading_from_lmdb_copies_nothing(tmp_path: Path) -> None:
    store = store_of("lmdb", tmp_path)
    write(store, [bytes(SIZE), bytes(SIZE)])
    with store.reader() as reader:

        def read() -> None:
            with reader.read(2) as view:
                assert view.nbytes == SIZE
            for event in reader.replay():
                assert event.payload.nbytes == SIZE

        copied = allocated(read)
    assert copied < 1 << 20, f"{copied / SIZE:.2f} of the payload"


def test_a_slice_of_a_view_that_outlives_its_block_is_an_error_and_never_garbage(tmp_path: Path) -> None:
    store = store_of("lmdb", tmp_path)
    write(store, [b"one" * 1000, b"two" * 1000])
    with store.reader() as reader:
        kept = []
        with pytest.raises(InvalidUsage, match=r"event 1 is still in use"), reader.read(1) as view:
            kept.append(view[:6])
        events = reader.replay(2)
        kept.append(next(events).payload[:6])
        with pytest.raises(InvalidUsage, match=r"event 2 is still in use"):
            next(events)
        with store.writer() as writer:  # what is written now takes no pages that are still looked at
            for _ in range(200):
                writer.write_mark("m", b"x" * 3000)
            writer.flush(60)
        assert bytes(kept[0]) == b"oneone"
        assert bytes(kept[1]) == b"twotwo"
        kept.clear()
        with reader.read(1) as view:
            assert bytes(view[:3]) == b"one"


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb", "rock"])
def test_replay_needs_little_memory(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    write(store, [bytes(1 << 20)] * 64)

    def replay() -> None:
        with store.reader() as reader:
            assert sum(event.payload.nbytes for event in reader.replay()) == 64 << 20

    assert allocated(replay) < 12 << 20


def test_a_log_is_read_as_of_an_event_and_kept_by_the_same_upkeep(tmp_path: Path) -> None:
    store = store_of("persist", tmp_path)
    for start in range(1, 61, 3):
        write(store, [b"event %d" % id_ for id_ in range(start, start + 3)])
    with persist.open(store.specifier.options[0]) as client:
        client.maintain("events")
        with client.open_reader("events") as read:
            for as_of in (0, 1, 7, 60):
                rows = read.snapshot(as_of=as_of, columns=["id", "payload"]).to_pylist()
                found = sorted((row["id"], row["payload"]) for row in rows)
                assert found == [(id_, b"event %d" % id_) for id_ in range(1, as_of + 1)]
            relation = read.snapshot(as_of=9).to_duckdb()
            counted = relation.query("log", "SELECT count(*), max(id) FROM log")
            assert counted is not None
            assert counted.fetchall() == [(9, 9)]
    write(store, [b"event 61"])
    with store.reader() as reader:
        assert [event.id for event in reader.replay()] == [*range(1, 62)]
