"""What is kept beside the events: snapshots of a program's state, and marks, small values by name.

A snapshot's id is that of the event that it follows, and it has that event's digest as what is `previous` to it. A mark
is a row of versions with ids of their own, of which the newest counts: it is replaced whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from persist_lib.arguments import shown
from persist_lib.errors import InvalidName, Missing
from persist_lib.events.api import EVENTS, RecordStore
from persist_lib.events.fragments import fetch, is_damage
from persist_lib.events.record import NOTHING

SNAPSHOTS = "snapshots"
MARKS = "mark-"
KEPT = 2
"""How many snapshots, and versions of a mark, are kept."""
FORGET_EVERY = 16
"""Old versions of a mark are removed each time that so many were added."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def space_of_mark(name: object) -> str:
    """The space of the versions of a mark. Raises InvalidName for a name that cannot be part of a path."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return MARKS + name
    raise InvalidName(f"a mark's name must be 1 to 64 letters, digits, '-' and '_': got {shown(name)}", name=name)


def next_id(records: RecordStore, known: dict[str, int], space: str) -> int:
    """The id of the next version of a mark."""
    if space not in known:
        known[space] = max(records.ids(space), default=0)
    known[space] += 1
    return known[space]


def forget_old(records: RecordStore, epoch: int, forgotten: dict[str, int], written: Mapping[str, int]) -> None:
    """Remove what newer snapshots and versions have replaced. `written`: the newest id of each space written to."""
    for space, newest in written.items():
        if space != SNAPSHOTS and newest - forgotten.get(space, 0) < FORGET_EVERY:
            continue
        forgotten[space] = newest
        there = records.ids(space)
        if len(there) > KEPT:
            records.remove(epoch, space, there[-KEPT])


def newest_snapshot(records: RecordStore, where: str, at_most: int) -> tuple[int, bytes] | None:
    """See `api.Reader`."""
    for id_ in reversed(records.ids(SNAPSHOTS)):
        if id_ > at_most:
            continue
        try:
            found = fetch(records, SNAPSHOTS, id_, where)
            if found is not None and found.label.previous == digest_of(records, id_, where):
                return id_, bytes(found.payload)
        except Exception as error:
            if not is_damage(error):
                raise
    return None


def digest_of(records: RecordStore, id_: int, where: str) -> bytes:
    """The digest of an event, which is verified."""
    if id_ == 0:
        return NOTHING
    whole = fetch(records, EVENTS, id_, where)
    if whole is None:
        raise Missing(f"event {id_} of {where} is missing. Restore it from a copy", key=f"{id_}:0")
    whole.release()
    return whole.label.digest


def read_mark(records: RecordStore, where: str, name: str) -> bytes | None:
    """See `api.Reader`. A damaged version raises: an older one would say something else."""
    space = space_of_mark(name)
    for _ in range(FORGET_EVERY):
        if not (there := records.ids(space)):
            return None
        if (found := fetch(records, space, there[-1], where)) is not None:
            return bytes(found.payload)
    return None


def check_evidence(records: RecordStore, where: str, last: int) -> None:
    """Raise Missing if a snapshot shows that there were more events: it became durable after the one it follows."""
    newest = max(records.ids(SNAPSHOTS), default=0)
    if newest > last:
        raise Missing(
            f"{where} ends at event {last}, and there is a snapshot of the state after event {newest}: events "
            f"{last + 1} to {newest} were there and are gone. Nothing was changed; restore them from a copy",
            key=f"{last + 1}:0",
        )
