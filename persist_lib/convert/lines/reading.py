"""What decides how lines become rows: the part of the settings that parsers look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

EpochUnit = Literal["s", "ms", "us", "ns", "days"]
Changes = Literal["by-key", "before"]


class Reading(Protocol):
    """How lines are read. `epochs`: columns of moments that are numbers, and their unit."""

    @property
    def delimiter(self) -> str: ...
    @property
    def quote(self) -> str: ...
    @property
    def nulls(self) -> tuple[str, ...]: ...
    @property
    def encoding(self) -> str: ...
    @property
    def multiline(self) -> bool: ...
    @property
    def extra(self) -> Literal["refuse", "ignore"]: ...
    @property
    def missing(self) -> Literal["refuse", "null"]: ...
    @property
    def epochs(self) -> Mapping[str, EpochUnit]: ...
    @property
    def changes(self) -> Changes: ...
    def source(self, column: str) -> str:
        """The name that a column has in the lines."""
        ...
