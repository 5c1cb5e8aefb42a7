"""The end mark of a log in files: which event a writer acknowledged last, in a small file beside the store.

It is written after each commit and never synced: it costs no time, and can never be ahead of the store. A process that
is killed leaves it exact; a power cut may leave an older one, or none, which says less and nothing wrong. So a log that
ends before its end mark has lost acknowledged events, whatever its store makes of the bytes that are left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from persist_lib.errors import Corrupt, Missing
from persist_lib.events.api import EVENTS, Put
from persist_lib.events.record import REPAIR, lost

SIZE = 24


class EndMark:
    """`path` is the file: the log's name, the last event's id (8 bytes, big-endian), and the digest of both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def checked(self, log: bytes, find_last: Callable[[], int]) -> int:
        """Return the last event that `find_last` finds. Raises Missing if one behind it was acknowledged."""
        marked = self.read(log)  # before, as a writer may continue in between
        last = find_last()
        if marked > last:
            why = f"{self.path} says that event {marked} was acknowledged"
            raise lost(self.path.parent, last, marked, why, REPAIR)
        return last

    def read(self, log: bytes) -> int:
        """The last event of this log that was acknowledged, as far as is known. Raises Corrupt."""
        data = self._bytes()
        if not data.strip(b"\0"):  # a power cut may leave this
            return 0
        if len(data) != SIZE or xxhash.xxh3_64_digest(data[:16]) != data[16:]:
            raise Corrupt(
                f"{self.path} is damaged: it says which event of the log was acknowledged last, and does not verify. "
                f"Nothing was changed. {REPAIR}",
                key=str(self.path),
            )
        return int.from_bytes(data[8:16], "big") if data[:8] == log else 0

    def known(self, log: bytes) -> int:
        """As `read`; of a mark that is damaged nothing is known."""
        try:
            return self.read(log)
        except Corrupt:
            return 0

    def check_new(self) -> None:
        """Raise Missing if there was a log here: a new one in its place would hide that it is gone."""
        data = self._bytes()
        if data.strip(b"\0"):
            last = int.from_bytes(data[8:16], "big")
            raise Missing(
                f"there is no event log any more in {self.path.parent}, and {self.path} says that there was one, up to "
                f"event {last}. Nothing was changed; restore it from a copy, or remove {self.path} for a new log",
                key=str(self.path),
            )

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def note(self, log: bytes, puts: Sequence[Put]) -> None:
        """Say that these were committed."""
        if ids := [put.key.id for put in puts if put.key.space == EVENTS and put.key.fragment == 0]:
            self.write(log, ids[-1])

    def write(self, log: bytes, last: int) -> None:
        """Say that this is the last event."""
        start = log + last.to_bytes(8, "big")
        with suppress(OSError):  # it is only evidence
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, start + xxhash.xxh3_64_digest(start), 0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
