"""What carries a table: one shard, a collection of shards, or a timeline. Each does the same for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from persist_lib.catalog import publications
from persist_lib.catalog.collection_arguments import parse_hold, parse_retention
from persist_lib.catalog.copies import HOLDS
from persist_lib.catalog.deleted_keys import no_carrier, parse_span
from persist_lib.catalog.reader import inner_of
from persist_lib.catalog.records import HOLD, rendition_shard
from persist_lib.catalog.wal import has_wal, wal_shard
from persist_lib.convert.filling import Filling
from persist_lib.core import commands as c
from persist_lib.core.cost import Cost
from persist_lib.core.holds import newest_time
from persist_lib.core.leases import keepers
from persist_lib.core.plan.retention import plan_retention
from persist_lib.core.refusals import OfMember
from persist_lib.core.state import MARK, NAMED, RETENTION, State
from persist_lib.core.transitions import apply
from persist_lib.errors import HoldConflict, InvalidUsage, SinceViolation
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import SeqNo, ShardId, parse_hold_name
from persist_lib.maintain.duties import Maintained
from persist_lib.maintain.publish.shards import lone
from persist_lib.maintain.publish.steps import Format, Published, Withdrawn, publish_shard, withdraw
from persist_lib.maintain.worker import Worker
from persist_lib.relation.row_selection import Asked, recast
from persist_lib.relation.statements import Done, Restore
from persist_lib.runtime.each import Each
from persist_lib.schema.evolution import adopted, changes_between
from persist_lib.schema.schema import Schema, comes_before
from persist_lib.shard.admin import Downgraded, check_evolves
from persist_lib.shard.numbers import filling_of
from persist_lib.shard.refusals import refused
from persist_lib.table.carrier import Carrier, KeptDeletes, Make, OpenHandles, TableDescription, Wal
from persist_lib.timeline.tables import execute
from persist_lib.times import Times

if TYPE_CHECKING:
    from persist_lib.catalog.collection_arguments import Retention
    from persist_lib.catalog.controller import Controller
    from persist_lib.catalog.deleted_keys import Span
    from persist_lib.client import Client
    from persist_lib.relation.changes import Changes
    from persist_lib.relation.listen import Listener
    from persist_lib.timeline.tables import Tables
    from persist_lib.times import TimeLike


class ShardCarrier(OpenHandles):
    """One shard is the table."""

    def __init__(self, client: Client, name: str, schema: Schema) -> None:
        self.kind, self.client, self.name, self.schema = "shard", client, name, schema
        self._begin()

    def _open(self, purpose: str) -> Any:
        return (self.client.open_reader if purpose == "read" else self.client.open_writer)(self.name, self.schema)

    def filling(self, *, is_dry: bool = False) -> Filling:
        return filling_of(self.client.machine(self.name), is_dry=is_dry)

    def _since(self) -> Antichain:
        return self._state().since

    def _state(self) -> State:
        """The newest state. Raises MemberOf where the shard is a collection's by now."""
        state = self.client.inspect(self.name).state
        self.client.machine(self.name).check_same(state)
        return state

    def restore(self, to: TimeLike, *, dry_run: bool, timeout: float | None) -> Done:
        done = self.client.restore(self.name, to, dry_run=dry_run, timeout=timeout)
        time = None if done.appended is None else (done.appended.upper.time or 1) - 1
        return Done(time, done.rows, b"", done.cost)

    def describe(self) -> TableDescription:
        state = self._state()
        return TableDescription(
            self.name, self.kind, state.schemas[-1].shown, state.since, state.upper, state.retention, _holds_in(state),
            (self.name,),
        )  # fmt: skip

    def evolve(self, schema: Schema, *, dry_run: bool) -> tuple[str, ...]:
        newest = self._state().schemas[-1]
        evolved = adopted(newest, schema)
        if evolved != newest and dry_run:
            check_evolves(self.name, self.client.machine(self.name).version, evolved)
        elif evolved != newest:
            self.client.evolve_schema(self.name, evolved)
        return changes_between(newest, evolved)

    def set_retention(self, distance: Retention, *, dry_run: bool) -> Downgraded:
        newest = self._state().schemas[-1]
        parsed = parse_retention(distance, newest, self.client.consensus.now)
        self._let_all_go()
        before = self._state()
        if dry_run:
            planned = msgspec.structs.replace(before, retention=parsed)
            return _downgraded(before, RETENTION, plan_retention(planned))
        self.client.set_retention(self.name, parsed)
        with self.client.even_if_paused():  # a person asked for this, and for nothing else
            self.client.retain(self.name)
        after = self._state()
        return Downgraded(before.since, after.since, tuple(keepers(after)))

    def set_keep_deletes(self, column: str | None, span: Span, *, dry_run: bool) -> None:  # noqa: ARG002 - it cannot
        self._state()
        if parse_span(column, span) is not None:
            raise no_carrier(self.name, "one shard")

    def kept_by(self) -> str:
        return self.name

    def shards_everywhere(self) -> list[str]:
        return [self.name]

    def give_up(self, until: int, timeout: float | None) -> None:  # noqa: ARG002 - one commit, with its own
        _move_hold(self, RETENTION, until)

    def hold_of(self, hold: object) -> tuple[str, str]:
        return self.name, parse_hold_name(hold)

    def promote(self, shards: int | None, timeline: str | None, *, dry_run: bool, **how: Any) -> str:  # noqa: ARG002 - Table asks the collection for them
        found = self.client.controller().promote(self.name, timeline=timeline, dry_run=dry_run, **how)
        return "" if found is None else found.id

    def publish(
        self, format_: Format, at: TimeLike | None, *, keep: int | None, follows: bool | None, dry_run: bool
    ) -> Published:
        machine, times = self.client.machine(self.name), Times(self._state().times, self.client.consensus.now)
        as_of = None if at is None else times.as_of(at, "at")
        with Worker(machine, self.client.leases) as worker:
            return publish_shard(machine, worker, format_, as_of, keep=keep, follows=follows, dry_run=dry_run)

    def withdraw(self, format_: Format, *, dry_run: bool) -> Withdrawn:
        self._state()
        return withdraw(lone(self.client.machine(self.name)), format_, dry_run=dry_run)

    def rename(self, to: str) -> None:
        self._state()
        raise InvalidUsage(
            f"table {self.name!r} is carried by one shard, whose name cannot change: readers and writers in other "
            f"processes know it by that. Nothing was changed. Once it is a collection it can: promote() makes it one, "
            f"in place, and then rename({to!r})",
            table=self.name, carrier=self.kind,
        )  # fmt: skip

    def drop(self, *, dry_run: bool) -> tuple[str, ...]:
        self.close()  # its own reader would be in the way
        self._let_all_go()
        machine = self.client.machine(self.name)
        if not dry_run:
            self._state()
            self.client.finish(self.name)
            return ()
        version = machine.fetch()
        found = apply(version.state, SeqNo(version.seqno + 1), c.Finish())
        if not isinstance(found, State):
            raise machine.refused(found)
        return ()

    def maintain(self, *, dry_run: bool) -> dict[str, Maintained]:
        self._state()
        return {self.name: self.client.maintain(self.name, dry_run=dry_run)}


