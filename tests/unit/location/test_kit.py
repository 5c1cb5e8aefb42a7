"""The meter and the shipped test kit do what their users will rely on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from persist_lib.errors import Determinate, Indeterminate
from persist_lib.ids import SeqNo
from persist_lib.location import Blob, Consensus, open_location
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.location.wrap.metering import Meter, MeteredBlob, MeteredConsensus
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
