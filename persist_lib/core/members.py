"""Members: shards that stood by themselves, and are the place of a collection's first rendition since.

A member keeps its log, its data and its live ids. What went with its name (holds of users, producers) is with the
rendition shard of the collection, which promises what was written by name. One transaction of both decides. Columns and
the retention's distance stay as they were at that transition, so that the catalog can be told what they are, by
whomever; the distance moves nothing any more.
From then on the member refuses commands that do not name it: a write by its name could be below a handover, and a hold
or a reader by its name would keep nothing that the collection knows of.

The places of a collection that joins a timeline become members of its next epoch, so that those who wrote it before are
refused: what they write would not be in the WAL.
"""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import MEMBERS
from persist_lib.core.holds import is_of_layer, layer_of
from persist_lib.core.identities import counting
from persist_lib.core.outcomes import remember
from persist_lib.core.state import COLLECTION, NAMED, RETENTION, Batch, Hold, Outcome, State
from persist_lib.core.trace import push
from persist_lib.frontier import MAX_TIME, MINIMUM, TOP, Antichain, at
from persist_lib.ids import MEMBER, SeqNo


def refuses_stranger(state: State, command: c.Command) -> r.OfMember | None:
    """Why a member does not take this command; None if it does, and where the shard stands by itself.

    Maintenance registers by the shard's name: it changes no contents.
    """
    if not state.member or not isinstance(command, c.NamesMember) or command.member == state.member:
        return None
    is_upkeep = isinstance(command, c.RegisterWriter) and command.purpose == "maintenance"
    return None if is_upkeep else r.OfMember(state.member)


def adopt(state: State, seqno: SeqNo, command: c.Adopt) -> StateDiff | r.Refusal:
    """What becoming a member changes."""
    if state.member and state.member == command.member:
        return r.AlreadyDone()
    if state.member != (command.former or ""):
        return r.OfMember(state.member)
    if state.format < MEMBERS:
        return r.NeedsFormat("whose member it is", MEMBERS, state.format)
    if not MEMBER.fullmatch(command.member):
        return r.Malformed(f"member {command.member!r}")
    if command.seqno != seqno:
        return r.Overtaken(command.seqno, seqno)
    if command.former is not None:
        return StateDiff(member=(state.member, command.member))
    if layer := layer_of(state) or next(
        (name for name in sorted(state.holds) if name != RETENTION and is_of_layer(name)), ""
    ):
        return r.OfLayer(layer)
    if counted := counting(state):
        return r.InvalidBounds(f"its columns {counted} count up, which only a shard by itself can")
    if state.upper.is_top() or state.upper < state.since:
        return r.InvalidBounds(f"its history is [{state.since}, {state.upper}), to which nothing can be added or read")
    return StateDiff(
        holds=(
            *((name, hold, None) for name, hold in sorted(state.holds.items())),
            (COLLECTION, None, Hold(state.since)),
        ),
        member=("", command.member),
    )


def inheritance(state: State, token: bytes, lower: Antichain) -> c.Inherit:
    """What a rendition shard whose upper is `lower` takes over from the shard in this state.

    Upper always moves. So a process that finds it at `lower` still, and closes it there, has kept the adoption
    out.
    """
    times = (state.upper.time or 0, (state.since.time or 0) + 1, (lower.time or 0) + 1)
    upper = TOP if state.upper.is_top() else at(min(MAX_TIME, max(times)))  # one that is closed refuses to be adopted
    holds = tuple((name, hold) for name, hold in sorted(state.holds.items()) if name != RETENTION)
    return c.Inherit(token, lower, upper, state.since, holds, tuple(sorted(state.producers.items())))


def inherit(state: State, seqno: SeqNo, command: c.Inherit) -> StateDiff | r.Refusal:
    """What taking over from a shard changes in the rendition shard."""
    if state.format < MEMBERS:
        return r.NeedsFormat("what it takes over", MEMBERS, state.format)
    if command.lower != state.upper:
        return r.WrongUpper(command.lower, state.upper)
    if others := sorted({*state.readers, *state.holds, *state.producers} - {COLLECTION}):
        return r.Held(tuple(others))  # it is in use: nothing reads a rendition shard before it has taken over
    if not (command.lower < command.upper and state.since <= command.since < command.upper):
        return r.InvalidBounds(f"history from {command.since} on, up to {command.upper}, after {command.lower}")
    holds = {**dict(command.holds), COLLECTION: Hold(command.since), NAMED: Hold(command.since)}
    if any(hold.since < command.since for hold in holds.values()):
        return r.BelowSince(min(hold.since for hold in holds.values()), command.since)
    batch = Batch(0, 1, command.lower, command.upper, MINIMUM, 0, 0, 0)
    return StateDiff(
        since=None if command.since == state.since else (state.since, command.since),
        trace=push(state, batch, seqno),
        holds=tuple(
            (name, state.holds.get(name), hold) for name, hold in holds.items() if state.holds.get(name) != hold
        ),
        outcomes=remember(state, Outcome(command.token, seqno, command.upper)),
        producers=tuple((name, None, msgspec.structs.replace(last, seqno=seqno)) for name, last in command.producers),
    )
