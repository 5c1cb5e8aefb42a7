"""The log of one shard: rows in Consensus, rollups in Blob. This fetches a version, and prepares the next row.

Opening costs one head, one rollup GET and one scan, however long the history. Each row names the row before it by
digest, and a rollup names the row that led to it, so a history that was cut, mixed or restored does not load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.state import Rollup, State, Version
from persist_lib.core.validate import check_change, check_group, check_references, check_state
from persist_lib.errors import Corrupt, HistoryRegressed, InvariantViolated, Missing, NotFound
from persist_lib.format.digest import digest, verify
from persist_lib.format.log import (
    GENESIS,
    GROUP,
    LogRow,
    Step,
    StoredState,
    decode_row,
    decode_state,
    encode_state,
    row_digest,
    row_format,
    row_start,
)
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, SeqNo, ShardId
from persist_lib.location.api import Blob, Consensus, Newest, Row
from persist_lib.location.wrap.chunk_cache import fetch
from persist_lib.runtime.ambient import Runtime

SCAN_ROWS = 1024
"""Rows of one scan. More than a rollup lags behind by, so that one scan is enough."""
IN_TURN = Runtime(background=False)
"""Fetches a rollup before the rows."""


def fetch_newest(blob: Blob, consensus: Consensus, shard: ShardId, runtime: Runtime = IN_TURN) -> Version | None:
    """The newest version of a shard, read from scratch and checked as a whole; None when there is no such shard.

    With a `runtime`, its rollup is fetched by a thread of it while the rows are, which is worth one where the Blob is
    far away.
    """
    missing: PartKey | None = None
    head = consensus.head(shard) or _newest_row(consensus, shard, SeqNo(0))
    while head is not None:
        rollup = decode_row(head.data, row_name(shard, head.seqno)).rollup
        version = _replay(blob, consensus, shard, rollup, runtime)
        if version is not None and version.seqno >= head.seqno:
            check_state(version.state, version.seqno)
            return version
        # A rollup that is gone, or rows truncated while we read, mean that the head we saw was stale. Look again, this
        # time by a scan. If the scan still names something that is not there, it was not collected but lost.
        key = rollup[1].key if rollup else PartKey("")
        if missing == key:
            raise Missing(
                f"shard {shard}: the newest state needs {key!r} and the rows after it, and they are not there. "
                "Restore them from a copy; nothing was changed",
                key=key, shard=shard,
            )  # fmt: skip
        missing = key
        seen, head = head.seqno, _newest_row(consensus, shard, head.seqno)
        if head is None:
            raise HistoryRegressed(
                f"shard {shard}: the log had a row v{seen} a moment ago, and now it ends before that. "
                "Consensus was restored from an older copy. Stop all writers before going on",
                shard=shard, seen=seen, head=None,
            )  # fmt: skip
    return None


def _newest_row(consensus: Consensus, shard: ShardId, known: SeqNo) -> Row | None:
    """The newest row by linearizable reads, given that there was one at `known`; None when there is none."""
    newest: Row | None = None
    while rows := consensus.scan(shard, known, SCAN_ROWS):
        newest, known = rows[-1], SeqNo(rows[-1].seqno + 1)
        if len(rows) < SCAN_ROWS:
            break
    return newest


def fetch_newer(blob: Blob, consensus: Consensus, shard: ShardId, known: Version) -> Version:
    """The newest version, given one that was seen before. One scan when little has happened.

    Raises HistoryRegressed when the log no longer contains what was seen: a restored backup, or a fork.
    """
    rows = consensus.scan(shard, known.seqno, SCAN_ROWS)
    if not rows:
        raise _regressed(shard, known, consensus.head(shard))
    if rows[0].seqno == known.seqno:
        if row_digest(rows[0].data) != known.digest:
            raise _regressed(shard, known, rows[0])
        if len(rows) < SCAN_ROWS:
            return apply_rows(shard, known, rows[1:])
    newest = fetch_newest(blob, consensus, shard)
    if newest is None or newest.seqno < known.seqno:
        raise _regressed(shard, known, None)
    return newest


class Followed(NamedTuple):
    """A row of the log, the versions before and after it, and the newest one that was read with it."""

    before: Version
    row: LogRow
    after: Version
    newest: Version


def follow_to(consensus: Consensus, shard: ShardId, known: Version, seqno: SeqNo) -> Followed | None:
    """The row `seqno`, which comes after `known`; None if the rows in between are truncated or too many. One scan."""
    rows = consensus.scan(shard, max(known.seqno, SeqNo(1)), SCAN_ROWS)
    if known.seqno:
        if not rows or rows[0].seqno != known.seqno:
            return None
        if row_digest(rows[0].data) != known.digest:
            raise _regressed(shard, known, rows[0])
        rows = rows[1:]
    place = seqno - known.seqno - 1
    if not place < len(rows) < SCAN_ROWS - 1:
        return None
    before = apply_rows(shard, known, rows[:place])
    after_ = apply_rows(shard, before, rows[place : place + 1])
    row = decode_row(rows[place].data, row_name(shard, seqno))
    return Followed(before, row, after_, apply_rows(shard, after_, rows[place + 1 :]))


def followed(shard: ShardId, known: Version, rows: Sequence[Row]) -> Followed | None:
    """The last of these rows, if they are those that come after `known`."""
    if not rows or rows[0].seqno != known.seqno + 1:
        return None
    if decode_row(rows[0].data, row_name(shard, rows[0].seqno)).previous != known.digest:
        return None
    before = apply_rows(shard, known, list(rows[:-1]))
    last = apply_rows(shard, before, list(rows[-1:]))
    return Followed(before, decode_row(rows[-1].data, row_name(shard, last.seqno)), last, last)


def fetch_at(blob: Blob, consensus: Consensus, shard: ShardId, newest: Version, seqno: SeqNo) -> Version:
    """An older version, from the newest rollup before it and the rows after that; v0 is the empty state.

    Raises NotFound if its rollup or rows are gone, as no reader needed them any more.
    """
    places = [at for at in newest.state.rollups if at <= seqno]
    start = Version(SeqNo(0), State(), GENESIS)
    if places:
        at = max(places)
        start = fetch_rollup(blob, shard, (at, newest.state.rollups[at])) or start
    version = start
    while version.seqno < seqno:
        rows = consensus.scan(shard, SeqNo(version.seqno + 1), min(seqno - version.seqno, SCAN_ROWS))
        if not rows or rows[0].seqno != version.seqno + 1:
            oldest = min(newest.state.rollups, default=newest.seqno)
            raise NotFound(
                f"v{seqno} of shard {shard} cannot be read any more: no reader needed its part of the log, so it was "
                f"truncated. The versions from v{oldest} to v{newest.seqno} are there",
                shard=shard, seqno=seqno, oldest=oldest,
            )  # fmt: skip
        version = apply_rows(shard, version, rows)
    return version


def next_row(version: Version, diff: StateDiff, state: State, token: bytes, command: str, now: int) -> LogRow:
    """The row that takes `version` to `state`."""
    return LogRow(SeqNo(version.seqno + 1), token, command, now, version.digest, _newest_rollup(state), diff)


def next_group(version: Version, steps: Sequence[Step], state: State, now: int) -> LogRow:
    """The row of several commands that takes `version` to `state`; of one command, that command's own row."""
    if len(steps) == 1:
        (step,) = steps
        return next_row(version, step.diff or StateDiff(), state, step.token, step.command, now)
    seqno, rollup = SeqNo(version.seqno + 1), _newest_rollup(state)
    return LogRow(seqno, b"", GROUP, now, version.digest, rollup, StateDiff(), tuple(steps))


