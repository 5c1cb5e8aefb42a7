"""Named holds: what setting, moving and releasing one changes, and to which layer a shard belongs by its holds.

A hold keeps history, so `SetHold` never moves since: where nothing would keep what is before the hold, the retention's
hold does from then on, as a shard without a policy keeps all. `DowngradeHold` is for the owner of a hold, who gives up
what the hold kept. Neither goes beyond the newest time, as the contents could then be read as of no time at all.

A layer above shards (collections, streams) sets a hold of its own on each of its shards. Where it keeps no history, its
name is the fencing value of the retention's hold, or of a mark: a hold that keeps nothing, as it moves with since. Such
a shard registers no id that appends for anything else: one append that the layer does not know of would stop it for
good. The check is at registration, as nothing appends without a live id.
"""

from __future__ import annotations

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.leases import fold_since, is_mark, moved_mark
from persist_lib.core.state import LAYERS, MARK, NAMED, RETENTION, Hold, State
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at, meet_all

LAYER_HOLDS = {
    "collection": "collection", "source": "source", "stream": "stream", "events.writer": "events",
    MARK: "", NAMED: "", "writer": "", "copy-r*": "", "source-*": "",
}  # fmt: skip
"""All holds of layers (`*`: that begin so), and whose shards have one; empty where a hold does not say so by itself.

The first one that a shard has says whose it is. `writer` is the lock of the streams' writer; copies and sources set the
last two on what they still have to read; `NAMED` is for readers by the name of a member."""
_BEGIN = tuple(name[:-1] for name in LAYER_HOLDS if name.endswith("*"))


def is_table(state: State) -> bool:
    """Whether the shard is a table of users: one that anybody writes, or that a stream, a pending area or a log feeds.

    A log has its events in one shard, by their ids, and its notes in another.
    """
    is_log = "events.writer" in state.holds and state.schemas[0].names[0] == "id"
    return is_log or layer_of(state) in {"", "pending"} or "stream" in state.holds


def is_of_layer(hold: str) -> bool:
    """Whether a hold of this name is a layer's."""
    return hold in LAYER_HOLDS or hold.startswith(_BEGIN)


def layer_of(state: State) -> str:
    """The layer to which the shard belongs; empty for a shard that anybody may append to."""
    found = [layer for name, layer in LAYER_HOLDS.items() if name in state.holds]
    found += [state.holds[name].opaque.decode(errors="replace") for name in (MARK, RETENTION) if name in state.holds]
    return next((layer for layer in found if layer in LAYERS), "")


def refuses_writer(state: State, command: c.RegisterWriter) -> r.OfLayer | None:
    """Why this id may not append to the shard; None if it may. Maintenance changes no contents, so any may do it."""
    layer = layer_of(state)
    return r.OfLayer(layer) if layer and command.purpose == "ingest" and command.layer != layer else None


def newest_time(state: State) -> Antichain:
    """The latest since with which contents can still be read: upper - 1. It is the top where upper is."""
    upper = state.upper.time
    return TOP if upper is None else at(max(0, upper - 1))


def let_go(state: State, since: Antichain, but: str | None = None) -> Antichain:
    """How far a reader or hold that needs history from `since` on may let go without ending the history of others.

    SUBTLE: since follows the least of all readers and holds. On a shard without another hold, a reader that moves would
    end the history before it for all others, though it only wanted to read. So it moves no further than the least hold,
    the one named `but` left out; without any, it keeps all that there is. Marks keep nothing.
    """
    holds = [hold.since for name, hold in state.holds.items() if name != but and not is_mark(name, hold)]
    return state.since if not holds else since.meet(meet_all(holds)).join(state.since)


def let_go_unasked(state: State, since: Antichain) -> Antichain:
    """The same for a reader that moves by itself, and was not asked to give history up.

    What a layer alone reads has the layer's own rules, and is let go as it says.
    """
    return let_go(state, since) if is_table(state) else since


def set_hold(state: State, command: c.SetHold | c.DowngradeHold) -> StateDiff | r.Refusal:
    """What creating or moving a hold changes."""
    old = state.holds.get(command.name)
    actual = old.opaque if old else None
    if actual != command.expected:
        return r.WrongOpaque(command.name, command.expected, actual)
    least = old.since if old else state.since
    if command.since < least:
        return r.BelowSince(command.since, least)
    new, newest = Hold(command.since, command.opaque), newest_time(state)
    since = None if is_mark(command.name, new) else fold_since(state, holds={**state.holds, command.name: new})
    moves = old is None or old.since < new.since
    keeps = isinstance(command, c.SetHold)
    owned = command.name == RETENTION or is_of_layer(command.name)  # by whom moves it at its own times
    given_up = keeps and since is not None and owned
    if moves and (given_up or new.since.is_top() or state.since.join(newest) < new.since):
        return r.GivesUpHistory(command.name, command.since, state.since, newest)
    changed = [] if new == old else [(command.name, old, new)]
    if keeps:
        if moves and since is not None and RETENTION not in state.holds:  # without a policy, all is kept
            changed.append((RETENTION, None, Hold(state.since, layer_of(state).encode())))
        since = None  # also where it could move for other reasons: that is for those who move
    if not changed and since is None:
        return r.AlreadyDone()
    return StateDiff(since=since, holds=(*changed, *moved_mark(state, since)))


def release_hold(state: State, command: c.ReleaseHold) -> StateDiff | r.Refusal:
    """What dropping a hold changes. Since stays where it is."""
    hold = state.holds.get(command.name)
    if hold is None or hold.opaque != command.expected:
        return r.WrongOpaque(command.name, command.expected, hold.opaque if hold else None)
    return StateDiff(holds=((command.name, hold, None),))


def set_retention(state: State, command: c.SetRetention) -> StateDiff | r.Refusal:
    """What a retention policy changes. Its hold is there at once, and keeps all until the duty moves it."""
    distance = command.distance
    if distance is not None and not 0 <= distance <= MAX_TIME:
        return r.Malformed(f"retention {distance}")
    old = new = state.holds.get(RETENTION)
    if distance is not None and old is None:
        new = Hold(state.since, command.layer.encode())
    elif old is not None and command.layer:
        new = Hold(old.since, command.layer.encode())
    if (distance, new) == (state.retention, old):
        return r.AlreadyDone()
    return StateDiff(
        retention=(state.retention, distance) if distance != state.retention else None,
        holds=((RETENTION, old, new),) if new != old else (),
    )
