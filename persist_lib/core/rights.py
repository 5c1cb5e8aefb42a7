"""Which right a client of a shard server needs for what. `commands` lists the commands; each has its line here.

`read`: read a shard, and keep its history by readers and holds. `append`: write to it, and create it. `maintain`: all
upkeep, and what ends or changes a shard for everybody. None includes another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from persist_lib.core import commands as c
from persist_lib.ids import READER, WRITER

Right = Literal["read", "append", "maintain"]
RIGHTS: tuple[Right, ...] = ("read", "append", "maintain")
Needed: TypeAlias = tuple[frozenset[Right], ...]
"""Of each of these sets, at least one right."""

READ: Needed = (frozenset({"read"}),)
APPEND: Needed = (frozenset({"append"}),)
MAINTAIN: Needed = (frozenset({"maintain"}),)
WRITE: Needed = (frozenset({"append", "maintain"}),)
KEEP: Needed = (frozenset({"read", "maintain"}),)
ANY: Needed = (frozenset(RIGHTS),)
ALL: Needed = (*READ, *APPEND, *MAINTAIN)
"""What writes the log itself, where any change may be in the bytes."""


def _by_ids(ids: Iterable[str]) -> Needed:
    """For ids of readers the right to read; for those of writers, which may append or maintain, one of the two."""
    kinds = {READ if READER.fullmatch(id_) else WRITE if WRITER.fullmatch(id_) else ALL for id_ in ids}
    return tuple(sorted({one for kind in kinds for one in kind}, key=sorted)) or ANY


BY_COMMAND: Mapping[type[c.Command], Needed | Callable[[Any], Needed]] = {
    c.Create: APPEND,
    c.RegisterWriter: lambda command: MAINTAIN if command.purpose == "maintenance" else APPEND,
    c.RegisterReader: READ,
    c.CloneReader: READ,
    c.CompareAndAppend: APPEND,
    c.AppendNow: APPEND,
    c.Append: APPEND,
    c.Absorb: APPEND,
    c.DiscardPending: WRITE,
    c.Heartbeat: lambda command: _by_ids(command.ids),
    c.DowngradeSince: READ,
    c.SetHold: ANY,  # readers keep history by it, the writer of streams its lock, upkeep the retention
    c.ReleaseHold: KEEP,
    c.ForgetProducer: MAINTAIN,
    c.SetRetention: MAINTAIN,
    c.Expire: MAINTAIN,
    c.Retire: lambda command: _by_ids([command.id]),
    c.ApplyCompaction: MAINTAIN,
    c.AddRollup: MAINTAIN,
    c.ForgetGarbage: MAINTAIN,
    c.ForgetRetired: MAINTAIN,
    c.EvolveSchema: WRITE,
    c.Upgrade: MAINTAIN,
    c.Finish: MAINTAIN,
}


def needed_for(command: c.Command) -> Needed:
    """The rights on its shard that a command needs."""
    found = BY_COMMAND[type(command)]
    return found if isinstance(found, tuple) else found(command)


def missing(needed: Needed, rights: frozenset[Right]) -> Needed:
    """What of the needed rights is not there; empty if nothing is missing."""
    return tuple(one for one in needed if not one & rights)
