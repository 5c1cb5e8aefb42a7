"""What every store of events does: one suite over all of them, with and without fragments."""

from __future__ import annotations

import os
import pickle
import random
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import persist_lib as persist
from persist_lib.errors import AlreadyWritten, Fenced, InvalidName, InvalidUsage, NotFound, NotSent
from persist_lib.events import Key, Scans, open_store
from persist_lib.events.record import decode_head, encode_number
from persist_lib.events.store import LogStore
from tests.eventlogs import KINDS as ALL
from tests.eventlogs import contents, store_of, write

LIMITS = {"whole": None, "64KiB": 65536, "100": 100}


KINDS = (*ALL, "gs", "az")
SERVED = ("pg", "s3", "persist", "gs", "az")
"""Slower ones, which `make events` runs with all limits. Whole records are in the tests of any kind."""
IS_ALL = os.environ.get("PERSIST_EVENTS") == "all"


@pytest.fixture(
    params=[f"{k}-{limit}" for k in KINDS for limit in LIMITS if IS_ALL or limit == "100" or k not in SERVED]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    kind, _, limit = request.param.partition("-")
    return store_of(kind, tmp_path, LIMITS[limit])


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    return store_of(request.param, tmp_path)


def of_size(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_what_was_written_is_read_and_replayed_byte_for_byte(store: LogStore) -> None:
    sizes = [0, 1, 26, 27, 28, 100, 3500]  # 3500 bytes are more than 127 records of 100 bytes
    if not store.specifier.text().endswith("limit=100"):
        sizes += [65536 - 80, 65536, 65537, 200_000]
    payloads = [of_size(size) for size in sizes]
    write(store, payloads)
    assert contents(store) == payloads
    assert contents(store, from_id=5) == payloads[4:]
    with store.reader() as reader:
        assert reader.last == len(payloads)
        for id_ in (1, 7, 6, 2):
            with reader.read(id_) as view:
                assert view == payloads[id_ - 1]
        assert [event.id for event in reader.replay(3, 6)] == [3, 4, 5, 6]
        assert [*reader.replay(20)] == []


def test_a_log_goes_on_where_it_ended(store: LogStore) -> None:
    for start in (1, 4, 4, 7):
        with store.writer() as writer:
            assert (writer.last, writer.accepted) == (start - 1, start - 1)
            if start != 4 or writer.epoch % 2:
                for id_ in range(start, start + 3):
                    writer.write(id_, b"%d" % id_ * 40)
    assert contents(store) == [b"%d" % id_ * 40 for id_ in range(1, 10)]


def test_epochs_rise_and_ids_are_acknowledged_in_order(any_kind: LogStore) -> None:
    order: list[int] = []
    with any_kind.writer() as first:
        futures = [first.write(id_, of_size(id_)) for id_ in range(1, 101)]
        for id_, future in enumerate(futures, 1):
            future.add_done_callback(lambda _, id_=id_: order.append(id_))  # type: ignore[misc]
        first.flush(60)
        assert first.last == 100
    with any_kind.writer() as second:
        assert second.epoch > first.epoch
    assert order == [*range(1, 101)]


def test_an_id_that_is_there_is_accepted_with_the_same_bytes_only(store: LogStore) -> None:
    write(store, [b"a" * 300, b"b"])
    with store.writer() as writer:
        writer.write(1, b"a" * 300).result(60)
        with pytest.raises(AlreadyWritten, match="event 2") as refused:
            writer.write(2, b"other").result(60)
        assert refused.value.id == 2
        writer.write(3, b"c")
        writer.write(3, b"c").result(60)  # under way, or there
        with pytest.raises(AlreadyWritten):
            writer.write(3, b"d").result(60)
        writer.write(4, b"it continues").result(60)
    assert contents(store) == [b"a" * 300, b"b", b"c", b"it continues"]


def test_a_gap_and_what_is_no_event_is_refused_at_once(any_kind: LogStore) -> None:
    with any_kind.writer() as writer:
        with pytest.raises(InvalidUsage, match="event 2 would leave a gap, as the next one is 1"):
            writer.write(2, b"")
        for wrong in (0, -1, True, "1", None, 1.0, 1 << 63):
            with pytest.raises(InvalidUsage, match="id must be an integer"):
                writer.write(wrong, b"")  # type: ignore[arg-type]
        for payload in ("text", None, 7, memoryview(bytes(10))[::2]):
            with pytest.raises(InvalidUsage, match="payload must be"):
                writer.write(1, payload)  # type: ignore[arg-type]
        writer.write(np.int64(1), bytearray(b"one")).result(60)  # type: ignore[arg-type]
        writer.write(2, memoryview(np.arange(4, dtype="<u2").data)).result(60)
        with pytest.raises(InvalidUsage, match="snapshot after event 3"):
            writer.write_snapshot(3, b"")
        for name in ("", "a/b", "ä", 7, "x" * 65):
            with pytest.raises(InvalidName):
                writer.write_mark(name, b"")  # type: ignore[arg-type]
    assert contents(any_kind) == [b"one", bytes([0, 0, 1, 0, 2, 0, 3, 0])]
    with pytest.raises(InvalidUsage, match="was closed"):
        writer.write(3, b"")
    writer.close()


def test_the_newest_writer_fences_the_one_before(any_kind: LogStore) -> None:
    first = any_kind.writer(owner="first")
    first.write(1, b"one").result(60)
    second = any_kind.writer(owner="second")
    assert second.last == 1
    second.write(2, b"two").result(60)
    with pytest.raises(Fenced) as fenced:
        first.write(2, b"of the first").result(60)
    assert (fenced.value.epoch, fenced.value.found) == (first.epoch, second.epoch)
    with pytest.raises(NotSent, match="earlier write failed"):
        first.write(3, b"")
    with pytest.raises(Fenced):
        first.flush(60)
    first.close(60)
    second.write(3, b"three").result(60)
    second.close(60)
    assert contents(any_kind) == [b"one", b"two", b"three"]


def test_a_fenced_writer_keeps_no_snapshot_and_no_mark(any_kind: LogStore) -> None:
    first = any_kind.writer()
    first.write(1, b"one").result(60)
    first.write_mark("m", b"of the first").result(60)
    with any_kind.writer() as second:
        second.write_mark("m", b"of the second").result(60)
        with pytest.raises(Fenced):
            first.write_mark("m", b"late").result(60)
    first.close(60)
    with any_kind.reader() as reader:
        assert reader.read_mark("m") == b"of the second"


def test_what_is_not_there_is_not_found_and_nothing_is_made_by_reading(any_kind: LogStore) -> None:
    for _ in range(2):
        with pytest.raises(NotFound):
            any_kind.reader()
    write(any_kind, [])
    with any_kind.reader() as reader:
        assert (reader.last, [*reader.replay()], reader.newest_snapshot(), reader.read_mark("m")) == (0, [], None, None)
        with pytest.raises(NotFound, match="no event 1"), reader.read(1):
            pass
        with pytest.raises(NotFound, match="no event 7"):
            reader.replay(1, 7)
        for wrong in (0, "1", None):
            with pytest.raises(InvalidUsage), reader.read(wrong):  # type: ignore[arg-type]
                pass
    with pytest.raises(InvalidUsage, match="closed"):
        reader.refresh()


def test_a_reader_sees_what_is_written_after_it_was_opened(any_kind: LogStore) -> None:
    with any_kind.writer() as writer:
        writer.write(1, b"one").result(60)
        with any_kind.reader() as reader:
            writer.write(2, b"two").result(60)
            assert reader.last == 1
            with reader.read(2) as view:
                assert bytes(view) == b"two"
            writer.write(3, b"three").result(60)
            assert reader.refresh() == 3
            assert [bytes(event.payload) for event in reader.replay(2)] == [b"two", b"three"]


def test_a_view_is_dead_after_its_block(store: LogStore) -> None:
    write(store, [b"one" * 50, b"two" * 50])
    with store.reader() as reader:
        with reader.read(1) as view:
            assert bytes(view[:3]) == b"one"
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        events = reader.replay()
        first = next(events)
        next(events)
        with pytest.raises(ValueError, match="released"):
            bytes(first.payload)
        events.close()  # type: ignore[attr-defined]


def test_snapshots_follow_their_event_and_the_newest_two_are_kept(store: LogStore) -> None:
    with store.writer() as writer:
        writer.write_snapshot(0, b"empty").result(60)
        for id_ in range(1, 13):
            writer.write(id_, b"%d" % id_)
            if id_ % 3 == 0:
                writer.write_snapshot(id_, b"state %d " % id_ * 9)
        writer.flush(60)
    with store.reader() as reader:
        assert reader.newest_snapshot() == (12, b"state 12 " * 9)
        assert reader.newest_snapshot(at_most=11) == (9, b"state 9 " * 9)
        assert reader.newest_snapshot(at_most=8) is None
    with store.writer() as writer:
        writer.write_snapshot(12, b"again").result(60)
        writer.write(13, b"13")
        writer.write_snapshot(13, b"x" * 400).result(60)
    with store.reader() as reader:
        assert reader.newest_snapshot(12) == (12, b"again")
        assert reader.newest_snapshot() == (13, b"x" * 400)


def test_of_two_snapshots_that_wait_together_the_second_counts(any_kind: LogStore) -> None:
    with any_kind.writer() as writer:
        waiting: list[Future[None]] = []

        def in_one_batch(_: Future[None]) -> None:
            waiting.extend(writer.write_snapshot(1, state) for state in (b"first" * 90, b"second" * 70))

        writer.write(1, b"one").add_done_callback(in_one_batch)
        writer.flush(60)
        for future in waiting:
            future.result(60)
        writer.write(2, b"two").result(60)
    with any_kind.reader() as reader:
        assert reader.newest_snapshot() == (1, b"second" * 70)


def test_marks_are_replaced_whole(store: LogStore) -> None:
    for round_ in range(2):
        with store.writer() as writer:
            for number in range(20):
                writer.write_mark("released", b"%d %d" % (round_, number) * 20)
            writer.write_mark("other-mark_2", b"").result(60)
            writer.flush(60)
        with store.reader() as reader:
            assert reader.read_mark("released") == b"%d 19" % round_ * 20
            assert reader.read_mark("other-mark_2") == b""
    assert len(store.records.ids("mark-released")) <= 18
    store.close()


def test_records_have_the_header_that_is_written_down(store: LogStore) -> None:
    write(store, [b"", of_size(1000)])
    records = store.records
    limit = records.limit or 1 << 40
    for id_, size in ((1, 0), (2, 1000)):
        found, fragment = 0, 0
        while (held := records.get(Key("events", id_, fragment))) is not None:
            record = bytes(held.record) + (b"" if held.body is None else bytes(held.body))
            assert len(record) <= limit
            label, end = decode_head(memoryview(record), "it")
            start = b"%b:%b:" % (encode_number(fragment), encode_number(label.fragments))
            assert record.startswith(start)
            assert (label.id, label.fragment, label.length) == (id_, fragment, len(record) - end)
            found, fragment = found + label.length, fragment + 1
            held.release()
        assert (found, fragment) == (size, label.fragments)
        assert fragment == 1 or limit == 100
    store.close()


def test_a_scan_gives_records_in_order_in_bounded_pages(any_kind: LogStore) -> None:
    payloads = [of_size(size * 1000) for size in range(60)]
    write(any_kind, payloads)
    records = any_kind.records
    assert isinstance(records, Scans)
    found = []
    for held in records.scan(1, 60):
        found.append(held.key)
        held.release()
    assert found == sorted(found)
    assert {key.id for key in found} == {*range(1, 61)}
    any_kind.close()


def test_several_threads_and_processes_may_read(any_kind: LogStore) -> None:
    payloads = [of_size(size) for size in range(40)]
    write(any_kind, payloads)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            assert contents(any_kind) == payloads
        except BaseException as error:  # noqa: BLE001 - raised in the test
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_stores_say_what_they_are_without_passwords_and_are_not_pickled(any_kind: LogStore) -> None:
    with any_kind.writer() as writer, any_kind.reader() as reader:
        for one in (any_kind, writer, reader):
            assert any_kind.specifier.kind in repr(one)
        for open_one in (writer, reader):
            with pytest.raises(persist.InvalidUsage, match="pickled"):
                pickle.dumps(open_one)
    assert open_store(any_kind.specifier.text()).specifier == any_kind.specifier
    assert open_store(any_kind.specifier).specifier == any_kind.specifier


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb"])
def test_a_forked_child_writes_nothing_through_its_parents_writer_and_can_open_its_own(
    kind: str, tmp_path: Path
) -> None:
    store = store_of(kind, tmp_path)
    with store.writer() as writer:
        writer.write(1, b"one").result(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer.write(2, b"of the child")
            except InvalidUsage:
                write(store, [b"two"])  # as another process would, this fences the parent
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(Fenced):
            writer.write(2, b"of the parent").result(60)
    assert contents(store) == [b"one", b"two"]
