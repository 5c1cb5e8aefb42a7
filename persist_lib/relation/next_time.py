"""The time that a call takes for its caller, and the token that such a call's append has."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, Self, TypeVar

import pyarrow as pa

from persist_lib.core.placing import time_after
from persist_lib.errors import ClockAhead, InvalidUsage, LeaseExpired, PersistError
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo, parse_token
from persist_lib.kernel.by_key import Counts
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.outcomes import Verdict, forgotten
from persist_lib.times import show_duration, show_time

_TOKEN = struct.Struct(">4sQQ16s")
_MARK = b"next"
_SINCE = struct.Struct(">4sQ16s")
_MARK_SINCE = b"past"


FAR_MS = 86_400_000
"""How far one machine's clock may be ahead of another's: beyond that one of them is wrong, and not just unprecise."""


def next_time(
    schema: Schema, shard: str, upper: Antichain, runtime: Runtime, store_now: Callable[[], int]
) -> int:  # fmt: skip
    """The time at which a call writes that leaves the choice to the library: of a clock now, but never before upper;
    otherwise upper.

    A clock that goes back, or is behind another machine's, gives upper. Raises ClockAhead where this process's clock is
    days ahead of the store's, InvalidUsage where the shard is closed for writing, and at the end of all times: of a
    clock, at the end of the year 9999.
    """
    own = 0 if schema.times is None else runtime.clock_ms()
    if (found := time_after(upper, schema.times, own)) is not None:
        if found != upper.time and schema.times is not None:
            check_clock(f"shard {shard}", own, store_now(), FAR_MS, "this machine's clock")
        return found
    ends = "the shard is closed for writing" if upper.is_top() else "its times end there"
    raise InvalidUsage(
        f"shard {shard}: upper is {schema.show(upper)}, and {ends}, so there is no next time to write at. This call "
        "wrote nothing; write to another shard",
        shard=shard, upper=upper,
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
    return since_of(token) is not None or (len(token) == _TOKEN.size and token.startswith(_MARK))


def format_since(runtime: Runtime, since: SeqNo) -> bytes:
    """A fresh token of an append at the next time, which carries a version that does not have it."""
    return _SINCE.pack(_MARK_SINCE, since, runtime.token())


def since_of(token: bytes) -> SeqNo | None:
    """The version that a token of `format_since` carries; None for any other token."""
    if len(token) == _SINCE.size and token.startswith(_MARK_SINCE):
        return SeqNo(_SINCE.unpack(token)[1])
    return None


Call = TypeVar("Call")
Basis = TypeVar("Basis")
Answer = TypeVar("Answer")


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
        """The time of its updates."""
        return (self.upper.time or 1) - 1


class Turn(NamedTuple, Generic[Basis]):
    """What is to be appended at an upper: updates without times, what they amount to by key, and what they rest on."""

    lower: Antichain
    changes: pa.Table
    counts: Counts
    basis: Basis


class AtNextTime(ABC, Generic[Call, Basis, Answer]):
    """What writes at the next time: the loop, and the steps of it that a shard and a collection do each in their way.

    `Call` is what a call brings to its steps.
    """

    def _at_next_time(self, call: Call, known: Named | None, deadline: Deadline, *, is_dry: bool = False) -> Answer:
        """Append what the newest contents ask for, at the next time; again if another writer was first.

        `known` is the append of an earlier call: its outcome answers, and it is sent again while it can be committed.
        """
        races = 0
        while True:
            if known is not None:
                verdict = self._certain(known, deadline)
                if verdict.seqno is not None:
                    return self._repeated(call, known, verdict.seqno)
                known = known if verdict.answer == "open" else None
            turn = self._next_turn(call, deadline)
            if known is not None and self._has_moved(known, turn):
                continue
            if not turn.changes.num_rows:
                return self._unwritten(call, turn)
            named = known or self._fresh(call, turn)
            if is_dry:
                return self._unwritten(call, turn)
            try:
                if (answer := self._try_turn(call, turn, named, deadline)) is not None:
                    return answer
            except LeaseExpired:
                if not self._registers_again():
                    raise
            races += 1
            if deadline.has_passed():
                raise self._outrun(deadline, races)

    def _certain(self, known: Named, deadline: Deadline) -> Verdict:
        verdict = self._judge(known, deadline)
        if verdict.answer == "unknown":
            raise forgotten(self._place(), known.token, verdict)
        return verdict

    def _has_moved(self, known: Named, turn: Turn[Basis]) -> bool:
        """Whether upper has passed the lower of an append since it was found open."""
        if turn.lower < known.lower:  # its token is of another place, or this one was put back to an earlier state
            raise self._gap(known, turn.lower)
        return turn.lower != known.lower

    @abstractmethod
    def _place(self) -> str:
        """What it writes, for messages."""

    @abstractmethod
    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        """What became of the append of an earlier call. Reads afresh."""

    @abstractmethod
    def _next_turn(self, call: Call, deadline: Deadline) -> Turn[Basis]:
        """The changes that the newest contents ask for. Writes nothing of them."""

    @abstractmethod
    def _fresh(self, call: Call, turn: Turn[Basis]) -> Named:
        """A name of its own, at the next time. Raises InvalidUsage where times end."""

    @abstractmethod
    def _try_turn(self, call: Call, turn: Turn[Basis], named: Named, deadline: Deadline) -> Answer | None:
        """Append the changes, if upper is still where the turn found it; None if another writer was first."""

    @abstractmethod
    def _repeated(self, call: Call, known: Named, seqno: SeqNo) -> Answer:
        """The answer where an earlier call was committed."""

    @abstractmethod
    def _unwritten(self, call: Call, turn: Turn[Basis]) -> Answer:
        """The answer where nothing is written: nothing is to be changed, or it is a dry run."""

    @abstractmethod
    def _registers_again(self) -> bool:
        """Whether a writer whose lease ended is registered again: until it is closed."""

    @abstractmethod
    def _gap(self, known: Named, upper: Antichain) -> PersistError:
        """The error where an append begins beyond upper."""

    @abstractmethod
    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        """The error where other writers were first until the deadline."""
