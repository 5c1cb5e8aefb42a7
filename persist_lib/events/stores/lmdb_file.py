"""The file of an LMDB database, looked at before it is mapped: a page that is not in it would end the process (SIGBUS).

LMDB itself checks next to nothing. Its first two pages say, in turns, how far the file is used and where its tree is;
the number of the commit tells which of the two is newer, so one that is wrong would hide a commit.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from persist_lib.errors import Corrupt

META = struct.Struct("=QHHIIIQQIH90xQQ")
"""Page number, padding, flags, free space; magic, version, address, map size; page size; last page, commit."""
MAGIC, VERSIONS, IS_META = 0xBEEFC0DE, (1, 2), 0x08
PAGE_SIZES = [1 << bits for bits in range(9, 17)]
ATTEMPTS = 5
SLACK_BYTES = 1 << 18
"""Offsets in a page have 16 bits, so a damaged one leads at most so far behind it (and that far again for a key)."""


class _Meta(NamedTuple):
    """What one of the two pages says."""

    page: int
    flags: int
    magic: int
    version: int
    page_bytes: int
    last_page: int
    commit: int


def check_file(path: Path) -> None:
    """Raise Corrupt for a file that is shorter than it must be, or whose first pages contradict each other."""
    with path.open("rb") as file:
        why = "it is empty"
        for _ in range(ATTEMPTS):  # a process that writes may commit between two reads
            if (why := _what_is_wrong(file.fileno())) == "":
                return
    raise Corrupt(
        f"the LMDB database {path} is damaged: {why}. Nothing was changed; restore it from a copy", key=str(path)
    )


def make_room(path: Path) -> None:
    """Let the file go on behind its last page, as far as a damaged offset in that page leads. It changes no page."""
    with suppress(OSError), path.open("r+b") as file:  # where it cannot be written, that page is not guarded
        first = _meta(file.fileno(), 0)
        second = first and _meta(file.fileno(), first.page_bytes)
        if first is not None and second:
            end = (max(first, second, key=_commit).last_page + 1) * first.page_bytes
            # SUBTLE: never `truncate`, which would cut off what another process appends meanwhile.
            os.posix_fallocate(file.fileno(), end, SLACK_BYTES)


def _what_is_wrong(fd: int) -> str:
    first = _meta(fd, 0)
    if first is None or first.page_bytes not in PAGE_SIZES:
        return "its first page is not as LMDB wrote it"
    second = _meta(fd, first.page_bytes)
    if second is None or second.page_bytes != first.page_bytes:
        return "its second page is not as LMDB wrote it"
    for number, meta in enumerate((first, second)):
        is_ours = (meta.page, meta.flags, meta.magic) == (number, IS_META, MAGIC) and meta.version in VERSIONS
        if not is_ours or (meta.commit and meta.commit % 2 != number):
            return f"page {number} is not as LMDB wrote it"
    if abs(first.commit - second.commit) > 1:
        return f"its first two pages are of the commits {first.commit} and {second.commit}"
    size, least = os.fstat(fd).st_size, (max(first, second, key=_commit).last_page + 1)
    if size < least * first.page_bytes:
        return f"it is cut: {size} of {least * first.page_bytes} bytes are there"
    return ""


def _commit(meta: _Meta) -> int:
    return meta.commit


def _meta(fd: int, at: int) -> _Meta | None:
    data = os.pread(fd, META.size, at)
    if len(data) < META.size:
        return None
    page, _, flags, _, magic, version, _, _, page_bytes, _, last_page, commit = META.unpack(data)
    return _Meta(page, flags, magic, version, page_bytes, last_page, commit)