def _newest_rollup(state: State) -> tuple[SeqNo, Rollup] | None:
    newest = state.newest_rollup
    return (newest, state.rollups[newest]) if newest else None


def row_to_follow(version: Version) -> Newest | None:
    """The row that led to `version`, as a compare-and-set names it to follow that row and no other."""
    return Newest(version.seqno, row_start(version.digest, version.row_format)) if version.seqno else None


def after(row: LogRow, data: bytes, state: State) -> Version:
    """The version that `row`, stored as `data`, leads to."""
    return Version(row.seqno, state, row_digest(data), row.rollup, row_format(data))


def encode_rollup(version: Version, key: PartKey) -> tuple[bytes, Rollup]:
    """A copy of the state at this version, and how the state will refer to it."""
    data = encode_state(StoredState(version.seqno, version.digest, version.state))
    return data, Rollup(key, len(data), digest(data))


def row_name(shard: ShardId, seqno: SeqNo) -> str:
    """The name of a row in messages."""
    return f"{shard} v{seqno}"


def fetch_rollup(blob: Blob, shard: ShardId, rollup: tuple[SeqNo, Rollup]) -> Version | None:
    """The version that a rollup holds; None when the rollup is not there (any more)."""
    seqno, entry = rollup
    key = blob_key(shard, entry.key)
    data = fetch(blob, key, 0, entry.size, entry.size, entry.digests)
    if data is None:
        return None
    verify(key, data, entry.digests)
    stored = decode_state(data, key)
    if stored.seqno != seqno:
        raise Corrupt(f"{key} holds the state at v{stored.seqno}, not v{seqno}", key=key)
    return Version(seqno, stored.state, stored.digest)


