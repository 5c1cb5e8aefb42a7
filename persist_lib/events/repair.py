"""Mending a damaged log as far as that needs no guess: what does not verify is dropped, nothing is made up.

What verifies is the first events, up to the first that is not as it was written: each follows the one before by its
digest, so none behind that one can be told to be part of the log. Snapshots only shorten a start; an end mark, or the
note of a closed log, only says where it ended.
"""

from __future__ import annotations

import msgspec

from persist_lib.errors import Damage, InvalidUsage
from persist_lib.events.api import EVENTS, Mends, RecordStore, Store
from persist_lib.events.fragments import fetch
from persist_lib.events.naming import name_of
from persist_lib.events.notes import SNAPSHOTS
from persist_lib.events.record import NOTHING, check_follows
from persist_lib.events.store import LogStore

OWNER = "persist events repair"
MOST_ID = (1 << 63) - 1


class Repaired(msgspec.Struct, frozen=True):
    """What a repair did, or would do: how many events are left, and what goes.

    `dropped`: how many events behind them are there, or were there as far as is known. `snapshots`: how many are
    removed, which only costs time at the next start. `findings` says what was wrong, a sentence each; empty: nothing.
    """

    events: int
    dropped: int
    snapshots: int
    findings: tuple[str, ...]


def repair(store: Store, *, apply: bool = False) -> Repaired:
    """Say what is wrong with a log, and with `apply` mend it: drop what lies behind the last event that verifies.

    Without `apply` it changes nothing. A program that runs on the log is fenced by `apply`. Raises InvalidUsage for a
    kind of store that is not mended in place, and Damage where the store itself cannot be opened any more: then only a
    copy helps.
    """
    if not isinstance(store, LogStore):
        raise InvalidUsage(f"{name_of(store)} is not mended in place")
    records, name = store.open_driver(create=apply), name_of(store)
    try:
        if not isinstance(records, Mends):
            raise InvalidUsage(
                f"a log of this kind is not mended in place ({name}). Restore what its error names: an object of S3 "
                "from an older version or a copy, a location by `persist repair` or from a copy. Else "
                "`persist events cat --through` gives the events before the first that is damaged, for a new log"
            )
        found = _found(records, name)
        if apply and found.findings:
            records.forget_end()
            epoch = records.claim(OWNER)
            records.discard(epoch, found.events)
            if found.snapshots:
                records.remove(epoch, SNAPSHOTS, MOST_ID)
        return found
    finally:
        records.close()


def _found(records: Mends, name: str) -> Repaired:
    findings: list[str] = []
    try:
        known = records.last()
        there = known
    except Damage as error:
        findings.append(error.message)
        known = records.known_last()
        there = _last_there(records, known)
    good, why = _verified(records, there, name)
    findings += why
    snapshots = records.ids(SNAPSHOTS)
    wrong = [id_ for id_ in snapshots if id_ > good or not _is_sound(records, id_, name)]
    findings += [
        f"the snapshot of the state after event {id_} is damaged, or of an event that is gone" for id_ in wrong
    ]
    dropped = max(known, there, *snapshots) - good
    return Repaired(good, dropped, len(snapshots) if wrong else 0, tuple(findings))


def _last_there(records: Mends, known: int) -> int:
    """Up to where it is worth looking."""
    try:
        return records.find_last()
    except Damage:
        return known


def _verified(records: RecordStore, last: int, name: str) -> tuple[int, list[str]]:
    """The last event up to which all are as they were written, and why not the next one."""
    digest, epoch = NOTHING, 0
    for id_ in range(1, last + 1):
        try:
            whole = fetch(records, EVENTS, id_, name)
            if whole is None:
                return id_ - 1, [f"event {id_} of {name} is missing, and there are events behind it"]
            whole.release()
            check_follows(whole.label, digest, epoch, f"event {id_} of {name}")
        except Damage as error:
            return id_ - 1, [error.message]
        digest, epoch = whole.label.digest, whole.label.epoch
    return last, []


def _is_sound(records: RecordStore, id_: int, name: str) -> bool:
    try:
        whole = fetch(records, SNAPSHOTS, id_, name)
    except Damage:
        return False
    if whole is None:
        return False
    whole.release()
    return True
