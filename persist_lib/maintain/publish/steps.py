"""Publishing: pin, then metadata under fresh names, then the pointer, then unpin what no snapshot names.

A crash after any step leaves pins and litter at most, which the next publication of the same name takes over: readers
see the old snapshot or the new one. The pins' fencing value is of one call, so that a call which was paused for long
notices that another one took over; and each pointer is moved on the condition that it is what the call has seen.

The pointer is read after the pins are taken over. Where they have more than it names, a call was cut short that
may still move it: then a snapshot is written even if nothing is new, as that call's move fails after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, Protocol, get_args

import msgspec

from persist_lib.arguments import shown
from persist_lib.core.cost import Cost
from persist_lib.core.holds import newest_time
from persist_lib.core.pins import BY_NAME, behind
from persist_lib.core.plan.compaction import Policy, plan_contents, plan_rewrite, policy_of
from persist_lib.core.plan.requests import Request
from persist_lib.core.plan.written import Seen
from persist_lib.core.state import Part, State
from persist_lib.errors import InvalidUsage, Missing, NotFound, SinceViolation, Unpublishable
from persist_lib.format.paths import folder_of
from persist_lib.frontier import at
from persist_lib.ids import PartKey
from persist_lib.location.scheme import with_extra
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.compaction import carry_out
from persist_lib.maintain.merge_tasks import local_engine
from persist_lib.maintain.publish.columns import Columns, columns_of
from persist_lib.maintain.publish.files import Chosen, File, Known, choose, copies_of, file_of, whole
from persist_lib.maintain.publish.folder import COPIES, Folder
from persist_lib.maintain.publish.shards import Pins, Shards, Terms, lone, terms_of
from persist_lib.maintain.worker import Worker
from persist_lib.schema.evolution import is_prefix
from persist_lib.schema.schema import comes_before
from persist_lib.shard.commit import Machine
from persist_lib.telemetry import duty
from persist_lib.times import show_time

Format = Literal["iceberg", "delta"]
FORMATS: tuple[Format, ...] = get_args(Format)
ROUNDS = 8
"""How often it looks for the objects of the contents, where others replace them at the same time."""


class Published(msgspec.Struct, frozen=True):
    """What a publication says, or with `dry_run` would say: the table as of a time, for other engines.

    `place` is the address of the table's folder, and `version` what the engine calls this version: the address of
    Iceberg's metadata, or the number of Delta's version. `files` of `rows` rows and `size` bytes are named, of which
    `shared` were in the version before, and `copied` bytes were written for it alone. `rewritten` is the bytes of the
    contents that were written for it, which serve the shard's own reads as well, and `metadata` those of all else.
    """

    table: str
    format: Format
    as_of: int
    place: str
    version: str
    files: int
    rows: int
    size: int
    shared: int = 0
    copied: int = 0
    rewritten: int = 0
    metadata: int = 0
    is_new: bool = True
    """False where it was published as of this time before, and nothing was left to do."""
    cost: Cost = Cost()
    """The requests that it made to the location."""


class Withdrawn(msgspec.Struct, frozen=True):
    """A publication that was taken back, or would be: its objects by their keys, and as of which time it was."""

    table: str
    format: Format
    keys: tuple[PartKey, ...]
    as_of: int | None
    cost: Cost = Cost()
    """The requests that it made to the location."""


class _Table(Protocol):
    """What writes a format. `write` and `expire` change nothing that readers see, `point` all of it at once."""

    @property
    def place(self) -> str: ...
    @property
    def version(self) -> str: ...
    def newest(self) -> Known | None: ...
    def named(self) -> set[str]: ...
    def names(self) -> dict[str, str]: ...
    def is_as(self, columns: Columns) -> bool: ...
    def write(self, columns: Columns, files: Sequence[File], as_of: int, keep: int) -> None: ...
    def point(self) -> bool: ...
    def expire(self, keep: int) -> None: ...
    def tidy(self) -> None: ...
    def withdraw(self) -> None: ...
    def close(self) -> None: ...


def parse_format(as_: object) -> Format:
    """Check that this is a format. Raises InvalidUsage."""
    if not isinstance(as_, str) or as_ not in FORMATS:
        raise InvalidUsage(f"as_ must be one of {', '.join(FORMATS)}: got {shown(as_)}", argument="as_", value=as_)
    return as_


def _table(folder: Folder, format_: Format, *, is_read: bool = True) -> _Table:
    module = with_extra(f"persist_lib.maintain.publish.{format_}", f"a publication as {format_}", "publish")
    table: _Table = getattr(module, format_.capitalize())(folder, is_read=is_read)
    return table


def publish(
    shards: Shards,
    workers: Sequence[Worker],
    format_: Format,
    as_of: int,
    *,
    keep: int | None = None,
    follows: bool | None = None,
    dry_run: bool = False,
) -> Published:
    """Publish a table as of a time that is complete in each of its shards. Doing it again finds nothing to do.

    `workers` rewrite the shards that have rows, in their order. `keep` and `follows` are as for `Table.publish`; None:
    as they are. Raises SinceViolation where a shard cannot be read as of the time.
    """
    states = _readable(shards, as_of)
    _columns(shards, states, format_, {})
    _check_follows(shards, states[0], format_)
    folder = Folder(shards.machines[0], shards.folder, shards.name)
    with closing(_table(folder, format_)) as table:
        columns = _columns(shards, states, format_, table.names())
        if dry_run:
            return _planned(folder, table, shards, states, format_, as_of, columns)
        version = table.version
    return _Run(shards, workers, folder, format_, as_of, terms_of(shards.pins(format_), keep, follows)).do(
        states, version
    )


@charged
def publish_shard(machine: Machine, worker: Worker, format_: Format, as_of: int | None = None, **how: Any) -> Published:
    """Publish a table that one shard is, as of a time; None: the newest that is complete. `how` is as for `publish`."""
    state = machine.fetch().state
    if state.member or folder_of(machine.shard) != machine.shard:
        raise Unpublishable(
            f"shard {machine.shard} cannot be published: it is a member of a collection, which has rows elsewhere as "
            "well. Nothing was published; publish the collection",
            table=machine.shard,
        )
    columns_of(machine.shard, state.schemas, format_, {})
    newest = (state.upper.time or 0) - 1
    if state.upper.is_top():
        newest = max((part.time_upper for one in state.trace for part in one.parts), default=0)
        newest = max(newest, state.since.time or 0)
    as_of = newest if as_of is None else as_of
    if not 0 <= as_of <= newest:
        raise _unreadable(machine, state, as_of)
    return publish(lone(machine), [worker], format_, as_of, **how)


def _readable(shards: Shards, as_of: int) -> list[State]:
    """The states of the shards that have rows. Raises SinceViolation where one cannot be read as of the time."""
    states = [machine.fetch().state for machine in shards.machines]
    for machine, state in zip(shards.machines, states, strict=True):
        if not (as_of >= 0 and state.since <= at(as_of) and state.upper.has_passed(as_of)):
            raise _unreadable(machine, state, as_of)
    return states


def _unreadable(machine: Machine, state: State, as_of: int) -> SinceViolation:
    return SinceViolation(
        f"shard {machine.shard} cannot be published as of {show_time(as_of, state.times)}: it can be read from "
        f"{state.since} on, before {state.upper}. Nothing was published",
        as_of=max(as_of, 0), since=state.since, shard=machine.shard,
    )  # fmt: skip


def _columns(shards: Shards, states: Sequence[State], format_: Format, names: Mapping[str, str]) -> list[Columns]:
    """The columns of each shard's parts, all shown as the same. Raises Unpublishable."""
    found = [columns_of(shards.name, state.schemas, format_, names) for state in states]
    if any((one.shown, one.ids) != (found[0].shown, found[0].ids) for one in found):
        raise Unpublishable(
            f"table {shards.name} cannot be published now: its columns are being changed, and not all of its shards "
            "have them. Nothing was published; try again, after `persist maintain` where the program that changed them "
            "was cut short",
            table=shards.name, as_=format_,
        )  # fmt: skip
    return found


