"""A file over ranges of bytes, as readers of Parquet need one."""

from __future__ import annotations

import io
from collections.abc import Callable


class Seekable(io.RawIOBase):
    """A read-only, seekable file of `size` bytes. `fetch` returns the bytes `[start, end)`."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch, self._at = size, fetch, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read starts."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as files do."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, or all that are left."""
        found = self._fetch(self._at, self._size if size < 0 else min(self._at + size, self._size))
        self._at += len(found)
        return found
