"""Checks whether an open file is still the one at its path.

An open file stays usable, whatever becomes of its name. If the file was replaced, for example by a restored copy, a
client that continues with the old one writes where no reader will ever look, and decides what to delete by a history
that no longer holds. A file is identified by its device and inode, which no other file can have while it is open.
Times of files are not compared. That of their directory is, as this is asked around each commit: a name in a directory
leads elsewhere only after a change of the directory, which gives it another ctime, and no program can set that back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable

from persist_lib.errors import HistoryRegressed
from persist_lib.location.contract import machine_clock

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
SETTLED_NS = 3_000_000_000
"""How old a directory's last change must be to tell it from a later one. The coarsest file systems count in 2 s."""
WHAT_TO_DO = "Stop every process that uses this location, put one whole copy of it in place, and start them again"


class InPlace:
    """Paths, and the identities of their files when these were opened.

    The files must stay open while this is in use: otherwise another file could get the same inode.
    """

    __slots__ = ("_directory", "_files", "_settled")

    def __init__(self, paths: Iterable[str]) -> None:
        self._files = [(path, identity_of(path)) for path in paths]
        directories = {os.path.dirname(path) for path, _ in self._files}  # noqa: PTH120 - as `by_stat`
        self._directory = directories.pop() if len(directories) == 1 else None
        self._settled: tuple[int, int, int] | None = None

    @property
    def first(self) -> Identity:
        return self._files[0][1]

    def moved(self) -> str | None:
        """Return the first path that now leads to another file or to none, or None when all lead where they did."""
        found = self._look()
        if found is not None and found == self._settled:
            return None
        for path, identity in self._files:
            try:
                if identity_of(path) != identity:
                    return path
            except OSError:
                return path
        # Looked at before the files were. A later change cannot have the same ctime, if that is old by now.
        is_old = found is not None and machine_clock() - found[2] > SETTLED_NS
        self._settled = found if is_old and not any(os.path.islink(path) for path, _ in self._files) else None  # noqa: PTH114
        return None

    def _look(self) -> tuple[int, int, int] | None:
        """The one directory in which all files are and its last change, in ns; None if that cannot be told."""
        if self._directory is None:
            return None
        try:
            found = os.stat(self._directory)  # noqa: PTH116 - as `by_stat`
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns

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
