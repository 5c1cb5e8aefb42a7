"""What an append goes under: the id of its writer, its times, and its token.

The id is that of a handle or a worker: registered when it is first needed, kept alive, and retired at the end. Calls
at the next time take a time for their caller, and name it in their token.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple, Self

from msgspec.structs import replace

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.outcomes import last_of, time_after
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, State, Version
from persist_lib.errors import (
    ClockAhead,
    Determinate,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    SchemaMismatch,
    TimedOut,
)
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo, WriterId, format_writer_id, parse_token
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Built
from persist_lib.shard.commit import Build, Committed, Machine
from persist_lib.shard.leases import Leases, Registering, was_closed
from persist_lib.times import Times, show_duration, show_time

_TOKEN = struct.Struct(">4sQQ16s")
_MARK = b"next"
_SINCE = struct.Struct(">4sQ16s")
_MARK_SINCE = b"past"
_MARK_STAGED = b"here"


FAR_MS = 86_400_000
"""How far one machine's clock may be ahead of another's: beyond that one of them is wrong, and not just unprecise."""


def next_time(
    schema: Schema, what: str, upper: Antichain, runtime: Runtime, store_now: Callable[[], int]
) -> int:  # fmt: skip
    """The time at which a call writes that leaves the choice to the library: of a clock now, but never before upper;
    otherwise upper. `what` is written is for messages: `shard orders`.

    A clock that goes back, or is behind another machine's, gives upper. Raises ClockAhead where this process's clock is
    days ahead of the store's, InvalidUsage where the shard is closed for writing, and at the end of all times: of a
    clock, at the end of the year 9999.
    """
    own = 0 if schema.times is None else runtime.clock_ms()
    if (found := time_after(upper, schema.times, own)) is not None:
        if found != upper.time and schema.times is not None:
            check_clock(what, own, store_now(), FAR_MS, "this machine's clock")
        return found
    ends = "the shard is closed for writing" if upper.is_top() else "its times end there"
    raise InvalidUsage(
        f"{what}: upper is {schema.show(upper)}, and {ends}, so there is no next time to write at. This call "
        "wrote nothing; write to another shard",
        shard=what.partition(" ")[2], upper=upper,
    )  # fmt: skip


def store_time(what: str, upper: int, now: int, own: int, most_ms: int = FAR_MS) -> int:
    """The next time by the store's clock `now`, in ms, which gives upper where it goes back.

    `own` is this machine's clock. Raises ClockAhead where upper is more than `most_ms` ahead, as the store's clock was
    wrong once, and where that is days ahead now: what is written there puts off all that follows.
    """
    check_clock(what, upper, now, most_ms, "its upper")
    check_clock(what, now, own, FAR_MS, "the store's clock", "this machine's clock")
    return max(upper, now)


def check_clock(
    what: str, found: int, clock: int, most_ms: int, whose: str, clock_of: str = "the store's clock"
) -> None:  # fmt: skip
    """Raise ClockAhead if a time, in ms, is further ahead of a clock than that."""
    if found > clock + most_ms:
        ahead = show_duration((found - clock) // 1_000 * 1_000, "ms")
        raise ClockAhead(
            f"{what}: {whose} is at {show_time(found, 'ms')}, which is {ahead} ahead of {clock_of} "
            f"({show_time(clock, 'ms')}). Nothing was written. Correct the clock that is wrong; if a wrong one was "
            "used before, wait until the right one has passed that time",
            found=found, clock=clock,
        )  # fmt: skip


def format_token(runtime: Runtime, lower: Antichain, upper: Antichain) -> bytes:
    """A fresh token that carries the bounds of its append, as the caller does not know them."""
    return _TOKEN.pack(_MARK, lower.time or 0, upper.time or 0, runtime.token())


def bounds_of(token: object) -> tuple[bytes, Antichain, Antichain]:
    """The token of an earlier call, and the bounds of its append. Raises InvalidUsage for any other token."""
    known = parse_token(token)
    if len(known) == _TOKEN.size and known.startswith(_MARK):
        _, lower, upper, _ = _TOKEN.unpack(known)
        if lower < upper:
            return known, at(lower), at(upper)
    raise InvalidUsage(
        "this call takes only a token that the Indeterminate of such a call carries, as it also tells the times. "
        "Leave it out in the first call; to choose a token yourself, use compare_and_append",
        token=token,
    )


def is_chosen(token: bytes) -> bool:
    """Whether the library chose the time of the append with this token."""
    marks = {_TOKEN.size: _MARK, _SINCE.size: _MARK_SINCE, len(_MARK_STAGED) + 16: _MARK_STAGED}
    return token[: len(_MARK)] == marks.get(len(token))


def staged_token(digest: bytes, *, chosen: bool) -> bytes:
    """The token of an append of staged answers, of which this is the digest; it says whether its time was chosen."""
    return _MARK_STAGED + digest if chosen else digest


def format_since(runtime: Runtime, since: SeqNo) -> bytes:
    """A fresh token of an append at the next time, which carries a version that does not have it."""
    return _SINCE.pack(_MARK_SINCE, since, runtime.token())


def since_of(token: bytes) -> SeqNo | None:
    """The version that a token of `format_since` carries; None for any other token."""
    if len(token) == _SINCE.size and token.startswith(_MARK_SINCE):
        return SeqNo(_SINCE.unpack(token)[1])
    return None


class Named(NamedTuple):
    """An append at one time: its token, and the bounds that this carries."""

    token: bytes
    lower: Antichain
    upper: Antichain

    @classmethod
    def of(cls, token: object) -> Self | None:
        """That of an earlier call, by its token. Raises InvalidUsage for a token that carries no bounds."""
        return None if token is None else cls(*bounds_of(token))

    @classmethod
    def fresh(cls, runtime: Runtime, lower: Antichain, time: int) -> Self:
        """One with a token that nothing else has."""
        return cls(format_token(runtime, lower, at(time + 1)), lower, at(time + 1))

    @property
    def time(self) -> int:
        return (self.upper.time or 1) - 1


def undoubted(shard: str, error: Indeterminate, what: str = "") -> Determinate:
    """The error for an append that was never sent, because a step before it failed. Only that step is in doubt."""
    return Determinate(
        f"{what or f'shard {shard}'}: this call appended nothing, as a step before the append failed: {error.message}. "
        "Try again",
        shard=shard,
    )


def outrun(machine: Machine, schema: Schema, deadline: Deadline, races: int, what_else: str = "") -> TimedOut:
    """The error for a call that other writers were faster than until its deadline passed."""
    shard, upper = machine.shard, machine.state.upper
    return TimedOut(
        f"shard {shard}: gave up after {deadline.timeout_s:g} s, as other writers were first {races} times; upper is "
        f"{schema.show(upper)} now. This call wrote nothing. Try again, with a longer timeout{what_else}",
        shard=shard, timeout_s=deadline.timeout_s, upper=upper,
    )  # fmt: skip


def check_newest(machine: Machine, schema: Schema, state: State) -> None:
    """Raise SchemaMismatch unless `schema` is the shard's newest: an older one cannot retract all of a row."""
    newest = state.schemas[-1]
    if newest != schema:
        raise SchemaMismatch(
            f"shard {machine.shard} has the schema {newest} by now, and this writer has {schema}, which cannot say all "
            "of the rows that are to be replaced. Nothing was written; open a writer with the newest schema",
            shard=machine.shard, actual=newest, expected=schema,
        )  # fmt: skip