def _check_follows(shards: Shards, state: State, format_: Format) -> None:
    """Raise Unpublishable where earlier snapshots are of a rendition with columns that this one's do not follow."""
    newest = state.schemas[-1].shown
    for machine in shards.former:
        older = machine.fetch().state
        if shards.pin_of(machine, format_) not in older.pins:
            continue
        had = older.schemas[-1].shown
        if not (is_prefix(had, newest) if format_ in BY_NAME else comes_before(had, newest)):
            raise Unpublishable(
                f"table {shards.name} cannot be published as {format_} beside its earlier snapshots: the rendition of "
                f"these has {had}, which cannot become {newest}. Nothing was published; withdraw the publication, and "
                "publish again",
                table=shards.name, as_=format_,
            )  # fmt: skip


class Followed(msgspec.Struct, frozen=True):
    """What was published again, or would be."""

    published: tuple[Published, ...]
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


@duty("publication")
@charged
def follow(machine: Machine, worker: Worker, *, dry_run: bool = False, seen: Seen | None = None) -> Followed:
    """Publish again what follows the shard, as of its newest time; of `seen`, if it is given, as of that of then.

    Doing it again finds nothing to do.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "publication")
    state = (seen.version if seen else machine.fetch()).state
    as_of = newest_time(state).time
    formats = [one for one in FORMATS if one in behind(state)]
    return Followed(tuple(publish_shard(machine, worker, one, as_of, dry_run=dry_run) for one in formats))


class _Run:
    """One call of `publish`: its steps."""

    def __init__(
        self, shards: Shards, workers: Sequence[Worker], folder: Folder, format_: Format, as_of: int, terms: Terms
    ) -> None:
        self._shards, self._workers, self._folder, self._format = shards, workers, folder, format_
        self._as_of, self._terms, self._pins = as_of, terms, Pins(shards, format_)

    def do(self, states: Sequence[State], version: str) -> Published:
        """Take the steps, unless another call was faster than to leave this version of the table the newest."""
        self._pins.take()
        with closing(_table(self._folder, self._format)) as table:
            if table.version != version:
                raise self._pins.fenced()
            return self._move(table, states)

    def _move(self, table: _Table, states: Sequence[State]) -> Published:
        folder, shards, known, rewritten = self._folder, self._shards, table.newest(), 0
        each = _columns(shards, states, self._format, table.names())
        shared, columns = dict(known.files) if known else {}, each[0]
        is_as, files = table.is_as(columns), list(shared.values())
        is_litter = not self._pins.keys() <= table.named()
        is_new = known is None or known.as_of != self._as_of or not is_as
        if is_new or is_litter:
            if known is None or not is_as or not self._is_still(known.as_of):
                files = []
                for worker, its in zip(self._workers, each, strict=True):
                    found, written = self._files(worker, its, shared)
                    files, rewritten = [*files, *found], rewritten + written
            self._check_there([one for one in files if one.key in shared])
            table.write(columns, files, self._as_of, self._terms.keep)
            self._pins.keys()  # raises where another call took one over
            if not table.point():
                raise self._pins.fenced()
        table.expire(self._terms.keep)
        named = table.named()
        self._pins.settle(named, self._as_of, self._terms)
        table.tidy()
        _drop_copies(folder, shards, self._format, named)
        fresh = (one.size for one in files if one.key.startswith(folder.prefix + COPIES) and one.key not in shared)
        copied = sum(fresh)
        return Published(
            shards.name, self._format, self._as_of, table.place, table.version, len(files),
            sum(one.rows for one in files), sum(one.size for one in files),
            shared=sum(one.key in shared for one in files), copied=copied, rewritten=rewritten,
            metadata=folder.written - copied, is_new=is_new or is_litter,
        )  # fmt: skip

    def _is_still(self, before: int) -> bool:
        """Whether the same shards had the same rows as of the time that is published."""
        is_same = before == self._as_of or all(_is_still(m.state, before, self._as_of) for m in self._shards.machines)
        return is_same and self._pins.are_as_of(before)

    def _files(self, worker: Worker, columns: Columns, known: dict[str, File]) -> tuple[list[File], int]:
        """The files of a shard's contents, pinned, and what was rewritten; copies, where nothing else has them."""
        machine, rewritten = worker.machine, 0
        for _ in range(ROUNDS):
            state = machine.fetch().state
            if not state.since <= at(self._as_of):
                raise _unreadable(machine, state, self._as_of)
            try:
                chosen = choose(
                    self._folder, machine, state, self._as_of, columns, below_folder=self._format in BY_NAME,
                    known=_in_place(known, self._folder),
                )  # fmt: skip
                if chosen is None and (request := self._request(machine, state)) is not None:
                    done = carry_out(machine, worker, request, local_engine(machine))
                    rewritten += done.bytes_out
                    continue
                if chosen is None:
                    return list(whole(self._folder, machine, state, self._as_of, columns)), rewritten
                if self._pins.add(machine, {part.key for part in chosen.in_place}):
                    copies = copies_of(self._folder, machine, state, chosen.copied, columns, known)
                    in_place = (file_of(machine, part, chosen.bounds.get(part.key)) for part in chosen.in_place)
                    return [*in_place, *copies], rewritten
            except Missing:
                if machine.fetch().state == state:
                    raise
        raise Missing(
            f"shard {machine.shard}: its objects were replaced faster than they could be published. Nothing was "
            "published; try again when less happens",
            shard=machine.shard,
        )

    def _request(self, machine: Machine, state: State) -> Request | None:
        """What makes one run of the contents; None where only a copy has them."""
        policy = policy_of(machine.config)
        if any(one.count for one in state.trace if not one.upper <= at(self._as_of + 1)):
            return None  # it is of the past
        return next_request(state, policy, below_folder=self._format in BY_NAME and self._folder.has(machine.shard))

    def _check_there(self, shared: Sequence[File]) -> None:
        """Raise Missing where a file that is named again is gone, or is another one."""
        if not shared:
            return
        below, blob = {one.key.rpartition("/")[0] + "/" for one in shared}, self._folder.machine.blob
        sizes = {one.key: one.size for prefix in below for one in blob.list(prefix)}
        if gone := [one.key for one in shared if sizes.get(one.key) != one.size]:
            raise Missing(
                f"table {self._shards.name}: {len(gone)} files that are published are gone or were replaced, as "
                f"{gone[0]}: another program deleted them. Nothing was published; see what the table itself lacks by "
                "`persist shard scrub`, restore the files, or withdraw the publication and publish again",
                shard=self._folder.machine.shard, key=gone[0], keys=tuple(gone),
            )  # fmt: skip


