"""Tables for tests: a location in memory or on files, and short ways to write and read."""

from __future__ import annotations

import persist_lib as persist
from persist_lib.timeline import Tables

SCHEMA = persist.Schema({"id": "int64 not null"}, {"cents": "int64"})
UNIQUE = persist.Schema({"id": "int64 not null"}, {"cents": "int64"}, unique=True)


def rows(*pairs: tuple[int, int | None]) -> list[dict[str, int | None]]:
    return [{"id": id_, "cents": cents} for id_, cents in pairs]


def read(tables: Tables, name: str, as_of: int | None = None) -> dict[int, int]:
    """The rows of a table whose keys are unique."""
    found = tables.read(name, as_of, diff=True).to_pylist()
    assert all(row["_diff"] == 1 for row in found)
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["cents"] for row in found}
