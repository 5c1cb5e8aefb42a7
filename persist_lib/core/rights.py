"""Which right a client of a shard server needs for what, by what it can destroy. Each command has its line in `TABLE`.

`read`: read a shard, and keep its history by readers and by holds of its own. `append`: write to it, and create it.
`maintain`: all upkeep, and what ends or changes a shard for everybody. None includes another.

Holds are owned, by their names: a token file says which names are a client's. Those of layers above shards (streams,
collections) belong to who writes the layer, and with the right `maintain` every hold may be moved and released. Leases
are not owned: one that ends early costs its owner a new one, and what must be kept is kept by a hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from persist_lib.core import commands as c
from persist_lib.core.holds import is_of_layer
from persist_lib.core.state import RETENTION
from persist_lib.ids import READER, WRITER

Right = Literal["read", "append", "maintain"]
RIGHTS: tuple[Right, ...] = ("read", "append", "maintain")
Needed: TypeAlias = tuple[frozenset[Right], ...]
"""Of each of these sets, at least one right."""
Owns: TypeAlias = Callable[[str], bool]
"""Whether a hold of this name is the caller's own."""

READ: Needed = (frozenset({"read"}),)
APPEND: Needed = (frozenset({"append"}),)
MAINTAIN: Needed = (frozenset({"maintain"}),)
WRITE: Needed = (frozenset({"append", "maintain"}),)
KEEP: Needed = (frozenset({"read", "maintain"}),)
ANY: Needed = (frozenset(RIGHTS),)
ALL: Needed = (*READ, *APPEND, *MAINTAIN)
"""What writes the log itself, where any change may be in the bytes."""


def nothing(_hold: str) -> bool:
    """Who owns no holds."""
    return False


def _by_ids(ids: Iterable[str]) -> Needed:
    """For ids of readers the right to read; for those of writers, which may append or maintain, one of the two."""
    kinds = {READ if READER.fullmatch(id_) else WRITE if WRITER.fullmatch(id_) else ALL for id_ in ids}
    return tuple(sorted({one for kind in kinds for one in kind}, key=sorted)) or ANY


def _by_hold(command: c.SetHold | c.DowngradeHold | c.ReleaseHold, owns: Owns) -> Needed:
    name = command.name
    if name == RETENTION:
        return MAINTAIN
    if is_of_layer(name):
        return WRITE
    return KEEP if owns(name) else MAINTAIN


class Line(NamedTuple):
    """What a command can destroy that is not its sender's own, and the rights that it needs for that."""

    destroys: str
    needed: Needed | Callable[[Any, Owns], Needed]


TABLE: Mapping[type[c.Command], Line] = {
    c.Create: Line("a name, which is never free again", APPEND),
    c.RegisterWriter: Line("", lambda one, _: MAINTAIN if one.purpose == "maintenance" else APPEND),
    c.RegisterReader: Line("", READ),
    c.CloneReader: Line("", READ),
    c.CompareAndAppend: Line("", APPEND),
    c.AppendNow: Line("", APPEND),
    c.Append: Line("", APPEND),
    c.Absorb: Line("pending batches", APPEND),
    c.DiscardPending: Line("pending batches", WRITE),
    c.Heartbeat: Line("", lambda one, _: _by_ids(one.ids)),
    c.DowngradeSince: Line("history that no hold and no other reader keeps", READ),
    c.SetHold: Line("the lock or the place of another program's hold", _by_hold),
    c.DowngradeHold: Line("history that the hold kept", _by_hold),
    c.ReleaseHold: Line("a lock, and history that the hold kept", _by_hold),
    c.ForgetProducer: Line("the memory of what was appended: it may be appended again", MAINTAIN),
    c.Reserve: Line("numbers, which are never given again", APPEND),
    c.SetRetention: Line("history, at the next upkeep", MAINTAIN),
    c.Expire: Line("leases", MAINTAIN),
    c.Retire: Line("a lease", lambda one, _: _by_ids([one.id])),
    c.ApplyCompaction: Line("the form of what is stored", MAINTAIN),
    c.KeepContents: Line("the form of what is stored", MAINTAIN),
    c.PinKeys: Line("room: what it names is kept", MAINTAIN),
    c.Unpin: Line("objects that something outside refers to", MAINTAIN),
    c.AddRollup: Line("an older rollup", MAINTAIN),
    c.ForgetGarbage: Line("the memory of objects that are still to be deleted", MAINTAIN),
    c.ForgetRetired: Line("the memory of ids", MAINTAIN),
    c.EvolveSchema: Line("the freedom to add other columns", WRITE),
    c.Upgrade: Line("older programs' access", MAINTAIN),
    c.Adopt: Line("every use of the shard by its name", MAINTAIN),
    c.Inherit: Line("where a rendition shard begins", MAINTAIN),
    c.Finish: Line("everything", MAINTAIN),
}


def needed_for(command: c.Command, owns: Owns = nothing) -> Needed:
    """The rights on its shard that a command needs, for a caller that owns these holds."""
    found = TABLE[type(command)].needed
    return found if isinstance(found, tuple) else found(command, owns)


def missing(needed: Needed, rights: frozenset[Right]) -> Needed:
    """What of the needed rights is not there; empty if nothing is missing."""
    return tuple(one for one in needed if not one & rights)
