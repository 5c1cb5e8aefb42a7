"""What an event log is: the interface for programs (`Store`, `Writer`, `Reader`), and that of drivers (`RecordStore`).

An event is bytes under an id: 1, 2, 3 and so on, without gaps. A writer acknowledges it when it is durable. What holds
for every store (epochs, the chain, gaps, fragments, writing twice, snapshots, marks) is built once, above drivers.
A driver only keeps records by key.

A `Program` is what a user writes: a pure function of a state and an event, and how its effects are released. The loop
calls `step` once for each event, in their order, in a thread of its own; and again for the same events when it starts,
to have the state back. So `step` must depend on nothing but its arguments: no clock, no randomness, no files. What it
needs of the time is in the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec
import xxhash

from persist_lib.arguments import check_callable, parse_integer, parse_text, shown
from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import Resource

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Bytes of a caller. A writer does not copy them, so they may not change before the future is resolved."""


MOST_ID = (1 << 63) - 1


class Event(NamedTuple):
    """One event of a log. `payload` is a view that dies with the next step of the loop, or with the block."""

    id: int
    payload: memoryview


class Writer(Resource, Protocol):
    """The one writer of a log. A newer writer fences it: from then on it acknowledges nothing more.

    One failure ends it: the events that it had accepted and not acknowledged fail too, and so does every later call.
    What became of them is known to the next writer, which finds each either in the log or not.
    """

    @property
    def last(self) -> int:
        """The id of the last durable event, 0 if there is none."""

    @property
    def accepted(self) -> int:
        """The id of the last event that was accepted, durable or not yet."""

    @property
    def epoch(self) -> int:
        """The number of this writer. Each has a higher one than all before it."""

    def write(self, id: int, payload: Buffer, *, timeout: float | None = None) -> Future[None]:  # noqa: A002
        """Accept an event. The future is resolved when it and all before it are durable, in the order of ids.

        `id` is `accepted + 1`. An id that was written before is accepted if the bytes are the same, and nothing is
        written; otherwise the future raises AlreadyWritten. The payload is not copied and may not change until then.

        Waits while as many events, or bytes, are under way as the writer takes; at most `timeout` seconds (None: no
        limit), then it raises BufferFull. Raises InvalidUsage for an id that would leave a gap, and for a writer that
        was closed. Raises NotSent if the writer has failed before: nothing of this event is written.

        The future raises Fenced if another writer took over (its message says whether this event may be in the log),
        NotSent if an earlier event failed (nothing of this one is in the log), Determinate if it certainly is not in
        the log, and Indeterminate if that is not known.
        """

    def write_snapshot(self, event_id: int, state: Buffer) -> Future[None]:
        """Keep the state as it is after the event `event_id`, which was accepted. The future: as that of `write`.

        It becomes durable after the event. The two newest snapshots are kept. One that fails ends the writer.
        """

    def write_mark(self, name: str, value: Buffer) -> Future[None]:
        """Replace the small value that is kept under a name (letters, digits, `-`, `_`). The future: as of `write`.

        Marks are durable in the order of the calls, and after what was written before them.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was accepted is durable. Raises what ended the writer, and TimedOut after `timeout` s."""

    def close(self, timeout: float | None = None) -> None:
        """Finish what was accepted, and accept no more. Idempotent. Safety does not depend on it."""


class Reader(Resource, Protocol):
    """Reads a log, of which it holds nothing. Used by one thread at a time."""

    @property
    def last(self) -> int:
        """The id of the last event as of opening, or of the last `refresh`; 0 if there is none."""

    def refresh(self) -> int:
        """Look for events that were written since. Returns `last`."""

    def read(self, id: int) -> AbstractContextManager[memoryview]:  # noqa: A002
        """Give the payload of one event, as a view of the store's own memory where the store can (LMDB).

        At the end of the block the view is released: using it then raises ValueError. A slice of it that is still there
        raises InvalidUsage at the end of the block. Raises NotFound if there is no such event, and Corrupt if what is
        there is not what was written.
        """

    def replay(self, from_id: int = 1, through: int | None = None) -> Iterator[Event]:
        """Yield the events from `from_id` through `through` (None: `last`), in bounded memory. Checks the chain.

        The payload of an event is released with the next step. Raises Missing if an event is not there, and Corrupt
        if one is not what was written there.
        """

    def newest_snapshot(self, at_most: int | None = None) -> tuple[int, bytes] | None:
        """The newest state that was kept and the event that it follows, which is `at_most` (None: `last`) or before.

        None if there is none. One that is damaged, or of another history than the log's, is passed over.
        """

    def read_mark(self, name: str) -> bytes | None:
        """The value that was last kept under this name; None if there is none."""


