"""Whether all of a shard is what it is said to be: its log, its rollups, its objects, and what its batches hold.

A scrub is the last step of it. The others are a walk over the log (`log_walk`) and a listing of the shard's objects.
What was found sound is remembered in the location, so that the next one reads what was added since, or all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.plan.garbage import Orphans, plan_orphans
from persist_lib.core.state import Batch, State, Version
from persist_lib.core.units import of, size
from persist_lib.errors import Damage, HistoryRegressed, NewerFormat, PersistError
from persist_lib.format.paths import blob_key, key_of, pending_key, pending_prefix
from persist_lib.format.scrub_marks import Walked, identity_of
from persist_lib.ids import PartKey, SeqNo, is_pending, parse_rollup_key
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.garbage import objects_of
from persist_lib.maintain.log_walk import Finding, Step, Walk, begins_like, canonical, every_object, said_by_newest_row
from persist_lib.maintain.scrub import REMEMBER_S, Adder, Scrubbed, scrub
from persist_lib.maintain.scrub_memory import Remembered, recall, recall_walked, remember_walked
from persist_lib.maintain.worker import Progress
from persist_lib.shard.commit import Machine
from persist_lib.telemetry import duty

log = logging.getLogger("persist.scrub")


class Verified(msgspec.Struct, frozen=True):
    """What was found wrong with a shard, and how much was looked at.

    `rows` of the log were read, of which `versions` were replayed, and `rollups` compared with them. `objects` of
    `size` bytes are referred to and there. `garbage` waits to be deleted; `pending` may be linked yet, and is no
    orphan. `newest` is the seqno up to which the log was walked.
    """

    findings: tuple[Finding, ...]
    newest: int
    rows: int
    versions: int
    rollups: int
    objects: int
    size: int
    orphans: int
    orphan_bytes: int
    garbage: int
    garbage_bytes: int
    pending: int
    scrubbed: Scrubbed | None
    """What was read of the batches; None if the newest state cannot be read."""
    left: int = 0
    """The rows that were found sound earlier, and were not read again."""
    truncated: int = 0
    """The rows that the log does not have any more, as no reader needs them."""
    unchecked: tuple[str, ...] = ()
    """What else was not looked at, and why. See `not_checked` for all of it."""
    remembered: bool = True
    """Whether the location holds up to where all was found sound."""
    cost: Cost = Cost()
    """The requests that it made to the location."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def is_damaged(self) -> bool:
        """Whether stored data is damaged, or missing."""
        return any(one.is_damage for one in self.findings)

    @property
    def not_checked(self) -> tuple[str, ...]:
        """All that was not looked at, and why."""
        return (*not_checked([self]), *self.unchecked)

    @property
    def says(self) -> str:
        """What was looked at, in one sentence."""
        batches = 0 if self.scrubbed is None else self.scrubbed.batches
        parts = [of(self.rows, "row") + " of the log", of(self.rollups, "rollup"), of(self.objects, "object")]
        return f"checked {', '.join(parts)} ({size(self.size)}), {of(batches, 'batch')}"


def not_checked(verified: Collection[Verified]) -> list[str]:
    """What of these shards was not read again, or is not there to be read."""
    left = sum(0 if one.scrubbed is None else one.scrubbed.left for one in verified)
    counts = {
        "of logs found sound earlier": of(sum(one.left for one in verified), "row"),
        "found sound by earlier scrubs": of(left, "batch"),
        "of logs truncated": of(sum(one.truncated for one in verified), "row"),
    }
    return [f"{count} {what}" for what, count in counts.items() if not count.startswith("0 ")]


PACE = 100
"""Rows after which progress is shown."""
WALKS = 5
"""How often a log is walked again in which something seems to be wrong, and that was truncated in the meantime."""


