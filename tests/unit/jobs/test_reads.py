"""What is read around a compaction: within the budget, as often right as it says, and wrong contents are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from orchestration.reads import ReadProbe
from persist_lib.core.plan.requests import MergeTask, TaskInput, TaskResult
from persist_lib.format.parts import parts_of
from persist_lib.format.paths import blob_key, part_key
from persist_lib.ids import ShardId, WriterId
from persist_lib.kernel.keys import encode_key
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.shard.batches import as_part
from persist_lib.shard.runs import Stored
from tests.spark.collections import SCHEMA, SMALL, write


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with opened(tmp_path) as found:
        yield found


def opened(tmp_path: Path, ahead: float = 0.0) -> persist.Client:
    return persist.open(f"file:{tmp_path}/data", config=persist.Config(**{**SMALL, "compaction_ahead": ahead}))


def plan_bytes(client: persist.Client, name: str) -> int:
    return sum(request.size for request in client.compact(name, dry_run=True).plan.requests)


def measured(client: persist.Client, engine: Any = None, **options: Any) -> tuple[ReadProbe, bool]:
    """Compact shard s between two measurements; whether they agree with each other, and with the state."""
    probe = ReadProbe(client, "s", 3, **options)
    before = probe.measure()
    client.compact("s", engine=engine)
    after = probe.measure()
    probe.close()
    same = all(after[piece] == sums for piece, sums in before.items())
    return probe, same and (probe.newest is None or after[probe.newest].fingerprint == probe.expected)


@pytest.mark.parametrize("share_of_plan", [1.0, 0.9, 0.5, 0.2, 0.01])
def test_no_more_is_read_than_the_budget_and_the_verdict_says_what(
    client: persist.Client, share_of_plan: float
) -> None:
    write(client, "s", batches=6, rows=8000)
    budget = int(plan_bytes(client, "s") * share_of_plan)
    probe, agrees = measured(client, budget_bytes=budget, seed=1)
    assert agrees
    assert probe.cost.bytes_read <= budget
    assert probe.is_whole is (share_of_plan == 1.0)
    assert f"{probe.cost.bytes_read:,} bytes" in probe.says()
    if probe.is_whole:
        assert probe.share == 1.0
        assert "read all keys at 5" in probe.says()
    else:
        assert probe.share < 1.0
        assert f"read {probe.share:.0%} of the keys" in probe.says()


def test_without_a_budget_everything_is_read_at_each_time(client: persist.Client) -> None:
    write(client, "s")
    probe, agrees = measured(client)
    assert agrees
    assert (probe.is_whole, probe.share, probe.points) == (True, 1.0, (0, 2, 4))


def test_what_fits_is_read_whole_before_and_after(client: persist.Client) -> None:
    write(client, "s")
    size = client.inspect("s").state.size
    probe, agrees = measured(client, budget_bytes=6 * size, seed=3)
    assert agrees
    assert all((piece.lower, piece.upper) == (None, None) for piece in probe.pieces)
    assert probe.points[-1] == 4
    assert probe.cost.bytes_read <= 6 * size


def test_the_same_seed_chooses_the_same(client: persist.Client) -> None:
    write(client, "s", batches=6, rows=40_000)
    chosen, budget = [], plan_bytes(client, "s") * 9 // 10
    for seed in (1, 1, 2):
        probe = ReadProbe(client, "s", 3, budget_bytes=budget, seed=seed)
        chosen.append((probe.pieces, probe.points, probe.share))
        probe.close()
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0][0]


def test_a_shard_without_a_complete_time_is_not_read(client: persist.Client) -> None:
    client.open_writer("s", SCHEMA).close()
    probe = ReadProbe(client, "s", 3, budget_bytes=1000)
    assert (probe.measure(), probe.is_whole, probe.points) == ({}, False, ())
    assert "no time" in probe.says()
    probe.close()


def loses(client: persist.Client, lost: int) -> Any:
    """An engine that leaves out the rows of one key, and claims the sums of all."""
    machine = client.machine("s")

    def run(tasks: list[MergeTask]) -> Iterator[TaskResult]:
        for task in tasks:
            result = run_task(task, machine.blob, machine.runtime.entropy)
            if not any(part.key_lower <= encode_key(SCHEMA, (lost,)) <= part.key_upper for part in result.parts):
                yield result
                continue
            stored = Stored(machine.blob, ShardId("s"), task.schemas, SCHEMA)
            tables = [table for run in stored.streams([TaskInput(result.parts, 0, None)]) for table in run]
            kept = [table.filter(pc.not_equal(table.column("k"), lost)) for table in tables]
            parts = []
            for encoded in parts_of(kept, SCHEMA, task.schema, task.part_bytes):
                key = part_key(WriterId(task.uploader), machine.runtime.entropy())
                machine.blob.set(blob_key(ShardId("s"), key), encoded.data)
                parts.append(as_part(encoded, key, task.schema))
            # The state machine compares what the parts claim to hold, so the first one claims what was left out too.
            claimed = result.sums.count - sum(part.rows for part in parts)
            parts[0] = msgspec.structs.replace(parts[0], rows=parts[0].rows + claimed)
            yield TaskResult(tuple(parts), result.sums)

    return run


def a_key(client: persist.Client, as_of: int) -> int:
    with client.open_reader("s") as reader:
        found = reader.snapshot(as_of, diff=True).to_arrow().column("k")
    return int(found[len(found) // 2].as_py())


def test_a_whole_read_finds_a_lost_key_always(client: persist.Client) -> None:
    write(client, "s", batches=6, rows=8000)
    lost = a_key(client, 5)
    probe, agrees = measured(client, loses(client, lost), budget_bytes=plan_bytes(client, "s"), seed=1)
    assert probe.is_whole
    assert not agrees


def test_a_lost_key_is_found_in_contents_that_are_kept_ahead(tmp_path: Path) -> None:
    with opened(tmp_path, ahead=0.01) as client:
        write(client, "s", batches=6, rows=8000)
        lost = a_key(client, 5)
        probe, agrees = measured(client, loses(client, lost), budget_bytes=plan_bytes(client, "s"), seed=1)
        assert client.inspect("s").state.contents is not None
        assert probe.is_whole
        assert not agrees


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_finds_a_lost_key_if_it_is_in_a_range_that_was_read(client: persist.Client, seed: int) -> None:
    model = write(client, "s", batches=6, rows=8000)
    lost = a_key(client, 5)
    probe, agrees = measured(client, loses(client, lost), budget_bytes=plan_bytes(client, "s") * 9 // 10, seed=seed)
    seen = {as_of: any(k == lost for k, _ in model.contents(as_of)) for as_of in probe.points}
    assert agrees is not any(seen[p.as_of] and holds(p.lower, p.upper, lost) for p in probe.pieces)


def test_a_sample_finds_a_lost_key_as_often_as_its_share_says(client: persist.Client) -> None:
    """Over many seeds and keys, without compacting each time."""
    write(client, "s", batches=6, rows=40_000)
    budget = plan_bytes(client, "s") // 2
    shares, found, keys = [], 0, range(0, 20_000, 97)
    for seed in range(40):
        probe = ReadProbe(client, "s", 2, budget_bytes=budget, seed=seed)
        shares.append(probe.share)
        found += sum(any(holds(p.lower, p.upper, key) for p in probe.pieces) for key in keys)
        probe.close()
    share = sum(shares) / len(shares)
    print(f"share {share:.1%}, found {found / len(keys) / 40:.1%}")
    assert 0.02 < share < 0.9
    assert abs(found / len(keys) / 40 - share) < 0.08


def holds(lower: bytes | None, upper: bytes | None, key: int) -> bool:
    encoded = encode_key(SCHEMA, (key,))
    return (lower is None or lower <= encoded) and (upper is None or encoded < upper)
