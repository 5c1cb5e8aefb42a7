"""Uploads of an append: they end with its timeout, and what no commit can refer to is deleted at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, LeaseExpired, TimedOut, UpperMismatch
from persist_lib.location import open_location
from persist_lib.location.wrap.around import AroundBlob, Operation
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.testing import Chances, Fate, FaultyBlob, Outcome, Script, check_world
from persist_lib.testing.faults import Plan
from tests.worlds import SCHEMA, SMALL, Storm, World, row

pytestmark = pytest.mark.slow

T = TypeVar("T")


class Hanging(AroundBlob):
    """A Blob whose uploads get no answer, for as long as stores wait for one."""

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind == "set":
            time.sleep(patience_s(30))
            raise Indeterminate(f"no answer to {operation.kind}")
        return call()


def threaded(blob: Callable[[Any], Any], config: persist.Config = SMALL) -> tuple[persist.Client, str]:
    """A client with threads and a real clock."""
    location = open_location("memory:", create=True)
    return persist.open(replace(location, blob=blob(location.blob)), config=config), location.url


def parts(count: int) -> pa.Table:
    """Updates that become about so many parts of SMALL."""
    rows = count * 1600
    return pa.table(
        {"id": np.arange(rows), "word": ["x" * 10] * rows, "_time": np.zeros(rows, np.uint64),
         "_diff": np.ones(rows, np.int64)}
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["compare_and_append", "append", "append_async"])
@pytest.mark.parametrize("fails", ["hanging", "refusing"])
def test_an_append_whose_uploads_fail_ends_with_its_timeout(verb: str, fails: str) -> None:
    refusing: Plan = Chances(0, {Outcome.REFUSED: 1.0})
    if fails == "hanging":
        client, url = threaded(Hanging)
    else:
        client, url = threaded(lambda blob: FaultyBlob(blob, OnlySets(refusing)))
    with client:
        write = client.open_writer("s", SCHEMA)
        assert write.id
        started = time.monotonic()
        with pytest.raises(Determinate):
            wait_for(getattr(write, verb)(parts(4), 0, 1, timeout=1))
        assert 0.5 < time.monotonic() - started < 20
        with persist.open(url) as other:
            world = check_world(other, "s")
            assert world.state.upper == persist.at(0)
            assert not world.referred


def wait_for(done: persist.Appended | Future[persist.Appended]) -> persist.Appended:
    return done.result(30) if isinstance(done, Future) else done


class OnlySets:
    """Only uploads meet their fate."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def decide(self, operation: Operation) -> Any:
        return self._plan.decide(operation) if operation.kind == "set" else Fate()


def test_the_timeout_covers_an_input_that_comes_slowly_and_nothing_is_committed_after_it() -> None:
    client, url = threaded(lambda blob: blob)

    def slowly() -> Iterator[pa.Table]:
        for part in range(4):
            yield parts(1).set_column(0, "id", pa.array(np.arange(1600) + part * 1600))
            time.sleep(0.2)

    with client:
        write = client.open_writer("s", SCHEMA)
        with pytest.raises(TimedOut):
            write.compare_and_append(slowly(), 0, 1, timeout=0.5)
        with persist.open(url) as other:
            assert other.inspect("s").state.upper == persist.at(0)
            assert not [*other.blob.list("s/")], "and it is gone again"


def test_whoever_waits_for_another_threads_append_waits_no_longer_than_its_timeout() -> None:
    client, _ = threaded(lambda blob: blob)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[pa.Table]:
        yield parts(1)
        begun.set()
        assert go_on.wait(20)

    with client:
        write = client.open_writer("s", SCHEMA)
        thread = threading.Thread(target=lambda: write.compare_and_append(slow(), 0, 1))
        thread.start()
        assert begun.wait(20)
        started = time.monotonic()
        with pytest.raises(TimedOut):
            write.compare_and_append([row(1, time=1)], 1, 2, timeout=0.3)
        assert time.monotonic() - started < 15
        go_on.set()
        thread.join(20)
        assert write.compare_and_append([row(1, time=1)], 1, 2).upper == persist.at(2)


