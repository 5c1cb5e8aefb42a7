"""What a power cut may leave of a disk, given what was written to it and which of that was synced.

The rules are what POSIX grants and no more. What was written to a file is there after its fsync; before it, each
sector of each write may be there or not, and the file may have grown without its data. A name in a directory is there
(or gone) after the fsync of the directory; before it, each name may be as it was after any of the changes. Nothing is
torn within a sector.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECTOR = 512
ROOT = 0
"""The directory that everything is below. It is there from the beginning."""


class Named(NamedTuple):
    """The directory `parent` has the name from now on for this node; or no longer, when it is None."""

    parent: int
    name: str
    node: int | None


class Written(NamedTuple):
    """Bytes of a file were written."""

    node: int
    start: int
    data: bytes


class Cut(NamedTuple):
    """A file was made so long."""

    node: int
    size: int


class Synced(NamedTuple):
    """An fsync of a file or a directory returned."""

    node: int


class Said(NamedTuple):
    """Somebody was told something at this point."""

    word: str
    number: int


Change = Named | Written | Cut
Event = Change | Synced | Said


class Fate(NamedTuple):
    """Which of what was not synced is there after all. Each is asked once for each change, in their order.

    `is_named`: this change of a directory. `is_stored`: a sector of a write, given the index of the write among the
    unsynced changes of its file, how many those are, and the index of the sector in the write. `is_grown`: the file has
    the length that it needs for this write.
    """

    is_named: Callable[[], bool]
    is_stored: Callable[[int, int, int], bool]
    is_grown: Callable[[], bool]
    filler: bytes = b"\0"


def _always(*_: int) -> bool:
    return True


def _never(*_: int) -> bool:
    return False


def fates(rng: random.Random) -> dict[str, Callable[[], Fate]]:
    """The worst cases by name, and cases at random."""

    def at_random() -> Fate:
        names, data, length = (rng.choice([0.1, 0.5, 0.9]) for _ in range(3))
        return Fate(
            lambda: rng.random() < names, lambda *_: rng.random() < data, lambda: rng.random() < length,
            rng.choice([b"\0", b"\xa5"]),
        )  # fmt: skip

    return {
        "nothing": lambda: Fate(_never, _never, _never),
        "everything": lambda: Fate(_always, _always, _always),
        "names without data": lambda: Fate(_always, _never, _never),
        "names and lengths": lambda: Fate(_always, _never, _always),
        "names and lengths with old bytes in them": lambda: Fate(_always, _never, _always, b"\xa5"),
        "data without names": lambda: Fate(_never, _always, _always),
        "the last write's first half": lambda: Fate(_always, lambda i, of, s: i < of - 1 or s % 8 < 4, _always),
        "the last write's second half": lambda: Fate(_always, lambda i, of, s: i < of - 1 or s % 8 >= 4, _always),
        "the last write alone": lambda: Fate(_always, lambda i, of, _: i == of - 1, _always),
        "all but the last write": lambda: Fate(_always, lambda i, of, _: i < of - 1, _always),
        "the first sectors of each write": lambda: Fate(_always, lambda _i, _of, sector: sector == 0, _always),
        "at random": at_random,
    }


@dataclass
class Node:
    """A file (`data`) or a directory (`names`) as it is durable, and what was changed since."""

    data: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)


class Disk:
    """Follows events, and builds what a power cut now may leave. `said` is what had been told by then."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {ROOT: Node()}
        self.said: list[Said] = []

    def follow(self, event: Event) -> None:
        """Go on by one event."""
        match event:
            case Said():
                self.said.append(event)
            case Synced(node):
                synced = self._node(node)
                synced.names = _names(synced, _everything)
                synced.data = _data(synced, _everything)
                synced.pending = []
            case Named(parent):
                self._node(parent).pending.append(event)
            case Written(node) | Cut(node):
                self._node(node).pending.append(event)

    def _node(self, number: int) -> Node:
        return self._nodes.setdefault(number, Node())

    def unsynced(self) -> int:
        """How many changes a power cut may undo."""
        return sum(len(node.pending) for node in self._nodes.values())

    def image(self, fate: Fate, folders: set[int], place: Path) -> None:
        """Write to `place` what is there after a power cut. `folders`: the numbers of directories."""
        kept = {number: _names(node, fate) for number, node in self._nodes.items()}
        pending = [(ROOT, place)]
        while pending:
            number, path = pending.pop()
            if number in folders:
                path.mkdir()
                pending += [(child, path / name) for name, child in kept.get(number, {}).items()]
            else:
                path.write_bytes(_data(self._node(number), fate))


_everything = Fate(_always, _always, _always)


def _names(node: Node, fate: Fate) -> dict[str, int]:
    names = dict(node.names)
    for change in node.pending:
        if isinstance(change, Named) and fate.is_named():
            if change.node is None:
                names.pop(change.name, None)
            else:
                names[change.name] = change.node
    return names


def _data(node: Node, fate: Fate) -> bytes:
    data = bytearray(node.data)
    changes = [change for change in node.pending if not isinstance(change, Named)]
    for index, change in enumerate(changes):
        if isinstance(change, Cut):
            if fate.is_stored(index, len(changes), 0):
                del data[change.size :]
                _grow(data, change.size, b"\0")
            continue
        if fate.is_grown():
            _grow(data, change.start + len(change.data), fate.filler)
        for number, (start, piece) in enumerate(_sectors(change)):
            if fate.is_stored(index, len(changes), number):
                _grow(data, start, fate.filler)
                data[start : start + len(piece)] = piece
    return bytes(data)


def _grow(data: bytearray, size: int, filler: bytes) -> None:
    data.extend(filler * (size - len(data)))


def _sectors(change: Written) -> Iterator[tuple[int, bytes]]:
    """A write in pieces that are each in one sector, with where they start."""
    start, end = change.start, change.start + len(change.data)
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        yield start, change.data[start - change.start : stop - change.start]
        start = stop


def moments(events: Iterable[Event]) -> Iterator[int]:
    """After how many events a power cut is worst: before each fsync, and when somebody has just been told something."""
    for number, event in enumerate(events):
        if isinstance(event, Synced):
            yield number
        elif isinstance(event, Said):
            yield number + 1