class _Listed(Carrier):
    """What is in the catalog: a collection, or a table of a timeline, which is one, too."""

    @property
    @abstractmethod
    def controller(self) -> Controller:
        """What is asked about it by its name."""

    def restore(self, to: TimeLike, *, dry_run: bool, timeout: float | None) -> Done:
        with self.read(to, Asked(diff=True), newest=False, timeout=timeout) as then:
            rows = then.to_arrow()
        made = partial(Restore, self.name, rows=rows)
        return self.execute(made, token=None, timeout=timeout, dry_run=dry_run)

    def describe(self) -> TableDescription:
        found = self.controller.describe(self.name)
        state = self.client.inspect(self.kept_by()).state
        return TableDescription(
            self.name, self.kind, found.schema, found.since, found.upper, found.retention, _holds_in(state),
            found.active.shards, found, self._kept_deletes(),
        )  # fmt: skip

    def _kept_deletes(self) -> KeptDeletes | None:
        contents = self.controller.catalog.latest()
        record = contents.named(self.name)
        marks = [] if record is None else contents.marks_of(record)
        if record is None or record.keep_deletes is None or not marks:
            return None
        shards = tuple(name for one in contents.renditions_of(marks[0].id) for name in one.names)
        return KeptDeletes(record.keep_deletes.column, record.keep_deletes.span_ms, marks[0].name, shards)

    def set_keep_deletes(self, column: str | None, span: Span, *, dry_run: bool) -> None:
        self.controller.set_keep_deletes(self.name, column, span, dry_run=dry_run)

    def evolve(self, schema: Schema, *, dry_run: bool) -> tuple[str, ...]:
        return self.controller.evolve(self.name, schema, dry_run=dry_run).added

    def set_retention(self, distance: Retention, *, dry_run: bool) -> Downgraded:
        parsed = parse_retention(distance, self.schema, self.client.consensus.now)
        self._let_all_go()
        found, keeper = self.controller.describe(self.name), self.kept_by()
        if dry_run:
            newest = (found.promised.meet(found.upper).time or 1) - 1
            target = None if parsed is None else at(max(0, newest - parsed))
            return _downgraded(self.client.inspect(keeper).state, HOLD, target)
        self.controller.alter(self.name, retention=parsed)
        with self.client.even_if_paused():  # a person asked for this, and for nothing else
            self.controller.tend(self.name)
        kept_by = tuple(keepers(self.client.inspect(keeper).state))
        return Downgraded(found.since, self.controller.describe(self.name).since, kept_by)

    def kept_by(self) -> str:
        return self.controller.catalog.fetch().find(self.name).shard

    def shards_everywhere(self) -> list[str]:
        contents = self.controller.catalog.fetch()
        record = contents.find(self.name)
        its = [shard for one in contents.renditions_of(record.id) for shard in one.every]  # members keep their names
        there = self.client.shards()
        every = [shard for shard in there if shard.startswith(f"{record.id}.") or shard in its]
        return [shard for shard in every if shard != rendition_shard(record.id)]

    def give_up(self, until: int, timeout: float | None) -> None:
        _move_hold(self, HOLD, until)
        self.controller.tend(self.name, timeout=timeout)

    def hold_of(self, hold: object) -> tuple[str, str]:
        return self.kept_by(), parse_hold(hold)

    def publish(
        self, format_: Format, at: TimeLike | None, *, keep: int | None, follows: bool | None, dry_run: bool
    ) -> Published:
        self.settle(None, dry_run=dry_run)
        return publications.publish(
            self.controller, self.name, format_, at, keep=keep, follows=follows, dry_run=dry_run
        )

    def withdraw(self, format_: Format, *, dry_run: bool) -> Withdrawn:
        return publications.withdraw(self.controller, self.name, format_, dry_run=dry_run)

    def rename(self, to: str) -> None:
        self.controller.rename(self.name, to)
        self.name = to

    def drop(self, *, dry_run: bool) -> tuple[str, ...]:
        self.close()
        done = self.controller.drop(self.name, dry_run=dry_run)
        return tuple(f"{step.subject}: {step.reason}" for step in done.waiting)

    def maintain(self, *, dry_run: bool) -> dict[str, Maintained]:
        self.controller.tend(self.name, dry_run=dry_run)
        found, contents = self.controller.describe(self.name), self.controller.catalog.latest()
        shards = [self.kept_by(), *(shard for one in found.renditions for shard in one.shards)]
        for marks in contents.marks_of(contents.find(self.name)):
            shards += [marks.shard, *(name for one in contents.renditions_of(marks.id) for name in one.names)]
        tried = Each[Maintained]().add(shards, lambda shard: self.client.maintain(shard, dry_run=dry_run))
        tried.check(f"table {self.name!r}: {{}} shards")
        return tried.done


