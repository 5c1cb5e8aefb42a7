"""The time that a call takes for its caller, and the token that such a call's append has."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, Self

from persist_lib.core.placing import time_after
from persist_lib.errors import ClockAhead, InvalidUsage
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo, parse_token
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.times import show_duration, show_time

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
        """The time of its updates."""
        return (self.upper.time or 1) - 1
