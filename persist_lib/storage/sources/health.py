"""How the instances of a source are: a collection with a row each. It is about processes, so it is not definite."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from persist_lib.errors import PersistError
from persist_lib.schema.schema import Schema
from persist_lib.storage.sources.running import Progress
from persist_lib.storage.writer import CollectionWriter

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

Health = Literal["running", "lagging", "stalled", "paused", "failed", "stopped"]
SCHEMA = Schema(
    key={"instance": "string not null"},
    value={
        "state": "string not null", "why": "string not null", "up_to": "timestamp[ms, UTC]", "lag": "int64",
        "behind_ms": "int64", "messages": "int64 not null", "errors": "int64 not null", "held_back": "int64",
    },
    times="ms", unique=True,
)  # fmt: skip
EVERY_MS = 10_000
"""How often it is told that nothing has changed."""
LAGGING_MS = 60_000
"""An instance that finds more than it can make durable, and is behind the clock by that much, is lagging."""


class Report:
    """What one instance says of itself. That it cannot say so is no reason for it to stop."""

    def __init__(self, controller: Controller, collection: str, instance: str) -> None:
        self._controller, self._collection, self._instance = controller, collection, instance
        self._writer: CollectionWriter | None = None
        self._said: tuple[str, str] = ("", "")
        self._at = 0
        self.messages = self.errors = 0

    def progress(self, progress: Progress) -> None:
        """A step is done."""
        self.messages, self.errors = self.messages + progress.messages, self.errors + progress.errors
        is_lagging = bool(progress.lag) and progress.behind_ms > LAGGING_MS
        why = [f"{progress.behind_ms / 1000:,.0f} s behind"] if is_lagging else []
        why += [progress.warning] if progress.warning else []
        self.say("lagging" if why else "running", "; ".join(why), progress)

    def say(self, state: Health, why: str, progress: Progress | None = None) -> None:
        """Write a row, if it is another state than before, or the last one was a while ago."""
        now = self._controller.client.consensus.now()
        if (state, why) == self._said and now < self._at + EVERY_MS:
            return
        self._said, self._at = (state, why), now
        row: dict[str, object] = {
            "instance": self._instance, "state": state, "why": why[:2000], "messages": self.messages,
            "errors": self.errors, "up_to": None, "lag": None, "behind_ms": None, "held_back": None,
        }  # fmt: skip
        if progress is not None:
            moment = SCHEMA.moment(progress.time)
            row |= {"up_to": moment, "lag": sum(progress.lag.values()), "behind_ms": progress.behind_ms}
            row["held_back"] = progress.held_back
        with suppress(PersistError):
            if self._writer is None:
                name = self._controller.catalog.fetch().collections[self._collection].name
                self._writer = self._controller.open_writer(name)
            self._writer.upsert([row])

    def close(self) -> None:
        """Close what it has open. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
