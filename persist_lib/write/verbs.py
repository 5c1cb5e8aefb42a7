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
from persist_lib.convert.by_key import parse_keys, parse_rows
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Version
from persist_lib.errors import Indeterminate, PersistError, UpperMismatch
from persist_lib.format.parts import within as within_times
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.kernel.by_key import Counts, count_deleted, count_upserted, one_row_each, replacing
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Machine
from persist_lib.shard.outcomes import Verdict, judge
from persist_lib.shard.refusals import named
from persist_lib.write.appending import check_newest, outrun, undoubted, whole
from persist_lib.write.looking import Looking
from persist_lib.write.pending import Appended
from persist_lib.write.registration import Registration
from persist_lib.write.share import Kind, Place
from persist_lib.write.times import next_time
from persist_lib.write.turns import AtNextTime, Named, Turn

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
