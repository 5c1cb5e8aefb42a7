"""What a user writes: a pure function of a state and an event, and how its effects are released.

The loop calls `step` once for each event, in their order, in a thread of its own; and again for the same events when it
starts, to have the state back. So `step` must depend on nothing but its arguments: no clock, no randomness, no files.
What it needs of the time is in the event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import xxhash

from persist_lib.arguments import check_callable, parse_integer, parse_text, shown
from persist_lib.errors import InvalidUsage

State = TypeVar("State")
LONGEST = 200
"""Characters of a version."""


class Input(msgspec.Struct, frozen=True):
    """An event as `step` gets it: its id, and its bytes."""

    id: int
    payload: bytes


class Effect(msgspec.Struct, frozen=True):
    """Something that had to wait for its event: the event's id, its number among the event's effects, and its value.

    `key` is the same each time the effect is released, and no other effect has it. Receivers drop what they have seen.
    """

    event_id: int
    number: int
    value: Any
    digest: int
    """Of the event's bytes, 64 bits."""

    @property
    def key(self) -> str:
        """The event's id, the effect's number, and the digest of the event, as in `17.0.9c1d3a5be0f2a477`.

        Ids come up again where a log was restored from an older copy. The digest tells such effects apart.
        """
        return f"{self.event_id}.{self.number}.{self.digest:016x}"


@dataclass(frozen=True, slots=True)
class Program(Generic[State]):
    """A program for the event loop.

    - `step(state, event)` returns the next state and a list of effects. It is pure. It may change the state that it
      gets and return that, as no other code has it. It refuses an event by an effect, never by an exception: an event
      that it raises on is in the log for good, and stops this start and each one that follows.
    - `initial()` makes the state before the first event.
    - `release(effect)` lets one effect out, and returns when that is done. It is called in the order of the events, by
      one thread, and at least once for each effect. If it raises, the loop stops.
    - `encode(state)` and `decode(data)` turn a state into bytes and back. With them the loop stores a snapshot of the
      state after every `snapshot_every` events and when it stops, so that a start need not compute all events again.
    - `version` names what `encode` writes. Snapshots of another version are passed over: change it when `step` or the
      state changes, and the next start computes the state from all events.
    """

    step: Callable[[State, Input], tuple[State, Sequence[object]]]
    initial: Callable[[], State]
    release: Callable[[Effect], object]
    encode: Callable[[State], bytes] | None = None
    decode: Callable[[bytes], State] | None = None
    snapshot_every: int = 10_000
    version: str = "1"

    def __post_init__(self) -> None:
        check_callable(self.step, "step", "a state and an event")
        check_callable(self.initial, "initial", "nothing")
        check_callable(self.release, "release", "an effect")
        if (self.encode is None) != (self.decode is None):
            raise InvalidUsage("encode and decode go together: give both, or none for a program without snapshots")
        if self.encode is not None:
            check_callable(self.encode, "encode", "a state")
            check_callable(self.decode, "decode", "bytes")
        object.__setattr__(self, "snapshot_every", parse_integer(self.snapshot_every, "snapshot_every", 1))
        parse_text(self.version, "version", LONGEST)


def compute(program: Program[State], state: State, event: Input) -> tuple[State, list[Effect]]:
    """Apply one event: the next state, and its effects. Raises what `step` raises, and InvalidUsage for an answer that
    is no pair of a state and a list of effects.
    """
    answer = program.step(state, event)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise InvalidUsage(
            f"event {event.id}: step must return the next state and a list of effects, as in `return state, []`: got "
            f"{shown(answer)}",
            event_id=event.id,
        )  # fmt: skip
    after, values = answer
    if not isinstance(values, (list, tuple)):
        raise InvalidUsage(
            f"event {event.id}: step must return its effects as a list, which may be empty: got {shown(values)}",
            event_id=event.id,
        )
    if not values:
        return after, []
    digest = xxhash.xxh3_64_intdigest(event.payload)
    return after, [Effect(event.id, number, value, digest) for number, value in enumerate(values)]


def encode_snapshot(program: Program[State], state: State) -> bytes:
    """A state as it is stored: the program's version, a zero byte, and what `encode` makes of the state."""
    data = program.encode(state) if program.encode is not None else None
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidUsage(f"encode must return bytes: got {shown(data)}")
    return b"\0".join((program.version.encode(), data))


def decode_snapshot(program: Program[State], stored: bytes) -> tuple[State] | None:
    """The state of a stored snapshot, in a tuple; None if another version of the program wrote it."""
    version, _, data = stored.partition(b"\0")
    if program.decode is None or version != program.version.encode():
        return None
    return (program.decode(data),)
