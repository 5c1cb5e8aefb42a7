"""What is asked of a location is counted, exactly, for the client and for the call that asked; and has a price.

The shipped test kit does what its users will rely on.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.cost import FREE, S3_LIST, Cost, Prices, parse_prices
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage
from persist_lib.ids import SeqNo
from persist_lib.location import Blob, Consensus
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.location.open import open_location
from persist_lib.location.wrap.around import Operation
from persist_lib.location.wrap.deadline import RetryingBlob, patience_s, within
from persist_lib.location.wrap.metering import Meter, MeteredBlob, MeteredConsensus, requested
from persist_lib.location.wrap.spending import PUTS, Spending
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import (
    Chances,
    FaultyBlob,
    FaultyConsensus,
    ManualClock,
    Outcome,
    RecordingLocation,
    Rival,
    Script,
)
from tests.logs import after

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
QUIET = Runtime(background=False)
DEAR = Prices(put=1.0, get=0.5, list=3.0, delete=0.25, commit=10.0, query=100.0, egress_gib=2**30 / 100)


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": id_, "word": "w" * 20} for id_ in ids]


def test_every_attempt_is_counted_and_charged_also_one_that_fails() -> None:
    clock = ManualClock()
    meter = Meter(clock.monotonic)
    faulty = FaultyBlob(MemoryBlob(), Script({("set", 1): Outcome.REFUSED, ("set", 2): Outcome.REFUSED}), clock.sleep)
    blob = RetryingBlob(MeteredBlob(faulty, meter, DEAR), clock.runtime(1))
    with Spending() as spent:
        blob.set("s/x", b"12345")
        blob.get("s/x")
    count = meter.counts()["set"]
    assert (count.calls, count.failures, count.sent_bytes) == (3, 2, 15)
    assert spent.cost == Cost(bytes_read=5, bytes_written=15, puts=3, gets=1, dollars=3.5 + 0.05)


def test_latencies_have_a_sum_a_longest_and_a_bound_for_every_share() -> None:
    clock = ManualClock()
    meter = Meter(clock.monotonic)
    for seconds in [0.001] * 98 + [0.5, 2.0]:
        meter.measure(Operation("get", "s/x"), lambda seconds=seconds: clock.sleep(seconds))  # type: ignore[misc]
    count = meter.counts()["get"]
    assert count.seconds == pytest.approx(2.598)
    assert count.longest_s == pytest.approx(2.0)
    assert 0.001 <= count.below_s(0.5) <= 0.002
    assert 0.5 <= count.below_s(0.99) <= 1.1
    assert count.below_s(1.0) == pytest.approx(2.0)
    assert sum(count.latencies) == 100


def test_what_is_spent_inside_is_spent_outside_too() -> None:
    blob = MeteredBlob(MemoryBlob(), Meter())
    with Spending() as outer:
        blob.get("s/a")
        with Spending() as inner:
            blob.get("s/b")
            with inner.again():
                blob.get("s/c")
    blob.get("s/d")
    assert (outer.cost.gets, inner.cost.gets) == (3, 2)


def test_an_iterator_is_charged_for_its_items_and_not_for_what_its_consumer_does() -> None:
    blob = MeteredBlob(MemoryBlob(), Meter())

    def items() -> Any:
        for n in range(3):
            blob.get("s/x")
            yield n

    with Spending() as around:
        own = Spending()
        for _ in own.over(items()):
            blob.set("s/y", b"")
    assert own.cost == Cost(gets=3)
    assert around.cost == Cost(gets=3, puts=3)


def test_threads_of_a_pool_count_for_whoever_gave_them_the_work_and_keep_its_deadline() -> None:
    blob, runtime = MeteredBlob(MemoryBlob(), Meter()), Runtime()

    def work(_: int) -> float:
        blob.get("s/x")
        return patience_s(1000.0)

    with Spending() as spent, runtime.pool(3, "test") as pool:
        patience = within(runtime.deadline(5.0), lambda: [*pool.map(work, range(50)), pool.submit(work, 0).result()])
    assert spent.cost.gets == 51
    assert max(patience) <= 5.0, "without a context they would wait for 1000 s"
    with ThreadPoolExecutor(1) as other, Spending() as unknown:
        other.submit(work, 0).result()
    assert unknown.cost.gets == 0


def test_two_calls_at_once_are_charged_each_for_its_own() -> None:
    blob = MeteredBlob(MemoryBlob(), Meter())

    def call(count: int) -> int:
        with Spending() as spent:
            for _ in range(count):
                blob.get("s/x")
        return spent.cost.gets

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(100, 900, 100))) == list(range(100, 900, 100))
    assert blob.meter.calls("get") == 3600


def test_a_store_that_tells_of_its_requests_is_charged_by_those_and_not_by_its_operations() -> None:
    class Wire(MemoryBlob):
        def set(self, key: str, data: bytes | memoryview) -> None:
            for _ in range(3):
                requested(PUTS)
            super().set(key, data)

    meter = Meter()
    blob = MeteredBlob(Wire(), meter, DEAR, by_request=True)
    with Spending() as spent:
        blob.set("s/x", b"123")
        blob.get("s/nothing is asked for this")
    assert spent.cost == Cost(bytes_written=3, puts=3, dollars=3.0)
    assert meter.counts()["set"].cost == spent.cost
    requested(PUTS)
    assert meter.counts()["set"].cost.puts == 3, "outside of an operation it is nobody's"


def test_what_another_process_spent_is_added_to_the_call_and_to_the_client() -> None:
    with persist.open("memory:") as client:
        before = client.metrics().cost
        elsewhere = pickle.loads(pickle.dumps(Cost(gets=3, bytes_read=7, dollars=0.5)))
        with Spending() as spent:
            client.charge(elsewhere)
        assert spent.cost == elsewhere
        assert client.metrics().cost == before + elsewhere


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_that_was_forked_while_others_count_can_count() -> None:
    blob = MeteredBlob(MemoryBlob(), Meter())
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            blob.get("s/x")

    def in_child() -> int:
        signal.alarm(20)  # a lock that stays held would hang for ever
        with Spending() as spent:
            blob.get("s/x")
        return spent.cost.gets

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            if not (child := os.fork()):
                os._exit(0 if in_child() == 1 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_client_counts_what_was_asked_of_its_location_and_nothing_else() -> None:
    recording = RecordingLocation(open_location("memory:", create=True))
    with persist.open(recording.location, runtime=QUIET, prices=DEAR) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append(rows(1, 2), 0, 1)
        with read.snapshot(0) as snapshot:
            snapshot.to_arrow()
        client.maintain("s")
        counted = {kind: count.calls for kind, count in client.metrics().operations.items()}
        kinds = [request.kind for request in recording.requests]
        assert counted == {kind: kinds.count(kind) for kind in set(kinds)}
        cost = client.metrics().cost
        assert cost.commits == sum(kinds.count(kind) for kind in ("compare_and_set", "truncate"))
        assert cost.dollars == pytest.approx(
            cost.puts + 0.5 * cost.gets + 3 * cost.lists + 10 * cost.commits + 100 * cost.queries
            + 0.25 * cost.deletes + 0.01 * cost.bytes_read
        )  # fmt: skip


def test_two_clients_of_one_process_count_each_for_itself() -> None:
    with persist.open("memory:two") as one, persist.open("memory:two") as other:
        one.open_writer("s", SCHEMA).compare_and_append(rows(1), 0, 1)
        assert set(other.metrics().operations) <= {"open"}
        assert one.metrics().operations["compare_and_set"].calls >= 2


def test_only_object_stores_take_money_unless_somebody_says_otherwise(tmp_path: Any) -> None:
    with persist.open(f"file:{tmp_path}/a") as client:
        assert client.prices == FREE
        client.open_writer("s", SCHEMA).compare_and_append(rows(1), 0, 1)
        assert client.metrics().cost.requests > 0
        assert client.metrics().cost.dollars == 0
    with persist.open(f"file:{tmp_path}/a", prices=Prices()) as client:
        assert client.prices == S3_LIST


def test_prices_are_named_or_given_in_part_and_never_negative() -> None:
    assert parse_prices("s3") == Prices() == S3_LIST
    assert parse_prices("free") == FREE
    assert parse_prices('{"egress_gib": 0.09}') == Prices(egress_gib=0.09)
    for wrong in ("", "aws", '{"gets": 1}', '{"get": "1"}', "[]"):
        with pytest.raises(InvalidUsage, match="prices are"):
            parse_prices(wrong)
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidUsage, match="get="):
            Prices(get=price)


def test_a_refused_read_is_retried_and_charged_to_the_call() -> None:
    clock = ManualClock()
    location = open_location("memory:", create=True, clock=clock)
    plan = Script({("get", 1): Outcome.REFUSED})
    meter = Meter(clock.monotonic)
    blob = RetryingBlob(MeteredBlob(FaultyBlob(location.blob, plan, clock.sleep), meter), clock.runtime(1))
    with Spending() as spent:
        assert blob.get("s/x") is None
    assert spent.cost.gets == 2
    faulty = FaultyBlob(location.blob, Script({("get", 1): Outcome.REFUSED}), clock.sleep)
    retried = RetryingBlob(MeteredBlob(faulty, meter), clock.runtime(1))
    with pytest.raises(Determinate), Spending() as spent:
        within(clock.runtime(2).deadline(0.0), lambda: retried.get("s/x"))
    assert spent.cost.gets == 1


def test_counting_takes_few_microseconds_of_an_append() -> None:
    """By CPU time, the least of several rounds: the difference between a bare call and one counted in a scope."""

    class Nothing(MemoryConsensus):
        def compare_and_set(self, key: str, expected: Any, data: bytes) -> bool:
            return True

    bare, rounds, calls = Nothing(), 7, 2000
    counted = MeteredConsensus(bare, Meter(), S3_LIST)

    def per_call_us(call: Any) -> float:
        started = time.process_time()
        for _ in range(calls):
            call()
        return (time.process_time() - started) / calls * 1e6

    def counted_call() -> Cost:
        with Spending() as spent:
            counted.compare_and_set("s", None, b"x" * 500)
        return spent.cost

    def alone() -> bool:
        return bare.compare_and_set("s", None, b"x" * 500)

    least = min(per_call_us(counted_call) - per_call_us(alone) for _ in range(rounds))
    assert least < 10, f"{least:.2f} µs; 4 when this was written"


def test_every_wrapper_is_a_blob_or_a_consensus() -> None:
    script = Script({})
    for blob in (MeteredBlob(MemoryBlob(), Meter()), FaultyBlob(MemoryBlob(), script)):
        assert isinstance(blob, Blob)
    for consensus in (Rival(MemoryConsensus()), FaultyConsensus(MemoryConsensus(), script)):
        assert isinstance(consensus, Consensus)


def test_a_meter_counts_calls_bytes_failures_and_seconds_by_kind() -> None:
    clock = ManualClock()
    meter = Meter(clock.monotonic)
    slow = FaultyBlob(MemoryBlob(), Chances(0, {}, delay_s=0.5), clock.sleep)
    blob, consensus = MeteredBlob(slow, meter), MeteredConsensus(MemoryConsensus(), meter)
    blob.set("s/x", b"12345")
    blob.get("s/x")
    blob.get_range("s/x", 0, 2)
    blob.get("s/missing")
    [*blob.list("s/")]
    consensus.compare_and_set("s", None, b"123")
    consensus.compare_and_set("s", None, b"123")
    consensus.scan("s", SeqNo(0), 9)
    consensus.head("s")
    consensus.now()
    with pytest.raises(Exception, match="truncated"):
        consensus.truncate("s", SeqNo(9))
    counted = {kind: tuple(count)[:4] for kind, count in meter.counts().items()}
    assert counted == {
        "set": (1, 0, 5, 0),
        "get": (2, 0, 0, 5),
        "get_range": (1, 0, 0, 2),
        "list": (1, 0, 0, 0),
        "compare_and_set": (2, 0, 6, 0),
        "scan": (1, 0, 0, 3),
        "head": (1, 0, 0, 3),
        "truncate": (1, 1, 0, 0),
    }
    assert 0 < meter.counts()["set"].seconds <= 0.5
    assert meter.counts()["compare_and_set"].seconds == 0
    assert meter.reset()["get"].calls == 2
    assert meter.calls("get") == 0


def test_a_meter_loses_no_count_among_threads() -> None:
    meter = Meter()
    blob = MeteredBlob(MemoryBlob(), meter)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [blob.get("s/x") for _ in range(500)], range(8)))
    assert meter.calls("get") == 4000


@pytest.mark.parametrize(
    ("outcome", "error", "happened"),
    [
        (Outcome.DONE, None, True),
        (Outcome.HAPPENED_UNKNOWN, Indeterminate, True),
        (Outcome.LOST_UNKNOWN, Indeterminate, False),
        (Outcome.REFUSED, Determinate, False),
    ],
)
def test_a_script_decides_what_becomes_of_the_nth_operation(
    outcome: Outcome, error: type[Exception] | None, happened: bool
) -> None:
    inner = MemoryConsensus()
    consensus = FaultyConsensus(inner, Script({("compare_and_set", 2): outcome}))
    assert consensus.compare_and_set("s", None, b"1")
    if error is None:
        assert consensus.compare_and_set("s", after(1), b"2")
    else:
        with pytest.raises(error, match="planned"):
            consensus.compare_and_set("s", after(1), b"2")
    assert len(inner.scan("s", SeqNo(0), 9)) == (2 if happened else 1)
    assert consensus.head("s") == inner.head("s"), "other kinds are not meant"


def outcomes(seed: int) -> list[str]:
    plan = Chances(seed, {Outcome.REFUSED: 0.3, Outcome.LOST_UNKNOWN: 0.3})
    blob = FaultyBlob(MemoryBlob(), plan)
    seen = []
    for _ in range(100):
        try:
            blob.get("s/x")
            seen.append("done")
        except (Determinate, Indeterminate) as error:
            seen.append(type(error).__name__)
    plan.stop()
    for _ in range(100):
        blob.get("s/x")
    return seen


def test_the_same_seed_fails_the_same_and_stopped_faults_are_over() -> None:
    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert set(outcomes(1)) == {"done", "Determinate", "Indeterminate"}


def test_a_rival_acts_just_before_the_next_compare_and_set_once_each_in_order() -> None:
    rival = Rival(MemoryConsensus())
    rival.before_next(lambda: rival.compare_and_set("s", None, b"rival"))
    rival.before_next(lambda: rival.compare_and_set("s", after(1), b"again"))
    assert rival.head("s") is None
    assert not rival.compare_and_set("s", None, b"mine")
    assert rival.waiting == 1
    assert not rival.compare_and_set("s", after(1), b"mine")
    assert rival.waiting == 0
    assert rival.compare_and_set("s", after(2), b"mine")
    assert [row.data for row in rival.scan("s", SeqNo(0), 9)] == [b"rival", b"again", b"mine"]


def test_a_rival_may_plan_the_next_race_while_it_acts() -> None:
    rival = Rival(MemoryConsensus())
    rival.before_next(lambda: rival.before_next(lambda: rival.compare_and_set("s", after(1), b"late")))
    assert rival.compare_and_set("s", None, b"1")
    assert not rival.compare_and_set("s", after(1), b"2")


def test_a_recording_tells_every_request_in_order() -> None:
    with open_location("memory:") as location:
        recording = RecordingLocation(location)
        recording.location.blob.set("s/x", b"123")
        recording.location.consensus.compare_and_set("s", None, b"1")
        recording.location.consensus.head("s")
        assert [tuple(request) for request in recording.requests] == [
            ("set", "s/x", 3),
            ("compare_and_set", "s", 1),
            ("head", "s", 0),
        ]
        assert recording.count() == 3
        assert recording.count("set", "head") == 2
        recording.clear()
        assert recording.count() == 0


def test_a_manual_clock_moves_when_told_or_slept_on() -> None:
    clock = ManualClock(0)
    runtime = clock.runtime(seed=1)
    deadline = runtime.deadline(5.0)
    runtime.sleep(4.0)
    assert deadline.remaining_s() == pytest.approx(1.0)
    clock.advance(2.0)
    assert deadline.has_passed()
    assert clock() == 6_000_000_000
    assert runtime.random.random() == ManualClock().runtime(seed=1).random.random()
