"""One event on its way through the loop: four explicit flags, and what its submitter is told in the end."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass, field

import msgspec

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.events.program import Effect
from persist_lib.runtime.threads import Future


class Done(msgspec.Struct, frozen=True):
    """An event that is durable and computed, and whose effects are released: its id, and those effects."""

    event_id: int
    effects: tuple[Effect, ...]


class EventFuture(Future[Done]):
    """The future of a submitted event. It cannot be cancelled. `event_id` is known at once, and is not durable yet."""

    def __init__(self, event_id: int) -> None:
        super().__init__()
        self.event_id = event_id
        self.set_running_or_notify_cancel()


@dataclass(slots=True, eq=False)
class Submitted:
    """One accepted event.

    Computing and persisting have nothing to do with one another: each is submitted, and done at some later moment. Only
    when both are done are the effects released. `failure` is why one of the two never will be.
    """

    id: int
    payload: bytes
    through_bytes: int
    """How many bytes were accepted up to and with this event, since the loop was opened."""
    future: EventFuture
    computing_submitted: bool = False
    computing_done: bool = False
    persisting_submitted: bool = False
    persisting_done: bool = False
    effects: list[Effect] = field(default_factory=list)
    failure: BaseException | None = None
    persisting: futures.Future[None] | None = None
    """What the store answered."""

    @property
    def is_releasable(self) -> bool:
        """Whether its effects may be released, once those of all events before it are."""
        return self.computing_done and self.persisting_done


def payload_of(event: object) -> bytes:
    """The event's bytes, which nobody else can change. Raises InvalidUsage for anything else."""
    if isinstance(event, (bytes, bytearray, memoryview)):
        return bytes(event)
    hint = "; encode the text first" if isinstance(event, str) else ""
    raise InvalidUsage(f"event must be bytes: got {shown(event)}{hint}", argument="event", value=event)
