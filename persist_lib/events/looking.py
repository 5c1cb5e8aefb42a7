"""What an operator may want to know of a log, and the one thing that he may have to say: how far effects count."""

from __future__ import annotations

import msgspec

from persist_lib.arguments import parse_integer
from persist_lib.errors import InvalidUsage
from persist_lib.events.api import Store, Verifies
from persist_lib.events.marks import Elsewhere, check_released, read_elsewhere, read_released, write_released
from persist_lib.events.moving import Progress, quiet
from persist_lib.events.naming import log_of, name_of


class Looked(msgspec.Struct, frozen=True):
    """A log: its last event, up to which one effects are released, and the event of its newest snapshot (0: none).

    `log` is its id in hexadecimal digits; `elsewhere` says where it goes on, if that is in another store.
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
