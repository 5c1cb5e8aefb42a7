"""Laws of building a batch: however its updates fall into parts, their sums are exact, judged by Python's integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.config import Config
from persist_lib.core.state import Batch
from persist_lib.errors import DiffOverflow
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import ShardId, format_writer_id
from persist_lib.kernel.merge import merge_runs
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.machine import Shard
from persist_lib.shard.runs import Stored, inputs_of
from persist_lib.testing.faults import ManualClock
from tests.properties.kernel_updates import Update, build, read, totals

SHARD, SCHEMA = ShardId("s"), Schema({"k": "int8"}, {"v": "int8"})
I64_MAX = 2**63 - 1
DIFFS = st.one_of(
    st.sampled_from([1, -1, I64_MAX, -I64_MAX, -(2**63), 2**62, -(2**62), 2**62 + 1, 2**61]),
    st.integers(-(2**63), I64_MAX).filter(bool),
)


def updates() -> st.SearchStrategy[list[Update]]:
    few = st.integers(0, 1)
    return st.lists(st.tuples(st.tuples(few, few), few, DIFFS), min_size=1, max_size=40)


def built(blob: MemoryBlob, tables: list[list[Update]], part_bytes: int, inline_bytes: int, runtime: Runtime) -> Built:
    config = Config().model_copy(update={"part_bytes": part_bytes})
    shard = Shard(SHARD, blob, MemoryConsensus(), config, runtime)
    builder = Builder(shard, lambda: format_writer_id(1), SCHEMA, 0, runtime.deadline(60.0))
    pieces = (build(SCHEMA, some) for some in tables)
    return builder.build(pieces, MINIMUM, at(2), inline_bytes=inline_bytes, by_time=True)


def stored(blob: MemoryBlob, batch: Batch) -> list[Update]:
    runs = Stored(blob, SHARD, (SCHEMA,), SCHEMA).streams(inputs_of((batch,)))
    return [update for window in merge_runs(runs, SCHEMA) for update in read(SCHEMA, window)]


@given(st.data())
def test_a_batch_of_any_size_has_exact_sums_or_overflows_only_where_a_total_does(data: st.DataObject) -> None:
    given_ = data.draw(updates())
    # Half of the time something that makes a partial sum overflow is taken back further on.
    if data.draw(st.booleans()):
        given_ += [(row, time, -max(diff, -I64_MAX)) for row, time, diff in data.draw(st.permutations(given_))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(given_)), max_size=5)))
    tables = [given_[a:b] for a, b in zip([0, *cuts], [*cuts, len(given_)], strict=True) if a < b]
    part_bytes = data.draw(st.sampled_from([1, 40, 100, 1 << 20]))
    blob, runtime = MemoryBlob(), ManualClock().runtime(1)
    expected = totals(given_)
    over = [total for total in expected.values() if not -(2**63) <= total <= I64_MAX]
    inline_bytes = data.draw(st.sampled_from([0, 1 << 14]))
    if over:
        with pytest.raises(DiffOverflow) as caught:
            built(blob, tables, part_bytes, inline_bytes, runtime)
        assert caught.value.fields["total"] in over
        assert not list(blob.list("s/"))
        return
    found = built(blob, tables, part_bytes, inline_bytes, runtime)
    rows = stored(blob, found.batch)
    assert totals(rows) == expected
    assert len(rows) == len(expected)
    assert (found.batch.diff_sum - sum(expected.values())) % 2**64 == 0
    for lower in (0, 1):
        diff_sum = found.by_time.from_(lower).diff_sum if found.by_time is not None else 0
        assert (diff_sum - sum(total for (_, time), total in expected.items() if time >= lower)) % 2**64 == 0
