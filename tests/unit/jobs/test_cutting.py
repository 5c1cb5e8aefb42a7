"""Requests are cut to what runs at once; one task never starts Spark; progress is told and repeated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import persist_lib as persist
from jobs.compact import compact_shards, overtaken
from jobs.cutting import FLOOR_BYTES, pieces
from jobs.engine import SparkEngine, adder_for, engine_for
from jobs.reach import SparkUnreachable
from jobs.watch import Watch
from persist_lib.config import MIB
from persist_lib.core.plan.requests import MergeTask
from persist_lib.maintain import local_engine
from tests.spark.collections import SMALL, check, write


@pytest.mark.parametrize(
    ("size_mib", "slots", "count"),
    [
        (1, 8, 1), (15, 8, 1), (16, 8, 2), (70, 8, 8), (1000, 8, 8), (1100, 8, 16), (129, 1, 2), (100, 1, 1),
        (300, 2, 4), (200, 1000, 25), (2000, 1000, 250), (0, 4, 1),
    ],
)  # fmt: skip
def test_a_request_is_cut_to_what_runs_at_once(size_mib: int, slots: int, count: int) -> None:
    assert pieces(size_mib * MIB, 128 * MIB, slots) == count


@given(waves=st.floats(0, 50), task_bytes=st.integers(1 << 16, 1 << 34), slots=st.integers(1, 5000))
def test_no_task_reads_too_much_or_next_to_nothing_and_no_wave_is_nearly_empty(
    waves: float, task_bytes: int, slots: int
) -> None:
    size = int(waves * slots * task_bytes)
    count, floor = pieces(size, task_bytes, slots), min(FLOOR_BYTES, task_bytes)
    assert count >= 1
    assert size <= count * task_bytes
    assert count == 1 or size // count >= min(floor, task_bytes // 2)
    if size >= slots * floor:
        assert count >= slots
        assert count % slots == 0 or size // (-(-count // slots) * slots) < floor


class Recorded:
    """In place of a SparkEngine: it notes what it is asked, and merges here."""

    def __init__(self, client: persist.Client, slots: int) -> None:
        self._client, self._slots = client, slots
        self.asked: list[str] = []
        self.tasks = 0

    def pieces(self, size: int, task_bytes: int) -> int:
        self.asked.append("pieces")
        return pieces(size, task_bytes, self._slots)

    def __call__(self, tasks: Sequence[MergeTask], tells: Any) -> Any:
        self.asked.append("run")
        self.tasks += len(tasks)
        return local_engine(self._client.machine(tasks[0].shard))(tasks)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(**{**SMALL, "spark_above_bytes": 0})) as opened:
        yield opened


def compacted(client: persist.Client, name: Any, spark: Recorded) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    engine = engine_for(client, "s", name, cast("SparkEngine", spark), lambda *said: told.append(said))
    client.compact("s", engine=engine)
    return told


def test_what_is_one_task_runs_here_whatever_its_size_is_said_to_be(tmp_path: Path) -> None:
    config = persist.Config(**{**SMALL, "spark_above_bytes": 0, "task_bytes": 128 * MIB})
    with persist.open(f"file:{tmp_path}/data", config=config) as client:
        model, spark = write(client, "s"), Recorded(client, 8)
        told = compacted(client, "auto", spark)
        assert spark.asked == []
        assert told[0] == (told[0][0], 0, 1)
        assert told[-1][1:] == (1, 1)
        assert told[0][0].startswith("compacting ")
        check(client, "s", model)
        write(client, "s", seed=1, rows=9000)
        compacted(client, "spark", spark)
        assert spark.asked == ["pieces", "run"], "an engine that is asked for is obeyed"


def test_what_is_several_tasks_runs_on_spark_and_is_cut_further(client: persist.Client) -> None:
    model, spark = write(client, "s"), Recorded(client, 2)
    compacted(client, "auto", spark)
    assert spark.asked == ["pieces", "run"]
    assert spark.tasks > 1
    check(client, "s", model)
    write(client, "s", seed=1)
    told = compacted(client, "local", spark)
    assert spark.asked == ["pieces", "run"]
    assert [done for _, done, _ in told] == list(range(told[0][2] + 1))
    assert {said for said, _, _ in told} == {told[0][0]}
    assert told[0][0].endswith("MiB, here")


def test_a_scrub_tells_how_far_it_is(client: persist.Client) -> None:
    write(client, "s")
    told: list[tuple[str, int, int]] = []
    client.scrub("s", engine=adder_for(client, "s", "local", None, lambda *said: told.append(said)))
    assert [done for _, done, _ in told] == list(range(told[0][2] + 1))
    assert told[0][0].startswith("scrubbing ")


def test_what_begins_is_said_and_what_goes_on_is_said_again() -> None:
    said: list[str] = []
    with Watch(said.append, every_s=0.1) as watch, watch.doing("orders") as tells, watch.doing("events"):
        tells("compacting 7 updates, here", 0, 40)
        tells("compacting 7 updates, here", 12, 40)
        time.sleep(0.35)
    assert said[0] == "shard orders: compacting 7 updates, here, 40 tasks"
    assert "shard orders: compacting 7 updates, here, 12 of 40 tasks, 0 s" in said
    assert "shard events: starting, 0 s" in said
    assert 4 <= len(said) <= 9
    assert watch.lines() == []
    said.clear()
    time.sleep(0.25)
    assert said == []


def test_a_spark_that_is_not_there_is_asked_once_for_many_shards(client: persist.Client) -> None:
    names, asked = [f"s{i}" for i in range(6)], []
    models = {name: write(client, name, batches=3) for name in names}

    def sessions() -> Any:
        asked.append(1)
        time.sleep(0.2)
        raise SparkUnreachable("nothing listens there")

    outcomes = list(compact_shards(client, names, sessions, engine="spark", in_flight=2))
    assert len(asked) == 1
    assert {str(one.error) for one in outcomes} == {"nothing listens there"}
    for name, model in models.items():
        assert client.census(name).writers == 0
        check(client, name, model)


def test_a_request_that_was_overtaken_is_told_in_words(client: persist.Client) -> None:
    write(client, "s", batches=3)

    def beaten(tasks: Sequence[MergeTask]) -> Any:
        done = list(local_engine(client.machine("s"))(tasks))
        client.compact("s")
        return done

    lines = overtaken(client.compact("s", engine=beaten))
    assert lines
    for line in lines:
        assert line.startswith("another compactor replaced ")
        assert "first, so this one committed nothing" in line
        assert "are left to the audit of orphans" in line
    assert overtaken(client.compact("s")) == []
