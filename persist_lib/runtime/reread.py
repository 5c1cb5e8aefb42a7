"""What is made of files that others replace, such as certificates and tokens: made again when a file changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from persist_lib.errors import InvalidUsage

log = logging.getLogger("persist")
T = TypeVar("T")
Mark = tuple[int, int, int]


class Reread(Generic[T]):
    """A value that `make` makes of the bytes of some files. Safe to use from several threads.

    It is made again when a file was replaced or written to. If that fails, the last value stays in force until a file
    changes again, and a warning is logged: half of a change must not end what runs. Files that belong together are best
    replaced one right after the other, each by a rename.
    """

    def __init__(self, paths: Sequence[Path], what: str, make: Callable[[Sequence[bytes]], T]) -> None:
        """Raises InvalidUsage if a file cannot be read, or as `make` does. `what` names the files in that message."""
        self._paths, self._what, self._make = list(paths), what, make
        self._lock = threading.Lock()
        self._marks = self._look()
        self._value = self._read()
        self.failures = 0
        """How many versions of the files could not be read or were wrong."""
        self.is_stale = False
        """Whether the newest version was, so that a former one is in force."""

    def get(self) -> T:
        """The value by the files as they are now."""
        with self._lock:
            # Looked at before they are read, so that a change in between is seen the next time.
            marks = self._look()
            if marks != self._marks:
                self._marks = marks
                try:
                    self._value, self.is_stale = self._read(), False
                except InvalidUsage as error:
                    self.failures, self.is_stale = self.failures + 1, True
                    log.warning("%s; what was read before stays in force", error.message)
                else:
                    log.info("%s was read again", self._what)
            return self._value

    def _look(self) -> list[Mark | None]:
        return [_mark(path) for path in self._paths]

    def _read(self) -> T:
        try:
            found = [path.read_bytes() for path in self._paths]
        except OSError as error:
            raise InvalidUsage(f"{self._what} cannot be read: {error}") from error
        return self._make(found)


def _mark(path: Path) -> Mark | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
