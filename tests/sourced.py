"""A world with a source in it: what tests do to a source, whatever it reads."""

from __future__ import annotations

from typing import Any

from persist_lib.sources import Sources
from tests.worlds import World


class Sourced:
    """A location with its sources. `name` is the source that a test is about."""

    name = "s"

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.sources = Sources(self.world.client().controller())
        self.controller = self.sources.controller

    def catch_up(self, sources: Sources | None = None) -> Any:
        """Ingest what is there a second later."""
        self.world.clock.advance(1)
        return (sources or self.sources).run(self.name, until_idle=True)

    def contents(self, name: str = "", as_of: int | None = None) -> list[dict[str, Any]]:
        """The rows of a collection with their diffs, always in the same order."""
        with self.controller.open_reader(name or self.name) as reader, reader.snapshot(as_of, diff=True) as snapshot:
            return sorted(snapshot.to_pylist(), key=repr)

    def words(self, as_of: int | None = None) -> dict[Any, Any]:
        return {row["id"]: row["word"] for row in self.contents(as_of=as_of)}

    def close(self) -> None:
        self.world.close()
