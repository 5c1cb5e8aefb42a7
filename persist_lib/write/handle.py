"""Writing: one handle, one writer id, appends by compare-and-set.

A writer registers at its first append. It looks after the shard a little as it goes: when the state carries as many
inline bytes as it may, it merges them into a part; when a rollup is due, one of those who append writes it. What
`append_async` accepts waits in an `outbox`, and is written as if appended one by one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType

import msgspec
import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.core import commands as c
from persist_lib.core.plan.compaction import plan_flush, policy_of
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, State, Version
from persist_lib.errors import Indeterminate, LeaseExpired, PersistError, TimedOut
from persist_lib.frontier import MINIMUM, TOP, Antichain, parse_frontier
from persist_lib.ids import WriterId, format_writer_id, parse_token
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain.compaction import carry_out, local_engine
from persist_lib.maintain.rollups import is_duty, write_rollup
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, taking
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Committed, Machine, refused
from persist_lib.shard.leases import Leased, Leases, Registering, was_closed
from persist_lib.shard.outcomes import REFUSED, committed_before
from persist_lib.write.appending import Share, Undoubted, parse_bounds, whole
from persist_lib.write.doubts import Doubt, Doubts
from persist_lib.write.pending import Appended, Batching, Pending, coalesced, copied, is_shared, size_of, take_over
from persist_lib.write.queue import Answer, Outbox

__all__ = ["Appended", "Batching", "WriteHandle"]

log = logging.getLogger("persist.write")
ROLLUP_S = 5.0
"""How long an append that is committed may be held up by the rollup that it found due."""


class WriteHandle(Leased):
    """Appends to one shard. Safe to use from several threads; appends of one handle are ordered."""

    def __init__(
        self, machine: Machine, leases: Leases, schema: Schema, schema_id: int, batching: Batching | None = None
    ) -> None:
        self.machine = machine
        self.schema = schema
        self._schema_id = schema_id
        self._leases = leases
        self._lock = threading.RLock()
        self._id: WriterId | None = None
        self._closed = False
        self._batching = batching
        self._outbox: Outbox | None = None
        self._doubts = Doubts()
        self._dropped: weakref.finalize[..., WriteHandle] | None = None

    @property
    def shard(self) -> str:
        """The shard's name."""
        return self.machine.shard

    @property
    def upper(self) -> Antichain:
        """The shard's upper as far as this process knows; `fetch_upper` asks."""
        return self.machine.state.upper

    @property
    def id(self) -> WriterId:
        """This writer's id; registers it on first use. Raises LeaseExpired once it is closed."""
        return self._register(self._deadline(None))

    def _register(self, deadline: Deadline) -> WriterId:
        if self._closed:
            raise self._closed_already()
        if self._id is None:
            if deadline.has_passed():  # without time for an answer it would only be in doubt
                raise self._timed_out(deadline, "what comes before its registration took that long")
            fresh = format_writer_id(self.machine.runtime.entropy())
            lease_ms = self.machine.config.lease_ms
            build = lambda _state, now: c.RegisterWriter(fresh, "ingest", now + lease_ms)  # noqa: E731
            self._leases.prepare()
            with Registering(self._leases, self.machine, fresh):
                self.machine.commit(build, deadline.remaining_s())
                self._leases.keep(self.machine, fresh)
                self._dropped = weakref.finalize(self, self._leases.abandon, self.machine, fresh)
                self._dropped.atexit = False
                self._id = fresh
        return self._id

    def _closed_already(self) -> LeaseExpired:
        return was_closed(self.machine, "writer")

    def _fetch_writable(self) -> Version:
        """The newest version, for who has nothing to write; raises why writing would be refused whatever it is."""
        if self._closed:
            raise self._closed_already()
        version = self.machine.fetch()
        if version.state.is_finished():
            raise refused(self.machine.shard, c.Finished())
        return version

    def fetch_upper(self) -> Antichain:
        """The shard's upper right now."""
        return self.machine.fetch().state.upper

    def compare_and_append(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
    ) -> Appended:
        """Append updates with times in `[expected_upper, new_upper)`, if upper is exactly `expected_upper`.

        `updates` is an Arrow table or batch, a pandas or polars frame, a list of dicts, or an iterator of any of these
        (then in bounded memory). `timeout` is in seconds. Raises UpperMismatch when another writer was first,
        LeaseExpired when this writer was retired (the next call registers anew), InvalidUsage for wrong updates; none
        of these wrote anything.

        With a `token` (bytes) the call may be repeated, here or in any other process, however much later: it appends
        what is not there yet, and answers with the seqno of then when it is. Token, `expected_upper` and `new_upper`
        together name the append; after Indeterminate, repeat the call with the token that the error carries. A repeated
        call raises UpperMismatch and the like only when it is certain that the append was never committed, and
        Indeterminate when that is not known any more. Its `count` is 0 where that is not known any more.

        Waits for what `append_async` accepted before; raises NotSent if that failed and nobody knows yet.
        """
        lower, upper = parse_bounds(expected_upper, new_upper)
        token = None if token is None else parse_token(token)
        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            return self._append(self._checked(updates, lower, upper), lower, upper, deadline, token)
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
        block: bool = True,
    ) -> Future[Appended]:
        """Accept a compare_and_append, to be carried out in the order of these calls; answers its future.

        One commit is under way at a time. What is accepted meanwhile, up to `config.buffer_bytes`, is the next one: all
        of it together where one continues the other, unless it has a `token`. Without room the call waits, or raises
        BufferFull if it is not to `block`. `updates` are checked and taken over before it returns, so InvalidUsage is
        raised here and concerns nothing else. `timeout` is from the call to the end of the future.

        The future fails as `compare_and_append` does, or with NotSent when an earlier one failed. When nobody has
        looked at a failure, by `result` or `exception`, then the next call on this handle raises NotSent, `flush` and
        `close` what it was; once. A future can be cancelled before it is sent, and is awaited by `asyncio.wrap_future`.
        """
        lower, upper = parse_bounds(expected_upper, new_upper)
        token, block = None if token is None else parse_token(token), parse_flag(block, "block")
        if self._closed:
            raise self._closed_already()
        deadline = self._deadline(timeout)
        outbox = self._outbox or self._begin_outbox()
        tables = self._checked(updates, lower, upper)
        table = take_over(self.schema, tables, copies=is_shared(updates))
        accepted_s = self.machine.runtime.monotonic()
        pending = Pending(table, lower, upper, token, deadline, accepted_s, size_of(table))
        return outbox.accept(pending, self._send, block=block)

    def flush(self, *, timeout: float | None = None) -> None:
        """Write all that was accepted before this call, now; returns when it is finished.

        Raises why an append failed if nobody has looked at that yet, and TimedOut when it is not finished in time.
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
        """Append what of `[lower, new_upper)` the shard does not have yet; nothing at all is a success too.

        For several writers of identical data: whoever is first wins, the others add what is beyond. Raises
        UpperMismatch when there is a gap before `lower`, and where the shard is closed for writing: whether what is
        there is this data, nobody can tell then. (An append of no updates misses nothing, and is a success.)
        """
        low, upper = parse_bounds(lower, new_upper)
        token = None if token is None else parse_token(token)

        def rest(built: Built, state: State) -> Batch:
            is_overlap = low < state.upper and state.upper < upper
            return built.trimmed(state.upper) if is_overlap else built.batch

        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            with Spending() as spent:
                builder = self._builder(deadline)
                built = self._build(builder, self._checked(updates, low, upper), low, upper, by_time=True)
                return self._commit(builder, built, rest, c.Append, deadline, token, spent)
        finally:
            if held:
                self._lock.release()

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Appended:
        """Say that nothing more happens before `new_upper`, from wherever upper is. A no-op when it is there.

        Raises ShardFinished for a tombstone, where nothing can be said any more.
        """
        upper = parse_frontier(new_upper, "new_upper")

        def from_upper(built: Built, state: State) -> Batch:
            # Overtaken meanwhile it stays as it is: wholly covered, which is a success.
            return msgspec.structs.replace(built.batch, lower=state.upper) if state.upper < upper else built.batch

        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            if upper <= self.upper and upper <= (version := self._fetch_writable()).state.upper:
                return Appended(version.seqno, version.state.upper, 0, token=b"", attempts=0)
            built = Built(Batch(0, 0, MINIMUM, upper, MINIMUM, 0, 0, 0))
            with Spending() as spent:
                return self._commit(self._builder(deadline), built, from_upper, c.Append, deadline, None, spent)
        finally:
            if held:
                self._lock.release()

    def finish(self, expected_upper: object | None = None, *, timeout: float | None = None) -> Appended:
        """Say that nothing is ever written again: upper becomes the empty frontier. The data stays readable.

        Closed already it is a no-op, unless an `expected_upper` is given: that is refused then.
        """
        if expected_upper is None:
            return self.advance_upper(TOP, timeout=timeout)
        return self.compare_and_append([], expected_upper, TOP, timeout=timeout)

    def close(self) -> None:
        """Write what was accepted, and retire this writer. What it appended stays.

        Raises why an append that was accepted failed, unless somebody has looked at that.
        """
        if self._outbox is not None:
            self._outbox.close(self._deadline(None))
        with self._lock:
            self._closed = True
            if self._id is not None:
                self._leases.retire(self.machine, self._id)
                self._forget_id()  # last: who was interrupted closes once more
        if self._outbox is not None:
            self._outbox.raise_failure(copied)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.mute()
        super().__exit__(kind, error, trace)

    def mute(self) -> None:
        """Tell of no append that failed any more: what went wrong first matters more."""
        if self._outbox is not None:
            self._outbox.mute()

    def after_fork_in_child(self) -> None:
        """What is on its way is the parent's, and so is whoever holds the lock."""
        self._lock = threading.RLock()
        if self._outbox is not None:
            self._outbox.after_fork_in_child()

    def share(
        self, updates: object, lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes, held: list[Lock]
    ) -> Share:
        """This handle's share of an append to several shards. While its lock is `held` it appends nothing else."""
        self._begin(deadline.remaining_s(), held)
        builder, is_asked = self._builder(deadline), False

        def give_up() -> None:
            if not is_asked:
                builder.discard()

        try:
            built = self._build(builder, self._checked(updates, lower, upper), lower, upper)
            self._check_in_time(builder, deadline)
            with Undoubted(self.shard):
                writer = self._register(deadline)

            def build(_state: State, now: int) -> c.Command:
                nonlocal is_asked
                is_asked = True
                return c.CompareAndAppend(writer, token, built.batch, now + self.machine.config.lease_ms)

            def make_room() -> None:
                nonlocal built
                with Undoubted(self.shard):
                    built = self._made_room(builder, built)

            def done(answer: Committed | c.AlreadyDone) -> Appended:
                if isinstance(answer, Committed):
                    self._housekeep(answer, deadline)
                    return Appended(answer.seqno, upper, built.batch.count, token, answer.attempts)
                seqno = answer.outcome.seqno if answer.outcome else self.machine.version.seqno
                return Appended(seqno, upper, built.batch.count, token, 0)

            return Share(self.machine, build, make_room, done, self._refused, give_up)
        except Exception:
            give_up()
            raise

    __reduce__ = not_pickled("A writer", "Open one in the other process")

    def _deadline(self, timeout: float | None) -> Deadline:
        timeout_s = self.machine.config.timeout_s if timeout is None else parse_seconds(timeout)
        return self.machine.runtime.deadline(timeout_s)

    def _begin(self, timeout: float | None, held: list[Lock]) -> Deadline:
        """Wait for this call's turn, and take the lock. Once it is in `held`, the caller gives it back."""
        deadline = self._deadline(timeout)
        if self._outbox is not None:
            self._outbox.settle(deadline)
            self._outbox.raise_failure()
        before = len(held)
        held += taking(self._lock, deadline.remaining_s())
        if len(held) == before:
            raise self._timed_out(deadline, "other appends of this handle took that long")
        return deadline

    def _begin_outbox(self) -> Outbox:
        # SUBTLE: not under the handle's own lock, which whoever sends holds for as long as a commit takes.
        with _beginning:
            if self._outbox is None:
                config = self.machine.config
                self._outbox = Outbox(self.shard, self.machine.runtime, config.buffer_bytes, self._batching)
                _with_outbox.add(self)
            return self._outbox

    def _timed_out(self, deadline: Deadline, why: str) -> TimedOut:
        return TimedOut(
            f"shard {self.shard}: gave up after {deadline.timeout_s:g} s, as {why}. This call appended nothing; try "
            "again, or with a longer timeout",
            shard=self.shard, timeout_s=deadline.timeout_s,
        )  # fmt: skip

    def _append(
        self, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes | None
    ) -> Appended:
        with Spending() as spent:
            builder = self._builder(deadline)
            found = None if token is None else self._doubts.find(token, lower, upper)
            count = 0
            try:
                if found is not None:
                    built, count = found[0].built, found[1]
                else:
                    built = self._build(builder, tables, lower, upper)
                    count = built.batch.count
                done = self._commit(builder, built, whole, c.CompareAndAppend, deadline, token, spent)
            except REFUSED as refusal:
                if token is None:
                    raise
                seqno = committed_before(self.machine, token, lower, upper, refusal)
                return Appended(seqno, upper, count, token, 0, spent.cost)
            return done if found is None else msgspec.structs.replace(done, count=count)

    def _send(self, batch: Sequence[Pending]) -> Sequence[Answer]:
        """Carry out accepted appends, all together or not at all."""
        first, last = batch[0], batch[-1]
        with self._lock, Spending() as spent:
            if first.deadline.has_passed():
                raise self._timed_out(first.deadline, "those that were accepted before took that long")
            if len(batch) == 1:
                tables = iter(() if first.table is None else (first.table,))
                return [self._append(tables, first.lower, first.upper, first.deadline, first.token)]
            table, counts = coalesced(self.schema, batch)
            builder, token = self._builder(first.deadline), self.machine.runtime.token()
            built = self._build(builder, iter(() if table is None else (table,)), first.lower, last.upper)
            try:
                done = self._commit(builder, built, whole, c.CompareAndAppend, first.deadline, token, spent)
            except Indeterminate as error:
                times = [(pending.lower, pending.upper) for pending in batch]
                return self._doubts.add(Doubt(built, token, dict(zip(times, counts, strict=True))), error)
            return [msgspec.structs.replace(done, count=count) for count in counts]

    def _builder(self, deadline: Deadline) -> Builder:
        machine = self.machine
        return Builder(
            machine.shard, lambda: self._register(deadline), self.schema, self._schema_id, machine.blob, machine.config,
            machine.runtime, deadline,
        )  # fmt: skip

    def _checked(self, updates: object, lower: Antichain, upper: Antichain) -> Iterator[pa.Table]:
        only = lower.time if lower.time is not None and upper.time == lower.time + 1 else None
        for table in iter_updates(self.schema, updates, time=only):
            check_times(table, lower, upper)
            yield table

    def _build(
        self, builder: Builder, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, *, by_time: bool = False
    ) -> Built:
        with Undoubted(self.shard):
            room = INLINE_TOTAL_BYTES - self.machine.state.inline_size
            inline_bytes = min(self.machine.config.inline_bytes, max(room, INLINE_TOTAL_BYTES // 2))
            if self._closed:
                inline_bytes = (
                    sys.maxsize
                )  # nothing is uploaded: at most, it was committed before the handle was closed
            return builder.build(tables, lower, upper, inline_bytes=inline_bytes, by_time=by_time)

    def _commit(
        self,
        builder: Builder,
        built: Built,
        place: Callable[[Built, State], Batch],
        kind: type[c.CompareAndAppend | c.Append],
        deadline: Deadline,
        token: bytes | None,
        spent: Spending,
    ) -> Appended:
        token = token or self.machine.runtime.token()
        lease_ms, placed, is_asked = self.machine.config.lease_ms, built.batch, False

        def build(state: State, now: int) -> c.Command:
            nonlocal placed, is_asked
            placed, is_asked = place(built, state), True
            return kind(writer, token, placed, now + lease_ms)

        try:
            self._check_in_time(builder, deadline)
            with Undoubted(self.shard):
                writer = self._register(deadline)
            while isinstance(answer := self.machine.try_commit(build, deadline.remaining_s(), token), c.InlineFull):
                with Undoubted(self.shard):
                    built = self._made_room(builder, built)
        except Exception:
            # SUBTLE: once a command was made of it, the log may refer to what was uploaded, or will: never delete that.
            if not is_asked:
                builder.discard()
            raise
        if isinstance(answer, Committed):
            self._housekeep(answer, deadline)
            return Appended(answer.seqno, answer.after.upper, placed.count, token, answer.attempts, spent.cost)
        if isinstance(answer, c.AlreadyDone):
            outcome = answer.outcome
            seqno, upper = (outcome.seqno, outcome.upper) if outcome else (self.machine.version.seqno, self.upper)
            return Appended(seqno, upper, 0 if outcome is None else placed.count, token, 0, spent.cost)
        raise self._refused(answer)

    def _check_in_time(self, builder: Builder, deadline: Deadline) -> None:
        if builder.has_uploaded and deadline.has_passed():
            raise self._timed_out(deadline, "its updates took that long to be uploaded")

    def _refused(self, refusal: c.Refusal) -> PersistError:
        error = refused(self.machine.shard, refusal)
        if isinstance(error, LeaseExpired):
            self._forget_id()
        return error

    def _forget_id(self) -> WriterId | None:
        """Stop using the id; answers it."""
        forgotten, self._id = self._id, None
        if self._dropped is not None:
            self._dropped.detach()
        if forgotten is not None:
            self._leases.drop(self.machine, forgotten)
        return forgotten

    def _made_room(self, builder: Builder, built: Built) -> Built:
        """The same, to be tried again: the state has room now, or it became an object."""
        try:
            return built if self._flush() else builder.externalised(built)
        except LeaseExpired:
            self._forget_id()
            raise

    def _flush(self) -> bool:
        """Merge the newest inline batches into a part, so that the state has room again."""
        state = self.machine.state
        request = plan_flush(state, policy_of(self.machine.config))
        if request is None or sum(batch.inline_size for batch in request.inputs) < INLINE_TOTAL_BYTES // 2:
            return False
        return carry_out(self.machine, self, request, local_engine(self.machine)).seqno is not None

    def _housekeep(self, committed: Committed, deadline: Deadline) -> None:
        """Roll up if it falls to this writer. What fails here fails after the append was committed: it is logged."""
        if not is_duty(committed, self.machine.config.rollup_every):
            return
        try:
            rolling = self.machine.runtime.deadline(min(ROLLUP_S, deadline.remaining_s()))
            within(rolling, lambda: write_rollup(self.machine, self.id))
        except PersistError as error:
            log.warning("shard %s: could not roll up after an append: %s", self.machine.shard, error)


_with_outbox: weakref.WeakSet[WriteHandle] = weakref.WeakSet()
_beginning = threading.Lock()


def _in_child() -> None:
    global _beginning  # noqa: PLW0603 - a thread that is not here may hold the old one
    _beginning = threading.Lock()
    for handle in list(_with_outbox):
        handle.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