@duty("scrub")
@charged
def verify(
    machine: Machine,
    *,
    full: bool = False,
    engine: Adder | None = None,
    progress: Progress | None = None,
    is_kept: bool = True,
) -> Verified:
    """Verify a shard: what was added since all was found sound, or with `full` all of it. Changes no data.

    What is wrong is returned in `findings`, not raised, and stops nothing else. What was found sound is remembered in
    the location, unless `is_kept` is false or that cannot be written. It is trusted only while the row that it names
    has the digest that it had. `progress` gets the rows read and their total, then the batches. The shard may be in
    use. Raises NotFound if there is no such shard, Paused, and what a store raises that does not answer.
    """
    if is_kept:
        machine.may_begin(machine.shard, "scrub")
    # SUBTLE: first what is remembered, then the objects, then the state. What is linked in between is not listed, and
    # is looked for again; in the other order, what is deleted in between would seem to be lost.
    look = _Look(machine, recall(machine.blob, machine.shard), is_kept=is_kept)
    look.fetch()
    look.walk(look.begin(full=full), progress)
    if look.version is not None:
        look.objects(look.version)
        look.batches(look.version, engine, progress, full=full)
    else:
        look.unchecked.append("objects and batches, as the newest state cannot be read")
    return look.answer()


class _Look:
    """One verification under way: what was found, and what the walk saw of objects that must be there."""

    def __init__(self, machine: Machine, known: Remembered, *, is_kept: bool) -> None:
        self.machine, self.unchecked = machine, list[str]()
        self.version: Version | None = None
        self._known, self._is_kept, self._findings = known, is_kept, list[Finding]()
        self._walked, self._replaced = recall_walked(machine.blob, known)
        self._listed: dict[PartKey, int] = {}
        self._needed: dict[PartKey, int] = {}
        self._lost: set[PartKey] = set()
        self._unread: Damage | None = None
        self._there = self._there_bytes = 0
        self._orphans = Orphans({}, (), 0, 0)
        self._scrubbed: Scrubbed | None = None
        self._walk = Walk(machine, {}, {}, self._findings.append)
        self._walked_to: Walked | None = None
        self._left = 0

    @property
    def _bring_back(self) -> str:
        return f"bring the object back from a copy, then `persist verify {self.machine.shard}`"

    def fetch(self) -> None:
        """List the shard's objects, and then read its newest state. One that cannot be read is not raised."""
        try:
            listed = objects_of(self.machine)
            self._listed = {key_of(self.machine.shard, entry.key): entry.size for entry in listed}
            self.version = self.machine.fetch()
        except Damage as error:
            self._unread = error
            self._listed = every_object(self.machine)

    def begin(self, *, full: bool) -> SeqNo | None:
        """From where on the log is to be walked: 0 is all of it, None nothing, as no row was added."""
        walked, shard = self._walked, self.machine.shard
        if full or walked is None:
            return SeqNo(0)
        rows = self.machine.consensus.scan(shard, walked.seqno, 2)
        if not rows or rows[0].seqno != walked.seqno:
            return SeqNo(0)  # it is truncated, or the log is another one; then the walk finds what is wrong
        if not begins_like(rows[0], walked.digest):
            says = f"v{walked.seqno} was found sound, and is another row by now: all was walked again"
            self.unchecked.append(f"what was remembered: {says}")
            return SeqNo(0)
        self._walked_to, self._left = walked, walked.seqno
        return walked.seqno if len(rows) > 1 or self.version is None else None

    def walk(self, begin: SeqNo | None, progress: Progress | None) -> None:
        """Walk the log, and note the objects of the versions that may still be read."""
        if begin is None:
            return
        found = self._walk_once(begin, progress)
        for _ in range(WALKS):
            if not found or not self._has_moved():
                break
            self.fetch()
            found = self._walk_once(begin, progress)
        self._findings += found
        walk, version = self._walk, self.version
        if walk.newer:
            self.unchecked.append(f"the log from there on: {walk.newer}")
        elif (unplayed := walk.rows - walk.replayed) and not found:
            self.unchecked.append(f"{of(unplayed, 'row')} before the oldest copy of the state, which were only linked")
        if not found and walk.newest is not None:
            self._walked_to = Walked(walk.newest.seqno, walk.newest.digest)
        if version is None and walk.newest is not None and not isinstance(self._unread, HistoryRegressed):
            self.version = walk.newest  # by older copies than a client opens it with
            with self.machine.turn:
                self.machine.take_over(walk.newest)
        elif self._unread is not None and (isinstance(self._unread, HistoryRegressed) or not found):
            do, shard = f"persist shard show {self.machine.shard}", self.machine.shard
            if not isinstance(self._unread, NewerFormat):
                self._findings.append(Finding("log", shard, "", self._unread.message, do))

    def _walk_once(self, begin: SeqNo, progress: Progress | None) -> list[Finding]:
        version, found = self.version, list[Finding]()
        said = said_by_newest_row(self.machine) if version is None else version.state.rollups
        copies = {seqno: key for key in self._listed if (seqno := parse_rollup_key(key)) is not None}
        self._walk = walk = Walk(self.machine, said, copies, found.append, begin)
        self._left, self._needed = max(0, walk.begin - 1), {}
        since, total = (SeqNo(0), 1) if version is None else (version.state.seqno_since(version.seqno), version.seqno)
        for step in walk.steps():
            at = step.after.seqno
            if at >= since:
                self._needed |= _linked(step, since)
            if version is not None and version.seqno == at and canonical(version) != canonical(step.after):
                says = "the log leads to another state than the one that is read from its newest rollup"
                found.append(Finding("log", f"v{at}", "", says, f"persist shard log {self.machine.shard}"))
            if progress is not None and walk.rows % PACE == 0:
                progress(min(walk.rows, total), total)
        return found

    def _has_moved(self) -> bool:
        """Whether rollups were collected, and rows with them, since the state was read: then the walk missed them."""
        try:
            return self.version is not None and self.machine.fetch().state.rollups != self.version.state.rollups
        except Damage:
            return False

    def objects(self, version: Version) -> None:
        """Find objects that have to be there and are not, or have another size, and orphans."""
        state, since = version.state, version.state.seqno_since(version.seqno)
        needed, listed = self._needed | _referred(state, since), self._listed
        self._orphans = plan_orphans(state, listed.items())
        if any(map(is_pending, needed)):
            listed = listed | _pending(self.machine)
        if wrong := {key for key, size_ in needed.items() if listed.get(key) != size_}:
            still, listed = self._once_more(needed, since)
            needed = {key: size_ for key, size_ in needed.items() if key not in wrong or key in still}
        for key, size_ in sorted(needed.items()):
            found = listed.get(key) if key in wrong else size_
            if found == size_:
                self._there, self._there_bytes = self._there + 1, self._there_bytes + size_
                continue
            self._lost.add(key)
            name, do = blob_key(self.machine.shard, key), self._bring_back
            if parse_rollup_key(key) is not None:
                do = f"persist shard repair {self.machine.shard} --dry-run"
                if any(one.about == name for one in self._findings):
                    continue  # the walk has found it
            told = "it is not there" if found is None else f"it has {found:,} bytes"
            self._findings.append(Finding("missing" if found is None else "size", name, f"{size_:,} bytes", told, do))
        if self._orphans.keys:  # some may have been garbage, and deleted and forgotten before the state was read
            there = every_object(self.machine)
            left = {key: size_ for key, size_ in self._orphans.keys.items() if key in there}
            self._orphans = msgspec.structs.replace(self._orphans, keys=left)
        if orphans := self._orphans.keys:
            says = f"{of(len(orphans), 'object')} that nothing can refer to, {size(sum(orphans.values()))}"
            do = f"persist maintain {self.machine.shard} --only orphans"
            self._findings.append(
                Finding("orphan", blob_key(self.machine.shard, min(orphans)), "", says, do, is_damage=False)
            )

    def _once_more(self, needed: Mapping[PartKey, int], since: SeqNo) -> tuple[set[PartKey], dict[PartKey, int]]:
        """What of this is needed by the state that is read after another listing, and that listing.

        An object may have been linked after the first listing, or deleted since as no reader needs it now.
        """
        pending = _pending(self.machine) if any(map(is_pending, needed)) else {}
        listed = every_object(self.machine) | pending
        now = self.machine.fetch()
        still = set(_referred(now.state, now_since := now.state.seqno_since(now.seqno)))
        return still | needed.keys() if now_since == since else still, listed

    def batches(self, version: Version, engine: Adder | None, progress: Progress | None, *, full: bool) -> None:
        """Scrub, also each batch of which an object is missing. What is found of these is left out, as it is known."""
        spoiled = [batch for batch in version.state.stored if self._lost.intersection(batch.keys)]
        lost, sound = {batch.id for batch in spoiled}, self._known.sound.difference(map(identity_of, spoiled))
        known = msgspec.structs.replace(self._known, sound=sound)
        self._scrubbed = found = scrub(
            self.machine, new_only=not full, engine=engine, progress=progress, is_kept=self._is_kept, known=known
        )
        self._findings += [
            Finding("batch", f"batch {id_}", "", what, self._bring_back)
            for id_, what in found.damaged
            if id_ not in lost
        ]
        if version.state.pins:
            self.unchecked.append("what is published for other engines, but for the shard's own objects")

    def answer(self) -> Verified:
        """Remember up to where the log is sound, and say all that was found."""
        walk, orphans, state = self._walk, self._orphans, self.version.state if self.version else State()
        last = 0 if walk.last is None else walk.last.seqno
        return Verified(
            findings=tuple(self._findings),
            newest=max(last, self._walked_to.seqno if self._walked_to else 0),
            rows=walk.rows, versions=walk.replayed, rollups=walk.rollups,
            objects=self._there, size=self._there_bytes,
            orphans=len(orphans.keys), orphan_bytes=sum(orphans.keys.values()),
            garbage=len(state.garbage), garbage_bytes=sum(one.size for one in state.garbage.values()),
            pending=orphans.pending - sum(1 for key in self._listed if key in state.garbage),
            scrubbed=self._scrubbed, left=self._left, truncated=walk.truncated,
            unchecked=tuple(self.unchecked), remembered=self._remember(),
        )  # fmt: skip

    def _remember(self) -> bool:
        walked = self._walked_to
        if not self._is_kept or walked is None or walked == self._walked:
            return walked is None or walked == self._walked
        deadline = self.machine.runtime.deadline(REMEMBER_S)
        try:
            within(deadline, lambda: remember_walked(self.machine, walked, self._replaced))
        except PersistError as error:
            log.warning("shard %s: up to where its log is sound cannot be remembered: %s", self.machine.shard, error)
            return False
        return True