class CollectionCarrier(_Listed, OpenHandles):
    """A collection of shards is the table."""

    name: str

    def __init__(self, controller: Controller, name: str) -> None:
        self.kind, self._controller, self.client = "collection", controller, controller.client
        self.name = name
        self._begin()
        self.schema = self._handle("read").schema

    @property
    def controller(self) -> Controller:
        """The same. Raises MemberOf where it has joined a timeline since."""
        found = self._controller.catalog.fetch().named(self.name)
        if found is not None and found.kind == "table":
            raise refused(ShardId(found.shard), OfMember(found.member), table=found.name)
        return self._controller

    def _open(self, purpose: str) -> Any:
        open_: Callable[..., Any] = self.controller.open_reader if purpose == "read" else self.controller.open_writer
        found = open_(self.name)
        schema = getattr(self, "schema", found.schema)  # where columns were added since, this stays in the older ones
        if schema == found.schema.shown or not comes_before(schema, found.schema):
            return found
        found.close()
        return open_(self.name, schema)

    def _since(self) -> Antichain:
        return self.controller.describe(self.name).since

    def promote(self, shards: int | None, timeline: str | None, *, dry_run: bool, **how: Any) -> str:
        if timeline is not None:
            joined = self.controller.promote(self.name, timeline=timeline, dry_run=dry_run, **how)
            return "" if joined is None else joined.id
        found = self.controller.describe(self.name)
        if shards is not None and shards != len(found.active.shards) and not dry_run:
            self.controller.reshard(self.name, shards, timeout=how["timeout"])
        return ""

    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes:
        def between(reader: Any) -> Any:
            inner = inner_of(reader)
            if to is not None and (span := inner.of_other_columns(to)) is not None:
                inner = inner_of(self._open("read"))
                inner.adopt(span)  # in the columns of then
            return inner.changes(from_, to, timeout=timeout)

        return self._reading(between)


