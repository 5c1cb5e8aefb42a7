"""Where the bytes of stored runs lie among the keys, as far as it takes to cut them evenly."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.cutting import Stretch
from persist_lib.core.plan.requests import MergeTask
from persist_lib.errors import Damage, Missing
from persist_lib.format.parquet import PartEncoder
from persist_lib.format.parts import StoredPart
from persist_lib.format.paths import blob_key
from persist_lib.maintain.compaction import compact
from persist_lib.maintain.merge_tasks import merge_tasks
from persist_lib.shard import stretches

SCHEMA = persist.Schema(key={"k": "string"}, value={"v": "int64"})
MIB = 1 << 20


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(inline_bytes=0, task_bytes=64 * 1024)) as opened:
        yield opened


def fill(client: persist.Client, runs: int, rows: int, names: Callable[[np.ndarray], np.ndarray]) -> None:
    """Appends, each over all keys."""
    random = np.random.default_rng(1)
    with client.open_writer("s", SCHEMA) as write:
        for _run in range(runs):
            keys = [f"key-{number:09d}" for number in names(random.integers(0, 10**9, rows))]
            table = pa.table({"k": keys, "v": random.integers(0, 1 << 60, rows)})
            table = table.append_column("_diff", pa.array(np.ones(rows, "i8")))
            write.append_now(table)


def tasks_of(client: persist.Client, count: int) -> list[MergeTask]:
    class Count:
        def pieces(self, size: int, task_bytes: int) -> int:
            return count

        def __call__(self, tasks: object) -> list[object]:
            raise AssertionError(tasks)

    machine = client.machine("s")
    (request,) = plan_compaction(machine.fetch().state).requests
    with client.worker("s") as worker:
        return merge_tasks(machine, worker.id, request, Count())  # type: ignore[arg-type]


def rows_of(client: persist.Client, tasks: list[MergeTask]) -> list[int]:
    """How many of the shard's updates are in each task's range."""
    with client.open_reader("s") as read:
        table = read.snapshot(diff=True).to_arrow()
    keys = [b"\x01" + name.encode() + b"\0\0" for name in table["k"].to_pylist()]
    return [
        sum((t.key_lower is None or key >= t.key_lower) and (t.key_upper is None or key < t.key_upper) for key in keys)
        for t in tasks
    ]


def spread(numbers: np.ndarray) -> np.ndarray:
    return numbers


def skewed(numbers: np.ndarray) -> np.ndarray:
    return np.where(numbers % 10 < 9, numbers // 1000, numbers)


@pytest.mark.parametrize("names", [spread, skewed])
@pytest.mark.parametrize("count", [2, 4, 9])
def test_appends_over_all_keys_are_cut_into_even_tasks(
    client: persist.Client, names: Callable[[np.ndarray], np.ndarray], count: int
) -> None:
    fill(client, 6, 20_000, names)
    counts = rows_of(client, tasks_of(client, count))
    assert len(counts) == count
    assert max(counts) < 1.25 * sum(counts) / count, counts


def test_parts_of_earlier_releases_which_note_no_keys_are_cut_as_evenly(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist_lib.format.parquet.inner_keys", lambda *_: [])
    fill(client, 6, 20_000, spread)
    monkeypatch.undo()
    counts = rows_of(client, tasks_of(client, 4))
    assert len(counts) == 4
    assert max(counts) < 1.25 * sum(counts) / 4, counts


def test_a_bounded_number_of_many_small_appends_is_looked_into(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 40, 2000, spread)
    monkeypatch.setattr(stretches, "MOST_LOOKS", 5)
    looked: list[str] = []
    look = stretches._look_into

    def noted(source: StoredPart, within: stretches.Within | None = None) -> list[Stretch]:
        looked.append(source.key)
        return look(source, within)

    monkeypatch.setattr(stretches, "_look_into", noted)
    counts = rows_of(client, tasks_of(client, 4))
    assert 1 <= len(looked) <= 5
    assert max(counts) < 1.3 * sum(counts) / 4, counts


def test_tasks_cover_every_key_once(client: persist.Client) -> None:
    fill(client, 6, 20_000, spread)
    tasks = tasks_of(client, 5)
    assert (tasks[0].key_lower, tasks[-1].key_upper) == (None, None)
    assert [t.key_upper for t in tasks[:-1]] == [t.key_lower for t in tasks[1:]]


def test_an_input_that_is_gone_while_it_is_cut_is_missing_and_nothing_changes(client: persist.Client) -> None:
    fill(client, 6, 20_000, spread)
    machine = client.machine("s")
    state = machine.fetch().state
    part = next(part for batch in state.trace for part in batch.parts)
    machine.blob.delete(blob_key(machine.shard, part.key))
    with client.worker("s") as worker, pytest.raises((Missing, Damage)):
        compact(machine, worker)
    assert machine.fetch().state.trace == state.trace


def test_keys_are_noted_at_even_distances_and_small_parts_note_none() -> None:
    def noted(rows: int) -> list[list[bytes]] | None:
        encoder = PartEncoder(SCHEMA, 0)
        columns = [[f"{n:06d}" for n in range(rows)], range(rows), np.zeros(rows, "u8"), np.ones(rows, "i8")]
        encoder.write(pa.table([pa.array(column) for column in columns], schema=SCHEMA.updates))
        metadata = pq.ParquetFile(pa.BufferReader(encoder.finish().data)).metadata.metadata
        found = metadata.get(b"persist.keys")
        return None if found is None else msgspec.msgpack.decode(base64.b64decode(found), type=list[list[bytes]])

    assert noted(64) is None
    assert noted(3200) == [[b"\x01" + f"{n:06d}".encode() + b"\0\0" for n in range(200, 3200, 200)]]
