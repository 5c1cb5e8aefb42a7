"""Writing by key: upsert and delete, and appending at the next time.

Each call reads the shard's upper and what it has to know of the contents there, and appends at that upper by one
compare-and-append. If another writer was first, nothing was written, and the call reads what is new and tries again. So
each call is against the contents just before it. What a caller read before the call is not looked at: an upsert of such
a value plus one goes over another writer's. A `compare_and_append` at the upper that was read, and a transaction of
tables, do not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from threading import RLock
from typing import NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from persist_lib.arguments import parse_flag
from persist_lib.convert.by_key import parse_keys, parse_rows, without_times
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome, Version
from persist_lib.errors import Indeterminate, LeaseExpired, PersistError, UpperMismatch
from persist_lib.format.parts import within as within_times
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.ids import SeqNo, parse_producer, parse_token
from persist_lib.kernel.by_key import Counts, count_deleted, count_upserted, one_row_each, replacing
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended
from persist_lib.relation.commit import Kind, Place
from persist_lib.relation.key_lookup import Looking
from persist_lib.relation.next_time import AtNextTime, Named, Turn, format_since, next_time, since_of
from persist_lib.relation.registration import Registration, check_newest, check_produced, outrun, undoubted, whole
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Machine
from persist_lib.shard.outcomes import Verdict, find_since, judge
from persist_lib.shard.refusals import named

Finding = Callable[[Version, Deadline], tuple[Version, pa.Table, Counts]]
"""Makes of a version the changes to append at its upper (in columns of `schema.contents`), and what they amount to."""
T = TypeVar("T")


class Changed(Appended, frozen=True):
    """What an upsert or a delete did: an `Appended`, and what became of each key.

    `inserted` keys had no row before, `updated` ones had another (or several), `unchanged` ones were already as they
    were to be, and `deleted` ones had rows and have none. If nothing was to be changed, nothing was written: `count`
    and `attempts` are 0, `token` is empty, and upper has not moved. `time` is the time of the change, None for none.
    The counts are 0 if an earlier call with the same token made the change.
    """

    time: int | None = None
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0


class Change(NamedTuple):
    """What a call at the next time appends: whether constraints were checked already, and for which producer."""

    find: Finding
    spent: Spending
    is_checked: bool = True
    producer: tuple[str, int] | None = None


class Verbs(AtNextTime[Change, SeqNo, Changed]):
    """The calls of a write handle that find out by themselves at which time to write, and what to retract."""

    machine: Machine
    schema: Schema
    _lock: RLock
    _registration: Registration

    def upsert(
        self, rows: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Changed:
        """Make each of `rows` the one row of its key, at the next time. Rows of other keys stay as they are.

        `rows` is what `append_now` takes, without `_time` and `_diff`; all of it is held in memory. What the shard has
        for these keys is looked up, in the row groups that can hold them, and retracted in the same append. Rows that
        are there already are not written again. Of several writers that upsert one key, the last one's row stays: a row
        that was made of one read before may go over another writer's. Two different rows for one key are refused:
        InvalidUsage names the keys. The writer's schema must be the shard's newest, or SchemaMismatch is raised, as an
        older one cannot say what to retract.

        `timeout` is in seconds, for everything. Raises TimedOut when other writers were first all that time, and
        UpperMismatch when the shard is closed for writing; then nothing was written. After Indeterminate, call again
        with the `token` that the error carries, and the same rows: if the first call was committed, that one answers.
        With `dry_run` nothing is written: the counts say what would be done now.
        """
        return self._change(self._upserting, parse_rows, rows, timeout, token, dry_run)

    def delete(
        self, keys: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Changed:
        """Retract all rows of these keys, at the next time. Keys that have none are left alone.

        `keys` is what `read.snapshot(keys=...)` takes. `timeout`, `token`, `dry_run` and errors are those of
        `upsert`.
        """
        return self._change(self._deleting, parse_keys, keys, timeout, token, dry_run)

    def _change(
        self,
        finding: Callable[[pa.Table], Finding],
        parse: Callable[[Schema, object], pa.Table],
        given: object,
        timeout: float | None,
        token: bytes | None,
        dry_run: bool,
    ) -> Changed:
        held: list[Lock] = []
        try:
            is_dry = parse_flag(dry_run, "dry_run")
            known, find = Named.of(token), finding(parse(self.schema, given))
            deadline = self._begin(timeout, held)
            with Spending() as spent:
                return self._at_next_time(Change(find, spent), known, deadline, is_dry=is_dry)
        finally:
            if held:
                self._lock.release()

    def _upserting(self, rows: pa.Table) -> Finding:
        new = one_row_each(self.schema, rows)
        keys = Keys.of(self.schema, new)
        looking = Looking(self.machine, keys)

        def find(version: Version, deadline: Deadline) -> tuple[Version, pa.Table, Counts]:
            version, old = self._contents(looking, version, deadline)
            changes = replacing(self.schema, old, new)
            return version, changes, count_upserted(keys, old, changes)

        return find

    def _deleting(self, keys_: pa.Table) -> Finding:
        keys = Keys.of(self.schema, keys_)
        looking = Looking(self.machine, keys)

        def find(version: Version, deadline: Deadline) -> tuple[Version, pa.Table, Counts]:
            version, old = self._contents(looking, version, deadline)
            return version, replacing(self.schema, old, old.slice(0, 0)), count_deleted(keys, old)

        return find

    def _contents(self, looking: Looking, version: Version, deadline: Deadline) -> tuple[Version, pa.Table]:
        version, old = looking.contents(version, deadline)
        check_newest(self.machine, self.schema, version.state)
        return version, old

    def _place(self) -> str:
        return named([self.machine.shard])

    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        return within(deadline, partial(judge, self.machine, *known))

    def _next_turn(self, call: Change, deadline: Deadline) -> Turn[SeqNo]:
        version = self._before(lambda: within(deadline, self._fetch_writable))
        if version.state.upper.is_top():
            raise self.machine.refused(r.WrongUpper(version.state.upper, version.state.upper))
        version, changes, counts = self._before(partial(call.find, version, deadline))
        return Turn(version.state.upper, changes, counts, version.seqno)

    def _fresh(self, _call: Change, turn: Turn[SeqNo]) -> Named:
        machine = self.machine
        time = next_time(self.schema, machine.shard, turn.lower, machine.runtime, machine.consensus.now)
        return Named.fresh(machine.runtime, turn.lower, time)

    def _try_turn(self, call: Change, turn: Turn[SeqNo], named: Named, deadline: Deadline) -> Changed | None:
        token, lower, upper = named
        builder, tables = self._builder(deadline), iter((at_time(turn.changes, named.time),))
        built = self._build(builder, tables, lower, upper, deadline, is_checked=call.is_checked)
        kind, spent = c.CompareAndAppend, call.spent
        try:
            done = self._commit(builder, built, whole, kind, deadline, token, spent, call.producer)
        except UpperMismatch:
            return None
        answer = Changed(done.seqno, done.upper, done.count, done.token, done.attempts, done.cost, named.time)
        return msgspec.structs.replace(answer, **turn.counts._asdict())

    def _repeated(self, call: Change, known: Named, seqno: SeqNo) -> Changed:
        return Changed(seqno, known.upper, 0, known.token, 0, call.spent.cost, known.time)

    def _unwritten(self, call: Change, turn: Turn[SeqNo]) -> Changed:
        answer = Changed(turn.basis, turn.lower, turn.changes.num_rows, b"", 0, call.spent.cost)
        return msgspec.structs.replace(answer, **turn.counts._asdict())

    def _registers_again(self) -> bool:
        return not self._registration.is_closed

    def _gap(self, known: Named, upper: Antichain) -> PersistError:
        return self.machine.refused(r.WrongUpper(known.lower, upper))

    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        return outrun(self.machine, self.schema, deadline, races, " or with fewer keys at once")

    def _append_rest(
        self, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline,
        token: bytes | None, spent: Spending,
    ) -> Appended:  # fmt: skip
        """`append` where there are constraints: what lies beyond upper is checked there, and appended only there."""
        table = pa.concat_tables([empty_table(self.schema.updates), *tables])
        races = 0
        while True:
            reached = self._before(lambda: within(deadline, self._fetch_writable)).state.upper
            if reached < lower:
                raise self.machine.refused(r.WrongUpper(lower, reached))
            builder = self._builder(deadline)
            if upper <= reached:  # the shard has all of it, and never less: there is nothing to check
                built = self._build(builder, iter((table,)), lower, upper, deadline, is_checked=True)
                return self._commit(builder, built, whole, c.Append, deadline, token, spent)
            rest = within_times(table, reached.time, None)
            built = self._build(builder, iter((rest,)), reached, upper, deadline)
            try:
                return self._commit(builder, built, whole, c.CompareAndAppend, deadline, token, spent)
            except UpperMismatch:
                races += 1
            if deadline.has_passed():
                raise outrun(self.machine, self.schema, deadline, races, " or with fewer keys at once")

    def _before(self, step: Callable[[], T]) -> T:
        """Do a step before anything is sent: whatever is in doubt of it, nothing was appended."""
        try:
            return step()
        except Indeterminate as error:
            raise undoubted(self.machine.shard, error) from error

    @abstractmethod
    def _begin(self, timeout: float | None, held: list[Lock]) -> Deadline: ...

    @abstractmethod
    def _fetch_writable(self) -> Version: ...

    @abstractmethod
    def _builder(self, deadline: Deadline) -> Builder: ...

    @abstractmethod
    def _build(
        self, builder: Builder, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline,
        *, by_time: bool = False, is_checked: bool = False,
    ) -> Built: ...  # fmt: skip

    @abstractmethod
    def _commit(
        self, builder: Builder, built: Built, place: Place, kind: Kind, deadline: Deadline, token: bytes | None,
        spent: Spending, producer: tuple[str, int] | None = None, since: SeqNo | None = None,
    ) -> Appended: ...  # fmt: skip


class AppendsNow(Verbs):
    """The call of a write handle that appends at the next time.

    Without a server, this process makes the append for the upper that it knows, and again after a lost race. A server
    puts it where upper is when its turn comes, so that no race is lost (`core.placing`).
    """

    def append_now(
        self,
        updates: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Appended:
        """Append updates at the next time: the shard's upper; where times are a clock, now if that is later.

        `updates` is what `compare_and_append` takes, without `_time`; all of it is held in memory. The time is
        `answer.upper.time - 1`. No updates are no append: nothing is written, and upper stays. `timeout`, `token` and
        errors are those of `upsert`. SUBTLE: unlike an upsert, this call does the same again when it is repeated
        without the token of its Indeterminate. With a `producer`, a name and a sequence number, it does not: it raises
        AlreadyProduced, as `compare_and_append` says.
        """
        held: list[Lock] = []
        try:
            since, producer = None if token is None else since_of(parse_token(token)), parse_producer(producer)
            known = Named.of(token) if since is None else None
            empty = empty_table(self.schema.contents)
            tables = [table.select(empty.schema.names) for table in without_times(self.schema, updates)]
            table = pa.concat_tables([empty, *tables])
            deadline = self._begin(timeout, held)
            if token is None:
                check_produced(self.machine, producer)
            # Constraints are checked at one upper, which must then still be there.
            is_placed = token is None and self.machine.places_appends and not self.schema.constraints
            if since is not None or is_placed:
                return self._append_placed(table, deadline, token, since, producer)
            with Spending() as spent:
                change = Change(lambda version, _: (version, table, Counts()), spent, False, producer)
                answer = self._at_next_time(change, known, deadline)
            return Appended(*msgspec.structs.astuple(answer)[: len(Appended.__struct_fields__)])
        finally:
            if held:
                self._lock.release()

    def _append_placed(
        self, table: pa.Table, deadline: Deadline, token: bytes | None, since: SeqNo | None,
        producer: tuple[str, int] | None,
    ) -> Appended:  # fmt: skip
        """Append wherever upper is then. A call with the token of an earlier one appends only if that did not."""
        machine, races = self.machine, 0
        with Spending() as spent:
            while True:
                if since is not None and token is not None:
                    found = within(deadline, partial(find_since, machine, token, since))
                    if isinstance(found, Outcome):
                        return Appended(found.seqno, found.upper, 0, token, 0, spent.cost)
                    since = found
                if not table.num_rows:
                    return self._nothing(deadline, spent)
                sent = token or format_since(machine.runtime, machine.seen)
                time = self._likely_time()
                builder = self._builder(deadline)
                tables = iter((at_time(table, time),))
                built = self._build(builder, tables, MINIMUM, at(time + 1), deadline, is_checked=True)
                try:
                    return self._commit(builder, built, whole, c.AppendNow, deadline, sent, spent, producer, since)
                except LeaseExpired:
                    races += 1
                    if self._registration.is_closed:
                        raise
                if deadline.has_passed():
                    raise outrun(machine, self.schema, deadline, races)

    def _likely_time(self) -> int:
        """The next time as far as this process knows. It stays in the data if it is that; else it is moved."""
        upper = self.machine.upper
        return (
            0
            if upper.is_top()
            else next_time(self.schema, self.machine.shard, upper, self.machine.runtime, self.machine.consensus.now)
        )

    def _nothing(self, deadline: Deadline, spent: Spending) -> Appended:
        """No updates are no append."""
        version = self._before(lambda: within(deadline, self._fetch_writable))
        upper = version.state.upper
        if upper.is_top():
            raise self.machine.refused(r.WrongUpper(upper, upper))
        return Appended(version.seqno, upper, 0, b"", 0, spent.cost)
