"""Late batches: those whose times the shard has already. They are compared while that is possible, and discarded.

They never become garbage at sight, but by a transition, which refuses what is referred to and what is still needed. A
reader at an older version may follow their writer; their deletion waits for it. Beneath a tombstone there are no
readers, and all that is pending is deleted at once. What a reader was given is compared with the shard in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.pending import parse_pending_key
from persist_lib.core.state import State
from persist_lib.errors import Diverged, Missing
from persist_lib.format.paths import pending_key, pending_prefix
from persist_lib.frontier import at
from persist_lib.ids import PartKey, ShardId
from persist_lib.location.api import Blob
from persist_lib.location.wrap.around import listed
from persist_lib.maintain.garbage import check_in_place
from persist_lib.pending_area.listing import SHOWN, Absorbed, Content, Disagreement, Fetcher, Id, Listing, Others, pages
from persist_lib.pending_area.objects import NONE, TimeSums, added, sums_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.runs import read_updates

PAGE = 1000


class Late(msgspec.Struct, frozen=True):
    """What became of late batches: how many were discarded, and which say something else than the shard.

    `keys` are those that a dry run would discard.
    """

    discarded: int
    disagreements: tuple[Disagreement, ...]
    keys: tuple[PartKey, ...] = ()


def discard_late(
    machine: Machine, listing: Listing, fetcher: Fetcher, agreed: Container[Id], has_room: Callable[[int], bool], *,
    dry_run: bool,
) -> Late:  # fmt: skip
    """Make garbage of the batches before upper that the shard does not refer to, a thousand in a transition.

    Those that say something else than the shard stay where they are, for an operator to look at and to delete. What is
    in `agreed` was compared already. It ends where the state has no room for that much garbage more.
    """
    state = machine.state
    known = known_of(state)
    names = (parse_pending_key(key) for key in known)
    said = {(n.lower, n.upper.time, n.count, n.digest) for n in names if n is not None}
    disagreements: list[Disagreement] = []

    def found() -> Iterator[tuple[PartKey, int]]:
        for content in listing.contents(listing.late(state.upper)):
            keyed = [(key, size) for key, size in listing.keyed(content.members) if key not in known]
            is_known = content.id in said or content.id in agreed
            if keyed and not is_known and (against := _against(machine, fetcher, content, dry_run=dry_run)) is not None:
                disagreements.append(against)
            else:
                yield from keyed

    count, keys = 0, list[PartKey]()
    for page in pages(found(), PAGE):
        if dry_run:
            count += len(page)
            keys += [key for key, _ in page]
        elif has_room(len(page)):
            count += discard_keys(machine, page)
        else:
            break
    return Late(count, tuple(disagreements[:SHOWN]), tuple(keys))


def discard_keys(machine: Machine, keys: Sequence[tuple[PartKey, int]]) -> int:
    """Make garbage of late batches, and return of how many. What another process did first is left out."""
    count = 0

    def build(state: State, _now: int) -> c.DiscardPending:
        nonlocal count
        known = known_of(state)
        left = tuple((key, size) for key, size in keys if key not in known)
        count = len(left)
        return c.DiscardPending(left)

    answer = machine.try_commit(build)
    if isinstance(answer, (r.AlreadyDone, r.Finished)):
        return 0
    if not isinstance(answer, Committed):
        raise machine.refused(answer)
    return count


def delete_all(
    machine: Machine, done: Absorbed, known: Container[str] = (), *, dry_run: bool
) -> tuple[Absorbed, list[PartKey]]:
    """Delete all pending batches beneath a tombstone but those `known`, page by page; a dry run names their keys.

    What is not a batch stays, and is counted.
    """
    foreign, deleted, failed, keys = Others(), 0, dict[str, str](), list[PartKey]()
    for page in pages(listed(machine.blob, pending_prefix(machine.shard)), PAGE):
        batches = []
        for entry in page:
            key = pending_key(machine.shard, entry.key)
            if parse_pending_key(key) is None:
                foreign = foreign.with_(entry.key)
            elif key not in known:
                batches.append(entry.key)
                keys += [key] * dry_run
        if not dry_run and batches:
            check_in_place(machine)
            failed |= {key: str(error) for key, error in machine.blob.delete_many(batches).items()}
        deleted += len(batches)
    top = machine.state.upper
    waits = f"{len(failed)} could not be deleted: {next(iter(failed.values()))}" if failed else ""
    found = msgspec.structs.replace(
        done, lower=top, upper=top, deleted=deleted - len(failed), foreign=foreign, left=len(failed), waits=waits
    )
    return found, keys


def known_of(state: State) -> set[PartKey]:
    """The keys that the state refers to or that are garbage."""
    return {key for batch in state.stored for key in batch.keys} | state.garbage.keys()


def _against(machine: Machine, fetcher: Fetcher, content: Content, *, dry_run: bool) -> Disagreement | None:
    """What a late content says other than the shard; None if nothing, or if it cannot be compared any more."""
    state = machine.state
    first = first_exact(state, content.lower)
    if first is None or first >= content.upper or not state.upper.has_passed(content.upper - 1):
        return None
    if (theirs := fetcher.sums(content)) is None:
        return None
    try:
        ours = shard_sums(machine.blob, machine.shard, state, first, content.upper)
    except Missing as error:  # collected since: nothing of the shard is held here
        if dry_run:
            return None
        if machine.fetch().state == state:
            text = f"shard {machine.shard}: an object that the newest state refers to is not there"
            raise Missing(text, key="") from error
        return _against(machine, fetcher, content, dry_run=False)
    time = ours.first_difference(theirs.between(first, content.upper))
    return None if time is None else fetcher.disagreement(time, [content], with_shard=True)


def first_exact(state: State, lower: int) -> int | None:
    """The first time from `lower` on at which the shard has what was written at that time; None if there is none.

    At since itself it also has what was advanced to it.
    """
    since = state.since.time
    return None if since is None else max(lower, since + 1 if since else 0)


def shard_sums(blob: Blob, shard: ShardId, state: State, lower: int, upper: int) -> TimeSums:
    """The sums by time of what the shard has at times in `[lower, upper)`."""
    schema = state.schemas[-1]
    batches = [batch for batch in state.trace if batch.lower.is_before(upper - 1) and at(lower) < batch.upper]
    return sums_of(schema, read_updates(blob, shard, batches, lower, upper, state.schemas, schema))


class Emitted:
    """The sums by time over `[lower, upper)` of what was read from the pending area and is not checked yet.

    What is read twice is compared at once, what was absorbed since with the shard.
    """

    def __init__(self, shard: str, schema: Schema) -> None:
        self._shard, self._schema = shard, schema
        self.lower = self.upper = 0
        self._sums = NONE
        self._from: tuple[tuple[int, int, str], ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.lower >= self.upper

    def add(self, lower: int, upper: int, sums: TimeSums, key: str) -> None:
        """Note that the updates with times in `[lower, upper)` were given, as the batch with this key has them.

        Raises Diverged if other updates were given for one of these times before.
        """
        if self.is_empty or lower > self.upper:
            self.lower = self.upper = lower
            self._sums, self._from = NONE, ()
        both = max(lower, self.lower), min(upper, self.upper)
        if both[0] < both[1]:
            self._compare(self._sums.between(*both), sums.between(*both), f"the pending batch {key} has")
        if upper > self.upper:
            self._sums = added([self._sums, sums.between(max(lower, self.upper), upper)])
            self._from = (*self._from, (self.upper, upper, key))
            self.upper = upper

    def check(self, upper: int, ours: TimeSums) -> None:
        """Compare what was given before `upper` with the sums of the shard over `[lower, upper)`, and forget it.

        Raises Diverged if they are not the same.
        """
        self._compare(self._sums.between(self.lower, upper), ours, "the shard has")
        self.forget(upper)

    def forget(self, upper: int) -> None:
        self.lower = min(upper, self.upper)
        self._sums = self._sums.between(self.lower, self.upper)
        self._from = tuple(one for one in self._from if one[1] > self.lower)

    def _compare(self, given: TimeSums, other: TimeSums, who: str) -> None:
        if (time := given.first_difference(other)) is None:
            return
        keys = [key for lower, upper, key in self._from if lower <= time < upper]
        raise Diverged(
            f"collection {self._shard}: at {self._schema.show(time)}, {who} other updates than this reader was given "
            f"from {' and '.join(keys) or 'another batch'}: the writers disagree. Drop what was read from that time "
            "on, and read again with merged_only=True, or once it is known who is right: `persist pending show`",
            collection=self._shard, shard=self._shard, time=time, keys=tuple(keys),
        )  # fmt: skip


def check_emitted(handle: ReadHandle, emitted: Emitted, state: State) -> None:
    """Compare what was given beyond the merged upper with what was absorbed since.

    What cannot be compared any more, as a read-only reader holds no history, is forgotten.
    """
    upper = emitted.upper if state.upper.time is None else min(emitted.upper, state.upper.time)
    first = first_exact(state, emitted.lower)
    if emitted.is_empty or upper <= emitted.lower:
        return
    if first is None or first > emitted.lower:
        emitted.forget(upper if first is None else min(first, upper))
    if emitted.lower < upper:
        machine = handle.machine
        emitted.check(upper, shard_sums(machine.reads, machine.shard, state, emitted.lower, upper))
