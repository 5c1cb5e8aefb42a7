"""The time that a call takes for its caller, and the token that such a call's append has."""

from __future__ import annotations

import struct

from persist_lib.core.placing import time_after
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo, ShardId, parse_token
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema

_TOKEN = struct.Struct(">4sQQ16s")
_MARK = b"next"
_SINCE = struct.Struct(">4sQ16s")
_MARK_SINCE = b"past"


def next_time(schema: Schema, shard: ShardId, upper: Antichain, runtime: Runtime) -> int:
    """The time at which a call writes that leaves the choice to the library: of a clock now, but never before upper;
    otherwise upper.

    A clock that goes back, or is behind another machine's, gives upper. Raises InvalidUsage where the shard is closed
    for writing, and at the end of all times: of a clock, at the end of the year 9999.
    """
    if (found := time_after(upper, schema.times, 0 if schema.times is None else runtime.clock_ms())) is not None:
        return found
    ends = "the shard is closed for writing" if upper.is_top() else "its times end there"
    raise InvalidUsage(
        f"shard {shard}: upper is {schema.show(upper)}, and {ends}, so there is no next time to write at. This call "
        "wrote nothing; write to another shard",
        shard=shard, upper=upper,
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


def format_since(runtime: Runtime, since: SeqNo) -> bytes:
    """A fresh token of an append at the next time, which carries a version that does not have it."""
    return _SINCE.pack(_MARK_SINCE, since, runtime.token())


def since_of(token: bytes) -> SeqNo | None:
    """The version that a token of `format_since` carries; None for any other token."""
    if len(token) == _SINCE.size and token.startswith(_MARK_SINCE):
        return SeqNo(_SINCE.unpack(token)[1])
    return None
