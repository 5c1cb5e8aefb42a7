"""Maintenance workers that ask to be alone exclude each other, whatever started them, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.errors import Busy, Corrupt, Indeterminate
from persist_lib.maintain import local_engine
from persist_lib.maintain.worker import Worker
from persist_lib.testing import check_swept, contents_of
from tests.shards import EAGER, TINY, filled
from tests.worlds import World

ROOT = Path(__file__).resolve().parents[3]


def writers(client: persist.Client) -> list[str]:
    return [writer.purpose for writer in client.inspect("s").state.writers.values()]


def alone(client: persist.Client) -> Worker:
    return Worker(client.machine("s"), client.leases, alone=True)


def test_the_second_worker_is_refused_and_told_who_is_at_work_until_when(world: World) -> None:
    first, second = world.client(TINY), world.client(TINY)
    filled(first, 6)
    with alone(first) as at_work:
        id_ = at_work.id
        seqno = second.inspect("s").seqno
        for call in (
            lambda: second.compact("s", policy=EAGER, alone=True),
            lambda: second.roll_up("s", force=True, alone=True),
        ):
            with pytest.raises(Busy) as raised:
                call()
            busy = raised.value
            assert (busy.worker, busy.shard) == (id_, "s")
            assert busy.lease_until == second.inspect("s").state.writers[id_].lease_until
            assert "Nothing was changed" in str(busy)
            assert " UTC, which is in 900 s" in str(busy)
        assert second.inspect("s").seqno == seqno, "it looked first, and did not even register"
        assert not second.compact("s", policy=EAGER, alone=True, dry_run=True).applied, "a dry run disturbs no other"
        assert second.compact("s", policy=EAGER).applied, "who does not ask to be alone is not kept out"
    assert second.roll_up("s", force=True, alone=True).key
    assert writers(first) == []


def test_a_worker_that_registers_between_the_look_and_the_commit_is_seen_and_the_fresh_id_is_retired(
    world: World,
) -> None:
    first = world.client(TINY)
    second = world.client(TINY, rival=world.rival)
    filled(first, 6)
    second.inspect("s")
    with alone(first) as at_work, alone(second) as late:
        world.rival.before_next(lambda: at_work.id)
        with pytest.raises(Busy):
            assert late.id
        assert world.rival.waiting == 0
        assert list(first.inspect("s").state.writers) == [at_work.id]
        with pytest.raises(Busy):
            assert late.id
    assert writers(first) == []


def test_an_ended_lease_and_an_ingesting_writer_keep_no_worker_out(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    with client.open_writer("s", client.inspect("s").state.schemas[-1]) as write:
        assert write.id
        assert alone(client).id
        world.clock.advance(TINY.lease_ms / 1000 + 1)
        with alone(client) as next_:
            assert next_.id, "the first one's lease has ended, though it was not retired"


def test_busy_is_raised_though_the_fresh_id_cannot_be_retired(world: World) -> None:
    first = world.client(TINY)
    second = world.client(TINY.model_copy(update={"timeout_s": 0.001}), rival=world.rival)
    filled(first, 6)
    second.inspect("s")
    with alone(first) as at_work:
        world.rival.before_next(lambda: at_work.id)
        late = alone(second)

        def refuse(*_: object) -> None:
            raise Indeterminate("planted")

        second.leases._commit_retirement = refuse  # type: ignore[method-assign,assignment]
        with pytest.raises(Busy):
            assert late.id
        assert not late._registration.has_id, "the id is not used by mistake"


def test_maintain_does_the_other_duties_and_tells_of_the_busy_ones(world: World) -> None:
    client = world.client(TINY.model_copy(update={"rollup_every": 2}))
    filled(client, 6)
    other = world.client(TINY)
    with alone(other) as at_work:
        assert at_work.id
        with pytest.raises(Busy) as raised:
            client.maintain("s", policy=EAGER, alone=True)
        failed, done = raised.value.failed, raised.value.done
        assert set(failed) == {"compaction", "rollups"}
        assert {"leases", "retention", "garbage", "orphans"} <= set(done)
        [part] = [part for batch in client.inspect("s").state.trace[:1] for part in batch.parts]
        world.inner.blob.delete(f"s/{part.key}")

        def damaged(*_: object, **__: object) -> None:
            raise Corrupt("planted")

        client.machine("s").consensus.truncate = damaged  # type: ignore[method-assign,assignment]
        client.machine("s").blob.list = damaged  # type: ignore[method-assign,assignment]
        with pytest.raises(Corrupt) as graver:
            client.maintain("s", policy=EAGER, alone=True)
        assert "compaction" in graver.value.failed


def test_an_interrupt_in_the_middle_retires_the_id(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)

    def interrupted(_tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
        assert writers(client) == ["maintenance"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.compact("s", policy=EAGER, engine=interrupted, alone=True)
    assert writers(client) == []
    assert client.compact("s", policy=EAGER, alone=True).applied


RACER = """
import sys
import persist_lib as persist
from persist_lib.errors import Busy
from persist_lib.maintain.worker import Worker
with persist.open(sys.argv[1], create=False) as client:
    client.machine("s").fetch()
    print("ready", flush=True)
    for line in sys.stdin:
        with Worker(client.machine("s"), client.leases, alone=True) as worker:
            try:
                told = worker.id
            except Busy as busy:
                told = "busy " + busy.worker
            print(told, flush=True)
            sys.stdin.readline()
        print("retired", flush=True)
