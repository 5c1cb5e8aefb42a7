"""Work on several shards that is stopped ends within seconds, whatever it waits for, and nothing new begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import persist_lib as persist
from jobs.aside import Call
from jobs.compact import compact_shards
from jobs.engine import SparkEngine
from jobs.parallel import GRACE_S, in_parallel
from jobs.stop import Stop
from jobs.watch import Tells, silent
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.location.api import Blob
from persist_lib.location.wrap.deadline import Stopped
from persist_lib.maintain.merge_tasks import local_engine
from tests.spark.collections import SMALL, check, write

LONGEST_S = GRACE_S + 15.0


def test_every_item_is_answered_and_no_more_are_in_flight_than_were_asked_for() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def one(item: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        return item * 2

    assert sorted(in_parallel(one, range(20), 3)) == [item * 2 for item in range(20)]
    assert 1 < most <= 3
    assert list(in_parallel(one, [], 3)) == []


def test_an_error_of_one_item_is_raised_and_stops_the_rest() -> None:
    begun: list[int] = []

    def one(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise persist.Corrupt("damaged")
        time.sleep(0.05)
        return item

    stop = Stop()
    with pytest.raises(persist.Corrupt):
        list(in_parallel(one, range(100), 2, stop))
    assert stop.is_set
    assert len(begun) < 20


def test_a_caller_that_stops_does_not_wait_for_what_is_stuck_and_drops_what_was_not_begun() -> None:
    begun: list[int] = []

    def one(item: int) -> int:
        begun.append(item)
        time.sleep(0 if item == 0 else 60)
        return item

    told: list[str] = []
    answers = in_parallel(one, range(10), 2, Stop(lambda: told.append("stopped")))
    assert next(answers) == 0
    started = time.monotonic()
    answers.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < LONGEST_S
    assert told == ["stopped"]
    assert len(begun) <= 3


def test_an_error_that_comes_with_the_stop_is_the_stop() -> None:
    stop = Stop()

    def cancelled() -> None:
        stop.set()
        raise RuntimeError("job 1 was cancelled")

    with pytest.raises(Stopped) as raised:
        Call(cancelled, "cancelled").result(stop)
    assert str(raised.value.__cause__) == "job 1 was cancelled"


def test_a_shard_whose_work_was_stopped_is_no_outcome(client: persist.Client) -> None:
    write(client, "s")
    stop = Stop()

    class Cancelled(SparkEngine):
        def __call__(self, tasks: Sequence[MergeTask], tells: Tells = silent) -> Iterable[TaskResult]:
            stop.set()
            raise Stopped

        def pieces(self, size: int, task_bytes: int) -> int:
            return 1

    spark = Cancelled(client, lambda: pytest.fail("it must not start"), stop=stop)
    with pytest.raises(Stopped):
        list(compact_shards(client, ["s"], engine="spark", spark=spark, stop=stop))
    assert client.census("s").writers == 0


def test_a_stop_by_another_thread_ends_the_wait_with_an_error() -> None:
    stop = Stop()
    threading.Timer(0.2, stop.set).start()
    started = time.monotonic()
    with pytest.raises(persist.Determinate, match="stopped"):
        list(in_parallel(lambda _: time.sleep(60), range(3), 2, stop))
    assert time.monotonic() - started < LONGEST_S
    assert stop.wait(0)
    with pytest.raises(persist.Determinate, match="stopped"):
        stop.check()


def test_calls_are_made_once_at_the_stop_and_at_once_after_it() -> None:
    stop, made = Stop(), threading.Semaphore(0)
    stop.on_set(made.release)
    stop.on_set(lambda: 1 / 0)  # an error of one call is logged, and keeps no other from being made
    assert not made.acquire(timeout=0.05)
    stop.set()
    stop.set()
    assert made.acquire(timeout=5)
    stop.on_set(made.release)
    assert made.acquire(timeout=5)
    assert not made.acquire(timeout=0.05)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(**SMALL)) as opened:
        yield opened


def stopped_at(call: str, blob: Blob, stop: Stop, monkeypatch: pytest.MonkeyPatch, at: int = 1) -> list[str]:
    """Set the stop at that request of that kind. Returns the requests that came to the store after it."""
    inner, after, seen = blob.inner, [], []  # type: ignore[attr-defined]
    for name in ("get", "get_range", "set", "delete", "delete_many", "list"):
        real = getattr(inner, name)

        def noted(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            if stop.is_set:
                after.append(name)
            if name in call.split("|"):
                seen.append(name)
                if len(seen) == at:
                    stop.set()
            return real(*args)

        monkeypatch.setattr(inner, name, noted)
    return after


def test_a_stop_ends_a_local_merge_at_its_next_request_and_nothing_is_committed(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(client, "s", batches=5)
    stop = Stop()
    with monkeypatch.context() as patched:
        after = stopped_at("set", client.blob, stop, patched)
        engine = local_engine(client.machine("s"))
        with pytest.raises(persist.Determinate, match="nothing more was committed"):
            list(in_parallel(lambda name: client.compact(name, engine=engine), ["s"], 1, stop))
    assert len(after) <= 1, "only what was under way is finished"
    census = client.census("s")
    assert (census.batches, census.writers) == (5, 0), "the worker's id is retired"
    check(client, "s", model)
    client.compact("s")
    check(client, "s", model)


def test_a_stop_between_the_merge_and_the_commit_commits_nothing(client: persist.Client) -> None:
    model = write(client, "s", batches=5)
    stop = Stop()

    def engine(tasks: object) -> object:
        done = list(local_engine(client.machine("s"))(tasks))  # type: ignore[arg-type]
        stop.set()
        return done

    with pytest.raises(persist.Determinate, match="nothing more was committed"):
        list(in_parallel(lambda name: client.compact(name, engine=engine), ["s"], 1, stop))  # type: ignore[arg-type]
    assert client.census("s").batches == 5
    assert client.census("s").writers == 0
    check(client, "s", model)


@pytest.mark.parametrize(("duty", "call"), [("scrub", "get|get_range"), ("collect", "delete|delete_many")])
def test_a_stop_ends_a_scrub_and_a_collection(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch, duty: str, call: str
) -> None:
    for seed in range(4):
        write(client, "s", batches=3, seed=seed)
        client.compact("s")
        client.roll_up("s", force=True)
    stop = Stop()
    with monkeypatch.context() as patched:
        after = stopped_at(call, client.blob, stop, patched)
        if duty == "collect":
            stop.set()
        with pytest.raises(persist.Determinate, match="stopped"):
            list(in_parallel(getattr(client, duty), ["s"], 1, stop))
    assert len(after) <= 1
    getattr(client, duty)("s")


PROGRAM = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
import persist_lib as persist
from jobs.parallel import in_parallel
from jobs.stop import Stop
def one(item):
    sys.stdout.write("begun\\n"); sys.stdout.flush()
    {stuck}
for _ in in_parallel(one, range(3), 2, Stop()):
    pass
"""


@pytest.mark.parametrize(
    "stuck",
    ["time.sleep(100)", "threading.Event().wait()", "sum(i * i for i in range(10**10))"],
)
def test_a_program_with_a_stuck_thread_ends_within_seconds_of_ctrl_c(tmp_path: Path, stuck: str) -> None:
    root = Path(__file__).parent.parent.parent.parent
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(stuck=stuck))
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=LONGEST_S + 5)
    assert time.monotonic() - started < LONGEST_S + 1
    assert b"KeyboardInterrupt" in error
    assert process.returncode == -signal.SIGINT
