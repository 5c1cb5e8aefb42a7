"""The same for many things, of which one may be bad: it stops none of the others, and is named at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from persist_lib.errors import Busy, Damage, Determinate, Indeterminate, PersistError

T = TypeVar("T")


@dataclass
class Each(Generic[T]):
    """The answers by name, and the errors of those that have none."""

    done: dict[str, T] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)

    def add(self, names: Iterable[str], do: Callable[[str], T], kind: type[Exception] = Exception) -> Self:
        """Call `do` with each name, whatever becomes of the others. An error that is not of this kind ends it."""
        for name in names:
            try:
                self.done[name] = do(name)
            except kind as error:
                self.failed[name] = error
        return self

    @property
    def why(self) -> Mapping[str, str]:
        return {name: why(error) for name, error in self.failed.items()}

    def check(self, what: str, done: Any = None) -> None:
        """Raise an error of the gravest failure's kind that names all failures, if there is any.

        `what` says of what, with {} for how many of how many. The error's field `failed` has the messages by name, and
        its field `done` the answers by name, or what is given.
        """
        if not self.failed:
            return
        gravest = min(self.failed.values(), key=_gravity)
        if not isinstance(gravest, PersistError):
            raise gravest
        counts = what.format(f"{len(self.failed)} of {len(self.failed) + len(self.done)}")
        others = f"the others were done: {', '.join(self.done)}" if self.done else "none was done"
        reasons = " ".join(f"{name}: {says}." for name, says in self.why.items())
        fields = {"failed": {name: str(error) for name, error in self.failed.items()}, "done": done or self.done}
        raise type(gravest)(f"{counts} failed, {others}. {reasons}", **{**gravest.fields, **fields}) from gravest


def why(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def _gravity(error: Exception) -> int:
    """The rank of an error: damage first, then failures of stores and networks, then the rest, and Busy last."""
    kinds = (Damage, Indeterminate, Determinate)
    rest = len(kinds) + isinstance(error, Busy)
    return next((rank for rank, kind in enumerate(kinds) if isinstance(error, kind)), rest)