"""


def test_of_two_processes_that_race_exactly_one_is_alone_each_time(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url) as client:
        filled(client, 1)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for _ in range(2)
    ]
    try:
        for racer in racers:
            assert read_line(racer) == "ready"
        for _ in range(60):
            for racer in racers:
                tell(racer)
            told = [read_line(racer) for racer in racers]
            [alone] = [one for one in told if not one.startswith("busy ")]
            assert sorted(told) == sorted([alone, f"busy {alone}"])
            for racer in racers:
                tell(racer)
            assert [read_line(racer) for racer in racers] == ["retired"] * 2
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    with persist.open(url, read_only=True) as client:
        assert writers(client) == []


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


COMPACTOR = """
import sys, time
import persist_lib as persist
from persist_lib.maintain import local_engine
from tests.shards import EAGER, TINY
config = TINY.model_copy(update={"lease_ms": int(sys.argv[2])})
with persist.open(sys.argv[1], config=config, create=False) as client:
    def engine(tasks):
        for result in local_engine(client.machine("s"))(tasks):
            print("merged", flush=True)
            time.sleep(600)
            yield result
    client.compact("s", policy=EAGER, engine=engine, alone=True)
"""


@pytest.mark.slow
def test_a_killed_compaction_is_in_the_way_for_its_lease_and_the_next_audit_sweeps_what_it_uploaded(
    tmp_path: Path,
) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url, config=TINY) as client:
        model = filled(client, 8)
        before = set((tmp_path / "data/blob/s").rglob("*.parquet"))
        process = subprocess.Popen(
            [sys.executable, "-c", COMPACTOR, url, "2000"], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert read_line(process) == "merged"
        time.sleep(3)
        with pytest.raises(Busy):  # longer than the lease: it is kept up while the process lives
            client.compact("s", policy=EAGER, alone=True)
        assert client.expire("s").overdue == ()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert set((tmp_path / "data/blob/s").rglob("*.parquet")) > before, "it had uploaded"
        with pytest.raises(Busy):
            client.compact("s", policy=EAGER, alone=True)
        assert client.audit_orphans("s").orphans == (), "it may still be linked"
        deadline = time.monotonic() + 20
        while not (overdue := client.expire("s").overdue):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(overdue) == 1
        assert len(client.audit_orphans("s").orphans) == 1
        assert set((tmp_path / "data/blob/s").rglob("*.parquet")) == before
        assert client.compact("s", policy=EAGER, alone=True).applied
        for _ in range(4):
            client.maintain("s", alone=True)
        check_swept(client, "s")
        assert overdue[0].id not in client.inspect("s").state.retired
        with client.open_reader("s") as read:
            assert contents_of(read.snapshot(7, diff=True).to_arrow()) == model.contents(7)


def test_a_compaction_that_was_overtaken_says_so_in_words(world: World) -> None:
    from jobs.compact import overtaken  # noqa: PLC0415
    from persist_lib.cli.duty_outcomes import compacted  # noqa: PLC0415

    client, other = world.client(TINY), world.client(TINY)
    filled(client, 6)

    def slow(tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
        results = list(local_engine(client.machine("s"))(tasks))
        other.compact("s", policy=EAGER)
        yield from results

    done = client.compact("s", policy=EAGER, engine=slow, alone=True)
    assert [(one.reason, one.seqno) for one in done.applied] == [("ahead", None), ("merge", None)]
    assert "2 requests came too late: another compactor was first" in compacted(done, False).summary
    _, said = overtaken(done)
    assert said.startswith("another compactor replaced 6 batches")
    assert overtaken(other.compact("s")) == []