def _drop_copies(folder: Folder, shards: Shards, format_: Format, named: set[str]) -> None:
    """Delete the copies that this publication of the table does not name, and no other one does."""
    there = set(folder.sizes(COPIES)) - named
    for other in FORMATS if there else ():
        if other != format_ and shards.pins(other):
            with closing(_table(folder, other)) as table:
                there -= table.named()
    folder.delete(there)


def _is_still(state: State, before: int, as_of: int) -> bool:
    """Whether nothing changed between two times, as far as the bounds of parts say."""
    parts = (part for one in state.trace for part in one.parts)
    return before < as_of and not any(part.time_upper > before and part.time_lower <= as_of for part in parts)


def _in_place(known: Mapping[str, File], folder: Folder) -> set[str]:
    return {key for key in known if not key.startswith(folder.prefix + COPIES)}


def next_request(state: State, policy: Policy, *, below_folder: bool) -> Request | None:
    """The next rewriting towards one run of the contents; None where none is left that the state would take."""
    if not state.filled:
        return None
    ahead = plan_contents(state, policy)
    if ahead is not None and len(ahead.merges) == 1:
        kept = state.contents
        if kept is not None and len(ahead.inputs) == 1:  # these are the contents, in another place
            return msgspec.structs.replace(ahead, inputs=(kept,), reason="drop")
        return ahead
    found = plan_rewrite(state, [one.id for one in state.filled], policy)
    if not found or state.contents is not None:
        return None
    is_last = len(found) == 1 and not found[0].is_partial and below_folder
    return msgspec.structs.replace(found[0], reason="publish") if is_last else found[0]


