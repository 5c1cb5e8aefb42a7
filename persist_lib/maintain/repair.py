"""Repair of a shard: what needs no guess is mended, and then the newest versions that cannot be read go.

What is mended are rollups that are gone or damaged, and that the log still leads to. A rollup is a copy of a state, and
the log says its size and its digests. What the log is replayed to is written again only if it has exactly these, so it
is what was there.

Dropping versions, back to the newest one that loads, is for damage to the log, and for rows that an early version of
this library committed although no reader could decode them. It is the only operation that undoes acknowledged commits.
So a dry run first says what it would drop, and no other process may use the shard during a repair: a process that has
seen a dropped version is refused from then on (HistoryRegressed) and has to be restarted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.state import Rollup, State, Version
from persist_lib.core.validate import check_state
from persist_lib.errors import Damage, HistoryRegressed, Missing, NewerFormat, NotFound, PersistError
from persist_lib.format.digest import digest
from persist_lib.format.frame import body_of
from persist_lib.format.log import GENESIS, decode_state, row_digest, row_format
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, SeqNo, ShardId, parse_rollup_key
from persist_lib.location.api import Blob, Consensus, Row
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus
from persist_lib.maintain.garbage import check_in_place
from persist_lib.maintain.log_walk import Finding, Walk, canonical, every_object, said_by_newest_row
from persist_lib.shard.commit import Machine
from persist_lib.shard.log import SCAN_ROWS, apply_rows, fetch_newest


class Dropped(msgspec.Struct, frozen=True):
    """One version that a repair drops. `command` and `now` (ms of the store's clock) are None if unreadable."""

    seqno: SeqNo
    command: str | None
    now: int | None
    size: int


class Repaired(msgspec.Struct, frozen=True):
    """What a repair mended, and dropped, or would: the versions after `kept` (0: all versions), and why.

    `mended` are objects that were written again, each with its proof. `missing` are objects that the state at `kept`
    needs and that have been collected since. If there are any, nothing is dropped.
    """

    kept: SeqNo
    dropped: tuple[Dropped, ...]
    why: str
    missing: tuple[PartKey, ...] = ()
    mended: tuple[Mended, ...] = ()


def repair(machine: Machine, *, dry_run: bool = False) -> Repaired:
    """Write rollups again that the log leads to, then drop the newest versions, from the first that cannot be read.

    With `dry_run` nothing changes, and the result says what would be done. Doing it again finds nothing to do. Raises
    NotFound if there is no such shard, and NewerFormat if a newer release wrote a version: that is not damage. Raises
    Missing if the remaining versions could not be read either, and HistoryRegressed if another process committed at the
    same time.
    """
    rows = _all_rows(machine.consensus, machine.shard)
    if not rows:
        raise NotFound(f"there is no shard {machine.shard!r} in this location", shard=machine.shard)
    mends = plan_mends(machine)
    blob = WithMends(machine.blob, mends)
    kept, why = _first_unreadable(machine, blob, rows)
    dropped, mended = tuple(_dropped(row) for row in rows if row.seqno > kept), tuple(mend.mended for mend in mends)
    found = Repaired(kept, dropped, why, _missing(machine, blob, kept) if dropped and kept else (), mended)
    if dry_run:
        return found
    carry_out(machine, mends)
    if not dropped:
        return found
    if found.missing:
        raise Missing(
            f"shard {machine.shard} was not repaired: v{kept} needs {len(found.missing)} objects that were deleted "
            f"since, {found.missing[0]} among them. Restore the log, or these objects, from a copy",
            shard=machine.shard, key=found.missing[0],
        )  # fmt: skip
    if machine.consensus.rewind(machine.shard, kept, rows[-1].newest) != len(dropped):
        raise HistoryRegressed(
            f"shard {machine.shard} was not repaired: another process committed or repaired at the same time. Stop it, "
            "and look again with a dry run",
            shard=machine.shard, seen=rows[-1].seqno, head=None,
        )  # fmt: skip
    machine.forget()
    return found


def _first_unreadable(machine: Machine, blob: Blob, rows: list[Row]) -> tuple[SeqNo, str]:
    """The newest version up to which every version can be read, and what is wrong with the next one."""
    first = rows[0].seqno
    version = Version(SeqNo(0), State(), GENESIS) if first == 1 else _copy_at(machine, blob, rows[0])
    for row in rows if first == 1 else rows[1:]:
        try:
            version = apply_rows(machine.shard, version, [row])  # what any client would refuse is refused here
            check_state(version.state, version.seqno)
        except NewerFormat:
            raise
        except Damage as damage:
            return version.seqno, damage.message
    try:
        fetch_newest(blob, machine.consensus, machine.shard)
    except NewerFormat:
        raise
    except Damage as damage:
        raise Missing(
            f"shard {machine.shard}: every row can be read, but the shard cannot be opened: {damage.message}",
            shard=machine.shard,
        ) from damage
    return version.seqno, "every version can be read"


def _copy_at(machine: Machine, blob: Blob, oldest: Row) -> Version:
    for key in every_object(machine):
        if parse_rollup_key(key) != oldest.seqno:
            continue
        try:
            stored = decode_state(blob.get(blob_key(machine.shard, key)) or b"", key)
        except NewerFormat:
            raise
        except PersistError:
            continue
        if stored.digest == row_digest(oldest.data):
            return Version(stored.seqno, stored.state, stored.digest, None, row_format(oldest.data))
    raise Missing(
        f"shard {machine.shard}: the log begins at v{oldest.seqno}, and there is no readable copy of that state to "
        "start from. Restore the shard from a copy; nothing was changed",
        shard=machine.shard,
    )


def _missing(machine: Machine, blob: Blob, kept: SeqNo) -> tuple[PartKey, ...]:
    """The objects that would be missing after the repair. Raises Damage if the shard would still not load."""
    version = fetch_newest(blob, _Until(machine.consensus, kept), machine.shard)
    if version is None or version.seqno != kept:
        raise Missing(
            f"shard {machine.shard}: v{kept} could not be loaded after a repair either; nothing was changed",
            shard=machine.shard,
        )
    there = every_object(machine)
    return tuple(sorted({key for batch in version.state.stored for key in batch.keys} - there.keys()))


def _all_rows(consensus: Consensus, shard: ShardId) -> list[Row]:
    rows: list[Row] = []
    while page := consensus.scan(shard, SeqNo(rows[-1].seqno + 1) if rows else SeqNo(0), SCAN_ROWS):
        rows += page
    return rows


def _dropped(row: Row) -> Dropped:
    """What can be shown of a row, even if the row as a whole does not decode."""
    try:
        fields = msgspec.msgpack.decode(body_of(row.data))
        command, now = fields[2], fields[3]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        command = now = None
    is_sound = isinstance(command, str) and isinstance(now, int)
    return Dropped(row.seqno, command if is_sound else None, now if is_sound else None, len(row.data))


class _Until(AroundConsensus):
    """A Consensus for reading, as it would be without the rows after `last`."""

    def __init__(self, inner: Consensus, last: SeqNo) -> None:
        super().__init__(inner)
        self._last = last

    def head(self, key: str) -> Row | None:
        rows = self.inner.scan(key, self._last, 1)
        return rows[0] if rows else None

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        return [row for row in self.inner.scan(key, from_seqno, limit) if row.seqno <= self._last]


class Upgraded(msgspec.Struct, frozen=True):
    """The shard's format before and after; they are equal if nothing had to be done."""

    before: int
    after: int


def upgrade(machine: Machine, format_: int, *, dry_run: bool = False) -> Upgraded:
    """Move the shard to `format_`, and return its format before and after. With `dry_run` nothing changes.

    Doing it again changes nothing. There is no way back to an older format.
    """
    state = machine.fetch().state
    if state.is_finished():
        return Upgraded(state.format, state.format)
    if dry_run and format_ >= state.format:
        return Upgraded(state.format, format_)
    committed = machine.commit(lambda _state, _now: c.Upgrade(format_))
    return Upgraded(committed.before.format, committed.after.format)


class Mended(msgspec.Struct, frozen=True):
    """An object that was written again, or would be: its key in Blob, what was wrong with it, and the proof."""

    key: str
    found: str
    proof: str
    size: int


class Mend(msgspec.Struct, frozen=True):
    """What is to be written again, and why."""

    mended: Mended
    data: bytes


def plan_mends(machine: Machine) -> list[Mend]:
    """The rollups of a shard that are not what its log says, and that its log leads to. Changes nothing."""
    listed = ((parse_rollup_key(key), key) for key in every_object(machine))
    copies = {seqno: key for seqno, key in listed if seqno is not None}
    said = _said(machine, copies)
    wrong: dict[str, Finding] = {}

    def found(finding: Finding) -> None:
        if finding.kind == "rollup":
            wrong.setdefault(finding.about, finding)

    mends = []
    for step in Walk(machine, said, copies, found).steps():
        rollup = said.get(step.after.seqno)
        finding = None if rollup is None else wrong.get(blob_key(machine.shard, rollup.key))
        if rollup is None or finding is None or step.before is None:
            continue
        data = canonical(step.after)
        if len(data) == rollup.size and digest(data) == rollup.digests:
            proof = f"the log leads to v{step.after.seqno}, and that has the {rollup.size:,} bytes and the digests said"
            mends.append(Mend(Mended(finding.about, finding.found, proof, rollup.size), data))
    return mends


def _said(machine: Machine, copies: dict[SeqNo, PartKey]) -> dict[SeqNo, Rollup]:
    """The rollups of the newest state that the log leads to, however a client would open it."""
    last = None
    for step in Walk(machine, {}, copies, lambda _: None).steps():
        last = step.after
    return said_by_newest_row(machine) if last is None else dict(last.state.rollups)


def carry_out(machine: Machine, mends: Sequence[Mend]) -> None:
    """Write the objects again, in place of what is there. Killed in between, it can be repeated."""
    for mend in mends:
        check_in_place(machine)
        machine.blob.delete(mend.mended.key)
        machine.blob.set(mend.mended.key, mend.data)


class WithMends(AroundBlob):
    """A Blob for reading, as it would be once these were carried out."""

    def __init__(self, inner: Blob, mends: Sequence[Mend]) -> None:
        super().__init__(inner)
        self._data = {mend.mended.key: mend.data for mend in mends}

    def get(self, key: str) -> bytes | None:
        return self._data[key] if key in self._data else super().get(key)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._data[key][start:end] if key in self._data else super().get_range(key, start, end)