def inline_room(machine: Machine, state: State) -> int:
    """How many bytes an inline batch may have now."""
    room = INLINE_TOTAL_BYTES - state.inline_size
    return min(machine.config.inline_bytes, max(room, INLINE_TOTAL_BYTES // 2))


def check_produced(machine: Machine, producer: tuple[str, int] | None) -> None:
    """Raise AlreadyProduced before anything is uploaded, if the shard has this append of the producer already.

    The version that this process knows says so without a request; where it does, it is read again.
    """
    if (
        producer is not None
        and last_of(machine.state, *producer)
        and (last := last_of(machine.fetch().state, *producer))
    ):
        raise machine.refused(r.AlreadyProduced(*producer, last))


def parse_bounds(lower: object, upper: object, times: Times) -> tuple[Antichain, Antichain]:
    """The bounds of an append as frontiers. Raises InvalidUsage when they are not frontiers, or not in order."""
    low, up = times.frontier(lower, "expected_upper"), times.frontier(upper, "new_upper")
    if not low < up:
        raise InvalidUsage(
            f"an append covers times from its lower to below its upper, so {times.show(low)} must be before "
            f"{times.show(up)}",
            lower=low,
            upper=up,
        )
    return low, up


def whole(built: Built, _state: State) -> Batch:
    """The batch as it was built: it is registered unchanged."""
    return built.batch


class Registration:
    """At most one writer id at a time, for one handle or worker, which guards it.

    `purpose` and `owner` are for people to read, `layer` is the one that this id appends for. A `judge` raises for a
    version after which it must not be registered: the registration is the transition after one that it let pass.
    Its lease is kept up from its registration until it is forgotten or
    closed. When the handle is dropped without `close`, the id is abandoned, and the thread that keeps leases
    up retires it.
    """

    def __init__(
        self, machine: Machine, leases: Leases, purpose: Literal["ingest", "maintenance"], owner: str = "",
        layer: str = "",
        judge: Callable[[Version], object] | None = None,
    ) -> None:  # fmt: skip
        self._machine = machine
        self.owner, self.layer, self._judge = owner, layer, judge
        self._leases = leases
        self._purpose = purpose
        self._id: WriterId | None = None
        self._dropped: weakref.finalize[..., Registration] | None = None
        self.is_closed = False

    @property
    def has_id(self) -> bool:
        """Whether an id is registered, as far as this process knows."""
        return self._id is not None

    @property
    def id(self) -> WriterId:
        """The id. Registers one, within the timeout of the settings, if there is none. Raises as `register` does."""
        return self.register(self._machine.runtime.deadline(self._machine.config.timeout_s))

    def register(self, deadline: Deadline, note: Callable[[Committed], object] | None = None) -> WriterId:
        """The id. Registers one if there is none, and then calls `note` with what was committed.

        Raises LeaseExpired after `close`, TimedOut after the deadline.
        """
        if self.is_closed:
            raise self.closed_already()
        if self._id is None:
            if deadline.has_passed():  # without time left for an answer, the registration would only be in doubt
                shard, why = self._machine.shard, "as the steps before its registration took that long"
                raise deadline.gave_up(f"shard {shard}", why, shard=shard)
            fresh = format_writer_id(self._machine.runtime.entropy())
            lease_ms, said = self._machine.config.lease_ms, (self.owner, self.layer)

            def build(_state: State, now: int) -> c.RegisterWriter:
                made = c.RegisterWriter(fresh, self._purpose, now + lease_ms, *said)
                if self._judge is None:
                    return made
                self._judge(version := self._machine.version)  # it is `_state`'s, as the committing thread has the turn
                return replace(made, at=SeqNo(version.seqno + 1))

            self._leases.prepare()
            with Registering(self._leases, self._machine, fresh):
                committed = self._commit(build, deadline)
                self._leases.keep(self._machine, fresh)
                self._dropped = weakref.finalize(self, self._leases.abandon, self._machine, fresh)
                self._dropped.atexit = False
                self._id = fresh
            if note is not None:
                note(committed)
        return self._id

    def _commit(self, build: Build, deadline: Deadline) -> Committed:
        return self._machine.commit(build, deadline.remaining_s())

    def closed_already(self) -> LeaseExpired:
        return was_closed(self._machine, "writer")

    def forget(self) -> None:
        """Stop using the id, as it is not live any more. The next call that needs an id registers a new one."""
        forgotten, self._id = self._id, None
        if self._dropped is not None:
            self._dropped.detach()
        if forgotten is not None:
            self._leases.drop(self._machine, forgotten)

    def close(self) -> None:
        """Retire the id, and never register another one. Idempotent."""
        self.is_closed = True
        self.retire()

    def retire(self) -> None:
        """Retire the id, if there is one. The next call that needs an id registers a new one."""
        if self._id is not None:
            self._leases.retire(self._machine, self._id)
            self.forget()  # last: after an interrupt, the next call retires the id


class Lent(Registration):
    """A writer id that another process registered, for as long as it is live. No other id ever takes its place."""

    def __init__(self, machine: Machine, leases: Leases, writer: WriterId) -> None:
        super().__init__(machine, leases, "ingest")
        self._id = self.lent = writer

    def register(self, _deadline: Deadline, _note: Callable[[Committed], object] | None = None) -> WriterId:
        """The id. Raises LeaseExpired when it was found not to be live any more."""
        if self._id is None:
            raise lease_ended(self._machine, self.lent)
        return self._id


def lease_ended(machine: Machine, writer: str) -> LeaseExpired:
    """The error where the id under which tasks wrote parts has ended, so that they can never be appended."""
    return LeaseExpired(
        f"shard {machine.shard}: the lease of the stage {writer} has ended, so what was written under it may be "
        "deleted at any time, and can never be appended. Nothing was appended. Write again, with a longer lease "
        "(lease_s) if the tasks have to wait for long before they write",
        id=writer, shard=machine.shard,
    )  # fmt: skip
