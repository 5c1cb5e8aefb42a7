"""What is read or written, as messages and the fields of errors name it."""

from __future__ import annotations

from typing import NamedTuple


class Named(NamedTuple):
    """A shard, collection or table by its name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"shard {self.name}" if self.kind == "shard" else f"{self.kind} {self.name!r}"

    @property
    def fields(self) -> dict[str, str]:
        """The fields of errors about it."""
        return {self.kind: self.name}
