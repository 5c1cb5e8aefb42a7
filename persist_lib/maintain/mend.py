"""What can be mended of a shard without a guess: rollups that are gone or damaged, and that its log still leads to.

A rollup is a copy of a state, and the log says its size and its digests. What the log is replayed to is written again
only if it has exactly these, so it is what was there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persist_lib.core.state import Rollup
from persist_lib.format.digest import digest
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, SeqNo, parse_rollup_key
from persist_lib.location.api import Blob
from persist_lib.location.wrap.around import AroundBlob
from persist_lib.maintain.garbage import check_in_place
from persist_lib.maintain.log_walk import Finding, Walk, canonical, every_object, said_by_newest_row
from persist_lib.shard.commit import Machine


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
