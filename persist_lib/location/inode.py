"""Which file a path leads to, by device and inode, without asking for its times.

SUBTLE: since Linux 6.13, a file system notes that somebody has seen a file's times, and the next write to it gives it
new ones. The sync of an overwritten SQLite log then has to write the inode as well: a commit took half as long again
when `os.stat` looked at the log before it. Python 3.11 cannot ask for less; the system call can.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable

Identity = tuple[int, int]
"""Device and inode."""

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
