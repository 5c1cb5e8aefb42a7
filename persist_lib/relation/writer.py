"""Writing: one handle, one writer id, appends by compare-and-set.

A writer registers at its first append. Each append builds a batch, and uploads what does not fit in the state. The
batch is then its share of a commit, of this shard alone or of several. Appends that `append_async` accepts wait in an
outbox, and are written as if they were made one by one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType

import msgspec
import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Batch, State, Version
from persist_lib.errors import ConstraintViolated, Indeterminate, LeaseExpired, PersistError
from persist_lib.frontier import MINIMUM, TOP, Antichain
from persist_lib.ids import SeqNo, WriterId, parse_producer, parse_token
from persist_lib.kernel.consolidate import consolidate
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.append_queue import Answer, Outbox, not_sent
from persist_lib.relation.appends import (
    Appended,
    Batching,
    Doubt,
    Doubts,
    Pending,
    coalesced,
    copied,
    is_shared,
    size_of,
    take_over,
)
from persist_lib.relation.commit import Kind, Place, Share, commit_shares
from persist_lib.relation.key_lookup import check_constraints
from persist_lib.relation.registration import (
    Registration,
    check_produced,
    inline_room,
    parse_bounds,
    timed_out,
    undoubted,
    whole,
)
from persist_lib.relation.staged_commit import Prepared
from persist_lib.relation.staging import Staging
from persist_lib.relation.verbs import AppendsNow, Changed
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Lock, taking
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leased, Leases
from persist_lib.shard.outcomes import REFUSED, committed_before
from persist_lib.times import Times

__all__ = ["Appended", "Batching", "Changed", "WriteHandle"]


class WriteHandle(Leased, AppendsNow, Staging):
    """Writes to one shard. Safe to use from several threads; the appends of one handle are carried out in order."""

    def __init__(
        self, machine: Machine, leases: Leases, schema: Schema, schema_id: int, batching: Batching | None = None,
        owner: str = "", registration: Registration | None = None, layer: str = "",
    ) -> None:  # fmt: skip
        self.machine = machine
        self.schema = schema
        self._schema_id = schema_id
        self._leases = leases
        self._lock, self._beginning = threading.RLock(), threading.Lock()
        self._registration = registration or Registration(machine, leases, "ingest", owner, layer)
        self._batching = batching
        self._outbox: Outbox | None = None
        self._doubts = Doubts()
        enrol(self, Stage.HANDLES)

    @property
    def shard(self) -> str:
        """The shard's name."""
        return self.machine.shard

    @property
    def upper(self) -> Antichain:
        """The newest upper of the shard that this process has seen. `fetch_upper` reads it from the location."""
        return self.machine.upper

    @property
    def id(self) -> WriterId:
        """This writer's id, which is registered on first use. Raises LeaseExpired when the handle is closed."""
        return self._registration.id

    def _fetch_writable(self) -> Version:
        """The newest version, for a call that has nothing to write. Raises if every write would be refused."""
        if self._registration.is_closed:
            raise self._registration.closed_already()
        version = self.machine.fetch()
        if version.state.is_finished():
            raise self.machine.refused(r.Finished())
        return version

    def fetch_upper(self) -> Antichain:
        """Read the shard's current upper from the location."""
        return self.machine.fetch().state.upper

    def compare_and_append(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Appended:
        """Append updates with times in `[expected_upper, new_upper)`, if upper is exactly `expected_upper`.

        `updates` is an Arrow table or batch, a pandas or polars frame, a list of dicts, or an iterator of any of these.
        An iterator is read in bounded memory. `timeout` is in seconds. Raises UpperMismatch when another writer was
        first, LeaseExpired when this writer was retired (the next call registers anew), and InvalidUsage for wrong
        updates. After any of these, nothing was written.

        With a `token` (bytes) the call may be repeated, in this process or any other, at any later time. If the append
        was not committed yet, the call commits it; if it was, the call returns the seqno at which it was. Token,
        `expected_upper` and `new_upper` together name the append. After Indeterminate, repeat the call with the token
        that the error carries. A repeated call raises UpperMismatch, LeaseExpired or ShardFinished only when it is
        certain that the append was never committed, and Indeterminate when that is not known any more. The `count` of
        its answer is 0 when the number of updates is not known any more.

        With a `producer`, a name and a sequence number, the shard commits no sequence number of that name twice, and
        only higher ones than its last. It remembers that for ever, whichever process asks. AlreadyProduced says that
        there was nothing left to do: which number was the last, and where it was committed. Unlike a token it does not
        depend on the times, so that a program that was killed can repeat a chunk at the upper of then. Names are 1 to
        200 bytes; a shard has at most 1,000 of them (`client.forget_producer`). A shard of format 2 or older refuses,
        with InvalidUsage, until `persist upgrade`.

        Waits for the appends that `append_async` accepted before. Raises NotSent if one of them failed and the caller
        has not looked at that failure yet.
        """
        times = self._times()
        lower, upper = parse_bounds(expected_upper, new_upper, times)
        token, producer = None if token is None else parse_token(token), parse_producer(producer)
        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            tables = self._checked(updates, lower, upper, times)
            return self._append(tables, lower, upper, deadline, token, producer)
        finally:
            if held:
                self._lock.release()

    def append_async(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
        block: bool = True,
    ) -> Future[Appended]:
        """Accept a `compare_and_append` and return its future. Accepted appends are carried out in the order of calls.

        One commit is under way at a time. Appends that are accepted during a commit, up to `config.buffer_bytes`, wait
        for the next one. Those of them that continue one another are committed together, except those with a `token`
        or a `producer`.
        When there is no room, the call waits; if `block` is false, it raises BufferFull instead. `updates` are checked
        and copied where needed before the call returns: InvalidUsage is raised here, and does not affect other appends.
        `timeout` is in seconds, from this call until the future is done.

        The future fails as `compare_and_append` does, or with NotSent when an earlier append failed. If the caller has
        not looked at a failure, by `result` or `exception`, then the next call on this handle raises NotSent, and
        `flush` and `close` raise the failure itself; this happens once. A future can be cancelled before its append is
        sent, and `asyncio.wrap_future` makes it awaitable.
        """
        times = self._times()
        lower, upper = parse_bounds(expected_upper, new_upper, times)
        token, block = None if token is None else parse_token(token), parse_flag(block, "block")
        producer = parse_producer(producer)
        if self._registration.is_closed:
            raise self._registration.closed_already()
        deadline = self._deadline(timeout)
        outbox = self._outbox or self._begin_outbox()
        tables = self._checked(updates, lower, upper, times)
        table = take_over(self.schema, tables, copies=is_shared(updates))
        accepted_s = self.machine.runtime.monotonic()
        pending = Pending(table, lower, upper, token, deadline, accepted_s, size_of(table), producer)
        return outbox.accept(pending, self._send, block=block)

    def flush(self, *, timeout: float | None = None) -> None:
        """Write all appends that were accepted before this call, now, and return when they are finished.

        If an append failed and the caller has not looked at that yet, its error is raised. Raises TimedOut when they
        are not finished after `timeout` seconds; they go on then, and their futures say how they end.
        """
        deadline = self._deadline(timeout)
        if self._outbox is None:
            return
        self._outbox.settle(deadline)
        self._outbox.raise_failure(copied)

    def append(
        self,
        updates: object,
        lower: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
    ) -> Appended:
        """Append those updates with times in `[lower, new_upper)` that the shard does not have yet.

        Use it when several writers write identical data: the first one to commit a time wins, and the others add what
        lies beyond it. If the shard has all of it already, the call succeeds and writes nothing. `timeout` and `token`
        are as in `compare_and_append`. Raises UpperMismatch when there is a gap before `lower`. Also raises it when the
        shard is closed for writing, as it cannot be told then whether the shard holds this data; an append of no
        updates succeeds there.
        """
        times = self._times()
        low, upper = parse_bounds(lower, new_upper, times)
        token = None if token is None else parse_token(token)

        def rest(built: Built, state: State) -> Batch:
            is_overlap = low < state.upper and state.upper < upper
            return built.trimmed(state.upper) if is_overlap else built.batch

        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            with Spending() as spent:
                tables = self._checked(updates, low, upper, times)
                if self.schema.constraints:
                    return self._append_rest(tables, low, upper, deadline, token, spent)
                builder = self._builder(deadline)
                built = self._build(builder, tables, low, upper, deadline, by_time=True)
                return self._commit(builder, built, rest, c.Append, deadline, token, spent)
        finally:
            if held:
                self._lock.release()

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Appended:
        """Advance upper to `new_upper` without writing updates, from wherever upper is now.

        This says that there are no more updates before `new_upper`. Does nothing when upper is there already or beyond.
        Raises ShardFinished for a tombstone.
        """
        upper = self._times().frontier(new_upper, "new_upper")

        def from_upper(built: Built, state: State) -> Batch:
            # If another writer has moved upper beyond this batch, the batch stays as it is. It is then wholly covered,
            # which is a success.
            return msgspec.structs.replace(built.batch, lower=state.upper) if state.upper < upper else built.batch

        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            if upper <= self.upper and upper <= (version := self._fetch_writable()).state.upper:
                return Appended(version.seqno, version.state.upper, 0, token=b"", attempts=0)
            built = Built(Batch(0, 0, MINIMUM, upper, MINIMUM, 0, 0, 0))
            with Spending() as spent:
                while True:
                    try:
                        return self._commit(self._builder(deadline), built, from_upper, c.Append, deadline, None, spent)
                    except LeaseExpired:  # registered again: it is the same wherever upper is by then
                        if self._registration.is_closed or deadline.has_passed():
                            raise
        finally:
            if held:
                self._lock.release()

    def finish(self, expected_upper: object | None = None, *, timeout: float | None = None) -> Appended:
        """Close the shard for writing, for ever: upper becomes the empty frontier. The data stays readable.

        If `expected_upper` is given, upper must be exactly there; otherwise this raises UpperMismatch. Without it, the
        call does nothing when the shard is closed already.
        """
        if expected_upper is None:
            return self.advance_upper(TOP, timeout=timeout)
        return self.compare_and_append([], expected_upper, TOP, timeout=timeout)

    def close(self) -> None:
        """Write the appends that were accepted, and retire this writer. Idempotent. The data that it appended stays.

        If an accepted append failed and the caller has not looked at that yet, its error is raised.
        """
        if self._outbox is not None:
            self._outbox.close(self._deadline(None))
        with self._lock:
            self._registration.close()
        if self._outbox is not None:
            self._outbox.raise_failure(copied)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.mute()
        super().__exit__(kind, error, trace)

    def mute(self) -> None:
        """Stop reporting appends that failed. Used when another error is being raised, which matters more."""
        if self._outbox is not None:
            self._outbox.mute()

    def after_fork_in_child(self) -> None:
        """What is on its way is the parent's, and so is the thread that may hold a lock."""
        self._lock, self._beginning = threading.RLock(), threading.Lock()
        if self._outbox is not None:
            self._outbox.after_fork_in_child()

    def share(
        self, updates: object, bounds: tuple[Antichain, Antichain], times: Times, deadline: Deadline, token: bytes,
        held: list[Lock], producer: tuple[str, int] | None,
    ) -> Share:  # fmt: skip
        """This handle's share of an append to several shards. While its lock is in `held`, it appends nothing else.

        `updates` may be what staged writes were prepared to.
        """
        self._begin(deadline.remaining_s(), held)
        if isinstance(updates, Prepared):
            return updates.share(self.machine, token, deadline)
        builder = self._builder(deadline)
        built = self._build(builder, self._checked(updates, *bounds, times), *bounds, deadline)
        return self._share(builder, built, whole, c.CompareAndAppend, deadline, token, producer)

    __reduce__ = not_pickled("A writer", "Open one in the other process")

    def _deadline(self, timeout: float | None) -> Deadline:
        timeout_s = self.machine.config.timeout_s if timeout is None else parse_seconds(timeout)
        return self.machine.runtime.deadline(timeout_s)

    def _begin(self, timeout: float | None, held: list[Lock]) -> Deadline:
        """Wait for this call's turn, and take the lock. Once the lock is in `held`, the caller must release it."""
        deadline = self._deadline(timeout)
        if self._outbox is not None:
            self._outbox.settle(deadline)
            self._outbox.raise_failure()
        held += taking(self._lock, deadline.remaining_s())
        if not held or held[-1] is not self._lock:
            raise timed_out(self.machine.shard, deadline, "other appends of this handle took that long")
        return deadline

    def _begin_outbox(self) -> Outbox:
        # SUBTLE: not under the handle's own lock. The sending thread holds that one for as long as a commit takes.
        with self._beginning:
            if self._outbox is None:
                config = self.machine.config
                self._outbox = Outbox(self.shard, self.machine.runtime, config.buffer_bytes, self._batching)
            return self._outbox

    def _append(
        self, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None,
    ) -> Appended:  # fmt: skip
        with Spending() as spent:
            if token is None:
                check_produced(self.machine, producer)
            builder = self._builder(deadline)
            found = None if token is None else self._doubts.find(token, lower, upper)
            count = 0
            try:
                if found is not None:
                    built, count = found[0].built, found[1]
                else:
                    built = self._build(builder, tables, lower, upper, deadline)
                    count = built.batch.count
                done = self._commit(builder, built, whole, c.CompareAndAppend, deadline, token, spent, producer)
            except REFUSED as refusal:
                if token is None:
                    raise
                seqno = committed_before(self.machine, token, lower, upper, refusal)
                return Appended(seqno, upper, count, token, 0, spent.cost)
            return done if found is None else msgspec.structs.replace(done, count=count)

    def _send(self, batch: Sequence[Pending]) -> Sequence[Answer]:
        """Carry out accepted appends: all of them together, or none."""
        first, last = batch[0], batch[-1]
        with self._lock, Spending() as spent:
            if first.deadline.has_passed():
                raise timed_out(self.machine.shard, first.deadline, "appends accepted before it took that long")
            if len(batch) == 1:
                tables = iter(() if first.table is None else (first.table,))
                return [self._append(tables, first.lower, first.upper, first.deadline, first.token, first.producer)]
            table, counts = coalesced(self.schema, batch)
            builder, token = self._builder(first.deadline), self.machine.runtime.token()
            tables = iter(() if table is None else (table,))
            try:
                built = self._build(builder, tables, first.lower, last.upper, first.deadline)
                done = self._commit(builder, built, whole, c.CompareAndAppend, first.deadline, token, spent)
            except ConstraintViolated:
                return self._one_by_one(batch)
            except Indeterminate as error:
                times = [(pending.lower, pending.upper) for pending in batch]
                return self._doubts.add(Doubt(built, token, dict(zip(times, counts, strict=True))), error)
            return [msgspec.structs.replace(done, count=count) for count in counts]

    def _one_by_one(self, batch: Sequence[Pending]) -> list[Answer]:
        """Carry out accepted appends of which one breaks a constraint: those before it, and none after it."""
        answers: list[Answer] = []
        for pending in batch:
            try:
                answers += self._send([pending])
            except PersistError as error:
                break_ = not_sent(self.shard, error)
                return [*answers, error, *(copied(break_) for _ in batch[len(answers) + 1 :])]
        return answers

    def _builder(self, deadline: Deadline) -> Builder:
        machine = self.machine
        return Builder(
            machine.shard, lambda: self._registration.register(deadline), self.schema, self._schema_id, machine.blob,
            machine.config, machine.runtime, deadline,
        )  # fmt: skip

    def _times(self) -> Times:
        return Times(self.schema.times, self.machine.consensus.now)

    def _checked(self, updates: object, lower: Antichain, upper: Antichain, times: Times) -> Iterator[pa.Table]:
        only = lower.time if lower.time is not None and upper.time == lower.time + 1 else None
        for table in iter_updates(self.schema, updates, time=only, times=times):
            check_times(table, lower, upper, times)
            yield table

    def _build(
        self, builder: Builder, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline,
        *, by_time: bool = False, is_checked: bool = False,
    ) -> Built:  # fmt: skip
        """The batch of these updates. Its constraints are checked, unless `is_checked` says that they hold."""
        try:
            if self.schema.constraints and not is_checked:
                tables = iter(self._constrained(tables, lower, deadline))
            inline_bytes = inline_room(self.machine, self.machine.version.state)
            if self._registration.is_closed:
                inline_bytes = sys.maxsize  # upload nothing: it can only have been committed before the handle closed
            return builder.build(tables, lower, upper, inline_bytes=inline_bytes, by_time=by_time)
        except Indeterminate as error:
            raise undoubted(self.machine.shard, error) from error

    def _constrained(self, tables: Iterator[pa.Table], lower: Antichain, deadline: Deadline) -> list[pa.Table]:
        """The same updates in one table. Raises ConstraintViolated if a constraint would not hold after them."""
        if not (held := list(tables)):
            return []
        table = consolidate(self.schema, pa.concat_tables(held))
        check_constraints(self.machine, table, lower, deadline)
        return [table]

    def _commit(
        self,
        builder: Builder,
        built: Built,
        place: Place,
        kind: Kind,
        deadline: Deadline,
        token: bytes | None,
        spent: Spending,
        producer: tuple[str, int] | None = None,
        since: SeqNo | None = None,
    ) -> Appended:
        token = token or self.machine.runtime.token()
        share = self._share(builder, built, place, kind, deadline, token, producer, since)
        return commit_shares((share,), deadline, token, spent)[0]

    def _share(
        self, builder: Builder, built: Built, place: Place, kind: Kind, deadline: Deadline, token: bytes,
        producer: tuple[str, int] | None = None, since: SeqNo | None = None,
    ) -> Share:  # fmt: skip
        """A share of the batch that was built, under this writer's id. Registers the writer if it has no id yet."""
        try:
            if builder.has_uploaded and deadline.has_passed():
                raise timed_out(self.machine.shard, deadline, "its updates took that long to be uploaded")
            writer = self._registration.register(deadline)
        except Exception as error:
            builder.discard()  # no command refers to what was uploaded
            if isinstance(error, Indeterminate):
                raise undoubted(self.machine.shard, error) from error
            raise
        return Share(self.machine, self._registration, writer, builder, built, place, kind, token, producer, since)
