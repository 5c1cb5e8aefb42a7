"""Publishing: pin, then metadata under fresh names, then the pointer, then unpin what no snapshot names.

A crash after any step leaves a pin and litter at most, which the next publication of the same name takes over: readers
see the old snapshot or the new one. The pin's fencing value is of one call, so that a call which was paused for long
notices that another one took over; and each pointer is moved on the condition that it is what the call has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Literal, Protocol, get_args

import msgspec

from persist_lib.arguments import shown
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.formats import PART_SUMS, PINS
from persist_lib.core.holds import newest_time
from persist_lib.core.pins import BY_NAME, behind
from persist_lib.core.plan.compaction import Policy, Request, plan_contents, plan_rewrite, policy_of
from persist_lib.core.plan.written import Seen
from persist_lib.core.state import Pin, State
from persist_lib.errors import Fenced, InvalidUsage, Missing, NotFound, SinceViolation, Unpublishable
from persist_lib.format.paths import key_of
from persist_lib.frontier import at
from persist_lib.ids import PartKey
from persist_lib.location.scheme import with_extra
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.compaction import carry_out, local_engine, move_up
from persist_lib.maintain.publish.columns import Columns, columns_of
from persist_lib.maintain.publish.files import Chosen, File, Known, choose, copies_of, file_of, whole
from persist_lib.maintain.publish.folder import COPIES, Folder
from persist_lib.maintain.worker import Worker
from persist_lib.shard.commit import Committed, Machine
from persist_lib.telemetry import duty
from persist_lib.times import show_time

Format = Literal["iceberg", "delta"]
FORMATS: tuple[Format, ...] = get_args(Format)
KEEP = 10
"""How many snapshots are kept, unless it is said."""
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


@charged
def publish(
    machine: Machine,
    worker: Worker,
    format_: Format,
    as_of: int | None = None,
    *,
    keep: int | None = None,
    follows: bool | None = None,
    dry_run: bool = False,
) -> Published:
    """Publish a shard as of a time; None: the newest that is complete. Doing it again finds nothing to do.

    `keep` and `follows` are as for `Table.publish`; None: as they are.
    """
    state = machine.fetch().state
    if state.member:
        raise Unpublishable(
            f"shard {machine.shard} cannot be published: it is a member of a collection, which has rows elsewhere as "
            "well. Nothing was published",
            table=machine.shard,
        )
    columns_of(machine.shard, state.schemas, format_, {})
    newest = (state.upper.time or 0) - 1 if not state.upper.is_top() else max(_last_time(state), state.since.time or 0)
    as_of = newest if as_of is None else as_of
    if not (0 <= as_of <= newest and state.since <= at(as_of)):
        raise SinceViolation(
            f"shard {machine.shard} cannot be published as of {show_time(as_of, state.times)}: it can be read from "
            f"{state.since} on, before {state.upper}. Nothing was published",
            as_of=at(as_of), since=state.since, shard=machine.shard,
        )  # fmt: skip
    folder = Folder(machine)
    with closing(_table(folder, format_)) as table:
        known, columns = table.newest(), columns_of(machine.shard, state.schemas, format_, table.names())
        if dry_run:
            return _planned(folder, table, state, format_, as_of, columns, known)
        keep, follows = _terms(state.pins.get(format_), keep, follows)
        return _Run(machine, worker, folder, table, format_, as_of, columns, keep, follows).do(known)


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
    return Followed(tuple(publish(machine, worker, one, as_of, dry_run=dry_run) for one in formats))


class _Run:
    """One call of `publish`: its steps."""

    def __init__(
        self, machine: Machine, worker: Worker, folder: Folder, table: _Table, format_: Format, as_of: int,
        columns: Columns, keep: int, follows: bool,
    ) -> None:  # fmt: skip
        self._machine, self._worker, self._folder, self._table = machine, worker, folder, table
        self._format, self._as_of, self._columns, self._keep, self._follows = format_, as_of, columns, keep, follows
        self._token = b"%016x" % (machine.runtime.entropy() % 2**64)
        self._is_ours = False

    def do(self, known: Known | None) -> Published:
        machine, folder, table, columns = self._machine, self._folder, self._table, self._columns
        upgrade(machine)
        self._pin(set(), known.as_of if known else self._as_of)
        shared, rewritten, copied = dict(known.files) if known else {}, 0, 0
        is_as = table.is_as(columns)
        is_new = known is None or known.as_of != self._as_of or not is_as
        files = list(shared.values())
        if is_new:
            if known is None or not is_as or not _is_still(machine.state, known.as_of, self._as_of):
                files, rewritten = self._files(shared)
            copied = sum(
                one.size for one in files if one.key.startswith(folder.prefix + COPIES) and one.key not in shared
            )
            self._check_there([one for one in files if one.key in shared])
            table.write(columns, files, self._as_of, self._keep)
            self._check_ours()
            if not table.point():
                raise self._fenced()
        table.expire(self._keep)
        named = table.named()
        self._pin(self._parts(named), self._as_of, is_last=True)
        table.tidy()
        _drop_copies(folder, self._format, named)
        return Published(
            machine.shard, self._format, self._as_of, table.place, table.version, len(files),
            sum(one.rows for one in files), sum(one.size for one in files),
            shared=sum(one.key in shared for one in files), copied=copied, rewritten=rewritten,
            metadata=folder.written - copied, is_new=is_new,
        )  # fmt: skip

    def _files(self, known: dict[str, File]) -> tuple[list[File], int]:
        """The files of the contents, pinned; copies are made where nothing else has them. And what was rewritten."""
        machine, rewritten = self._machine, 0
        for _ in range(ROUNDS):
            state = machine.fetch().state
            try:
                chosen = choose(
                    machine,
                    state,
                    self._as_of,
                    self._columns,
                    below_folder=self._format in BY_NAME,
                    known=_in_place(known, self._folder),
                )
                if chosen is None and (request := self._request(state)) is not None:
                    done = carry_out(machine, self._worker, request, local_engine(machine))
                    rewritten += done.bytes_out
                    continue
                if chosen is None:
                    self._pin(set(), self._as_of)
                    return list(whole(self._folder, state, self._as_of, self._columns)), rewritten
                if self._pin({part.key for part in chosen.in_place}, self._as_of):
                    copies = copies_of(self._folder, state, chosen.copied, self._columns, known)
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

    def _request(self, state: State) -> Request | None:
        """What makes one run of the contents; None where only a copy has them."""
        policy = policy_of(self._machine.config)
        if any(one.count for one in state.trace if not one.upper <= at(self._as_of + 1)):
            return None  # it is of the past
        return next_request(state, policy, below_folder=self._format in BY_NAME)

    def _pin(self, keys: set[PartKey], as_of: int, *, is_last: bool = False) -> bool:
        """Pin these, and all that is pinned, unless it is the last step. False where one was replaced before."""
        answer = self._machine.try_commit(lambda state, _now: self._command(state, keys, as_of, is_last=is_last))
        if isinstance(answer, r.Unknown):
            return False
        self._judge(answer)
        return True

    def _command(self, state: State, keys: set[PartKey], as_of: int, *, is_last: bool) -> c.PinKeys:
        old = state.pins.get(self._format)
        expected = self._token if self._is_ours else old.opaque if old else None
        together = keys if is_last or old is None else {*old.keys, *keys}
        return c.PinKeys(self._format, tuple(sorted(together)), expected, self._token, as_of, self._keep, self._follows)

    def _judge(self, answer: object) -> None:
        if isinstance(answer, r.WrongOpaque):
            raise self._fenced()
        if not isinstance(answer, Committed | r.AlreadyDone):
            raise self._machine.refused(answer)  # type: ignore[arg-type]
        self._is_ours = True

    def _check_ours(self) -> None:
        pin = self._machine.fetch().state.pins.get(self._format)
        if pin is None or pin.opaque != self._token:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"shard {self._machine.shard}: another program publishes it as {self._format}, or withdrew it, and took "
            "over. This call moved nothing that readers see; look at what is published, and publish again",
            shard=self._machine.shard,
        )

    def _check_there(self, shared: Sequence[File]) -> None:
        """Raise Missing where a file that is named again is gone, or is another one."""
        if not shared:
            return
        below = {one.key.rpartition("/")[0] + "/" for one in shared}
        sizes = {one.key: one.size for prefix in below for one in self._machine.blob.list(prefix)}
        if gone := [one.key for one in shared if sizes.get(one.key) != one.size]:
            raise Missing(
                f"shard {self._machine.shard}: {len(gone)} files that are published are gone or were replaced, as "
                f"{gone[0]}: another program deleted them. Nothing was published; see what the shard itself lacks by "
                "`persist shard scrub`, restore the files, or withdraw the publication and publish again",
                shard=self._machine.shard, key=gone[0], keys=tuple(gone),
            )  # fmt: skip

    def _parts(self, named: set[str]) -> set[PartKey]:
        return {key_of(self._machine.shard, key) for key in named if not key.startswith(self._folder.prefix + COPIES)}


def _drop_copies(folder: Folder, format_: Format, named: set[str]) -> None:
    """Delete the copies that this publication of the shard does not name, and no other one does."""
    there = set(folder.sizes(COPIES)) - named
    for other in FORMATS if there else ():
        if other != format_ and other in folder.machine.state.pins:
            with closing(_table(folder, other)) as table:
                there -= table.named()
    folder.delete(there)


def _is_still(state: State, before: int, as_of: int) -> bool:
    """Whether nothing changed between two times, as far as the bounds of parts say."""
    parts = (part for one in state.trace for part in one.parts)
    return before < as_of and not any(part.time_upper > before and part.time_lower <= as_of for part in parts)


def _in_place(known: dict[str, File], folder: Folder) -> set[str]:
    return {key for key in known if not key.startswith(folder.prefix + COPIES)}


def upgrade(machine: Machine) -> None:
    """Bring a shard to the format that has pins. Raises where settings keep it from that."""
    if (most := machine.config.format) is not None and most < PINS:
        raise machine.refused(r.NeedsFormat("publications", PINS, most))
    move_up(machine, min(most or PART_SUMS, PART_SUMS))


def next_request(state: State, policy: Policy, *, below_folder: bool) -> Request | None:
    """The next rewriting towards one run of the contents; None where none is left that the state would take."""
    filled = [one for one in state.trace if one.count]
    if not filled:
        return None
    ahead = plan_contents(state, policy)
    if ahead is not None and len(ahead.merges) == 1:
        kept = state.contents
        if kept is not None and len(ahead.inputs) == 1:  # these are the contents, in another place
            return msgspec.structs.replace(ahead, inputs=(kept,), reason="drop")
        return ahead
    found = plan_rewrite(state, [one.id for one in filled], policy)
    if not found or state.contents is not None:
        return None
    is_last = len(found) == 1 and not found[0].is_partial and below_folder
    return msgspec.structs.replace(found[0], reason="publish") if is_last else found[0]


def _last_time(state: State) -> int:
    return max((part.time_upper for one in state.trace for part in one.parts), default=0)


def _terms(pin: Pin | None, keep: int | None, follows: bool | None) -> tuple[int, bool]:
    return keep or (pin.keep if pin else 0) or KEEP, bool(pin and pin.follows) if follows is None else follows


def _planned(
    folder: Folder, table: _Table, state: State, format_: Format, as_of: int, columns: Columns, known: Known | None
) -> Published:
    """What a publication would do: where contents are written, as many bytes as are read at most."""
    machine, shared = folder.machine, known.files if known else {}
    is_new = known is None or known.as_of != as_of or not table.is_as(columns)
    chosen: Chosen | None = Chosen([], [], {})
    if is_new:
        chosen = choose(
            machine, state, as_of, columns, below_folder=format_ in BY_NAME, known=_in_place(shared, folder)
        )
    batches = [one for one in state.batches_at(as_of) if one.lower.is_before(as_of)]
    parts = [part for one in batches for part in one.parts] if chosen is None else [*chosen.in_place, *chosen.copied]
    size, rows = sum(part.size for part in parts), sum(part.rows for part in parts)
    same = [] if chosen is None else [part for part in chosen.in_place if file_of(machine, part).key in shared]
    copied = 0 if chosen is None else sum(part.size for part in chosen.copied)
    return Published(
        machine.shard, format_, as_of, table.place, table.version, len(parts) if is_new else len(shared), rows, size,
        shared=len(same), copied=copied, rewritten=size if chosen is None else 0, is_new=is_new,
    )  # fmt: skip


@charged
def withdraw(machine: Machine, format_: Format, *, dry_run: bool = False) -> Withdrawn:
    """Take a publication back: its pointer first, then its metadata and copies, then its pin.

    Readers that have it open may fail from then on. Doing it again finishes what a crash left. Raises NotFound where
    it is missing.
    """
    pin = machine.fetch().state.pins.get(format_)
    if pin is None:
        raise NotFound(f"shard {machine.shard} is not published as {format_}. Nothing was done", shard=machine.shard)
    answer = Withdrawn(machine.shard, format_, pin.keys, pin.as_of)
    if dry_run:
        return answer
    token = b"%016x" % (machine.runtime.entropy() % 2**64)
    taken = machine.try_commit(
        lambda state, _now: c.PinKeys(
            format_, pin.keys, state.pins[format_].opaque if format_ in state.pins else None, token
        )
    )
    if not isinstance(taken, Committed):
        raise machine.refused(taken)
    folder = Folder(machine)
    with closing(_table(folder, format_, is_read=False)) as table:  # also where it cannot be read
        table.withdraw()
    _drop_copies(folder, format_, set())
    gone = machine.try_commit(lambda _state, _now: c.Unpin(format_, token))
    if not isinstance(gone, Committed):
        raise machine.refused(gone)
    return answer
