"""What the metadata of large shards costs: planning, states, transitions, bytes an update. `docs/scale.md` uses it.

States are built as compaction leaves them, with the parts that so many updates would have; nothing is stored in them.
The bytes of an update are measured on rows that are encoded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import count

import numpy as np
import pyarrow as pa

from bench import tpch
from bench.figures import Figure, timed
from bench.merges import table_of
from persist_lib.config import Config
from persist_lib.core import commands as c
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.requests import task_inputs
from persist_lib.core.state import Batch, Outcome, Part, State, Version, Writer
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change, check_state
from persist_lib.format.log import StoredState, decode_state, encode_row, encode_state
from persist_lib.format.parts import encode_part
from persist_lib.format.paths import part_key
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, format_writer_id
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.order import sort_updates
from persist_lib.schema.schema import DIFF_FIELD, Schema
from persist_lib.shard.log import next_row

UPDATES = (10**8, 10**9, 10**10, 10**11, 10**12)
"""In one shard: a ten thousandth of 10^12, up to all of it."""
QUICK_UPDATES = (10**7, 10**9)
ROWS, QUICK_ROWS = 1_000_000, 50_000
WIDE = 64
"""Bytes of an update that the states are built for."""
APPENDS = 64
"""Small batches since the last maintenance."""
WRITER = format_writer_id(1)
DIGEST_BYTES, CHUNK_BYTES = 16, 8 << 20
CONFIG = Config()


def scale(quick: bool) -> list[Figure]:
    """Bytes an update; and for each size of shard the rollup, opening it, planning, and the CPU of one append."""
    rows = QUICK_ROWS if quick else ROWS
    found = [
        Figure("bytes of an update: id, state, cents, note", bytes_of_orders(rows), WIDE, "B", "a bound"),
        Figure("bytes of an update: lineitem of TPC-H", bytes_of_lineitems(rows), WIDE, "B", "a bound"),
    ]
    for updates in QUICK_UPDATES if quick else UPDATES:
        found += _of_shard(updates, WIDE)
    return found


def bytes_of_orders(rows: int) -> float:
    """The bytes of a narrow row, in a part."""
    schema = Schema({"id": "int64"}, {"state": "string", "cents": "int64", "note": "string"})
    return _bytes_each(schema, table_of(np.arange(rows), 0))


def bytes_of_lineitems(rows: int) -> float:
    """The bytes of a row of TPC-H's widest table, in a part."""
    return _bytes_each(tpch.LINEITEM, tpch.lineitems(np.arange(rows // 4)))


def _bytes_each(schema: Schema, table: pa.Table) -> float:
    updates = at_time(table.append_column(DIFF_FIELD, [np.ones(len(table), np.int64)]), 7)
    return encode_part(schema, 0, sort_updates(schema, updates.cast(schema.updates))).size / len(table)


def state_of(updates: int, bytes_each: float, appends: int = APPENDS) -> State:
    """A shard at rest: half of all updates in the oldest batch, half of the rest in the next; and small appends."""
    batches: list[Batch] = []
    numbers, left, times = count(1), updates, 0
    while left > 100_000:
        rows = left // 2 if left > 200_000 else left
        batches.append(_batch(len(batches), rows, bytes_each, numbers, times))
        left, times = left - rows, times + 1
    for _ in range(appends):
        batches.append(_batch(len(batches), 1_000, bytes_each, numbers, times))
        times += 1
    total = sum(batch.count for batch in batches)
    state = State(
        trace=tuple(batches), schemas=(Schema({"id": "int64"}, {"word": "string"}),),
        writers={WRITER: Writer("ingest", 2**62)}, count=total, size=sum(batch.size for batch in batches),
        fingerprint=sum(batch.fingerprint for batch in batches) % 2**64, format=3,
        outcomes=(Outcome(b"", SeqNo(1), at(times)),), appended_bytes=1,
    )  # fmt: skip
    check_state(state, SeqNo(1_000))
    return state


def _batch(place: int, rows: int, bytes_each: float, numbers: count[int], time: int) -> Batch:
    per_part = int(CONFIG.part_bytes / bytes_each)
    parts = []
    for start in range(0, rows, per_part):
        held = min(per_part, rows - start)
        size = max(1, int(held * bytes_each))
        number = next(numbers)
        key = number.to_bytes(12, "big")
        digests = bytes(DIGEST_BYTES * -(-size // CHUNK_BYTES))
        parts.append(Part(part_key(WRITER, number), size, held, digests, key, key, time, time, 0, earliest=held))
    return Batch(place, place + 1, at(time), at(time + 1), at(0), rows, rows, rows, tuple(parts), (0,), born=SeqNo(1))


def _of_shard(updates: int, bytes_each: float) -> list[Figure]:
    state = state_of(updates, bytes_each)
    stored = StoredState(SeqNo(1_000), bytes(16), state)
    data = encode_state(stored)
    parts = sum(len(batch.parts) for batch in state.trace)
    plan = plan_compaction(state)
    inputs = sum(len(task_inputs(request)) for request in plan.requests)
    whole = sum(batch.size for batch in state.trace) // CONFIG.task_bytes + 1
    name = f"shard of {updates:.0e} updates".replace("e+", "e")
    what = f"{len(state.trace)} batches, {parts:,} parts, {state.size / 2**30:,.0f} GiB; {whole:,} tasks for all of it"
    return [
        Figure(f"{name}: rollup", len(data) / 2**20, 64, "MiB", "a bound", note=what),
        Figure("  writing one", _median_ms(lambda: encode_state(stored)), 1000, "ms", "a bound"),
        Figure("  opening: decode and check", _median_ms(lambda: _open(data)), 1000, "ms", "a bound"),
        Figure("  planning", _median_ms(lambda: plan_compaction(state)), 1000, "ms", "a bound",
               note=f"{len(plan.requests)} requests of {inputs} runs"),
        Figure("  one append, CPU", _median_ms(lambda: _append(state)), 1, "ms", "a bound"),
    ]  # fmt: skip


def _open(data: bytes) -> None:
    check_state(decode_state(data, "rollup").state, SeqNo(1_001))


def _append(state: State) -> None:
    """What a commit does between two requests: the transition, its checks and its row."""
    lower = state.upper.time or 0
    part = Part(part_key(WRITER, 0), 100, 1, bytes(16), b"a", b"a", lower, lower, 0, earliest=1)
    batch = Batch(0, 0, at(lower), at(lower + 1), at(0), 1, 1, 1, (part,), (0,))
    command = c.CompareAndAppend(WRITER, b"token", batch, 0)
    diff = change(state, SeqNo(1_001), command)
    if not isinstance(diff, StateDiff):
        raise SystemExit(f"refused: {diff}")
    new = apply_diff(state, diff)
    check_change(state, diff, new, SeqNo(1_001))
    version = Version(SeqNo(1_000), state, bytes(16))
    encode_row(next_row(version, diff, new, b"token", "CompareAndAppend", 1), 3)


def _median_ms(call: Callable[[], object], rounds: int = 5) -> float:
    call()
    return 1000 * statistics.median(timed(call) for _ in range(rounds))
