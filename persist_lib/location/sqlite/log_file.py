"""SQLite's write-ahead log, looked at before SQLite does, which ends it at the first frame that does not verify.

What a power cut tears is the last transaction, as each one was synced before the next was written. So a frame that does
not verify, with a whole transaction behind it that continues another one, is damage: SQLite would drop it in silence,
and a checkpoint then write over it. Single transactions that continue nothing are left by syncs that failed, one over
the other. It cannot tell damage to the last transaction, nor that a log was cut or removed.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from persist_lib.errors import Corrupt

HEADER = struct.Struct(">IIIIIIII")
"""Magic, version, page size, checkpoint, two salts, two sums."""
FRAME_HEADER = 24
"""Page number, size of the database after a commit (else 0), two salts, two sums: four bytes each."""
MAGIC = 0x377F0682
PAGE_SIZES = [1 << bits for bits in range(9, 17)]
WORD = 1 << 32
READINGS = 3
TOGETHER = 64
"""Frames that are summed at once."""


class _Wrong(NamedTuple):
    """Where a log is damaged: the byte, and what is there."""

    at: int
    why: str


def check_log(path: Path) -> None:
    """Raise Corrupt if the write-ahead log of the database at `path` is damaged where SQLite would take it for its end.

    Another process may write at the same time: damage is what stays the same however often it is read.
    """
    log = path.with_name(f"{path.name}-wal")
    found = None
    for reading in range(READINGS):
        try:
            wrong = _find_wrong(log.read_bytes())
        except FileNotFoundError:
            return
        if wrong is None or (reading and wrong != found):
            return
        found = wrong
    assert found is not None  # noqa: S101 - set by each reading
    raise Corrupt(
        f"{log}, the write-ahead log of an SQLite database, is damaged at byte {found.at}: {found.why}. Nothing was "
        "changed, and SQLite would drop what is behind it. Keep a copy of all files; restore them from an older one",
        key=str(log), expected=None, actual=found.why,
    )  # fmt: skip


def _find_wrong(data: bytes) -> _Wrong | None:
    if len(data) <= HEADER.size:
        return None
    magic, _, page_bytes, _, _, _, *sums = HEADER.unpack_from(data)
    order = ">u4" if magic & 1 else "<u4"
    start = np.frombuffer(data, order, 6).astype(np.uint32)[None] @ _weights(3)[0]
    if magic & ~1 != MAGIC or page_bytes not in PAGE_SIZES or start[0].tolist() != sums:
        return _Wrong(0, "its header does not verify")
    size = FRAME_HEADER + page_bytes
    count = (len(data) - HEADER.size) // size
    frames = np.frombuffer(data, np.uint8, count * size, HEADER.size).reshape(count, size)
    if not count:
        return None
    words = frames[:, :FRAME_HEADER].copy().view(">u4").astype(np.uint32)
    before = np.concatenate([np.array([sums], np.uint32), words[:-1, 4:]])
    pairs, power = _weights(page_bytes // 8 + 1)
    sound = (_added(frames.view(order), pairs) + before @ power == words[:, 4:]).all(1)
    ours = (words[:, 2:4] == np.frombuffer(data, ">u4", 2, 16).astype(np.uint32)).all(1)
    return _behind(sound & ours, ours & (words[:, 1] != 0), page_bytes)


def _added(frames: Any, pairs: Any) -> Any:
    """What each frame, as words, adds to the two sums: its first two words and its page. Few at once stay in caches."""
    weights = np.concatenate([pairs[:2], np.zeros((4, 2), np.uint32), pairs[2:]]).T.copy()
    found = np.empty((len(frames), 2), np.uint32)
    for start in range(0, len(frames), TOGETHER):
        some = frames[start : start + TOGETHER].astype(np.uint32)
        for which in (0, 1):
            found[start : start + TOGETHER, which] = (some * weights[which]).sum(1, dtype=np.uint32)
    return found


def _behind(sound: Any, commits: Any, page_bytes: int) -> _Wrong | None:
    """What is wrong, if behind the first frame that does not verify a sound transaction follows the end of another.

    It was begun after the sync of the one that it follows, so what that one followed was once durable.
    """
    first = int(np.argmin(sound))
    ends = np.flatnonzero(commits[first:]) + first
    unsound = np.cumsum(~sound)[ends]
    followed = ends[1:][unsound[1:] == unsound[:-1]]
    if sound.all() or not len(followed):
        return None
    at = HEADER.size + first * (FRAME_HEADER + page_bytes)
    return _Wrong(at, f"frame {first + 1} does not verify, and later ones behind it do, up to {followed[-1] + 1}")


@functools.cache
def _weights(steps: int) -> tuple[Any, Any]:
    """What each word of a text of `steps` pairs adds to its two sums, and what the two sums before it add to them.

    Sums are linear, so no loop over words is needed. A step takes a pair (a, b): `first += a + second`, `second += b +
    first`, all modulo 2**32.
    """
    rows, (p, q, r, s) = [], (1, 0, 0, 1)
    for _ in range(steps):  # from the last pair to the first
        rows += [(q, s), ((p + q) % WORD, (r + s) % WORD)]
        p, q, r, s = (p + q) % WORD, (p + 2 * q) % WORD, (r + s) % WORD, (r + 2 * s) % WORD
    return np.array(rows[::-1], np.uint32), np.array([[p, r], [q, s]], np.uint32)
