"""Pins: objects that something outside refers to, which are not deleted while it does.

A hold keeps history, a pin keeps objects: compaction replaces the parts of a publication although a hold keeps all of
their history. What is pinned becomes garbage as before, and waits there. A key is pinned only while a batch has it, or
a pin: a key that is garbage and not pinned may be deleted at any time, and never comes back.

The pin of a publication is called as its format is, and where that stands in another folder than the shard's own, as a
collection's does, `FORMAT.FOLDER`.
"""

from __future__ import annotations

from persist_lib.arguments import shown
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import PINS
from persist_lib.core.state import Pin, State
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import NAME, PartKey
from persist_lib.schema.evolution import evolved

BY_NAME = frozenset({"delta"})
"""The pins of publications whose readers find columns by the names in the files, and files below their folder alone."""
MOST_KEPT = 1000
"""How many snapshots of a publication may be kept: each keeps its objects."""


def pin_name(format_: str, folder: str, shard: str) -> str:
    """What the pin of a publication is called that stands in this folder, in the state of a shard."""
    return format_ if folder == shard else f"{format_}.{folder}"


def format_of(pin: str) -> str:
    """The format of the publication that a pin is of, by the pin's name."""
    return pin.partition(".")[0]


def folders_of(state: State, shard: str) -> dict[str, str]:
    """The folders that publications stand in which name objects of a shard, by their pins."""
    return {name: name.partition(".")[2] or shard for name in state.pins}


def by_name(state: State) -> list[str]:
    """The formats that a shard is published in whose readers find columns by name."""
    return sorted(BY_NAME.intersection(map(format_of, state.pins)))


def pinned(state: State) -> dict[PartKey, list[str]]:
    """Who pins each key that is pinned, by name."""
    found: dict[PartKey, list[str]] = {}
    for name, pin in sorted(state.pins.items()):
        for key in pin.keys:
            found.setdefault(key, []).append(name)
    return found


def changed_pins(diff: StateDiff, new: State) -> list[str]:
    """What is wrong with the pins that `diff` may have broken: all, if it changed one, or those of lost garbage."""
    if diff.pins:
        return problems(new)
    if not (new.pins and diff.garbage):
        return []
    gone = {key for key, _, after in diff.garbage if after is None}
    return [f"{key} is pinned, and no garbage any more" for key in sorted(gone & pinned(new).keys())]


def problems(state: State) -> list[str]:
    """What is wrong with the pins, one sentence each."""
    if not state.pins:
        return []
    known = {key for batch in state.stored for key in batch.keys} | state.garbage.keys()
    found = [f"pin {shown(name)} is malformed" for name, pin in state.pins.items() if not _is_sound(name, pin)]
    return found + [f"{key} is pinned, and neither in a batch nor garbage" for key in pinned(state) if key not in known]


def _is_sound(name: str, pin: Pin) -> bool:
    is_time = pin.as_of is None or 0 <= pin.as_of <= MAX_TIME
    in_order = list(pin.keys) == sorted(set(pin.keys))
    return bool(NAME.fullmatch(name)) and is_time and in_order and 0 <= pin.keep <= MOST_KEPT


def pin_keys(state: State, command: c.PinKeys) -> StateDiff | r.Refusal:
    """What making or moving a pin changes."""
    if state.format < PINS:
        return r.NeedsFormat("which objects are referred to from outside", PINS, state.format)
    if format_of(command.name) in BY_NAME and (columns := evolved(state.schemas)):
        reason = f"other engines would not find columns that changed or have defaults, as {', '.join(columns)}"
        return r.WrongSchema(len(state.schemas) - 1, reason)
    old = state.pins.get(command.name)
    if (actual := old.opaque if old else None) != command.expected:
        return r.WrongOpaque(command.name, command.expected, actual)
    new = Pin(tuple(sorted(set(command.keys))), command.opaque, command.as_of, command.keep, command.follows)
    if not _is_sound(command.name, new):
        return r.Malformed(f"pin {shown(command.name)} as of {command.as_of}, with {command.keep} snapshots")
    known = {key for batch in state.stored for key in batch.keys} | pinned(state).keys()
    if strangers := tuple(key for key in new.keys if key not in known):
        return r.Unknown(strangers)
    return r.AlreadyDone() if new == old else StateDiff(pins=((command.name, old, new),))


def unpin(state: State, command: c.Unpin) -> StateDiff | r.Refusal:
    """What dropping a pin changes."""
    pin = state.pins.get(command.name)
    if pin is None or pin.opaque != command.expected:
        return r.WrongOpaque(command.name, command.expected, pin.opaque if pin else None)
    return StateDiff(pins=((command.name, pin, None),))


def behind(state: State) -> tuple[str, ...]:
    """The formats that each upkeep of the shard publishes again, as they are of an earlier time than the newest.

    What is published of a collection is published again by the upkeep of that.
    """
    newest = (state.upper.time or 0) - 1
    own = ((name, pin) for name, pin in sorted(state.pins.items()) if "." not in name and not state.member)
    return tuple(name for name, pin in own if pin.follows and (pin.as_of or 0) < newest)
