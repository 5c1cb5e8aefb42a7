"""Compaction at size, small: many runs, many updates of one key, and what is kept when it is stopped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.config import KIB, MIB
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.fan_in import FEWEST, Room, grouped, slices
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.core.state import Batch, Part
from persist_lib.frontier import at
from persist_lib.ids import PartKey
from persist_lib.maintain import local_engine
from persist_lib.maintain.compaction import carry_out
from persist_lib.maintain.merge_tasks import merge_tasks
from persist_lib.testing import check_world

SCHEMA = persist.Schema({"k": "int64"}, {"v": "string", "n": "int64"})
HOT = 500


def updates(rng: np.random.Generator, rows: int, time: int, hot: float = 0.0, values: int = 1 << 40) -> pa.Table:
    """Updates at one time. A share of them has the key HOT, and there are so many values."""
    keys = np.where(rng.random(rows) < hot, HOT, rng.integers(0, 1000, rows))
    numbers = rng.integers(0, values, rows)
    texts = [f"value {n % 7}" for n in numbers.tolist()]
    diffs = rng.choice([1, 1, 1, -1], rows)
    return pa.table({"k": keys, "v": texts, "n": numbers, "_time": np.full(rows, time, np.uint64), "_diff": diffs})


def fill(client: persist.Client, batches: int, rows: int, hot: float = 0.0, values: int = 1 << 40) -> None:
    rng = np.random.default_rng(batches)
    with client.open_writer("s", SCHEMA) as writer:
        for time in range(batches):
            writer.compare_and_append(updates(rng, rows, time, hot, values), time, time + 1)


def contents(client: persist.Client, as_of: int) -> list[dict[str, object]]:
    with client.open_reader("s") as reader:
        return reader.snapshot(as_of, diff=True).to_pylist()


def opened(tmp_path: Path, **config: int) -> persist.Client:
    small = {"part_bytes": 64 * KIB, "task_bytes": 64 * KIB, "inline_bytes": 0, "merge_bytes": MIB}
    return persist.open(f"file:{tmp_path}/data", config=persist.Config(**{**small, **config}))


def test_many_batches_are_merged_in_rounds_each_of_a_bounded_number_of_runs(tmp_path: Path) -> None:
    runs: list[int] = []
    with opened(tmp_path) as client:
        fill(client, 120, 400)
        before = [contents(client, as_of) for as_of in (0, 60, 119)]
        engine = local_engine(client.machine("s"))

        def noting(tasks: Sequence[MergeTask]) -> Iterable[TaskResult]:
            runs.extend(len(task.inputs) for task in tasks)
            return engine(tasks)

        compacted = client.compact("s", engine=noting)
        assert [one.reason for one in compacted.applied].count("fold") > 4
        assert len({one.seqno for one in compacted.applied}) == len(compacted.applied), "each is committed on its own"
        assert max(runs) < 40, runs
        assert compacted.batches_after <= 3
        assert [contents(client, as_of) for as_of in (0, 60, 119)] == before
        assert client.compact("s").applied == ()
        check_world(client, "s")


def test_a_batch_of_many_runs_is_merged_in_rounds_too(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        rng = np.random.default_rng(0)
        with client.open_writer("s", SCHEMA) as writer:
            table = updates(rng, 60_000, 0)
            writer.compare_and_append(iter([table.slice(at, 500) for at in range(0, 60_000, 500)]), 0, 1)
        [batch] = client.inspect("s").state.trace
        assert len(batch.runs) > 2 * FEWEST
        before = contents(client, 0)
        compacted = client.compact("s")
        assert [one.reason for one in compacted.applied] == ["sort"] * len(compacted.applied)
        assert len(compacted.applied) > 1
        [batch] = client.inspect("s").state.trace
        assert len(batch.runs) == 1
        assert contents(client, 0) == before
        check_world(client, "s")


def test_what_was_committed_stays_when_a_later_request_fails(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        fill(client, 60, 400)
        before = contents(client, 59)
        engine = local_engine(client.machine("s"))

        def failing(tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
            for number, result in enumerate(engine(tasks)):
                if number == 2:
                    raise KeyboardInterrupt
                yield result

        batches = client.census("s").batches
        told: list[tuple[int, int]] = []
        with pytest.raises(KeyboardInterrupt) as raised:
            client.compact("s", engine=failing, progress=lambda done, total: told.append((done, total)))
        [note] = raised.value.__notes__
        assert re.match(r"shard s: [12] of 5 requests were committed, [1-9]", note), note
        assert "are kept" in note
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert 0 < told[-1][0] < told[-1][1]
        left = client.census("s").batches
        assert 1 < left < batches
        assert contents(client, 59) == before
        client.compact("s")
        assert client.census("s").batches <= 3
        assert contents(client, 59) == before


def test_a_damaged_batch_stops_only_the_request_that_reads_it(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        fill(client, 60, 400)
        victim = client.inspect("s").state.trace[30].parts[0].key.rpartition("/")[2]
        [path] = [path for path in tmp_path.rglob("*") if path.name.startswith(victim)]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(persist.Corrupt, match=victim):
            client.compact("s")
        state = client.inspect("s").state
        assert len(state.trace) < 40
        assert [batch.id for batch in state.trace if batch.lo <= 30 < batch.hi] != [(0, 60)]


@pytest.mark.parametrize("values", [1 << 40, 3, 1])
def test_one_key_with_most_updates_is_cut_into_even_tasks_and_read_as_before(tmp_path: Path, values: int) -> None:
    with opened(tmp_path, merge_bytes=64 * MIB, part_bytes=256 * KIB) as client:
        fill(client, 4, 60_000, hot=0.9, values=values)
        before = [contents(client, as_of) for as_of in range(4)]
        machine = client.machine("s")
        request = plan_compaction(machine.fetch().state, client.policy()).requests[-1]
        with client.worker("s") as worker:
            tasks = merge_tasks(machine, worker.id, request)
            results = list(local_engine(machine)(tasks))
            rows = [sum(part.rows for part in result.parts) for result in results]
            if values == 1 << 40:
                assert len(tasks) > 8
                assert max(rows) < 2 * sum(rows) / len(rows), rows
            applied = carry_out(machine, worker, request, local_engine(machine))
        assert applied.seqno is not None
        assert [contents(client, as_of) for as_of in range(4)] == before
        check_world(client, "s")


def test_updates_of_one_datum_meet_when_since_passes_them_however_it_was_cut(tmp_path: Path) -> None:
    """One datum, thousands of times: cut by time beyond since only, so that what since lets meet is added up."""
    rows, times = 20_000, 2_000
    with (
        opened(tmp_path, merge_bytes=64 * MIB) as client,
        client.open_writer("s", SCHEMA) as writer,
        client.open_reader("s") as reader,
    ):
        for lower in range(0, 4 * times, times):
            at = np.repeat(np.arange(lower, lower + times, dtype=np.uint64), rows // times)
            numbers = np.where(np.arange(rows) % 10 == 0, np.arange(rows), 1)
            table = {"k": np.full(rows, HOT), "v": ["v"] * rows, "n": numbers}
            writer.compare_and_append(
                pa.table({**table, "_time": at, "_diff": np.ones(rows, np.int64)}), lower, lower + times
            )
        before = contents(client, 4 * times - 1)
        since = 3 * times
        reader.downgrade_since(since)
        machine = client.machine("s")
        [request] = plan_compaction(machine.fetch().state, client.policy()).requests
        with client.worker("s") as worker:
            tasks = merge_tasks(machine, worker.id, request)
            assert len(tasks) > 1
            assert all(len(task.key_upper or b"") > 20 for task in tasks[:-1]), "cut by time"
            assert carry_out(machine, worker, request, local_engine(machine)).seqno is not None
        for left, right in pairwise(tasks):
            assert left.key_upper == right.key_lower
        assert contents(client, 4 * times - 1) == before
        check_world(client, "s")
        [batch] = client.inspect("s").state.trace
        assert batch.count < 3 * times + rows


def run_of(rows: int, size: int, parts: int = 1) -> tuple[Part, ...]:
    return tuple(Part(PartKey("w/p"), size, rows, b"", b"", b"", 0, 0, 0) for _ in range(parts))


def test_what_a_merge_takes_grows_neither_with_the_size_of_runs_nor_with_their_number() -> None:
    room = Room.of(256 * MIB)
    large = [run_of(50_000_000, 128 * MIB, parts=100)] * 1000
    starts = grouped(large, 40, room)
    assert max(end - start for start, end in pairwise(starts)) <= 20
    small = [run_of(1000, 20_000)] * 10_000
    starts = grouped(small, 40, room)
    assert all(1000 <= end - start <= 4096 for start, end in pairwise(starts))
    assert grouped([run_of(10, 100)] * 3, 40, room) == [0]


def test_a_heavy_batch_waits_for_the_last_round() -> None:
    heavy = _batch(0, 10_000_000, 500 * MIB)
    light = [_batch(number, 5_000, 100_000) for number in range(1, 5001)]
    found = slices([heavy, *light], 40, Room.of(256 * MIB))
    assert found[0][0] == 1
    assert found[-1][1] == 5001
    assert all(end - start > 1 for start, end in found)


def _batch(lo: int, rows: int, size: int) -> Batch:

    return Batch(lo, lo + 1, at(lo), at(lo + 1), at(0), rows, rows, 0, run_of(rows, size), (0,))
