"""Checks whether an open file is still the one at its path.

An open file stays usable, whatever becomes of its name. If the file was replaced, for example by a restored copy, a
client that goes on with the old one writes where no reader will ever look, and decides what to delete by a history that
no longer holds. A file is identified by its device and inode, which no other file can have while it is open. Times
are not compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from persist_lib.errors import HistoryRegressed
from persist_lib.location.inode import Identity, identity_of

UNTOUCHED = "Nothing was written or deleted"
WHAT_TO_DO = "Stop every process that uses this location, put one whole copy of it in place, and start them again"


class InPlace:
    """Paths, and the identities of their files when these were opened.

    The files must stay open while this is in use: otherwise another file could get the same inode.
    """

    __slots__ = ("_files",)

    def __init__(self, paths: Iterable[str]) -> None:
        self._files = [(path, identity_of(path)) for path in paths]

    @property
    def first(self) -> Identity:
        """The identity of the first of them."""
        return self._files[0][1]

    def moved(self) -> str | None:
        """Return the first path that now leads to another file or to none, or None when all lead where they did."""
        for path, identity in self._files:
            try:
                if identity_of(path) != identity:
                    return path
            except OSError:
                return path
        return None

    def check(self, happened: str = UNTOUCHED) -> None:
        """Raise HistoryRegressed unless all paths lead where they did. `happened` says what was done before."""
        if (path := self.moved()) is not None:
            raise moved_away(path, happened)


def check_same(path: str, identity: Identity) -> None:
    """Raise HistoryRegressed unless the file at `path` has this identity."""
    try:
        is_same = identity_of(path) == identity
    except OSError:
        is_same = False
    if not is_same:
        raise moved_away(path)


def moved_away(path: str, happened: str = UNTOUCHED) -> HistoryRegressed:
    """The error for an open file that is no longer at its path."""
    there = "another one is there now" if os.path.lexists(path) else "nothing is there now"
    return HistoryRegressed(
        f"{path} is not what this process has open: it was moved, deleted or replaced, and {there}. {happened}. "
        f"{WHAT_TO_DO}",
        path=path, seen=None, head=None,
    )  # fmt: skip
