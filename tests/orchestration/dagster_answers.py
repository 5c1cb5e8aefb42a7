"""What a running `dagster dev` answers over GraphQL, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FINISHED = ("SUCCESS", "FAILURE", "CANCELED")


@dataclass(frozen=True)
class Event:
    """One entry of a run's log. `error` is the whole chain of messages, if there is one."""

    kind: str
    message: str
    level: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Run:
    """A run as the UI shows it."""

    id: str
    job: str
    status: str
    tags: Mapping[str, str]
    config: str
    parent: str | None
    started: float | None
    ended: float | None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in FINISHED


def key_of(asset: str) -> dict[str, list[str]]:
    """An asset's key as GraphQL takes it; `prefix/name` has two parts."""
    return {"path": asset.split("/")}


def run_from(found: Mapping[str, Any]) -> Run:
    """A run from an answer."""
    assert "runId" in found, "there is no such run"
    return Run(
        id=found["runId"], job=found["jobName"], status=found["status"],
        tags={tag["key"]: tag["value"] for tag in found["tags"]}, config=json.dumps(found["runConfig"]),
        parent=found["parentRunId"], started=found["startTime"], ended=found["endTime"],
    )  # fmt: skip


def event_from(found: Mapping[str, Any]) -> Event:
    """An event from an answer."""
    error, messages = found.get("error"), []
    while error:
        messages.append(error["message"])
        error = error.get("cause")
    return Event(
        kind=found.get("eventType") or found["__typename"], message=found.get("message") or "",
        level=found.get("level") or "", seconds=float(found.get("timestamp") or 0) / 1000, error="\n".join(messages),
    )  # fmt: skip


def text_of(events: Sequence[Event]) -> str:
    """A log as text."""
    return "\n".join(f"{one.seconds:.1f} {one.level} {one.message} {one.error}".rstrip() for one in events)