def _planned(
    folder: Folder, table: _Table, shards: Shards, states: Sequence[State], format_: Format, as_of: int,
    each: Sequence[Columns],
) -> Published:  # fmt: skip
    """What a publication would do: where contents are written, as many bytes as are read at most."""
    known = table.newest()
    shared = known.files if known else {}
    is_new = known is None or known.as_of != as_of or not table.is_as(each[0])
    found = list[Part]()
    copied = rewritten = same = 0
    for machine, state, columns in zip(shards.machines, states, each, strict=True):
        chosen: Chosen | None = Chosen([], [], {})
        if is_new:
            chosen = choose(
                folder, machine, state, as_of, columns, below_folder=format_ in BY_NAME,
                known=_in_place(shared, folder),
            )  # fmt: skip
        batches = [one for one in state.batches_at(as_of) if one.lower.is_before(as_of)]
        if chosen is None:
            parts = [part for one in batches for part in one.parts]
            rewritten += sum(part.size for part in parts)
        else:
            parts = [*chosen.in_place, *chosen.copied]
            same += sum(file_of(machine, part).key in shared for part in chosen.in_place)
            copied += sum(part.size for part in chosen.copied)
        found += parts
    return Published(
        shards.name, format_, as_of, table.place, table.version, len(found) if is_new else len(shared),
        sum(part.rows for part in found), sum(part.size for part in found), shared=same, copied=copied,
        rewritten=rewritten, is_new=is_new,
    )  # fmt: skip


@charged
def withdraw(shards: Shards, format_: Format, *, dry_run: bool = False) -> Withdrawn:
    """Take a publication back: its pointer first, then its metadata and copies, then its pins.

    Readers that have it open may fail from then on. Doing it again finishes what a crash left. Raises NotFound where
    it is missing.
    """
    for machine in shards.every:
        machine.fetch()
    if not (pins := shards.pins(format_)):
        raise NotFound(f"table {shards.name} is not published as {format_}. Nothing was done", table=shards.name)
    keys = tuple(sorted({key for pin in pins for key in pin.keys}))
    as_of = max((pin.as_of for pin in pins if pin.as_of is not None), default=None)
    if dry_run:
        return Withdrawn(shards.name, format_, keys, as_of)
    held = Pins(shards, format_)
    held.take(make=False)
    folder = Folder(shards.machines[0], shards.folder, shards.name)
    with closing(_table(folder, format_, is_read=False)) as table:  # also where it cannot be read
        table.withdraw()
    _drop_copies(folder, shards, format_, set())
    held.drop()
    return Withdrawn(shards.name, format_, keys, as_of)
