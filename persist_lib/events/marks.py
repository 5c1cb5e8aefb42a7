"""The small facts that a log keeps beside its events: how far effects are released, whether it continues elsewhere."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

import msgspec

from persist_lib.errors import Corrupt, HistoryRegressed, Refused
from persist_lib.events.api import Reader, Writer

T = TypeVar("T", bound=msgspec.Struct)
RELEASED = "released"
ELSEWHERE = "elsewhere"


class Released(msgspec.Struct, frozen=True):
    """The effects of all events up to and with `through` are released."""

    through: int = 0


class Elsewhere(msgspec.Struct, frozen=True):
    """The log continues in another store: this one was moved, or it is a copy that is not complete yet (`is_part`).

    `store` is the other one's specifier, without a password, and `log` the id of the log in it, in hexadecimal digits.
    Empty: the log continues here.
    """

    store: str = ""
    log: str = ""
    is_part: bool = False

    @property
    def is_moved(self) -> bool:
        """Whether the log was moved to the other store."""
        return bool(self.store) and not self.is_part


def read_released(reader: Reader) -> int:
    """Up to and with which event effects are released, as far as the log says; 0 if it says nothing."""
    return _read(reader, RELEASED, Released).through


def write_released(writer: Writer, through: int) -> Future[None]:
    """Store that the effects of all events up to and with this one are released."""
    return writer.write_mark(RELEASED, msgspec.json.encode(Released(through)))


def read_elsewhere(reader: Reader) -> Elsewhere:
    """Where the log continues."""
    return _read(reader, ELSEWHERE, Elsewhere)


def write_elsewhere(writer: Writer, mark: Elsewhere) -> Future[None]:
    """Store where the log continues."""
    return writer.write_mark(ELSEWHERE, msgspec.json.encode(mark))


def check_here(reader: Reader, name: str) -> None:
    """Raise Refused if the log continues in another store."""
    if (found := read_elsewhere(reader)).store:
        other, why = found.store, "this is a copy that is not complete" if found.is_part else "it was moved there"
        raise Refused(
            f"the log in {name} continues in {other}: {why}. Nothing was changed. Open the other store; or move the "
            "log here, with that one as the source and this one as the store, which also finishes a copy",
            store=name, other=other,
        )  # fmt: skip


def check_released(reader: Reader, name: str) -> int:
    """Up to which event effects are released. Raises HistoryRegressed if that one is beyond the log."""
    released = read_released(reader)
    if released > reader.last and released > reader.refresh():  # a program may be writing to it
        raise HistoryRegressed(
            f"{name} ends at event {reader.last}, and effects were released up to event {released}: the log was "
            "restored from an older copy, or lost events. No event was changed. Continue from a newer copy; or, if "
            f"those events are lost for good, say so: `persist events mark {name} --through {reader.last}`. Ids are "
            "used again then, and effects have other keys",
            seen=released, head=reader.last,
        )  # fmt: skip
    return released


def _read(reader: Reader, name: str, kind: type[T]) -> T:
    data = reader.read_mark(name)
    if data is None:
        return kind()
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the mark {name!r} of an event log does not decode: {error}", key=name) from error