def _replay(
    blob: Blob, consensus: Consensus, shard: ShardId, rollup: tuple[SeqNo, Rollup] | None, runtime: Runtime
) -> Version | None:
    """All rows after a rollup applied to it; None when it is gone, or rows in between were truncated."""
    version: Version | None = Version(SeqNo(0), State(), GENESIS)
    if rollup is None:
        rows = consensus.scan(shard, SeqNo(1), SCAN_ROWS)
    else:
        with runtime.pool(1, "persist-rollup") as pool:
            fetching = pool.submit(fetch_rollup, blob, shard, rollup)
            rows = consensus.scan(shard, SeqNo(rollup[0] + 1), SCAN_ROWS)
            version = fetching.result()
    while version is not None and not (rows and rows[0].seqno != version.seqno + 1):
        version = apply_rows(shard, version, rows)
        if len(rows) < SCAN_ROWS:
            return version if version.seqno > 0 else None
        rows = consensus.scan(shard, SeqNo(version.seqno + 1), SCAN_ROWS)
    return None


def apply_rows(shard: ShardId, version: Version, rows: list[Row]) -> Version:
    """The version that these rows, which must follow `version`, lead to. Each is checked as before it was committed."""
    state = version.state
    diffs: list[StateDiff] = []
    seqno, previous, rollup, format_ = version.seqno, version.digest, version.rollup, version.row_format
    for seqno_found, data in rows:
        name = row_name(shard, seqno_found)
        row = decode_row(data, name)
        if seqno_found != seqno + 1 or row.seqno != seqno_found or row.previous != previous:
            raise Corrupt(
                f"{name} does not follow v{seqno}: the log was cut, mixed or restored from different copies. "
                "Nothing was changed; restore one whole copy",
                key=name, expected=previous, actual=row.previous,
            )  # fmt: skip
        state = apply_row(state, row, name)
        diffs += row.diffs
        seqno, previous, rollup, format_ = row.seqno, row_digest(data), row.rollup, row_format(data)
    check_references(state, diffs, seqno)
    return Version(seqno, state, previous, rollup, format_)


def apply_row(state: State, row: LogRow, name: str) -> State:
    """The state after a row: its changes one after another, each of them checked as before it was committed.

    So a client that follows the log refuses the same rows as a client that loads it afresh. Raises Corrupt naming
    `name` when a change does not apply, and InvariantViolated when it breaks what must hold.
    """
    for diff in row.diffs:
        try:
            before, state = state, apply_diff(state, diff)
        except InvariantViolated as error:
            raise Corrupt(f"{name} does not apply: {error.message}", key=name) from error
        check_change(before, diff, state, row.seqno)
    check_group(row.diffs, state, row.seqno)
    return state


def _regressed(shard: ShardId, known: Version, found: Row | None) -> HistoryRegressed:
    there = "nothing" if found is None else f"v{found.seqno} with digest {row_digest(found.data).hex()}"
    return HistoryRegressed(
        f"shard {shard}: this client has seen v{known.seqno} with digest {known.digest.hex()}, "
        f"and the log now has {there}. "
        "Consensus was restored from an older copy, or is another one. Stop all writers before going on",
        shard=shard, seen=known.seqno, head=found and found.seqno,
    )  # fmt: skip
