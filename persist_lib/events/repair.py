"""Mending a damaged log as far as that needs no guess: what does not verify is dropped, nothing is made up.

What verifies is the first events, up to the first that is not as it was written: each follows the one before by its
digest, so of those behind that one it is not known whether they are part of the log. Snapshots only shorten a start; an
end mark, or the note of a closed log, only says where it ended.
"""

from __future__ import annotations

from contextlib import closing, suppress

import msgspec

from persist_lib.arguments import parse_integer
from persist_lib.errors import Damage, InvalidUsage
from persist_lib.events.api import EVENTS, MOST_ID, Mends, Store, Verifies
from persist_lib.events.log import (
    SNAPSHOTS,
    Elsewhere,
    Log,
    check_released,
    read_elsewhere,
    read_released,
    write_released,
)
from persist_lib.events.migrate import Progress, quiet
from persist_lib.events.record import NOTHING, check_follows
from persist_lib.events.store import LogStore, log_of, name_of


class Looked(msgspec.Struct, frozen=True):
    """A log: its last event, up to which one effects are released, and the event of its newest snapshot (0: none).

    `log` is its id in hexadecimal digits; `elsewhere` says where it continues, if that is in another store.
    """

    last: int
    released: int
    snapshot: int
    log: str
    elsewhere: Elsewhere


class Checked(msgspec.Struct, frozen=True):
    """A log in which all is as it was written: how many events there are, and the bytes of their payloads."""

    events: int
    bytes: int


def look(store: Store) -> Looked:
    """Look at a log. Reads no events. Raises NotFound if there is none."""
    with store.reader() as reader:
        snapshot = reader.newest_snapshot()
        return Looked(
            last=reader.last, released=read_released(reader), snapshot=0 if snapshot is None else snapshot[0],
            log=log_of(store).hex(), elsewhere=read_elsewhere(reader),
        )  # fmt: skip


def check(store: Store, *, progress: Progress = quiet) -> Checked:
    """Read every event, and check that it is what was written, and that it follows the one before it.

    Then it checks the marks, the snapshots, and what the store alone can tell. Raises NotFound if there is no log, and
    Damage, which names the record, at the first that is not so; HistoryRegressed if effects of later events than the
    last one are released.
    """
    count = size = 0
    with store.reader() as reader:
        for event in reader.replay():
            count, size = count + 1, size + event.payload.nbytes
            progress(count, reader.last)
        read_elsewhere(reader)
        check_released(reader, name_of(store))
        if isinstance(reader, Verifies):
            reader.verify()
    return Checked(count, size)


def set_released(store: Store, through: int) -> int:
    """Say that the effects of all events up to and with `through` count as released, and return what was said before.

    For an effect that never can be released, and for a log that has lost events for good. It ends a loop that runs on
    the log. Raises InvalidUsage for an event that the log does not have, and NotFound where there is no log.
    """
    event_id = parse_integer(through, "through")
    with store.reader() as reader:
        before, last = read_released(reader), reader.last
    if event_id > last:
        raise InvalidUsage(
            f"the log ends at event {last}: there is no event {event_id}. Nothing was changed", last=last
        )
    with store.writer(owner="persist events mark") as writer:
        write_released(writer, event_id).result()
    return before


OWNER = "persist events check --repair"


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
    name = name_of(store)
    with closing(store.open_driver(create=apply)) as records:
        if not isinstance(records, Mends):
            raise InvalidUsage(
                f"a log of this kind is not mended in place ({name}). Restore what its error names: an object of S3 "
                "from an older version or a copy, a location by `persist shard repair` or from a copy. Else "
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


def _found(records: Mends, name: str) -> Repaired:
    findings: list[str] = []
    try:
        known = there = records.last()
    except Damage as error:
        findings.append(error.message)
        known = there = records.known_last()
        with suppress(Damage):
            there = records.find_last()
    log = Log(records, name)
    good, why = _verified(log, there)
    findings += why
    snapshots = records.ids(SNAPSHOTS)
    wrong = [id_ for id_ in snapshots if id_ > good or not _is_sound(log, id_)]
    findings += [
        f"the snapshot of the state after event {id_} is damaged, or of an event that is gone" for id_ in wrong
    ]
    dropped = max(known, there, *snapshots) - good
    return Repaired(good, dropped, len(snapshots) if wrong else 0, tuple(findings))


def _verified(log: Log, last: int) -> tuple[int, list[str]]:
    """The last event up to which all are as they were written, and why not the next one."""
    digest, epoch = NOTHING, 0
    for id_ in range(1, last + 1):
        what = f"event {id_} of {log.where}"
        try:
            if (label := log.label_of(EVENTS, id_)) is None:
                return id_ - 1, [f"{what} is missing, and there are events behind it"]
            check_follows(label, digest, epoch, what)
        except Damage as error:
            return id_ - 1, [error.message]
        digest, epoch = label.digest, label.epoch
    return last, []


def _is_sound(log: Log, id_: int) -> bool:
    try:
        return log.label_of(SNAPSHOTS, id_) is not None
    except Damage:
        return False
