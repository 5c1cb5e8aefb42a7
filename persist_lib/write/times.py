"""The time that a call takes for its caller, and the token that such a call's append has."""

from __future__ import annotations

import struct

from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import ShardId, parse_token
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.times import END_S, PER_SECOND

_TOKEN = struct.Struct(">4sQQ16s")
_MARK = b"next"


def next_time(schema: Schema, shard: ShardId, upper: Antichain, runtime: Runtime) -> int:
    """The time at which a call writes that leaves the choice to the library: of a clock now, but never before upper;
    otherwise upper.

    A clock that goes back, or is behind another machine's, gives upper. Raises InvalidUsage where the shard is closed
    for writing, and at the end of all times: of a clock, at the end of the year 9999.
    """
    least, unit = upper.time, schema.times
    if least is not None and unit is None and least < MAX_TIME:
        return least
    if least is not None and unit is not None:
        found = max(least, runtime.clock_ms() * PER_SECOND[unit] // 1_000)
        if found < END_S * PER_SECOND[unit]:
            return found
    ends = "the shard is closed for writing" if least is None else "its times end there"
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
