"""Many small runs, which threads read together: all of them are in what is gathered and in what is looked up."""

from __future__ import annotations

import pyarrow as pa
import pytest

from persist_lib.core.plan.requests import TaskInput
from persist_lib.format.parts import encode_inline, encode_part
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, ShardId
from persist_lib.kernel.keyset import Keys
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard import runs as stored_runs
from persist_lib.shard.batches import as_part
from persist_lib.shard.runs import Stored, look_up, read_groups
from persist_lib.shard.small_runs import gather

SCHEMA = Schema({"k": "int64"}, {"v": "string"})
SHARD = ShardId("s")
RUNS = 150


def stored(monkeypatch: pytest.MonkeyPatch) -> tuple[Stored, list[TaskInput]]:
    """Runs of one row each: inline, as small objects, and as objects that are not small."""
    blob, inputs = MemoryBlob(), []
    monkeypatch.setattr(stored_runs, "SMALL_BYTES", 2_000)
    for place in range(RUNS):
        text = f"{place} " * (1_000 if place % 5 == 0 else 1)
        table = pa.table([[place], [text], [place], [1]], schema=SCHEMA.updates)
        if place % 2:
            part = as_part(encode_inline(SCHEMA, 0, table), None, 0)
        else:
            key, encoded = PartKey(f"n/{place}"), encode_part(SCHEMA, 0, table)
            blob.set(blob_key(SHARD, key), encoded.data)
            part = as_part(encoded, key, 0)
        inputs.append(TaskInput((part,), 0, None))
    return Stored(blob, SHARD, [SCHEMA], SCHEMA), inputs


@pytest.mark.parametrize("threads", [1, 2])
def test_all_runs_are_gathered_and_looked_through(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    where, inputs = stored(monkeypatch)
    with Runtime(background=threads > 1).pool(threads, "test") as pool:
        found = gather(where, inputs, None, 1 << 28, pool)
        keys = Keys.of(
            SCHEMA, pa.table({"k": pa.array(range(0, RUNS, 3))}, schema=pa.schema([SCHEMA.updates.field("k")]))
        )
        looked_up = look_up(where, inputs, keys, None, pool)
    assert found.table is not None
    assert not found.rest
    assert found.table.column("k").to_pylist() == list(range(RUNS))
    assert looked_up.column("k").to_pylist() == list(range(0, RUNS, 3))
    assert [text.split()[0] for text in looked_up.column("v").to_pylist()] == [str(k) for k in range(0, RUNS, 3)]


@pytest.mark.parametrize(("times", "fetched"), [(0.5, 7), (3.0, 9), (100.0, 12)])
def test_parts_are_read_ahead_by_all_threads_but_no_more_than_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, times: float, fetched: int
) -> None:
    """Six are decoded ahead, of six row groups; and so many more parts are fetched."""
    blob, parts, asked = MemoryBlob(), [], []
    for place in range(20):
        table = pa.table([[place], ["text"], [place], [1]], schema=SCHEMA.updates)
        key, encoded = PartKey(f"n/{place}"), encode_part(SCHEMA, 0, table)
        blob.set(blob_key(SHARD, key), encoded.data)
        parts.append(as_part(encoded, key, 0))
    monkeypatch.setattr(stored_runs, "AHEAD_BYTES", int(times * max(part.size for part in parts)))
    get = blob.get

    def get_and_note(key: str) -> bytes | None:
        asked.append(key)
        return get(key)

    monkeypatch.setattr(blob, "get", get_and_note)
    where, run = Stored(blob, SHARD, [SCHEMA], SCHEMA), TaskInput(tuple(parts), 0, None)
    with Runtime().pool(6, "test") as pool:
        read_groups(where, run, None, lambda table: table, pool, times=True)
    assert len(asked) == fetched
