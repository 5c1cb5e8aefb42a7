"""Calls of a runtime: their order, group commit, what a failure does to the calls behind it, and what is refused.

And what a commit does to each stream: without any store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib import streams
from persist_lib.frontier import at as upto
from persist_lib.location import open_location
from persist_lib.location.wrap.around import Operation
from persist_lib.streams.committer import check_since
from persist_lib.streams.stream_state import Op, Step, plan
from persist_lib.testing import Fate, Outcome, Script
from tests.gated import LONG_S, Gate, wait_for
from tests.streaming import SCHEMA, all_of, start, unsealed_in, update
from tests.worlds import World

T = TypeVar("T")
CASES = {"compare_and_set", "compare_and_set_many"}


class Stores(Gate):
    """A Consensus that can keep commits waiting, or lose the answers of those that happen."""

    answers_lost = False

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind not in CASES:
            return call()
        if not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(LONG_S)
        self.passed += 1
        if self.outcome is not None:
            raise self.outcome
        answer = call()
        if self.answers_lost:
            raise persist.Indeterminate("the answer was lost")
        return answer


class Place:
    """A runtime with threads, whose commits a test lets through."""

    def __init__(self, **config: Any) -> None:
        location = open_location("memory:", create=True)
        self.url = location.url
        self.gate = Stores(location.consensus)
        self.client = persist.open(
            replace(location, consensus=self.gate), config=persist.Config(**({"timeout_s": 10.0} | config))
        )
        self.runtime = streams.open(self.client)
        self.write, self.read = self.runtime.create_or_load("s", SCHEMA)
        self.write.write([update(0, 1000)]).result()
        self.write.seal(1).result()  # both shards have their writers
        self.gate.passed = 0

    def outstanding(self) -> futures.Future[persist.Appended]:
        """A write whose commit does not arrive before the gate is opened."""
        self.gate.shut()
        future = self.write.write([update(1, 1001)])
        assert self.gate.waiting.wait(LONG_S)
        return future

    def close(self) -> None:
        self.gate.outcome, self.gate.answers_lost = None, False
        self.gate.open.set()
        with suppress(persist.PersistError):
            self.runtime.stop()
        self.client.close()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def has_spilled(stream: Any) -> bool:
    return stream.kept is None


BASE = {(0, "w", 1000): 1}


def test_calls_that_wait_become_one_commit_and_resolve_together(place: Place) -> None:
    first = place.outstanding()
    rest = [place.write.write([update(2, 5)]), place.write.write([update(3, 7)]), place.write.seal(6)]
    rest += [place.write.write([update(4, 6)]), place.write.seal(7)]
    place.gate.open.set()
    done = [one.result() for one in rest]
    first.result()
    assert place.gate.passed == 2
    assert len({one.token for one in done}) == 1
    assert [one.count for one in done] == [1, 1, 0, 1, 0]
    assert {one.upper for one in done} == {persist.at(7)}
    assert all_of(place.read) == BASE | {(1, "w", 1001): 1, (2, "w", 5): 1, (3, "w", 7): 1, (4, "w", 6): 1}


def test_what_is_written_and_sealed_by_one_commit_never_enters_the_unsealed_shard(place: Place) -> None:
    place.outstanding()
    place.write.write([update(2, 5)])
    place.gate.open.set()
    before = place.client.inspect("s.unsealed").state.count
    place.runtime.flush()
    place.gate.shut()
    blocked = place.write.write([])
    together = [place.write.write([update(3, 6)]), place.write.seal(6), place.write.seal(7)]
    place.gate.open.set()
    futures.wait([blocked, *together])
    state = place.client.inspect("s.unsealed").state
    assert state.count - before <= 3  # the two earlier writes, and the retraction of one of them
    assert unsealed_in(place.read) == BASE | {(1, "w", 1001): 1}


def test_a_time_that_calls_before_have_sealed_is_refused_at_once_and_harms_no_other(place: Place) -> None:
    first = place.outstanding()
    sealing = place.write.seal(10)
    with pytest.raises(persist.InvalidUsage, match="times must be in"):
        place.write.write([update(2, 9)])
    behind = place.write.write([update(2, 10)])
    place.gate.open.set()
    assert [one.result().upper for one in (first, sealing, behind)]
    assert place.write.upper == persist.at(10)


def test_a_call_that_fails_fails_every_call_behind_it(place: Place) -> None:
    """Else the write at 5 is lost for good: it timed out, and the seal up to 10 was committed."""
    first = place.outstanding()
    late = place.write.write([update(2, 5)], timeout=0.05)
    sealing = place.write.seal(10)
    time.sleep(0.1)
    place.gate.open.set()
    first.result()
    wait_for(sealing.done)
    with pytest.raises(persist.NotSent, match="failed"):  # a call of a caller that does not know of it yet
        place.write.seal(11)
    with pytest.raises(persist.TimedOut):
        late.result()
    with pytest.raises((persist.NotSent, persist.TimedOut)):  # the latter where it was to share a commit with the write
        sealing.result()
    assert place.write.upper == persist.at(1)
    again = [place.write.write([update(2, 5)]), place.write.seal(10)]
    assert [one.result().upper for one in again][-1] == persist.at(10)
    assert all_of(place.read) == BASE | {(1, "w", 1001): 1, (2, "w", 5): 1}


def test_a_call_that_was_cancelled_fails_every_call_behind_it(place: Place) -> None:
    place.outstanding()
    writing = place.write.write([update(2, 5)])
    sealing = place.write.seal(10)
    assert writing.cancel()
    place.gate.open.set()
    with pytest.raises(persist.NotSent):
        sealing.result(LONG_S)
    assert place.write.upper == persist.at(1)


@pytest.mark.parametrize("happened", [True, False])
def test_an_unknown_outcome_blocks_the_calls_behind_it_until_it_is_decided(happened: bool) -> None:
    place = Place(timeout_s=0.3)
    if happened:
        place.gate.answers_lost = True
    else:
        place.gate.outcome = persist.Indeterminate("no answer")
    writing = place.write.write([update(2, 5)])
    sealing = place.write.seal(10, timeout=60)
    time.sleep(1.0)
    assert not writing.done()
    assert not sealing.done()
    place.gate.outcome, place.gate.answers_lost = None, False
    assert writing.result(LONG_S).count == 1
    assert sealing.result(LONG_S).upper == persist.at(10)
    assert all_of(place.read) == BASE | {(2, "w", 5): 1}
    place.close()


def test_a_runtime_that_is_stopped_with_an_unknown_outcome_says_so_and_the_next_one_finds_out() -> None:
    place = Place(timeout_s=0.3)
    place.gate.outcome = persist.Indeterminate("no answer")
    writing = place.write.write([update(2, 5)])
    wait_for(lambda: place.gate.passed > 0)
    sealing = place.write.seal(10)
    with pytest.raises(persist.PersistError):
        place.runtime.stop(timeout=0.5)
    with pytest.raises(persist.Indeterminate):
        writing.result(LONG_S)
    with pytest.raises(persist.NotSent):
        sealing.result(LONG_S)
    place.gate.outcome = None
    place.runtime = streams.open(place.client, reentrance_id="x") if _is_free(place.client) else _broken(place.client)
    write, read = place.runtime.create_or_load("s", SCHEMA)
    assert write.upper == persist.at(1)
    assert all_of(read) == BASE
    place.close()


def _is_free(client: persist.Client) -> bool:
    lock = streams.fetch_lock(client)
    return lock is not None and not lock.instance


def _broken(client: persist.Client) -> streams.Streams:
    streams.break_lock(client)
    return streams.open(client)


def test_callers_wait_for_room_and_callbacks_may_call_without_a_deadlock() -> None:
    place = Place(buffer_bytes=64 * 1024)
    word, written = "x" * 2000, Counter[int]()

    def again(_done: object) -> None:
        written[place.write.write([update(-1, 50)]) is not None] += 1

    def many(base: int) -> None:
        for at in range(100):
            future = place.write.write([update(base + at, 60, word)])
            if at % 10 == 0:
                future.add_done_callback(again)

    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(0, 800, 100)))
    place.runtime.flush(timeout=60)
    wait_for(lambda: written[True] == 80)
    place.runtime.flush(timeout=60)
    found = all_of(place.read)
    assert found[-1, "w", 50] == 80
    assert sum(1 for key in found if key[2] == 60) == 800
    place.close()


def test_several_threads_write_and_seal_in_the_order_of_their_calls(place: Place) -> None:
    lock, frontier = threading.Lock(), 1

    def work(base: int) -> None:
        nonlocal frontier
        for at in range(30):
            with lock:
                place.write.write([update(base + at, frontier)])
                if at % 3 == 0:
                    frontier += 1
                    place.write.seal(frontier)

    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, 400, 100)))
    place.runtime.flush()
    assert place.write.upper == persist.at(frontier)
    assert sum(all_of(place.read).values()) == 121


def test_a_multi_write_over_streams_is_one_commit(place: Place) -> None:
    other, reading = place.runtime.create_or_load("t", SCHEMA)
    other.write([]).result()
    other.seal(5).result()
    place.gate.passed = 0
    parts = [
        streams.Write(place.write, [update(1, 5)]), streams.Seal(place.write, 20), streams.Write(other, [update(2, 9)]),
        streams.AllowCompaction(other, 4),
    ]  # fmt: skip
    place.runtime.multi_write(parts).result()
    assert place.gate.passed == 1
    assert (place.write.upper, other.since) == (persist.at(20), persist.at(4))
    assert unsealed_in(reading) == {(2, "w", 9): 1}
    assert place.client.inspect("t").state.since == persist.at(4)


def test_a_seal_and_a_move_of_since_of_one_stream_are_two_calls(place: Place) -> None:
    with pytest.raises(persist.InvalidUsage, match="two commits"):
        place.runtime.multi_write([streams.Seal(place.write, 10), streams.AllowCompaction(place.write, 5)])
    place.runtime.multi_write([streams.Seal(place.write, 1), streams.AllowCompaction(place.write, 0)]).result()
    assert place.runtime.multi_write([]).result().count == 0


def test_a_seal_reads_nothing_back_of_what_is_in_memory(world: World) -> None:
    runtime = start(world)
    write, _ = runtime.create_or_load("s", SCHEMA)
    write.write([update(1, 5), update(2, 9)]).result()
    write.seal(1).result()
    world.requests.clear()
    write.seal(6).result()
    assert [request.kind for request in world.requests] == ["compare_and_set_many"]
    world.requests.clear()
    write.write([update(3, 9)]).result()
    assert [request.kind for request in world.requests] == ["compare_and_set"]


def test_unsealed_updates_beyond_the_bound_of_memory_are_read_back(world: World) -> None:
    config = persist.Config(buffer_bytes=64 * 1024, timeout_s=60)
    runtime = start(world, config)
    write, read = runtime.create_or_load("s", SCHEMA)
    stream = runtime._shared.committer.streams["s"]  # type: ignore[union-attr]
    for at in range(40):
        write.write([update(1000 * at + n, 10 + n % 20, "x" * 50) for n in range(100)]).result()
        assert stream.size <= config.buffer_bytes
    assert has_spilled(stream)
    write.seal(20).result()
    assert has_spilled(stream)
    write.write([update(7, 29)]).result()
    write.seal(29).result()
    assert not has_spilled(stream)
    found = all_of(read)
    assert len(found) == 4001
    assert len(unsealed_in(read)) == 201
    runtime.stop()
    write, read = start(world, config).create_or_load("s", SCHEMA)
    write.seal(100).result()
    assert all_of(read) == found


def test_a_stream_that_is_sealed_for_good_takes_nothing_more(place: Place) -> None:
    place.write.seal([]).result()
    assert place.write.upper == persist.TOP
    with pytest.raises(persist.InvalidUsage, match="for good"):
        place.write.write([update(5, 2000)])
    place.write.seal([]).result()
    assert len(place.read.snapshot().to_arrow()) == 1
    assert unsealed_in(place.read) == {}
    place.runtime.stop()
    again, read = streams.open(place.client).create_or_load("s", SCHEMA)
    assert again.upper.is_top()
    assert len(read.contents().to_arrow()) == 1


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda w: w.write([{"id": 1, "word": "a"}]), "_time"),
        (lambda w: w.write("text"), "text|str"),
        (lambda w: w.write([update(1, 2**63)]), "times must be in"),
        (lambda w: w.write([update(1, -1)]), "_time"),
        (lambda w: w.write([update(1, 5)], timeout="x"), "timeout"),
        (lambda w: w.seal("x"), "upper"),
        (lambda w: w.seal(None), "upper"),
        (lambda w: w.seal(2**63), "at most"),
        (lambda w: w.seal(True), "upper"),
        (lambda w: w.allow_compaction(1), "before that"),
        (lambda w: w.allow_compaction([]), "before that"),
        (lambda w: w.allow_compaction(1.5), "since"),
    ],
)
def test_a_wrong_call_is_refused_at_once(
    place: Place, call: Callable[[streams.StreamWriter], object], why: str
) -> None:
    with pytest.raises(persist.InvalidUsage, match=why):
        call(place.write)
    place.write.seal(np.int64(2)).result()
    assert place.write.upper == persist.at(2)


@pytest.mark.parametrize("verb", ["flush", "stop"])
@pytest.mark.parametrize("timeout", ["soon", -1.0, float("nan")])
def test_a_wrong_timeout_of_the_runtime_is_refused_and_changes_nothing(place: Place, verb: str, timeout: Any) -> None:
    with pytest.raises(persist.InvalidUsage, match="timeout"):
        getattr(place.runtime, verb)(timeout=timeout)
    assert place.write.write([update(5, 9)]).result().count == 1


def test_a_diff_that_has_no_opposite_is_refused(place: Place) -> None:
    with pytest.raises(persist.DiffOverflow, match="no opposite"):
        place.write.write([update(1, 5, diff=-(2**63))])


@pytest.mark.parametrize("parts", ["text", {"a": 1}, 5, [5], [streams.Write], None])
def test_what_is_no_list_of_calls_is_refused(place: Place, parts: object) -> None:
    with pytest.raises(persist.InvalidUsage, match="multi_write takes"):
        place.runtime.multi_write(parts)


def test_a_writer_of_another_runtime_is_refused(place: Place, world: World) -> None:
    stranger, _ = start(world).create_or_load("s", SCHEMA)
    with pytest.raises(persist.InvalidUsage, match="another runtime"):
        place.runtime.multi_write([streams.Write(stranger, [])])


@pytest.mark.parametrize("name", ["", "-x", "a/b", 5, None, "x.unsealed", "streams.x", "x" * 81])
def test_a_name_that_no_stream_can_have_is_refused(place: Place, name: Any) -> None:
    with pytest.raises(persist.InvalidName):
        place.runtime.create_or_load(name, SCHEMA)


def test_schemas_that_a_stream_cannot_have_are_refused(place: Place) -> None:
    with pytest.raises(persist.InvalidUsage, match="no constraints"):
        place.runtime.create_or_load("u", persist.Schema(key={"id": "int64"}, unique=True))
    with pytest.raises(persist.InvalidUsage, match="no column '_at'"):
        place.runtime.create_or_load("u", persist.Schema(key={"_at": "int64"}))
    with pytest.raises(persist.SchemaMismatch):
        place.runtime.create_or_load("s", persist.Schema(key={"other": "int64"}))
    with pytest.raises(persist.InvalidUsage, match="schema must be"):
        place.runtime.create_or_load("u", {"id": "int64"})  # type: ignore[arg-type]


def test_a_shard_that_is_no_stream_is_left_alone(place: Place) -> None:
    place.client.open_writer("plain", SCHEMA).compare_and_append([], 0, 1)
    with pytest.raises(persist.NameTaken, match="not a stream"):
        place.runtime.create_or_load("plain", SCHEMA)
    place.client.open_writer("half.unsealed", SCHEMA).compare_and_append([], 0, 1)
    _, read = place.runtime.create_or_load("half", SCHEMA)
    assert read.record.sealed == "half.2"


@pytest.mark.parametrize(
    "schema", [persist.Schema.json(), persist.Schema.bytes(), persist.Schema(key={"a": "string"}, times="ms")]
)
def test_streams_of_each_codec_and_of_clock_times(place: Place, schema: persist.Schema) -> None:
    write, read = place.runtime.create_or_load("codec", schema)
    of_codec: dict[str, list[Any]] = {"json": [{"a": 1}, [2]], "bytes": [b"x", b"\0"], "columns": ["p", "q"]}
    keys = of_codec[schema.codec]
    if schema.codec == "columns":
        rows: list[Any] = [{"a": key, "_time": f"2026-11-22T00:00:0{n}Z"} for n, key in enumerate(keys)]
        until: Any = "2026-11-22T00:00:01Z"
    else:
        rows, until = [((key, b"v" if schema.codec == "bytes" else "v"), n, 1) for n, key in enumerate(keys)], 1
    write.write(rows).result()
    write.seal(until).result()
    with read.contents() as found:
        assert found.sealed is not None
        assert (found.sealed.to_arrow().num_rows, found.unsealed.num_rows) == (1, 1)
    write.seal([]).result()
    assert read.snapshot().to_arrow().num_rows == 2


def test_a_stream_whose_shard_was_given_columns_continues_with_them(world: World) -> None:
    runtime = start(world)
    write, _ = runtime.create_or_load("s", SCHEMA)
    write.write([update(1, 5)]).result()
    runtime.stop()
    wider = persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "more": "int64"})
    world.client().evolve_schema("s", wider)
    runtime = start(world)
    write, read = runtime.create_or_load("s", wider)
    write.write([{**update(2, 5), "more": 7}]).result()
    write.seal(6).result()
    assert sorted(row["more"] or 0 for row in read.snapshot().to_pylist()) == [0, 7]


def test_only_its_stream_appends_to_a_streams_shards_and_what_was_acknowledged_is_sealed(world: World) -> None:
    runtime = start(world)
    write, read = runtime.create_or_load("s", SCHEMA)
    write.write([update(1, 5)]).result()
    client = world.client()
    hidden = client.inspect("s.unsealed").state.schemas[-1]
    for name, schema in (("s", SCHEMA), ("s.unsealed", hidden)):
        with pytest.raises(persist.OfLayer, match="belongs to a stream, and only that appends to it"):
            client.open_writer(name, schema).advance_upper(9)
        with pytest.raises(persist.OfLayer):
            client.open_writer(name, schema).stage()
    with pytest.raises(persist.InvalidName, match="is kept for what stands on shards"):
        client.open_writer("streams.list", client.inspect("streams.list").state.schemas[-1])
    with pytest.raises(persist.OfLayer):
        client.open_writer("s", SCHEMA, layer="collection").append_now([{"id": 1, "word": "x"}])
    assert write.seal(6).result().upper == persist.at(6)
    assert read.snapshot(5).to_arrow().num_rows == 1
    client.maintain("s")  # maintenance changes no contents


def test_what_something_else_appended_to_the_sealed_shard_stops_the_stream(world: World) -> None:
    runtime = start(world, reentrance_id="x")
    write, _ = runtime.create_or_load("s", SCHEMA)
    write.write([update(1, 5)]).result()
    # An older program, or one that says that it is the stream.
    world.client().open_writer("s", SCHEMA, layer="stream").compare_and_append([update(9, 0)], 0, 2)
    with pytest.raises(persist.UpperMismatch):
        write.seal(6).result()
    with pytest.raises(persist.UpperMismatch):
        write.write([update(1, 5)])
    with pytest.raises(persist.UpperMismatch, match="something else than a stream"):
        start(world, reentrance_id="x").create_or_load("s", SCHEMA)


def test_a_stopped_runtime_finished_its_work_and_takes_none(place: Place) -> None:
    writing, sealing = place.write.write([update(5, 50)]), place.write.seal(60)
    place.runtime.stop()
    assert (writing.done(), sealing.result().upper) == (True, persist.at(60))
    place.runtime.stop()
    for call in (lambda: place.write.write([]), lambda: place.runtime.create_or_load("x", SCHEMA), place.runtime.list):
        with pytest.raises(persist.InvalidUsage, match="stopped"):
            call()


def test_a_runtime_stops_when_its_last_clone_is_closed(place: Place) -> None:
    with place.runtime.clone() as other:
        place.runtime.close()
        place.runtime.close()
        other.create_or_load("s", SCHEMA)[0].write([update(5, 50)]).result()
        with pytest.raises(persist.InvalidUsage, match="stopped"):
            place.runtime.flush()
    with pytest.raises(persist.InvalidUsage, match="stopped"):
        other.list()
    assert _is_free(place.client)


def test_a_forked_child_has_no_runtime(place: Place) -> None:
    if (child := os.fork()) == 0:
        try:
            place.write.write([update(5, 50)])
        except persist.Fenced:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    place.write.write([update(5, 50)]).result()


def test_a_format_that_cannot_remember_how_far_a_stream_is_sealed_is_refused(world: World) -> None:
    runtime = start(world, persist.Config(format=2))
    with pytest.raises(persist.InvalidUsage, match="format 3 or newer"):
        runtime.create_or_load("s", SCHEMA)


def test_a_stream_whose_creation_failed_half_way_is_completed_by_the_next_call(world: World) -> None:
    for place, (kind, number) in enumerate([(kind, n) for kind in sorted(CASES) for n in range(1, 5)]):
        plan, name = Script({}), f"s{place}"
        runtime = start(world, plan=plan, reentrance_id="x")
        plan._fates[kind, plan.seen[kind] + number] = Fate(Outcome.REFUSED)
        with suppress(persist.Determinate):
            runtime.create_or_load(name, SCHEMA)
        write, read = runtime.create_or_load(name, SCHEMA)
        write.write([update(1, 5)]).result()
        write.seal(6).result()
        write.allow_compaction(5).result()
        assert [row["id"] for row in read.snapshot().to_pylist()] == [1]
        state = runtime.client.inspect(f"{name}.unsealed").state
        assert state.retention is not None


def test_a_sum_beyond_64_bits_is_sealed_once_it_was_retracted(world: World) -> None:
    runtime = start(world, reentrance_id="x")
    write, _ = runtime.create_or_load("s", SCHEMA)
    for _ in range(3):
        write.write([update(1, 5, diff=2**62)]).result()
    runtime.client.maintain("s.unsealed")
    runtime = start(world, reentrance_id="x")
    write, read = runtime.create_or_load("s", SCHEMA)
    with pytest.raises(persist.DiffOverflow, match="retract some of them"):
        write.seal(6).result()
    write.write([update(1, 5, diff=-(2**62))] * 2).result()
    write.seal(6).result()
    write.write([update(1, 7, diff=-(2**62))]).result()
    write.seal(8).result()
    assert read.snapshot().to_pylist() == []
    assert unsealed_in(read) == {}


def test_a_sum_beyond_64_bits_fails_no_call_that_merely_shares_a_commit(place: Place) -> None:
    place.outstanding()
    writing = [place.write.write([update(2, 5, diff=2**62)]) for _ in range(3)]
    sealing = place.write.seal(6)
    place.gate.open.set()
    assert [one.result().count for one in writing] == [1, 1, 1]
    with pytest.raises(persist.DiffOverflow):
        sealing.result()
    place.write.write([update(2, 5, diff=-(2**62))] * 2).result()
    assert place.write.seal(6).result().upper == persist.at(6)


def test_times_of_a_clock_that_are_sealed_are_refused_in_words(place: Place) -> None:
    schema = persist.Schema(key={"a": "string"}, times="ms")
    write, _ = place.runtime.create_or_load("clock", schema)
    write.seal("2026-11-22").result()
    with pytest.raises(persist.InvalidUsage, match="2026-11-21T00:00:00Z"):
        write.write([{"a": "x", "_time": "2026-11-21"}])
    with pytest.raises(persist.InvalidUsage):
        write.write([{"a": "x", "_time": 2**63}])
    with pytest.raises(persist.InvalidUsage, match="before that"):
        write.allow_compaction("2026-11-23")


def test_threads_that_create_the_same_stream_at_once_get_the_same(place: Place) -> None:
    with futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: place.runtime.create_or_load("new", SCHEMA), range(8)))
    assert {read.record.sealed for _, read in found} == {"new"}
    for n, (write, _) in enumerate(found):
        write.write([update(n, 5)])
    place.runtime.flush()
    assert len(unsealed_in(found[0][1])) == 8


def updates(*times: int) -> pa.Table:
    rows = [{"id": time, "_time": time, "_diff": 1} for time in times]
    return pa.Table.from_pylist(rows, schema=SCHEMA.updates)


def test_of_several_calls_the_furthest_frontiers_count() -> None:
    ops = [
        Op("s", since=upto(5)),
        Op("s", upper=upto(9)),
        Op("s", since=upto(3)),
        Op("s", upper=upto(8)),
    ]
    (step,) = plan(ops, {"s": upto(1)}).values()
    assert (step.lower, step.upper, step.since) == (upto(1), upto(9), upto(5))


def test_a_seal_takes_what_is_before_it_and_leaves_the_rest_unsealed() -> None:
    (step,) = plan(
        [Op("s", table=updates(1, 5)), Op("s", table=updates(4, 6)), Op("s", upper=upto(5))],
        {"s": upto(0)},
    ).values()
    assert [row["_time"] for table in step.direct() for row in table.to_pylist()] == [1, 4]
    assert [row["_time"] for table in step.fresh() for row in table.to_pylist()] == [5, 6]


@pytest.mark.parametrize(("since", "is_legal"), [(4, True), (5, False), (6, False)])
def test_since_stays_before_the_frontier_of_what_is_sealed(since: int, is_legal: bool) -> None:
    steps = {"s": Step(upto(5), upto(5), since=upto(since))}
    if is_legal:
        check_since(steps)
    else:
        with pytest.raises(persist.InvalidUsage, match=r"is sealed up to .5. only"):
            check_since(steps)
