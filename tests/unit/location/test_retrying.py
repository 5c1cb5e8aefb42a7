"""What is tried again, how often, for how long, and what is never sent twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from persist_lib.config import CacheConfig, Config
from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.api import Change
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.location.stack import wrap
from persist_lib.location.wrap.chunk_cache import CachingBlob
from persist_lib.location.wrap.deadline import RetryingBlob, RetryingConsensus, within
from persist_lib.location.wrap.metering import MeteredBlob, MeteredConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import Chances, Fate, FaultyBlob, FaultyConsensus, ManualClock, Outcome, Script
from tests.logs import after

FAILURES = [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN, Outcome.REFUSED]
CALLS: dict[str, Callable[[Any], object]] = {
    "get": lambda blob: blob.get("s/x"),
    "get_range": lambda blob: blob.get_range("s/x", 0, 1),
    "set": lambda blob: blob.set("s/x", b"x"),
    "delete_many": lambda blob: blob.delete_many(["s/y"]),
    "list": lambda blob: [*blob.list("s/")],
    "head": lambda consensus: consensus.head("s"),
    "scan": lambda consensus: consensus.scan("s", SeqNo(0), 9),
    "truncate": lambda consensus: consensus.truncate("s", SeqNo(1)),
    "list_keys": lambda consensus: [*consensus.list_keys()],
    "heads": lambda consensus: consensus.heads(),
}
OF_CONSENSUS = ("head", "scan", "truncate", "list_keys", "heads")


def faulty(plan: Script | Chances, clock: ManualClock) -> tuple[RetryingBlob, RetryingConsensus]:
    blob, consensus = MemoryBlob(), MemoryConsensus(clock)
    blob.set("s/x", b"x")
    consensus.compare_and_set("s", None, b"1")
    return (
        RetryingBlob(FaultyBlob(blob, plan, clock.sleep), clock.runtime(), 10.0),
        RetryingConsensus(FaultyConsensus(consensus, plan, clock.sleep), clock.runtime(), 10.0),
    )


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", CALLS)
def test_what_is_the_same_when_done_twice_is_tried_again(kind: str, failure: Outcome) -> None:
    plan = Script({(kind, 1): failure, (kind, 2): failure})
    blob, consensus = faulty(plan, ManualClock())
    expected = CALLS[kind](faulty(Script({}), ManualClock())[kind in OF_CONSENSUS])
    assert CALLS[kind](consensus if kind in OF_CONSENSUS else blob) == expected
    assert plan.seen[kind] == 3


@pytest.mark.parametrize("kind", ["get", "get_range", "list", "head", "scan", "list_keys", "heads"])
def test_a_read_that_keeps_failing_certainly_changed_nothing(kind: str) -> None:
    clock = ManualClock()
    plan = Script({(kind, n): Outcome.LOST_UNKNOWN for n in range(1, 1000)})
    blob, consensus = faulty(plan, clock)
    with pytest.raises(Determinate, match="Nothing was changed"):
        CALLS[kind](consensus if kind in OF_CONSENSUS else blob)


@pytest.mark.parametrize("many", [False, True])
def test_a_compare_and_set_is_tried_again_only_when_it_certainly_did_not_happen(many: bool) -> None:
    kind = "compare_and_set_many" if many else "compare_and_set"

    def call(consensus: RetryingConsensus) -> bool:
        change = (after(1), b"2")
        return consensus.compare_and_set_many({"s": change}) if many else consensus.compare_and_set("s", *change)

    refused = Script({(kind, 1): Outcome.REFUSED, (kind, 2): Outcome.REFUSED})
    assert call(faulty(refused, ManualClock())[1])
    assert refused.seen[kind] == 3
    for outcome in (Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN):
        unknown = Script({(kind, 2): outcome, (kind, 1): Outcome.REFUSED})
        with pytest.raises(Indeterminate):
            call(faulty(unknown, ManualClock())[1])
        assert unknown.seen[kind] == 2


class Away(MemoryConsensus):
    """A Consensus by way of a server, which is away at first."""

    asked = 0

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        self.asked += 1
        if self.asked < 3:
            raise Determinate("the server cannot be reached")
        return super().compare_and_set_many(changes)


def test_whether_there_are_transactions_is_asked_again_where_that_is_a_request() -> None:
    clock = ManualClock()
    away = Away(clock)
    assert RetryingConsensus(away, clock.runtime(), 10.0).compare_and_set_many({})
    assert away.asked == 3


@pytest.mark.parametrize("error", [Corrupt("x"), InvalidUsage("x"), KeyboardInterrupt(), ValueError()])
def test_nothing_else_is_tried_again(error: BaseException) -> None:
    class Broken(MemoryBlob):
        calls = 0

        def get(self, key: str) -> bytes | None:
            self.calls += 1
            raise error

    inner = Broken()
    with pytest.raises(type(error)):
        RetryingBlob(inner, ManualClock().runtime()).get("s/x")
    assert inner.calls == 1


def always(outcome: Outcome) -> Chances:
    return Chances(1, {outcome: 1.0})


def test_it_gives_up_at_the_timeout_with_the_last_failure() -> None:
    clock = ManualClock()
    started = clock.monotonic()
    with pytest.raises(Determinate):
        faulty(always(Outcome.REFUSED), clock)[0].get("s/x")
    assert 8 < clock.monotonic() - started <= 10


def test_the_caller_s_deadline_counts_and_not_the_own_timeout() -> None:
    clock = ManualClock()
    started = clock.monotonic()
    with pytest.raises(Determinate):
        within(clock.runtime().deadline(0.5), lambda: faulty(always(Outcome.REFUSED), clock)[1].head("s"))
    assert clock.monotonic() - started <= 0.5


def test_pauses_grow_and_differ() -> None:
    clock = ManualClock()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.sleep(seconds)

    runtime = replace(clock.runtime(), sleep=sleep)
    blob = RetryingBlob(FaultyBlob(MemoryBlob(), always(Outcome.REFUSED)), runtime, 30.0)
    with pytest.raises(Determinate):
        blob.get("s/x")
    assert 10 < len(pauses) < 60, "neither hammering nor asleep"
    assert max(pauses) <= 1.5
    assert pauses[0] < 0.01 < pauses[5]
    assert len(set(pauses)) > 5


def test_a_doubt_is_not_forgotten_because_a_later_attempt_certainly_failed() -> None:
    clock = ManualClock()
    plan = Script({("set", 1): Outcome.HAPPENED_UNKNOWN, **{("set", n): Outcome.REFUSED for n in range(2, 999)}})
    with pytest.raises(Indeterminate):
        faulty(plan, clock)[0].set("s/new", b"x")


def test_delete_many_tries_again_only_what_was_not_deleted() -> None:
    asked: list[list[str]] = []

    class Stubborn(MemoryBlob):
        def delete_many(self, keys: Any) -> dict[str, Exception]:
            asked.append(list(keys))
            return {key: Determinate("not yet") for key in keys if key.endswith("3") and len(asked) < 3}

    blob = RetryingBlob(Stubborn(), ManualClock().runtime(), 10.0)
    assert blob.delete_many(["s/1", "s/2", "s/3"]) == {}
    assert asked == [["s/1", "s/2", "s/3"], ["s/3"], ["s/3"]]


def test_delete_many_names_what_could_not_be_deleted_in_time() -> None:
    class Stubborn(MemoryBlob):
        def delete_many(self, keys: Any) -> dict[str, Exception]:
            return {key: Determinate("never") for key in keys}

    assert list(RetryingBlob(Stubborn(), ManualClock().runtime(), 1.0).delete_many(["s/1"])) == ["s/1"]


def test_under_random_faults_everything_finishes_and_every_answer_is_right() -> None:
    clock = ManualClock()
    plan = Chances(7, {Outcome.HAPPENED_UNKNOWN: 0.2, Outcome.LOST_UNKNOWN: 0.2, Outcome.REFUSED: 0.2}, delay_s=0.01)
    blob, _ = faulty(plan, clock)
    for n in range(200):
        blob.set(f"s/{n}", f"{n}".encode())
    assert [blob.get(f"s/{n}") for n in range(200)] == [f"{n}".encode() for n in range(200)]


def test_slow_operations_use_up_the_deadline() -> None:
    clock = ManualClock()
    plan = Script({("get", n): Fate(Outcome.REFUSED, delay_s=4.0) for n in range(1, 99)})
    with pytest.raises(Determinate):
        faulty(plan, clock)[0].get("s/x")
    assert plan.seen["get"] == 3


def test_a_location_is_wrapped_with_the_timeout_of_the_config() -> None:
    with open_location("memory:") as location:
        stack = wrap(location, Config(timeout_s=3.0), ManualClock().runtime())
        counted = stack.blob.inner, stack.consensus.inner
        assert isinstance(counted[0], MeteredBlob)
        assert isinstance(counted[1], MeteredConsensus)
        assert (counted[0].inner, counted[1].inner) == (location.blob, location.consensus)
        assert stack.blob.timeout_s == stack.consensus.timeout_s == 3.0
        assert (stack.reads, stack.cache) == (stack.blob, None)


def test_a_location_that_is_wrapped_is_measured_by_the_clock_of_its_client() -> None:
    with open_location("memory:") as location:
        ticks = count()  # by one at each look
        stack = wrap(location, Config(), Runtime(monotonic=lambda: float(next(ticks))))
        location.blob.set("s/x", b"x")
        assert stack.blob.get("s/x") == b"x"
        assert stack.meter.counts()["get"].seconds == 1.0


def test_reads_are_cached_where_the_config_asks_for_it_and_nothing_else_is() -> None:
    with open_location("memory:") as location:
        stack = wrap(location, Config(cache=CacheConfig()), ManualClock().runtime())
        assert isinstance(stack.reads, CachingBlob)
        assert (stack.reads.inner, stack.reads.cache) == (stack.blob, stack.cache)
        assert isinstance(stack.blob, RetryingBlob)
