"""Offsets of a stream: how far it has come, as small JSON that Spark keeps in the query's checkpoint.

    Contents(as_of, key)       of the contents as of a time, those with keys before `key` have been delivered
    Updates(at)                everything before the time `at` has been delivered; None: all, the shard is closed
    Updates(at, until, key)    the same, and of the updates in `[at, until)` those with keys before `key`

In a collection, the updates at the time of a handover are its difference; keys are cut alike in all shards.

An offset also names the shard (of a collection the rendition shard) and the stream's hold. Spark does not keep the
offset that a query starts from. So the first one that it keeps says in `began` what came before: with it, the first
batch can be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage, NewerFormat
from persist_lib.relation.row_selection import KeyRange
from persist_lib.spark.slices import Section

VERSION = 1
START: dict[str, Any] = {"version": VERSION}
"""Before the first offset. It says nothing, so that it is the same whenever Spark asks for it again."""
BEGINNING = b""
"""Below all keys."""


class Contents(NamedTuple):
    """Within the contents as of a time."""

    as_of: int
    key: bytes = BEGINNING

    @property
    def since(self) -> int | None:
        """The history that is needed from here on: since must not be beyond it."""
        return self.as_of


class Updates(NamedTuple):
    """Before the updates at a time, or within those in `[at, until)`."""

    at: int | None
    until: int | None = None
    key: bytes = BEGINNING

    @property
    def since(self) -> int | None:
        """The history that is needed from here on; None for none, as all has been delivered."""
        return None if self.at is None else max(0, self.at - 1)


Position = Contents | Updates


class Offset(NamedTuple):
    """A position in a shard, the hold that keeps what comes after it, and for the first one where it began."""

    shard: str
    hold: str
    position: Position
    began: Position | None = None


def encode(offset: Offset) -> dict[str, Any]:
    """The JSON of an offset."""
    found = {"version": VERSION, "shard": offset.shard, "hold": offset.hold, **_encode(offset.position)}
    return found if offset.began is None else {**found, "began": _encode(offset.began)}


def decode(given: Mapping[str, Any], shard: str, what: str) -> Offset | None:
    """The offset of this shard that JSON says; None for `START`. Raises InvalidUsage for anything else.

    Of a collection it is the rendition shard, which keeps its name. `what` is how messages call it.
    """
    version = given.get("version")
    if isinstance(version, int) and version > VERSION:
        raise NewerFormat(
            f"{what}: the stream's checkpoint has offsets of version {version}, and this release knows up to "
            f"{VERSION}. Upgrade persist-lib on the driver and the executors",
            found=version, known=VERSION,
        )  # fmt: skip
    if dict(given) == START:
        return None
    try:
        began = None if given.get("began") is None else _decode(given["began"])
        found = Offset(given["shard"], given["hold"], _after(began, _decode(given)), began)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidUsage(
            f"{what}: {shown(dict(given))} is no offset of a stream of Persist's. Does the checkpoint belong to "
            "another source?",
            offset=dict(given),
        ) from error  # fmt: skip
    if found.shard != shard:
        raise InvalidUsage(
            f"the checkpoint is that of a stream of shard {found.shard}, and the stream now reads {what}. Pass what it "
            "is of, or another checkpointLocation",
            shard=shard,
        )
    return found


def steps(start: Position, end: Position) -> list[tuple[Section, KeyRange]]:
    """What lies between two positions of a stream: sections, and which keys of them.

    Raises InvalidUsage where `end` is before `start`: what lies between would be delivered twice.
    """
    if start == end:
        return []
    if isinstance(start, Contents):
        section = Section(start.as_of)
        if isinstance(end, Contents):
            if end.as_of != start.as_of or end.key < start.key:
                raise _step_back(start, end)
            return [(section, _keys(start.key, end.key))]
        return [(section, _keys(start.key, None)), *steps(Updates(start.as_of + 1), end)]
    if isinstance(end, Contents) or _place(end) < _place(start):
        raise _step_back(start, end)
    if start.until is not None:
        section = Section(None, start.at or 0, start.until)
        if end.until == start.until and end.at == start.at:
            return [(section, _keys(start.key, end.key))]
        return [(section, _keys(start.key, None)), *steps(Updates(start.until), end)]
    found = []
    if end.at is None or end.at > (start.at or 0):
        found.append((Section(None, start.at or 0, end.at), KeyRange()))
    if end.until is not None:
        found.append((Section(None, end.at or 0, end.until), _keys(BEGINNING, end.key)))
    return found


def _place(position: Updates) -> tuple[bool, int, bytes]:
    return position.at is None, position.at or 0, position.key


def _step_back(start: Position, end: Position) -> InvalidUsage:
    return InvalidUsage(f"a stream goes forward, and {end} is not after {start}: is the checkpoint damaged?")


def _keys(lower: bytes, upper: bytes | None) -> KeyRange:
    return KeyRange(lower or None, upper)


def _after(began: Position | None, position: Position) -> Position:
    """The position of an offset. Earlier releases could log one before the contents that it began with."""
    if isinstance(began, Contents) and isinstance(position, Updates) and position.at is not None:
        return position if position.at > began.as_of else Updates(began.as_of + 1)
    return position


def _encode(position: Position) -> dict[str, Any]:
    if isinstance(position, Contents):
        return {"contents": position.as_of, "key": position.key.hex()}
    if position.until is None:
        return {"at": position.at}
    return {"at": position.at, "until": position.until, "key": position.key.hex()}


def _decode(given: Mapping[str, Any]) -> Position:
    if "contents" in given:
        return Contents(_time(given["contents"]), bytes.fromhex(given["key"]))
    at = None if given["at"] is None else _time(given["at"])
    if "until" not in given:
        return Updates(at)
    return Updates(at, _time(given["until"]), bytes.fromhex(given["key"]))


def _time(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is no time")
    return value
