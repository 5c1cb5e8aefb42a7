"""Writing by key: upsert and delete, and appending at the next time. The loop around UpperMismatch is in here.

Each call reads the shard's upper and what it has to know of the contents there, and appends at that upper by one
compare-and-append. If another writer was first, nothing was written, and the call reads what is new and tries again. So
no update is lost, whoever writes at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from threading import RLock
from typing import TypeVar

import msgspec
import pyarrow as pa

from persist_lib.arguments import parse_flag
from persist_lib.convert.by_key import parse_keys, parse_rows
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Version
from persist_lib.errors import Indeterminate, LeaseExpired, UpperMismatch
from persist_lib.format.parts import within as within_times
from persist_lib.frontier import Antichain, at
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
from persist_lib.shard.outcomes import forgotten, judge
from persist_lib.shard.refusals import named
from persist_lib.write.appending import check_newest, outrun, undoubted, whole
from persist_lib.write.looking import Looking
from persist_lib.write.pending import Appended
from persist_lib.write.registration import Registration
from persist_lib.write.share import Kind, Place
from persist_lib.write.times import bounds_of, format_token, next_time

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


def _changed(done: Appended, time: int) -> Changed:
    return Changed(done.seqno, done.upper, done.count, done.token, done.attempts, done.cost, time)


class Verbs(ABC):
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
        are there already are not written again. Two different rows for one key are refused: InvalidUsage names the
        keys. The writer's schema must be the shard's newest, or SchemaMismatch is raised, as an older one cannot say
        what to retract.

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
            known = None if token is None else bounds_of(token)
            find = finding(parse(self.schema, given))
            deadline = self._begin(timeout, held)
            answer, counts = self._at_next_time(find, deadline, known, is_checked=True, is_dry=is_dry)
            return msgspec.structs.replace(answer, **counts._asdict())
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

    def _at_next_time(
        self,
        find: Finding,
        deadline: Deadline,
        known: tuple[bytes, Antichain, Antichain] | None,
        *,
        is_checked: bool,
        is_dry: bool = False,
        producer: tuple[str, int] | None = None,
    ) -> tuple[Changed, Counts]:
        """Append what `find` makes of the newest version, at its upper; again if another writer was first."""
        races = 0
        with Spending() as spent:
            while True:
                if known is not None:
                    answer = self._repeated(*known, deadline, spent)
                    if isinstance(answer, Changed):
                        return answer, Counts()
                    known = answer
                version = self._before(lambda: within(deadline, self._fetch_writable))
                if version.state.upper.is_top():
                    raise self.machine.refused(r.WrongUpper(version.state.upper, version.state.upper))
                version, changes, counts = self._before(partial(find, version, deadline))
                lower = version.state.upper
                if known is not None and known[1] != lower:
                    continue  # upper has moved since: ask again what became of it
                if not changes.num_rows:
                    return Changed(version.seqno, lower, 0, b"", 0, spent.cost), counts
                token, time, upper = self._named(lower, known)
                if is_dry:
                    return Changed(version.seqno, lower, changes.num_rows, b"", 0, spent.cost), counts
                try:
                    done = self._send_at(
                        changes, time, lower, upper, deadline, token, spent, is_checked=is_checked, producer=producer
                    )
                    return _changed(done, time), counts
                except UpperMismatch:
                    races += 1
                except LeaseExpired:
                    if self._registration.is_closed:
                        raise
                if deadline.has_passed():
                    raise outrun(self.machine, self.schema, deadline, races, " or with fewer keys at once")

    def _named(
        self, lower: Antichain, known: tuple[bytes, Antichain, Antichain] | None
    ) -> tuple[bytes, int, Antichain]:
        """The token of an append at `lower`, its time and its new upper: those of an earlier call, or fresh ones."""
        if known is not None:
            return known[0], (known[2].time or 1) - 1, known[2]
        time = next_time(self.schema, self.machine.shard, lower, self.machine.runtime, self.machine.consensus.now)
        return format_token(self.machine.runtime, lower, at(time + 1)), time, at(time + 1)

    def _repeated(
        self, token: bytes, lower: Antichain, upper: Antichain, deadline: Deadline, spent: Spending
    ) -> Changed | tuple[bytes, Antichain, Antichain] | None:
        """What an earlier call with this token did; the token and bounds if it is still open; None if nothing."""
        machine = self.machine
        verdict = within(deadline, partial(judge, machine, token, lower, upper))
        if verdict.seqno is not None:
            time = (upper.time or 1) - 1
            return Changed(verdict.seqno, upper, 0, token, 0, spent.cost, time)
        if verdict.answer == "unknown":
            raise forgotten(named([machine.shard]), token, verdict)
        return (token, lower, upper) if verdict.answer == "open" else None

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

    def _send_at(
        self, changes: pa.Table, time: int, lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes,
        spent: Spending, *, is_checked: bool, producer: tuple[str, int] | None,
    ) -> Appended:  # fmt: skip
        """Append the changes at one time, if upper is still `lower`."""
        builder = self._builder(deadline)
        built = self._build(builder, iter((at_time(changes, time),)), lower, upper, deadline, is_checked=is_checked)
        return self._commit(builder, built, whole, c.CompareAndAppend, deadline, token, spent, producer)

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
