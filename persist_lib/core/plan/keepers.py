"""What each reader, hold, pin and missing rollup of a shard keeps: a pure ledger of one state.

Two things are kept, and they differ. *Garbage* is deleted data that waits: its keeper gone, the next pass deletes it.
*History* is in batches that are still read: its keeper gone, since can move, and a compaction then rewrites the batches
with changes of that time. They cancel out against one another and against older rows; how much is left is not known
before. What several keep together is freed by none of them alone: for each of them it is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from persist_lib.core.leases import is_mark
from persist_lib.core.pins import pinned
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.state import RETENTION, Batch, Pin, State
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, SeqNo

Kind = Literal["reader", "hold", "retention", "writer", "pin", "rollup"]


class Keeper(msgspec.Struct, frozen=True):
    """A reader, a writer, a named hold, the hold of the retention, a pin, or a missing rollup, and what it keeps.

    `owner` is what it says of itself. It needs history from `since` on, and a reader states from `seqno` on; a writer
    keeps neither. `garbage` are the objects that would go if it alone went, and `garbage_size` their bytes. `batches`
    are the ids of those of which a compaction could then forget changes, and `history_size` all of their bytes, of
    which it frees some. `shared_size` is what it keeps together with others, of both. `lease_until` is in ms of the
    store's clock; a hold has none. `set_ms` is since when it is there; with `is_older` it was there before, as the log
    does not go back further.
    """

    name: str
    kind: Kind
    owner: str = ""
    since: Antichain | None = None
    seqno: SeqNo | None = None
    lease_until: int | None = None
    garbage: tuple[PartKey, ...] = ()
    garbage_size: int = 0
    batches: tuple[tuple[int, int], ...] = ()
    history_size: int = 0
    shared_size: int = 0
    set_ms: int | None = None
    is_older: bool = False

    @property
    def size(self) -> int:
        """Bytes of garbage that it alone keeps, and of batches of which it alone keeps changes."""
        return self.garbage_size + self.history_size


def keepers_of(state: State, seqno: SeqNo) -> tuple[Keeper, ...]:
    """All that has a lease or a hold in the state at `seqno`, and what each keeps: most bytes first."""
    found = [
        Keeper(id_, "writer", one.owner or one.purpose, lease_until=one.lease_until)
        for id_, one in state.writers.items()
    ]
    for name, hold in state.holds.items():
        if not is_mark(name, hold):
            fence = hold.opaque.decode(errors="backslashreplace")
            found.append(Keeper(name, "retention" if name == RETENTION else "hold", fence, hold.since))
    found += [
        Keeper(id_, "reader", one.purpose, one.since, one.seqno, one.lease_until) for id_, one in state.readers.items()
    ]
    found = _with_garbage(_with_history(found, state), state)
    found += [*_pins(state, seqno), *_rollup(state, seqno)]
    return tuple(sorted(found, key=lambda one: (-one.size, one.kind, one.name)))


def _with_history(keepers: Sequence[Keeper], state: State) -> list[Keeper]:
    """Since follows the least of all, so only the one that is alone at the least keeps something alone.

    Without any other, since does not move by itself either.
    """
    least, second = (*sorted(_time(one.since) for one in keepers if one.since is not None), END, END)[:2]
    alone = [] if second == END else _between(state, least, second)
    own, size = tuple(batch.id for batch in alone), sum(batch.size for batch in alone)

    def one(keeper: Keeper) -> Keeper:
        if keeper.since is None:
            return keeper
        since = _time(keeper.since)
        kept, its = (own, size) if since == least else ((), 0)
        needed = sum(batch.size for batch in _between(state, since, END))
        return msgspec.structs.replace(keeper, batches=kept, history_size=its, shared_size=needed - its)

    return [one(keeper) for keeper in keepers]


def _between(state: State, begins: int, ends: int) -> list[Batch]:
    """The batches with updates at times that become one with earlier ones if since moves from one time to the other."""
    begins = max(begins, _time(state.since))
    return [
        batch for batch in state.trace
        if begins < ends and batch.count and begins < _time(batch.upper) - 1 and _time(batch.lower) <= ends
    ]  # fmt: skip


def _with_garbage(keepers: Sequence[Keeper], state: State) -> list[Keeper]:
    """Garbage waits for all readers that may still read a state from before it was deleted; and for pins."""
    pins = pinned(state)
    seqnos = sorted(reader.seqno for reader in state.readers.values())
    least, second = (*seqnos, None, None)[:2]

    def one(keeper: Keeper) -> Keeper:
        seqno = keeper.seqno
        if seqno is None:
            return keeper
        held = {key: one for key, one in state.garbage.items() if one.seqno >= seqno}
        own = {
            key: one.size
            for key, one in held.items()
            if key not in pins and seqno == least and (second is None or one.seqno < second)
        }
        shared = sum(one.size for one in held.values()) - sum(own.values())
        return msgspec.structs.replace(
            keeper, garbage=tuple(own), garbage_size=sum(own.values()), shared_size=keeper.shared_size + shared
        )

    return [one(keeper) for keeper in keepers]


def _pins(state: State, seqno: SeqNo) -> list[Keeper]:
    """Each pin, with the garbage that only it keeps, and what it keeps with readers and other pins."""
    names, least = pinned(state), state.seqno_since(SeqNo(seqno + 1))  # what is deleted only now as well

    def one(name: str, pin: Pin) -> Keeper:
        held = {key: state.garbage[key] for key in pin.keys if key in state.garbage}
        own = {key: found.size for key, found in held.items() if len(names[key]) == 1 and found.seqno < least}
        shared = sum(found.size for found in held.values()) - sum(own.values())
        owner = "a publication" if pin.as_of is not None else ""
        return Keeper(name, "pin", owner, garbage=tuple(own), garbage_size=sum(own.values()), shared_size=shared)

    return [one(name, pin) for name, pin in state.pins.items()]


def _rollup(state: State, seqno: SeqNo) -> list[Keeper]:
    """The rollup for which garbage waits that no reader needs, if there is such garbage."""
    since, free = state.seqno_since(seqno), plan_garbage(state, seqno).keys | pinned(state).keys()
    own = {key: one.size for key, one in state.garbage.items() if one.seqno < since and key not in free}
    if not own:
        return []
    newest = max(one.seqno for key, one in state.garbage.items() if key in own)
    return [
        Keeper(f"beyond v{newest}", "rollup", "the duty rollups", garbage=tuple(own), garbage_size=sum(own.values()))
    ]


END = 2**64


def _time(frontier: Antichain | None) -> int:
    """A frontier as a number; the empty one is beyond all times."""
    return END if frontier is None or frontier.time is None else frontier.time
