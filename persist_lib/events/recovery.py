"""What a writer does before it writes: claim an epoch, find the end of the log, discard what lies beyond."""

from __future__ import annotations

from typing import NamedTuple

from persist_lib.errors import Missing
from persist_lib.events.api import EVENTS, RecordStore
from persist_lib.events.fragments import check_limit, fetch
from persist_lib.events.notes import check_evidence, digest_of
from persist_lib.events.record import NOTHING, damaged


class Tail(NamedTuple):
    """Where a writer goes on: its epoch, the last event and its digest."""

    epoch: int
    last: int
    digest: bytes


def recover(records: RecordStore, where: str, owner: str) -> Tail:
    """Become the writer. The order matters: what a predecessor still writes after the claim, it does not acknowledge.

    SUBTLE: so everything that was acknowledged is there when the end is looked for. What lies beyond the first gap was
    not acknowledged, as ids are acknowledged in order. It is discarded durably before anything is written: otherwise
    the new event of that id would be refused for ever, or the old one be taken for part of the log.
    """
    check_limit(records.limit)
    epoch = records.claim(owner)
    last = records.last()
    check_evidence(records, where, last)
    digest = check_tail(records, where, last)
    records.discard(epoch, last)
    return Tail(epoch, last, digest)


def check_tail(records: RecordStore, where: str, last: int) -> bytes:
    """Verify the last event and that it follows the one before. Returns its digest."""
    if last == 0:
        return NOTHING
    whole = fetch(records, EVENTS, last, where)
    if whole is None:
        raise Missing(f"event {last} of {where} is missing. Restore it from a copy", key=f"{last}:0")
    label = whole.label
    whole.release()
    if label.previous != digest_of(records, last - 1, where):
        raise damaged(f"event {last} of {where}", f"it follows another event {last - 1} than the one that is there")
    return label.digest