class TimelineCarrier(_Listed):
    """A table of a timeline."""

    name: str

    def __init__(self, tables: Tables, name: str) -> None:
        self._tables, self.client = tables, tables.client
        self.name = name
        self._timeline = tables.timeline_of(name)[0]
        self.kind, self.schema = f"timeline {self._timeline!r}", tables.controller.describe(name).schema

    @property
    def controller(self) -> Controller:
        return self._tables.controller

    def promote(self, shards: int | None, timeline: str | None, *, dry_run: bool, **how: Any) -> str:  # noqa: ARG002 - it cannot
        if shards is None and timeline in {None, self._timeline}:
            return ""
        raise InvalidUsage(
            f"table {self.name!r} is on a {self.kind}, which is as much as can carry a table. Nothing was changed. To "
            "give it other shards, make a rendition of it: persist collection rendition make",
            table=self.name, carrier=self.kind,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: what is open is the client's, for all of its tables."""

    def writer(self) -> Any:
        raise InvalidUsage(
            f"table {self.name!r} is on a {self.kind}, which mints the times of its tables: append at the next time, "
            "without bounds",
            table=self.name, carrier=self.kind,
        )  # fmt: skip

    def _let_all_go(self) -> None:  # a timeline lets go of what it has read by itself, at the next renewal of leases
        self.read(None, Asked(keys=[]), newest=True, timeout=None).release()
        self.client.heartbeat()

    def restore(self, to: TimeLike, *, dry_run: bool, timeout: float | None) -> Done:
        with self.read(to, Asked(diff=True), newest=False, timeout=timeout) as then:
            rows, time = then.to_arrow(), then.as_of
        marks = None
        if (kept := self._kept_deletes()) is not None:
            with self._tables.read(kept.table, time, diff=True, timeout=timeout) as known:
                marks = known.to_arrow()
        had = self.schema.whole

        def made(schema: Schema) -> Restore:
            return Restore(self.name, schema, recast(rows, had.shown, schema), marks)

        return self.execute(made, token=None, timeout=timeout, dry_run=dry_run)

    def hold_of(self, hold: object) -> tuple[str, str]:
        found = super().hold_of(hold)
        if not self.client.read_only:  # what is in the WAL alone has no history yet that a hold could keep
            self._tables.apply(self._timeline)
        return found

    def describe(self) -> TableDescription:
        found, newest = super().describe(), self.read(None, Asked(keys=[]), newest=True, timeout=None)
        newest.release()  # what is in the WAL is the table's, too
        return msgspec.structs.replace(found, upper=found.upper.join(at(newest.as_of + 1)))

    def settle(self, timeout: float | None, *, dry_run: bool) -> Wal | None:
        line = self._tables.timelines()[self._timeline]
        record = self.controller.catalog.latest().find(self.name)
        if line != "wal" or dry_run:
            return None if line != "wal" else Wal(wal_shard(str(record.timeline)), record.id, MAX_TIME)
        upper = self._tables.apply(self._timeline, timeout=timeout).upper
        self._tables.tidy(self._timeline, timeout=timeout)
        return Wal(wal_shard(str(record.timeline)), record.id, upper - 1)

    def shards_everywhere(self) -> list[str]:
        record = self.controller.catalog.latest().find(self.name)
        return [*super().shards_everywhere(), *([wal_shard(str(record.timeline))] if has_wal(record) else [])]

    def execute(self, make: Make, *, token: bytes | None, timeout: float | None, dry_run: bool = False) -> Done:
        if token is not None:  # it may have been done by the call of which this is the token
            time = self._tables.outcome(token, timeline=self._timeline, table=self.name)
            if time is not None:
                return Done(time, 0, token, Cost())
        return execute(self._tables, self.name, make, timeout, dry_run=dry_run, schema=self.schema)

    def read(self, as_of: TimeLike | None, asked: Asked, *, newest: bool, timeout: float | None) -> Any:
        return self._tables.read(
            self.name, as_of, newest=newest, timeout=timeout, schema=self.schema, **asked._asdict()
        )

    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes:
        return self._tables.changes(self.name, from_, to, timeout=timeout, schema=self.schema)

    def listen(self, as_of: TimeLike | None, *, until: object, replace: bool, timeout: float | None) -> Listener:
        if replace:
            raise InvalidUsage(
                f"table {self.name!r} is on a {self.kind}, whose listeners keep their columns: leave out replace",
                table=self.name, carrier=self.kind,
            )  # fmt: skip
        return self._tables.listen(self.name, as_of, until=until, timeout=timeout, schema=self.schema)


def _move_hold(on: Carrier, name: str, until: int) -> None:
    """Move the hold of the table's own retention to `until`, unless it is beyond that, and since with it."""
    machine = on.client.machine(on.kept_by())
    state = machine.fetch().state
    hold, to = state.holds.get(name), at(until).meet(newest_time(state)).join(state.since)
    if state.since < to:  # also where the hold is there, and since waits for a transition to follow it
        to = to if hold is None else to.join(hold.since)
        with suppress(SinceViolation, HoldConflict):  # another process has moved it further
            on.client.downgrade_hold(machine.shard, name, to)


def _holds_in(state: State) -> dict[str, Antichain]:
    own = {RETENTION, HOLD, MARK, NAMED}
    return {n: hold.since for n, hold in sorted(state.holds.items()) if n not in own and not n.startswith(HOLDS)}


def _downgraded(before: State, name: str, target: Antichain | None) -> Downgraded:
    """How since would move with a hold that moves to `target`, if it is before that."""
    hold = before.holds.get(name)
    after = before
    if target is not None and (hold is None or hold.since < target):
        opaque = None if hold is None else hold.opaque
        found = apply(before, SeqNo(1), c.DowngradeHold(name, target.join(before.since), opaque, opaque or b""))
        after = found if isinstance(found, State) else before
    return Downgraded(before.since, after.since, tuple(keepers(after)))
