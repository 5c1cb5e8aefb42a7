"""Checks of what must always hold of a shard: its log, state, blobs and history together.

Each check reads everything, changes nothing, and raises AssertionError, whose message is the first statement that does
not hold. The shard must be at rest: no process may write to it during a check.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise, repeat

import msgspec
import pyarrow as pa

from persist_lib.client import Client
from persist_lib.core.state import Batch, Part, State, Version
from persist_lib.core.sums import MODULUS
from persist_lib.core.validate import check_state, history_problems
from persist_lib.format import value_bounds
from persist_lib.format.digest import verify as verify_digests
from persist_lib.format.log import LogRow
from persist_lib.format.parts import decode_inline, decode_part, within
from persist_lib.format.paths import blob_key, pending_key, pending_prefix
from persist_lib.ids import PartKey, ShardId
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.fingerprint import diff_sum_of, diffs_of, fingerprint
from persist_lib.kernel.keys import lower_bound, upper_bound
from persist_lib.kernel.order import is_sorted
from persist_lib.maintain.log_walk import Finding, Walk, every_object
from persist_lib.maintain.verify import verify
from persist_lib.schema.schema import TIME
from persist_lib.verify import check as verify_location


class World(msgspec.Struct, frozen=True):
    """What there is of a shard: its newest state, and every key in Blob by what it is."""

    state: State
    referred: frozenset[PartKey]
    garbage: frozenset[PartKey]
    orphans: frozenset[PartKey]


def check_world(client: Client, shard: str) -> World:
    """Check all of a shard: what `client.verify` does, batches recomputed by other means, and which keys are in Blob.

    What is found sound is not remembered.
    """
    machine = client.machine(shard)
    for finding in verify(machine, full=True, is_kept=False).findings:
        _expect(not finding.is_damage, finding.says)
    version = machine.fetch()
    for batch in version.state.stored:
        _check_batch(client, shard, version.state, batch)
    return _world(client, shard, version.state)


def check_swept(client: Client, shard: str) -> World:
    """Do `check_world`, and check that Blob holds only what the newest state refers to."""
    world = check_world(client, shard)
    _expect(not world.garbage, f"garbage is left in Blob: {sorted(world.garbage)}")
    _expect(not world.orphans, f"orphans are left in Blob: {sorted(world.orphans)}")
    return world


def check_location(client: Client) -> None:
    """Check every shard of a location, and what its records promise of shards: what `persist verify` does."""
    for shard, finding in verify_location(client, full=True).findings:
        _expect(not finding.is_damage, f"{shard}: {finding.says}")


def read_history(client: Client, shard: str) -> tuple[tuple[Version, ...], tuple[LogRow, ...]]:
    """Every version that the log still has, and its rows, oldest first; each is checked, and each rollup."""

    def found(finding: Finding) -> None:
        raise AssertionError(finding.says)

    steps = [*Walk(client.machine(shard), client.inspect(shard).state.rollups, {}, found).steps()]
    _expect(bool(steps), "there are no rows")
    return tuple(step.after for step in steps), tuple(step.row for step in steps)


def check_history(versions: Sequence[Version], rows: Sequence[LogRow] = ()) -> None:
    """Check each version against the next: frontiers and holds only advance, and only appends change the contents."""
    for version in versions:
        check_state(version.state, version.seqno)
    for (before, after), row in zip(pairwise(versions), rows[1:] or repeat(None, len(versions) - 1), strict=True):
        done = None if row is None else {step.command for step in row.steps if step.diff is not None}
        problems = history_problems(before.state, after.state, after.seqno, done)
        _expect(not problems, f"v{after.seqno}: {'; '.join(problems)}")


def _check_batch(client: Client, shard: str, state: State, batch: Batch) -> None:
    """Recompute from the bytes everything that the state says about a batch.

    This does not use `format.descriptions`, on purpose. A mistake there would be stored, and a check that shares the
    mistake would not find it.
    """
    count = diff_sum = print_ = 0
    newest = state.schemas[-1]
    for run in batch.run_parts():
        tables = []
        for part in run:
            table = _read_part(client, shard, state, part)
            tables.append(within(table, batch.lower.time, batch.upper.time))
            count += tables[-1].num_rows
            diff_sum += diff_sum_of(diffs_of(tables[-1]))
            print_ += fingerprint(newest, tables[-1])
        whole = pa.concat_tables(tables)
        _expect(is_sorted(newest, whole), f"a run of batch {batch.id} is not in order")
        consolidated = consolidate(newest, whole, "split").num_rows
        _expect(consolidated == whole.num_rows, f"a run of batch {batch.id} is not consolidated")
    said = batch.count, batch.diff_sum % MODULUS, batch.fingerprint
    found = count, diff_sum % MODULUS, print_ % MODULUS
    _expect(said == found, f"batch {batch.id} is said to have count, diff sum, fingerprint {said}, and has {found}")


def _read_part(client: Client, shard: str, state: State, part: Part) -> pa.Table:
    name, written = part.key or "an inline part", state.schemas[part.schema]
    data = part.inline
    if data is None:
        data = client.blob.get(blob_key(ShardId(shard), part.key))
    if data is None:
        raise AssertionError(f"{name} is not in Blob, and the newest state refers to it")
    _expect(len(data) == part.size, f"{name} has {len(data)} bytes, not {part.size}")
    verify_digests(name, data, part.digests)
    decode = (
        partial(decode_part, name, data, part.digests) if part.inline is None else partial(decode_inline, name, data)
    )
    if part.at is not None:
        _expect(
            len(set(decode(written).column(TIME).to_pylist())) == 1, f"{name} counts at one time, and holds several"
        )
    read = decode(written, at=part.at)
    times = read.column(TIME).to_pylist()
    _expect(read.num_rows == part.rows, f"{name} has {read.num_rows} updates, not {part.rows}")
    _expect((min(times), max(times)) == (part.time_lower, part.time_upper), f"{name} has other times than said")
    _expect(part.key_lower <= lower_bound(written, read), f"{name} has keys before its bounds")
    _expect(part.key_upper >= upper_bound(written, read), f"{name} has keys beyond its bounds")
    for one in part.values:
        column = read.column(written.names[one.column])
        _expect(one.has_null is (column.null_count > 0), f"{name} is said to have nulls where it has none, or none")
        found = [value for value in column.to_pylist() if value is not None]
        least, most = (
            None if end is None else value_bounds.scalar_of(end, column.type).as_py() for end in (one.lower, one.upper)
        )
        is_right = (min(found), max(found)) == (least, most) if found else least is most is None
        _expect(is_right, f"{name} has values from {min(found, default=None)} on, not {one}")
    if written == state.schemas[-1]:
        return read
    newest = state.schemas[-1]
    if part.inline is None:
        return decode(newest, at=part.at)
    return decode(written, newest, at=part.at)


def _world(client: Client, shard: str, state: State) -> World:
    """What is in Blob, but for the pending area: what is there is no orphan."""
    name = ShardId(shard)
    listed = set(every_object(client.machine(shard)))
    listed |= {pending_key(name, e.key) for e in client.blob.list(pending_prefix(name))} & state.garbage.keys()
    referred = {key for batch in state.stored for key in batch.keys} | {one.key for one in state.rollups.values()}
    _expect(not state.garbage.keys() & referred, "garbage is referred to")
    garbage = listed & state.garbage.keys()
    return World(state, frozenset(referred), frozenset(garbage), frozenset(listed - referred - garbage))


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