@pytest.mark.parametrize("verb", ["compare_and_append", "append"])
@pytest.mark.parametrize("error", [InvalidUsage, OSError])
def test_input_that_is_refused_or_fails_half_way_leaves_no_objects(
    world: World, verb: str, error: type[Exception]
) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)

    def spoilt() -> Iterator[Any]:
        for part in range(5):
            yield parts(1).set_column(0, "id", pa.array(np.arange(1600) + part * 1600))
        if error is OSError:
            raise OSError("the source is gone")
        yield [row(1, time=9)]

    with pytest.raises(error, match="gone" if error is OSError else None):
        getattr(write, verb)(spoilt(), 0, 1)
    assert world.count("set") >= 3, "some were uploaded by then"
    assert not [*world.inner.blob.list("s/")]
    assert write.compare_and_append(parts(2), 0, 1).count == 3200
    check_world(client, "s")


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_an_upload_that_fails_takes_the_others_along(world: World, outcome: Outcome, nth: int) -> None:
    """What got no answer too: were it stored later, the audit would find it."""
    plan = Script({("set", n): outcome for n in range(nth, 400)})
    client = world.client(SMALL.model_copy(update={"timeout_s": 0.3}), plan=plan)
    write = client.open_writer("s", SCHEMA)
    with pytest.raises(Determinate):
        write.compare_and_append(parts(5), 0, 1)
    assert plan.seen["set"] >= nth
    assert not [*world.inner.blob.list("s/")]
    assert client.inspect("s").state.upper == persist.at(0)


def test_what_cannot_be_deleted_is_left_and_the_first_failure_is_told(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "delete_many", "delete")
    client = world.client(SMALL, plan=storm)
    write = client.open_writer("s", SCHEMA)
    storm.blows = True

    def failing() -> Iterator[Any]:
        yield from (parts(1) for _ in range(5))
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="gone"):
        write.compare_and_append(failing(), 0, 1)
    storm.blows = False
    left = len([*world.inner.blob.list("s/")])
    assert left >= 3
    write.close()
    assert len(client.audit_orphans("s").orphans) == left


@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
def test_nothing_is_deleted_once_a_commit_may_refer_to_it(world: World, outcome: Outcome) -> None:
    storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan", first=outcome)
    client = world.client(SMALL.model_copy(update={"timeout_s": 1}), plan=storm)
    write = client.open_writer("s", SCHEMA)
    assert write.id
    storm.blows = True
    with pytest.raises(Indeterminate) as told:
        write.compare_and_append(parts(3), 0, 1)
    storm.blows = False
    assert len([*world.inner.blob.list("s/")]) >= 3
    assert not world.count("delete", "delete_many")
    assert write.compare_and_append(parts(3), 0, 1, token=told.value.token).count == 4800
    check_world(client, "s")


def test_nothing_is_deleted_after_a_race_was_lost_or_an_id_expired(world: World) -> None:
    """A command was made of it: that it came to nothing is for the audit to say, which looks at the log."""
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append(parts(1), 0, 1)
    with pytest.raises(UpperMismatch):
        write.compare_and_append(parts(1), 0, 1)
    world.clock.advance(10_000)
    world.client().expire("s")
    with pytest.raises(LeaseExpired):
        write.compare_and_append([row(1, time=1)], 1, 2)
    assert not world.count("delete", "delete_many")
    check_world(client, "s")


def test_what_was_uploaded_is_deleted_when_there_is_no_time_to_ask_for_the_commit(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    assert write.id

    def until_late() -> Iterator[Any]:
        yield parts(2)
        world.clock.advance(100)

    with pytest.raises(TimedOut):
        write.compare_and_append(until_late(), 0, 1, timeout=10)
    assert world.count("set") >= 1
    assert not [*world.inner.blob.list("s/")]
    assert write.compare_and_append(parts(2), 0, 1).count == 3200


def test_without_time_left_nobody_registers(world: World) -> None:
    write = world.client(SMALL).open_writer("s", SCHEMA)

    def until_late() -> Iterator[Any]:
        world.clock.advance(100)
        yield parts(2)

    before = world.bytes("s")
    with pytest.raises(TimedOut):
        write.compare_and_append(until_late(), 0, 1, timeout=10)
    assert world.bytes("s") == before
