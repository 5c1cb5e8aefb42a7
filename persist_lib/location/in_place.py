"""Checks whether an open file is still the one at its path.

An open file stays usable, whatever becomes of its name. If the file was replaced, for example by a restored copy, a
client that continues with the old one writes where no reader will ever look, and decides what to delete by a history
that no longer holds. A file is identified by its device and inode, which no other file can have while it is open.
Times are not compared.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable

from persist_lib.errors import HistoryRegressed

Identity = tuple[int, int]
"""Device and inode."""

# Since Linux 6.13, a file system notes that a file's times were seen, and the next write to it gives it
# new ones. The sync of an overwritten SQLite log then has to write the inode as well: a commit took half as long again
# when `os.stat` looked at the log before it. Python 3.11 cannot ask for less; the system call can.
AT_FDCWD = -100
STATX_INO = 0x100
STATX_BYTES = 256
FIELDS = struct.Struct("=32xQ96xII")
"""Of the answer: the inode, and the two numbers of the device."""
NOT_OFFERED = (errno.ENOSYS, errno.EPERM)
"""The kernel does not know the call, or a sandbox does not let it through."""


def by_stat(path: str) -> Identity:
    """The identity of the file at `path`, from all that the system tells of it. Raises OSError."""
    found = os.stat(path)  # noqa: PTH116 - asked around each commit; a Path would double what it costs
    return found.st_dev, found.st_ino


def _find_statx() -> Callable[[str], Identity] | None:
    """The same by a call that asks for the inode alone; None where it is not to be had, or tells something else."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):  # another system, or an old C library
        return None
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)

    def by_statx(path: str) -> Identity:
        answer = ctypes.create_string_buffer(STATX_BYTES)
        if statx(AT_FDCWD, os.fsencode(path), 0, STATX_INO, answer) == 0:
            inode, major, minor = FIELDS.unpack_from(answer)
            return os.makedev(major, minor), inode
        if (number := ctypes.get_errno()) in NOT_OFFERED:
            return by_stat(path)
        raise OSError(number, os.strerror(number), path)

    return by_statx if by_statx("/") == by_stat("/") else None


identity_of: Callable[[str], Identity] = _find_statx() or by_stat
"""Return the identity of the file at a path. Raises OSError when that cannot be told."""


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
