"""Erasing rows from a shard: from its objects, its replaced and unlinked ones too, and from its log.

Nothing is remembered in between: each call looks through all that the shard has, does what can be done, and looks
again. So it may be killed and repeated at any time, and its answer is what a scan has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from persist_lib.core import commands as c
from persist_lib.core.formats import PINS
from persist_lib.core.leases import keepers
from persist_lib.core.pins import folders_of
from persist_lib.core.plan.compaction import Policy, plan_rewrite, policy_of
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.plan.requests import Request
from persist_lib.core.state import COLLECTION, Part, Version
from persist_lib.errors import Damage, Missing
from persist_lib.format.digest import CHUNK, digest
from persist_lib.format.log import LogRow, decode_row, decode_state
from persist_lib.format.parquet import PartFile
from persist_lib.format.parts import decode_inline
from persist_lib.format.paths import blob_key, key_of, pending_prefix, published_prefix
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, parse_rollup_key
from persist_lib.kernel.columns import Rows, integers
from persist_lib.maintain.compaction import carry_out
from persist_lib.maintain.garbage import audit_orphans, collect, objects_of
from persist_lib.maintain.merge_tasks import local_engine
from persist_lib.maintain.publish.files import opened
from persist_lib.maintain.publish.folder import COPIES
from persist_lib.maintain.worker import Worker, roll_up
from persist_lib.schema.schema import TIME
from persist_lib.shard.commit import Machine
from persist_lib.shard.log import SCAN_ROWS
from persist_lib.times import show_time

ROUNDS = 4
"""How often a shard is rewritten in one call, where others write the keys again or replace the same batches, beside."""

STAYS = {"batch", "pending", "copy", "unreadable"}
"""What a rollup and a collection of garbage do not take away."""

WHY = {
    "pending": "it is not absorbed yet, and may have some: absorb it, and erase again",
    "copy": "a publication names it: publish again, and keep one snapshot, or withdraw it; then erase again",
    "unreadable": "it cannot be read, and may have some: see `persist shard scrub`",
    "unlinked": "who uploaded it may still link it; it goes once that id is retired",
}
"""What keeps places of these kinds, whatever the state says."""

Kind = Literal["batch", "replaced", "unlinked", "rollup", "log", "pending", "copy", "unreadable"]


class Sought(NamedTuple):
    """Which rows: whether rows with these bounds of keys may be among them, and which rows of a table are.

    The table has the key columns, in canonical order. `is_by_key` is whether the rows are those of some keys.
    """

    may_be: Callable[[bytes, bytes], bool]
    find: Callable[[pa.Table], Rows]
    is_by_key: bool = True


class Place(msgspec.Struct, frozen=True):
    """What has some of the rows: a part of a batch, a part that a later state has `replaced`, an `unlinked` object, a
    rollup, a row of the log, a `copy` that a publication names; or may have some: a batch in the pending area, and an
    object that is `unreadable`.

    `name` is its key in Blob, or the version of the row. `digests` (hex) are of its chunks; empty where it is no part.
    """

    kind: Kind
    name: str
    size: int
    digests: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else f"{self.kind}, inline"


class Found(msgspec.Struct, frozen=True):
    """What a search found in a shard whose newest version was `seqno`, in how many objects and rows of its log.

    `until` is the last time of the rows in batches, -1 without any, and `batches` those that have them.
    """

    seqno: SeqNo
    places: tuple[Place, ...]
    objects: int
    rows: int
    until: int = -1
    batches: tuple[tuple[int, int], ...] = ()


class ErasedShard(msgspec.Struct, frozen=True):
    """What became of one shard. `gone` had some of the rows and is deleted; `left` still has some, and why.

    As of version `seqno` a scan of `objects` objects and `log_rows` rows of the log found the rows nowhere but in
    `left`.
    """

    shard: str
    seqno: SeqNo
    gone: tuple[Place, ...]
    left: tuple[tuple[Place, str], ...]
    objects: int
    log_rows: int


def search(machine: Machine, sought: Sought) -> Found:
    """Look for the rows in all that the shard has. Reads bounds of all parts, and keys where these do not exclude them.

    Objects are listed before the state is read, so that what is linked in between is looked at as linked.
    """
    for _ in range(ROUNDS):
        listed = {entry.key: entry.size for entry in objects_of(machine)}
        pending = [Place("pending", e.key, e.size) for e in machine.blob.list(pending_prefix(machine.shard))]
        pending += _copies(machine, sought)
        version = machine.fetch()
        try:
            return _Search(machine, sought, version).run(listed, pending)
        except Missing:
            if machine.fetch().seqno == version.seqno:
                raise
    raise Missing(
        f"shard {machine.shard}: its objects were replaced faster than they could be looked through. Nothing was "
        "changed; try again when less is going on",
        shard=machine.shard,
    )


def _copies(machine: Machine, sought: Sought) -> list[Place]:
    """The copies of publications that have some of the rows. They are plain Parquet files."""
    if machine.state.format < PINS:
        return []
    schema, found = machine.state.schemas[-1], list[Place]()
    ids = [column.id for column in schema.key]  # copies call them so
    folders = sorted({machine.shard, *folders_of(machine.state, machine.shard).values()})
    for entry in (one for folder in folders for one in machine.blob.list(f"{published_prefix(folder)}{COPIES}")):
        data = machine.blob.get(entry.key)
        if data is None:
            continue
        keys = pq.read_table(pa.BufferReader(data), columns=ids).rename_columns(schema.key_names)
        if sought.find(keys).size:
            found.append(Place("copy", entry.key, entry.size))
    return found


class _Search:
    def __init__(self, machine: Machine, sought: Sought, version: Version) -> None:
        self._machine, self._sought, self._version = machine, sought, version
        self._schema = version.state.schemas[-1]
        self._live = {part.key for batch in version.state.stored for part in batch.parts if part.inline is None}

    def run(self, listed: Mapping[str, int], pending: Sequence[Place]) -> Found:
        state, places, until, batches = self._version.state, [*pending], -1, []
        for batch in state.stored:
            for part in batch.parts:
                if (time := self._last_time(part)) >= 0:
                    if batch is not state.contents:
                        until = max(until, time)
                        batches.append(batch.id)
                    key = blob_key(self._machine.shard, part.key) if part.inline is None else ""
                    places.append(Place("batch", key, part.size, part.digests.hex()))
        others = {key: size for key, size in listed.items() if key_of(self._machine.shard, key) not in self._live}
        for key, size in others.items():
            if (place := self._of_object(key, size)) is not None:
                places.append(place)
        rows = 0
        for row in _log(self._machine):
            rows += 1
            added = [batch for diff in row.diffs if diff.trace for batch in diff.trace.added]
            added += [kept for diff in row.diffs if diff.contents for kept in diff.contents if kept is not None]
            if any(self._refers(part) for batch in added for part in batch.parts):
                places.append(Place("log", f"v{row.seqno}", 0))
        return Found(
            self._version.seqno, tuple(places), len(self._live | {*others}), rows, until, tuple(dict.fromkeys(batches))
        )

    def _last_time(self, part: Part) -> int:
        """The last time of the rows in a part of a batch; -1 where it has none."""
        if not self._sought.may_be(part.key_lower, part.key_upper):
            return -1
        if part.inline is not None:
            schemas = self._version.state.schemas
            table = decode_inline("inline rows", part.inline, schemas[part.schema], self._schema, at=part.at)
            found = self._sought.find(table.select(self._schema.key_names))
            return int(integers(table.column(TIME))[found].max()) if found.size else -1
        times = self._times(opened(self._machine, self._version.state, part, self._schema))
        return max(times, default=-1) if part.at is None or not times else part.at

    def _times(self, file: PartFile) -> list[int]:
        """The last time of the rows in each row group that has some."""
        names, _ = file.key_columns()
        found = []
        for group, bounds in enumerate(file.bounds):
            if self._sought.may_be(*bounds):
                rows = self._sought.find(file.read_group(group, names))
                if rows.size:
                    found.append(int(integers(file.read_group(group, [TIME]).column(TIME))[rows].max()))
        return found

    def _of_object(self, key: str, size: int) -> Place | None:
        """What an object that no batch refers to has of the rows; None: nothing, or it is gone by now."""
        state, name = self._version.state, key_of(self._machine.shard, key)
        data = self._machine.blob.get(key)
        if data is None:
            return None
        try:
            if parse_rollup_key(name) is not None:
                parts = (part for batch in decode_state(data, key).state.stored for part in batch.parts)
                return Place("rollup", key, size) if any(map(self._refers, parts)) else None
            found = self._times(PartFile(key, pa.BufferReader(data), self._schema))
        except Damage:
            return Place("unreadable", key, size)
        digests = b"".join(digest(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))
        return Place("replaced" if name in state.garbage else "unlinked", key, size, digests.hex()) if found else None

    def _refers(self, part: Part) -> bool:
        """Whether what names this part has some of the rows: as rows, or by a bound of an object that is replaced."""
        if part.inline is not None:
            return self._last_time(part) >= 0
        return part.key not in self._live and self._sought.may_be(part.key_lower, part.key_upper)


def _log(machine: Machine) -> Iterator[LogRow]:
    start = SeqNo(0)
    while rows := machine.consensus.scan(machine.shard, start, SCAN_ROWS):
        for row in rows:
            yield decode_row(row.data, f"{machine.shard} v{row.seqno}")
        start = SeqNo(rows[-1].seqno + 1)
        if len(rows) < SCAN_ROWS:
            return


def erase(machine: Machine, worker: Worker, sought: Sought, found: Found, before: ErasedShard) -> ErasedShard:
    """Rewrite the batches that have the rows, and delete what had them. The rows must add up to nothing by since.

    `found` is where a search has found them. What since has not passed stays, and so does what readers may still read:
    `left` says both. Doing it again continues; the answer has what is `gone` of the answer `before`, too.
    """
    policy, gone = policy_of(machine.config), {place.name: place for place in before.gone}
    if machine.fetch().state.contents is not None:  # the next compaction makes others
        machine.try_commit(lambda _state, _now: c.KeepContents(worker.id, None))
    for _ in range(ROUNDS):
        gone |= {place.name: place for place in found.places if place.name}
        state = machine.fetch().state
        if not found.batches or state.since < at(found.until) or not _rewrite(machine, worker, found, policy):
            break
        found = search(machine, sought)
    for _ in range(ROUNDS):  # a rollup goes once there are two that come after it
        if found.batches or all(place.kind in STAYS for place in found.places):
            break
        known = found.places
        roll_up(machine, worker, force=True)
        collect(machine)
        audit_orphans(machine)
        found = search(machine, sought)
        gone |= {place.name: place for place in found.places if place.name}
        if found.places == known and machine.state.readers:
            break  # they wait for these
    version = machine.fetch()
    left = tuple((place, _why(place, found, version)) for place in found.places)
    for place, _ in left:
        gone.pop(place.name, None)
    return ErasedShard(machine.shard, found.seqno, tuple(gone.values()), left, found.objects, found.rows)


def _rewrite(machine: Machine, worker: Worker, found: Found, policy: Policy) -> bool:
    """Merge the batches that have the rows, and those in between, into one: what adds up to nothing goes.

    False where they are one already, so that nothing would go.
    """
    requests: list[Request] = []
    for _ in range(ROUNDS):
        requests = plan_rewrite(machine.fetch().state, found.batches, policy)
        for request in requests:
            carry_out(machine, worker, request, local_engine(machine))
        if not any(request.is_partial for request in requests):
            break
    return bool(requests)


def _why(place: Place, found: Found, version: Version) -> str:
    """What keeps a place: who reads, or what has to be done about it."""
    state = version.state
    if found.batches and place.kind not in STAYS:
        return "a batch has them, too, and goes first"
    if place.kind in WHY:
        return WHY[place.kind]
    if place.kind == "batch":
        if holders := keepers(state, at(found.until)):
            own = {f"hold {COLLECTION}": "the collection"}
            kept_by = ", ".join(own.get(name, name) for name in holders)
            return f"history up to {show_time(found.until, state.times)} is kept by {kept_by}"
        return "the keys were written again, or the batch was replaced, in the meantime: erase again"
    if held := plan_garbage(state, version.seqno).held:
        return "; ".join(dict.fromkeys(one.why for one in held))
    oldest = min((reader.seqno for reader in state.readers.values()), default=version.seqno)
    return f"a reader may still need versions from v{oldest} on"
