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
from persist_lib.core.validate import check_state
from persist_lib.format.digest import verify
from persist_lib.format.log import GENESIS, LogRow, StoredState, decode_row, decode_state, encode_state, row_digest
from persist_lib.format.parts import decode_inline, decode_part, is_sorted, within
from persist_lib.format.paths import blob_key, key_of, parts_prefix, pending_key, pending_prefix, prefix
from persist_lib.ids import PartKey, SeqNo, ShardId
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.fingerprint import diff_sum_of, diffs_of, fingerprint
from persist_lib.kernel.keys import lower_bound, upper_bound
from persist_lib.location.api import Row
from persist_lib.schema.schema import TIME
from persist_lib.shard.log import apply_row

APPENDS = frozenset({"CompareAndAppend", "Append", "Absorb"})
ROWS = 10_000


class World(msgspec.Struct, frozen=True):
    """What a shard is made of: its versions in the log, and every key in Blob by what it is."""

    versions: tuple[Version, ...]
    rows: tuple[LogRow, ...]
    referred: frozenset[PartKey]
    garbage: frozenset[PartKey]
    orphans: frozenset[PartKey]

    @property
    def state(self) -> State:
        return self.versions[-1].state


def check_world(client: Client, shard: str) -> World:
    """Check all of a shard: log, history, state, batches against their blobs, and which keys are in Blob."""
    version = client.machine(shard).fetch()
    check_state(version.state, version.seqno)
    versions, rows = read_history(client, shard)
    replayed = [one for one in versions if one.seqno == version.seqno]  # a heartbeat may have followed since
    _expect(
        [_canonical(version)] == list(map(_canonical, replayed)), "the log replays to another state than the client has"
    )
    check_history(versions, rows)
    for batch in version.state.stored:
        _check_batch(client, shard, version.state, batch)
    return _check_keys(client, shard, versions, rows)


def check_swept(client: Client, shard: str) -> World:
    """Do `check_world`, and check that Blob holds only what the newest state refers to."""
    world = check_world(client, shard)
    _expect(not world.garbage, f"garbage is left in Blob: {sorted(world.garbage)}")
    _expect(not world.orphans, f"orphans are left in Blob: {sorted(world.orphans)}")
    return world


def read_history(client: Client, shard: str) -> tuple[tuple[Version, ...], tuple[LogRow, ...]]:
    """Every version that the log still has, and its rows, oldest first. Each rollup is checked against the rows."""
    name, rows = ShardId(shard), _all_rows(client, shard)
    _expect(bool(rows), "there are no rows")
    seqnos = [row.seqno for row in rows]
    _expect(seqnos == list(range(seqnos[0], seqnos[0] + len(rows))), f"rows are not contiguous: {seqnos}")
    rollups = {}
    for seqno, rollup in client.inspect(shard).state.rollups.items():
        data = client.blob.get(blob_key(name, rollup.key))
        _expect(data is not None, f"the rollup {rollup.key} is not in Blob")
        verify(rollup.key, data or b"", rollup.digests)
        stored = decode_state(data or b"", rollup.key)
        rollups[seqno] = Version(seqno, stored.state, stored.digest)
    version = Version(SeqNo(0), State(), GENESIS) if seqnos[0] == 1 else None
    versions, decoded, previous = [], [], None
    for found in rows:
        row = decode_row(found.data, f"{shard} v{found.seqno}")
        _expect(previous in {None, row.previous}, f"v{row.seqno} does not name the row before it")
        previous = row_digest(found.data)
        if version is not None:
            _expect(row.previous == version.digest, f"v{row.seqno} does not follow v{version.seqno}")
            state = apply_row(version.state, row, f"{shard} v{row.seqno}")
            version = Version(row.seqno, state, row_digest(found.data), row.rollup)
            if row.seqno in rollups:
                same = _canonical(version) == _canonical(rollups[row.seqno])
                _expect(same, f"the rollup of v{row.seqno} is not what the rows lead to")
        elif row.seqno in rollups:
            _expect(
                row_digest(found.data) == rollups[row.seqno].digest, f"the rollup of v{row.seqno} names another row"
            )
            version = rollups[row.seqno]
        if version is not None:
            versions.append(version)
            decoded.append(row)
    _expect(bool(versions), "neither the first row nor any rollup is there")
    return tuple(versions), tuple(decoded)


