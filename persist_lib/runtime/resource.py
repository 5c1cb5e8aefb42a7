"""The base of what is open until it is closed."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Protocol, Self


class Resource(Protocol):
    """An object that is open until `close`, and that a `with` block closes at its end.

    An error of the block is raised as it is, also if `close` fails after it: what the failure says is added as a note.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what is held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing failed as well: {type(failure).__name__}: {failure}")