def _pending(machine: Machine) -> dict[PartKey, int]:
    below = machine.blob.list(pending_prefix(machine.shard))
    return {pending_key(machine.shard, entry.key): entry.size for entry in below}


def _referred(state: State, since: SeqNo) -> dict[PartKey, int]:
    """The objects that a state refers to, and those that it has given up and versions from `since` on refer to.

    A pending batch that no version refers to may be gone. Who absorbs looks at a listing, and may discard one
    that others have absorbed, deleted and forgotten since.
    """
    given_up = ((key, one) for key, one in state.garbage.items() if one.seqno > since)
    found = {key: garbage.size for key, garbage in given_up if not is_pending(key)}
    found |= {rollup.key: rollup.size for rollup in state.rollups.values()}
    return found | _parts_of(state.stored)


def _linked(step: Step, since: SeqNo) -> dict[PartKey, int]:
    """The objects of a step's version; only the new ones, if the version before it may be read, too."""
    if step.before is None or step.before.seqno < since:
        return _parts_of(step.after.state.stored)
    added = [batch for diff in step.row.diffs if diff.trace is not None for batch in diff.trace.added]
    added += [diff.contents[1] for diff in step.row.diffs if diff.contents is not None and diff.contents[1]]
    return _parts_of(added)


def _parts_of(batches: Iterable[Batch]) -> dict[PartKey, int]:
    return {part.key: part.size for batch in batches for part in batch.parts if part.inline is None}