def _all_rows(client: Client, shard: str) -> list[Row]:
    """All rows, page by page: where collectors are killed all the time, the log is never truncated."""
    rows: list[Row] = []
    while page := client.consensus.scan(shard, SeqNo(rows[-1].seqno + 1) if rows else SeqNo(0), ROWS):
        rows += page
    return rows


def check_history(versions: Sequence[Version], rows: Sequence[LogRow] = ()) -> None:
    """Check each version against the next: frontiers and holds only advance, and only appends change the contents."""
    for version in versions:
        check_state(version.state, version.seqno)
    for (before, after), row in zip(pairwise(versions), rows[1:] or repeat(None, len(versions) - 1), strict=True):
        old, new, name = before.state, after.state, f"v{after.seqno}"
        _expect(old.since <= new.since and old.upper <= new.upper, f"{name}: since or upper went back")
        seqnos = old.seqno_since(before.seqno), new.seqno_since(after.seqno)
        _expect(seqnos[0] <= seqnos[1], f"{name}: seqno_since went back, from {seqnos[0]} to {seqnos[1]}")
        for id_ in old.readers.keys() & new.readers.keys():
            was, is_ = old.readers[id_], new.readers[id_]
            _expect(was.since <= is_.since and was.seqno <= is_.seqno, f"{name}: {id_} holds what it had given up")
        came_back = new.retired.keys() & (new.writers.keys() | new.readers.keys())
        _expect(not came_back, f"{name}: {came_back} came back")
        done = {step.command for step in row.steps if step.diff is not None} if row is not None else set()
        if row is None or not done & APPENDS:
            _expect(old.upper == new.upper or new.is_finished(), f"{name}: upper moved without an append")
            _expect(old.fingerprint == new.fingerprint or new.is_finished(), f"{name}: the contents changed unasked")
        written = old.appended_bytes <= new.appended_bytes and old.maintained_bytes <= new.maintained_bytes
        _expect(written, f"{name}: the bytes ever written went back")
        if row is not None and not done & APPENDS:
            _expect(old.appended_bytes == new.appended_bytes, f"{name}: {row.command} counts as an append")
        if row is not None and not done & {"ApplyCompaction", "KeepContents"}:
            _expect(old.maintained_bytes == new.maintained_bytes, f"{name}: {row.command} counts as a compaction")
        if row is not None and done <= {"Expire", "Retire", "Heartbeat", "ApplyCompaction", "KeepContents"}:
            _expect(old.since == new.since, f"{name}: since jumped from {old.since} to {new.since} in {row.command}")


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
    verify(name, data, part.digests)
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
    if written == state.schemas[-1]:
        return read
    newest = state.schemas[-1]
    if part.inline is None:
        return decode(newest, at=part.at)
    return decode(written, newest, at=part.at)


def _check_keys(client: Client, shard: str, versions: tuple[Version, ...], rows: tuple[LogRow, ...]) -> World:
    listed = (one for start in (prefix, parts_prefix) for one in client.blob.list(start(ShardId(shard))))
    sizes = {key_of(ShardId(shard), entry.key): entry.size for entry in listed}
    newest = versions[-1]
    # What is in the pending area is not an orphan; but what a state refers to has to be there.
    known = {key for version in versions for key in (*_parts(version.state), *version.state.garbage)}
    below = ((pending_key(ShardId(shard), e.key), e.size) for e in client.blob.list(pending_prefix(ShardId(shard))))
    sizes |= {key: size for key, size in below if key in known}
    for version in versions:
        if version.seqno < newest.state.seqno_since(newest.seqno):
            continue
        absent = _parts(version.state).keys() - sizes.keys()
        _expect(not absent, f"v{version.seqno}, which may still be read, refers to {sorted(absent)}, not in Blob")
    referred = _parts(newest.state) | {rollup.key: rollup.size for rollup in newest.state.rollups.values()}
    for key, size in referred.items():
        _expect(sizes.get(key) == size, f"{key} has {sizes.get(key)} bytes in Blob, and {size} are said")
    garbage = sizes.keys() & newest.state.garbage.keys()
    _expect(not newest.state.garbage.keys() & referred.keys(), "garbage is referred to")
    orphans = sizes.keys() - referred.keys() - garbage
    return World(versions, rows, frozenset(referred), frozenset(garbage), frozenset(orphans))


def _parts(state: State) -> dict[PartKey, int]:
    return {part.key: part.size for batch in state.stored for part in batch.parts if part.inline is None}


def _canonical(version: Version) -> bytes:
    return encode_state(StoredState(version.seqno, version.digest, version.state))


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
