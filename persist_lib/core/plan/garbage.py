"""What may be physically deleted, decided without a clock: pure plans from one state.

A part that was logically deleted at X may be deleted when every live reader holds a state beyond X (`seqno_since > X`),
and a rollup exists at a seqno beyond X, so that no client ever rebuilds a state that refers to the part. An old rollup
waits for readers only: a client that misses it looks at the log again, and if it waited for a newer rollup, there would
always have to be one more. Log rows below the newest rollup at or below `seqno_since` may go. Blobs are deleted first,
then rows.

An orphan is a blob that no state refers to and that no writer can ever link: its uploader is not live in a state that
was read *after* the listing. Ages are never consulted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from persist_lib.core.pins import pinned
from persist_lib.core.state import State
from persist_lib.ids import READER, WRITER, PartKey, SeqNo, parse_rollup_key, uploader_of


class Held(msgspec.Struct, frozen=True):
    """Garbage that has to wait, and why: for which reader or rollup."""

    keys: int
    size: int
    why: str


class GarbagePlan(msgspec.Struct, frozen=True):
    """What deleting garbage would do: delete these keys (with their sizes), then truncate the log below a seqno."""

    keys: Mapping[PartKey, int]
    truncate_below: SeqNo
    held: tuple[Held, ...]

    @property
    def size(self) -> int:
        """Bytes that would be freed."""
        return sum(self.keys.values())


def plan_garbage(state: State, seqno: SeqNo) -> GarbagePlan:
    """The garbage that no live reader can reach any more, and that no pin names, given the state at `seqno`."""
    since, newest = state.seqno_since(seqno), state.newest_rollup
    names = pinned(state)
    garbage = {key: g for key, g in state.garbage.items() if key not in names} if names else state.garbage
    readers = {key: g for key, g in garbage.items() if g.seqno >= since}
    unrolled = {key: g for key, g in garbage.items() if newest <= g.seqno < since and parse_rollup_key(key) is None}
    free = {key: g.size for key, g in garbage.items() if key not in readers and key not in unrolled}
    held = []
    if readers:
        holders = sorted(id_ for id_, reader in state.readers.items() if reader.seqno == since)
        why = (
            f"reader {', '.join(holders)} may still read from v{since}" if holders else f"deleted only now, at v{seqno}"
        )
        held.append(Held(len(readers), sum(g.size for g in readers.values()), why))
    held += [one for one in (_held_by(pin, state, names) for pin in sorted(state.pins)) if one.keys]
    if unrolled:
        why = f"no rollup beyond v{max(g.seqno for g in unrolled.values())} yet; the newest is v{newest}"
        held.append(Held(len(unrolled), sum(g.size for g in unrolled.values()), why))
    usable = [at for at in state.rollups if at <= since]
    return GarbagePlan(free, max(usable, default=SeqNo(0)), tuple(held))


def _held_by(pin: str, state: State, names: Mapping[PartKey, list[str]]) -> Held:
    """What waits for a pin; what waits for several counts for the first."""
    own = [state.garbage[key].size for key, by in names.items() if by[0] == pin and key in state.garbage]
    return Held(len(own), sum(own), f"pin {pin} names it: publish again, or withdraw that publication")


class Orphans(msgspec.Struct, frozen=True):
    """What an audit found: orphans with their sizes, and retired ids that have no objects left under their prefix."""

    keys: Mapping[PartKey, int]
    swept: tuple[str, ...]
    live: int
    pending: int
    uploads: frozenset[PartKey] = frozenset()
    """The keys whose unfinished uploads no writer can ever finish and link."""


def plan_orphans(state: State, listed: Iterable[tuple[PartKey, int]], uploads: Iterable[PartKey] = ()) -> Orphans:
    """Judge a listing, and one of unfinished uploads, that were complete *before* `state` was read (linearizably).

    SUBTLE: the other order would delete objects that were linked in between. And a state may refer to the key of an
    unfinished upload, if its sender tried again and succeeded. Only the unfinished upload is given up, not the object.
    """
    referred = {key for batch in state.stored for key in batch.keys} | {r.key for r in state.rollups.values()}
    orphans: dict[PartKey, int] = {}
    uploaders: set[str] = set()
    live = pending = 0
    for key, size in listed:
        uploaders.add(uploader_of(key))
        if key in referred:
            live += 1
        elif key in state.garbage or not can_never_be_linked(key, state):
            pending += 1
        else:
            orphans[key] = size
    unfinished = frozenset(uploads)
    uploaders |= {uploader_of(key) for key in unfinished}
    abandoned = frozenset(key for key in unfinished if can_never_be_linked(key, state))
    return Orphans(orphans, tuple(sorted(state.retired.keys() - uploaders)), live, pending, abandoned)


def can_never_be_linked(key: PartKey, state: State) -> bool:
    """Whether no transition from this state on can make a state refer to an object with this key."""
    if (seqno := parse_rollup_key(key)) is not None:
        return seqno <= state.newest_rollup
    uploader = uploader_of(key)
    is_ours = WRITER.fullmatch(uploader) or READER.fullmatch(uploader)
    return bool(is_ours) and uploader not in state.writers