class Store(Resource, Protocol):
    """Where an event log is. Making one does no I/O."""

    def writer(self, *, owner: str = "") -> Writer:
        """Become the writer: make the log if there is none, claim an epoch, and discard what lies beyond the first gap.

        The writer before is fenced from then on, also if it was paused and continues later. `owner` is a text for
        people. Raises NewerFormat, before anything is changed, for a log of a newer release.
        """

    def reader(self) -> Reader:
        """Open the log for reading, which changes nothing. Raises NotFound if there is none, and NewerFormat."""

    @property
    def records(self) -> RecordStore:
        """The driver, opened for reading. Raises as `reader`."""

    def close(self) -> None:
        """Close the driver. Close writers and readers first. Idempotent."""


EVENTS = "events"
"""The space of the events. Other spaces hold snapshots and marks."""


class Key(NamedTuple):
    """Under what a record is kept: `<id>:<fragment>` in its space. Ids and fragments are unsigned integers."""

    space: str
    id: int
    fragment: int

    def __str__(self) -> str:
        return f"{self.id}:{self.fragment}" if self.space == EVENTS else f"{self.space} {self.id}:{self.fragment}"


class Put(NamedTuple):
    """A record to keep: `head`, at most some 80 bytes, and then `body`. They come apart, to be copied nowhere."""

    key: Key
    head: bytes
    body: Buffer


class Held:
    """A record that was read. `head` begins with the head, `body` is the rest. `release` ends the life of `body`."""

    __slots__ = ("body", "key", "record")

    def __init__(self, key: Key, record: memoryview, body: memoryview | None = None) -> None:
        """`record` is the whole record, or only its head if the driver keeps the `body` apart."""
        self.key, self.record, self.body = key, record, body

    def release(self) -> None:
        """End the life of the views."""
        self.record.release()
        if self.body is not None:
            self.body.release()


class Records(Protocol):
    """Records of opaque bytes by key. Readers, also of other processes, may read while one thread writes.

    Failures of the world are Determinate (it certainly did not happen), Indeterminate (it may have happened) and
    Damage, as in `persist_lib.location.api`.
    """

    limit: int | None
    """The most bytes of a record, head and body together. None: no limit."""
    log: bytes
    """Eight random bytes that were drawn when the log was made."""

    def claim(self, owner: str) -> int:
        """Return an epoch above all before it, durably.

        From the return on, no write of a lower epoch changes what is there of the events.
        """

    def get(self, key: Key) -> Held | None:
        """Return a record, or None when there is none. One request."""

    def ids(self, space: str) -> list[int]:
        """The ids of a space other than that of the events of which fragment 0 is there, ascending. They are few."""

    def close(self) -> None:
        """Release connections and files. Idempotent."""


class RecordStore(Records, Protocol):
    """Keeps records durably. What third parties implement."""

    def last(self) -> int:
        """The greatest id such that fragment 0 of it and of each id before it is there; 0 if there is none."""

    def discard(self, epoch: int, last: int) -> None:
        """Durably remove all events above `last`. It is called before the first `put` of an epoch. Raises Fenced."""

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        """Keep records, durably on return. Raises Fenced, with nothing changed, if a higher epoch was claimed.

        Ids continue those that are there. Fragment 0 of an id comes after its other fragments, and may be kept only
        together with them or later. Records of other spaces come last, replace what is there, and may be kept only
        together with the events or later. If it raises, any number of them may be kept, unless it raises Determinate.
        """

    def remove(self, epoch: int, space: str, below: int) -> None:
        """Remove all records of a space other than that of the events with an id below `below`. Raises Fenced."""


@runtime_checkable
class Scans(Protocol):
    """An optional protocol of a RecordStore: it reads many events faster than one by one."""

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        """Yield the records of the events in `[from_id, through]`, by id and then by fragment, in bounded memory.

        A record may be released, or reused, with the next step. Records that are not there are left out.
        """


@runtime_checkable
class Verifies(Protocol):
    """An optional protocol of a RecordStore, or a Reader: it checks what reading the events alone does not touch."""

    def verify(self) -> None:
        """Raise Damage unless all is as it was written. It may read everything."""


@runtime_checkable
class Mends(RecordStore, Protocol):
    """An optional protocol of a RecordStore: `discard` may be called with fewer events than there are."""

    def find_last(self) -> int:
        """The same as `last`, whatever else says that there were more."""

    def known_last(self) -> int:
        """The last event that was there once, as far as anything beside the events says; 0 if nothing does."""

    def forget_end(self) -> None:
        """Let nothing say any more that there were events behind `find_last`. It is called before `claim`."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a driver is opened: with `create`, a log that is not there is made. Ambient things come from `runtime`."""

    create: bool = False
    runtime: Runtime = field(default_factory=Runtime)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of store: how it is opened, from the options after its name in a specifier.

    `open` raises InvalidUsage for wrong options, NotFound when there is no log unless it may create one, and
    NewerFormat. `options` says in a few words what options there are. Third parties add kinds as entry points of the
    group `persist.events`: the name is the kind, the object a `Kind`.
    """

    open: Callable[[Sequence[str], Opening], RecordStore]
    options: str = ""


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
