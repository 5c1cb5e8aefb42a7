"""What a writer does whatever places it writes: its calls in their order, accepted appends, and repeats of doubts."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.config import Config
from persist_lib.convert.filling import Filling
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.errors import ConstraintViolated, Indeterminate, InvalidUsage, PersistError, TimedOut
from persist_lib.frontier import Antichain
from persist_lib.ids import parse_producer, parse_token
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.append_queue import Answer, Outbox, one_by_one
from persist_lib.relation.appends import Batching, Pending, coalesced, copied, is_shared, size_of, take_over
from persist_lib.relation.registration import check_produced, parse_bounds, undoubted
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Lock, taking
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leased
from persist_lib.shard.outcomes import REFUSED
from persist_lib.times import Times

Brought = TypeVar("Brought")
"""What one commit sends: of a lone shard, the batch that was built; else the updates."""
Done = TypeVar("Done", bound=msgspec.Struct)
"""What an append answers; it has a `count`."""
T = TypeVar("T")
DOUBTS = 4
"""How many commits of several appends, whose outcome is unknown, a writer remembers."""


class Doubt(NamedTuple, Generic[Brought]):
    """Appends that were sent together and whose outcome is unknown: their token, and how many updates each of them has.

    Token and bounds name an append, so that the log can tell what became of it, whichever process asks. The
    handle that sent them repeats all of them when it repeats one, which decides them together.
    """

    token: bytes
    brought: Brought
    counts: Mapping[tuple[Antichain, Antichain], int]

    @property
    def bounds(self) -> tuple[Antichain, Antichain]:
        """From where the first begins to where the last ends."""
        bounds = list(self.counts)
        return bounds[0][0], bounds[-1][1]

    def errors(self, cause: Indeterminate) -> list[Answer]:
        """One error for each append, in the order of their times."""
        return [
            Indeterminate(
                f"this append was sent together with {len(self.counts) - 1} others, and it is not known whether they "
                f"were committed: {cause.message}. The same is true of the others",
                **{**cause.fields, "token": self.token, "lower": lower, "upper": upper},
            )
            for lower, upper in self.counts
        ]


class Checked(NamedTuple):
    """Updates that were checked by what routes them here: in the columns of this writer, at the times of the call."""

    table: pa.Table


class OrderedWriter(Leased, Generic[Brought, Done]):
    """A writer whose calls are carried out one after the other. Safe to use from several threads.

    `what` it writes is for messages, `shard` for the fields of errors.
    """

    schema: Schema

    def __init__(
        self, what: str, shard: str, runtime: Runtime, config: Config, now: Callable[[], int],
        batching: Batching | None,
    ) -> None:  # fmt: skip
        self._what, self._shard, self._runtime, self._config, self._now = what, shard, runtime, config, now
        self._batching = batching
        self._lock, self._beginning = threading.RLock(), threading.Lock()
        self._outbox: Outbox | None = None
        self._doubts: deque[Doubt[Brought]] = deque(maxlen=DOUBTS)
        enrol(self, Stage.HANDLES, OrderedWriter._after_fork_in_child)

    def _after_fork_in_child(self) -> None:
        """What is on its way is the parent's, and so is the thread that may hold a lock."""
        self._lock, self._beginning = threading.RLock(), threading.Lock()
        if self._outbox is not None:
            self._outbox.after_fork_in_child()

    def compare_and_append(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Done:
        """Append updates with times in `[expected_upper, new_upper)`, if upper is exactly `expected_upper`.

        `updates` is an Arrow table or batch, a pandas or polars frame, a list of dicts, or an iterator of any of these.
        An iterator is read in bounded memory where one shard is written. `timeout` is in seconds. Raises UpperMismatch
        when another writer was first, LeaseExpired when this writer was retired (the next call registers again), and
        InvalidUsage for wrong updates. After any of these, nothing was written. A collection is written by one
        transaction over all its shards; one that is written by definite appends refuses, with InvalidUsage.

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
        with InvalidUsage, until `persist shard upgrade`.

        Waits for the appends that `append_async` accepted before. Raises NotSent if one of them failed and the caller
        has not looked at that failure yet.
        """
        self._check_verb("compare_and_append")
        times = self._times()
        lower, upper = parse_bounds(expected_upper, new_upper, times)
        known, producer = None if token is None else parse_token(token), self._parse_producer(producer)

        def append(deadline: Deadline) -> Done:
            return self._append(self._checked(updates, lower, upper, times), (lower, upper), deadline, known, producer)

        return self._in_turn(timeout, append)

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
    ) -> Future[Done]:
        """Accept a `compare_and_append` and return its future. Accepted appends are carried out in the order of calls.

        One commit is under way at a time. Appends that are accepted during a commit, up to `config.buffer_bytes`, wait
        for the next one. Those of them that continue one another are committed together, except those with a `token`
        or a `producer`, and those on both sides of a handover.
        When there is no room, the call waits; if `block` is false, it raises BufferFull instead. `updates` are checked
        and copied where needed before the call returns: InvalidUsage is raised here, and does not affect other appends.
        `timeout` is in seconds, from this call until the future is done.

        The future fails as `compare_and_append` does, or with NotSent when an earlier append failed. If the caller has
        not looked at a failure, by `result` or `exception`, then the next call on this handle raises NotSent, and
        `flush` and `close` raise the failure itself; this happens once. A future can be cancelled before its append is
        sent, and `asyncio.wrap_future` makes it awaitable.
        """
        self._check_verb("append_async")
        block, copies = parse_flag(block, "block"), is_shared(updates)
        pending = self._accepted(updates, expected_upper, new_upper, timeout, token, producer, copies=copies)
        outbox = self._outbox or self._begin_outbox()
        accepted = outbox.accept(lambda: pending, pending.size, pending.deadline, self._send, block=block)
        return cast("Future[Done]", accepted)

    def flush(self, *, timeout: float | None = None) -> None:
        """Write all appends that were accepted before this call, now, and return when they are finished.

        If an append failed and the caller has not looked at that yet, its error is raised. Raises TimedOut when they
        are not finished after `timeout` seconds; they continue then, and their futures say how they end.
        """
        deadline = self._deadline(timeout)
        if self._outbox is not None:
            self._outbox.settle(deadline)
            self._outbox.raise_failure(copied)

    def close(self) -> None:
        """Write the appends that were accepted, and retire this writer. Idempotent. The data that it appended stays.

        If an accepted append failed and the caller has not looked at that yet, its error is raised.
        """
        if self._outbox is not None:
            self._outbox.close(self._deadline(None))
        with self._lock:
            self._retire()
        if self._outbox is not None:
            self._outbox.raise_failure(copied)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            mute(self)
        super().__exit__(kind, error, trace)

    __reduce__ = not_pickled("A writer", "Open one in the other process")

    def _accepted(
        self, updates: object, expected_upper: object, new_upper: object, timeout: float | None, token: bytes | None,
        producer: tuple[str, int] | None, *, copies: bool,
    ) -> Pending:  # fmt: skip
        """An append whose arguments are checked. With `copies` the caller cannot change its updates any more."""
        times = self._times()
        lower, upper = parse_bounds(expected_upper, new_upper, times)
        known, producer = None if token is None else parse_token(token), self._parse_producer(producer)
        deadline = self._deadline(timeout)
        table = take_over(self.schema, self._checked(updates, lower, upper, times), copies=copies)
        return Pending(table, lower, upper, known, deadline, self._runtime.monotonic(), size_of(table), producer)

    def _begin(self, timeout: float | None, held: list[Lock]) -> Deadline:
        """Wait for this call's turn, and take the lock. Once the lock is in `held`, the caller must release it."""
        deadline = self._deadline(timeout)
        if self._outbox is not None:
            self._outbox.settle(deadline)
            self._outbox.raise_failure()
        held += taking(self._lock, deadline.remaining_s())
        if not held or held[-1] is not self._lock:
            raise self._out_of_time(deadline, "other appends of this handle took that long")
        return deadline

    def _in_turn(self, timeout: float | None, call: Callable[[Deadline], T]) -> T:
        """Do a call when its turn comes, by its deadline."""
        held: list[Lock] = []
        try:
            deadline = self._begin(timeout, held)
            return call(deadline)
        finally:
            if held:
                self._lock.release()

    def _before(self, step: Callable[[], T]) -> T:
        """Do a step before anything is sent: whatever is in doubt of it, nothing was appended."""
        try:
            return step()
        except Indeterminate as error:
            raise undoubted(self._shard, error, self._what) from error

    def _begin_outbox(self) -> Outbox:
        # SUBTLE: not under the handle's own lock. The sending thread holds that one for as long as a commit takes.
        with self._beginning:
            if self._outbox is None:
                size = self._config.buffer_bytes
                self._outbox = Outbox(self._shard, self._runtime, size, self._batching, self._what)
            return self._outbox

    def _append(
        self, tables: Iterator[pa.Table], bounds: tuple[Antichain, Antichain], deadline: Deadline,
        token: bytes | None, producer: tuple[str, int] | None,
    ) -> Done:  # fmt: skip
        with Spending() as spent:
            if token is None and producer is not None:
                check_produced(self._producing(), producer)
            doubts = [one for one in self._doubts if one.token == token and bounds in one.counts]
            doubt = doubts[0] if doubts else None
            count = 0 if doubt is None else doubt.counts[bounds]
            try:
                if doubt is not None:
                    again = self._brought_again(doubt.brought, deadline)
                    done = self._commit_brought(again, doubt.bounds, deadline, token, producer, spent)
                    return msgspec.structs.replace(done, count=count)
                brought = self._bring(tables, bounds, deadline)
                count = self._count_of(brought)
                return self._commit_brought(brought, bounds, deadline, token, producer, spent)
            except REFUSED as refusal:
                if token is None:
                    raise
                return self._committed_before(token, bounds, count, refusal, spent)

    def _send(self, batch: Sequence[Pending]) -> Sequence[Answer]:
        """Carry out accepted appends: all of them together, or none."""
        first, bounds = batch[0], (batch[0].lower, batch[-1].upper)
        with self._lock, Spending() as spent:
            if first.deadline.has_passed():
                raise self._out_of_time(first.deadline, "appends accepted before it took that long")
            if len(batch) == 1:
                tables = iter(() if first.table is None else (first.table,))
                return [cast("Answer", self._append(tables, bounds, first.deadline, first.token, first.producer))]
            table, counts = coalesced(self.schema, batch)
            token = self._runtime.token()
            try:
                brought = self._bring(iter(() if table is None else (table,)), bounds, first.deadline)
                done = self._commit_brought(brought, bounds, first.deadline, token, None, spent)
            except (ConstraintViolated, InvalidUsage):  # of one of them; or a handover is in between
                return one_by_one(batch, lambda pending: self._send([pending]), self._shard, self._what)
            except Indeterminate as error:
                times = [(pending.lower, pending.upper) for pending in batch]
                self._doubts.append(doubt := Doubt(token, brought, dict(zip(times, counts, strict=True))))
                return doubt.errors(error)
            return [cast("Answer", msgspec.structs.replace(done, count=count)) for count in counts]

    def _filling(self, *, is_dry: bool = False) -> Filling:  # noqa: ARG002 - of those that take numbers
        """What fills columns in one call. In a dry run it takes no numbers."""
        return Filling(self._runtime)

    def _times(self) -> Times:
        return Times(self.schema.times, self._now)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self._runtime.deadline(self._config.timeout_s if timeout is None else parse_seconds(timeout))

    def _checked(self, updates: object, lower: Antichain, upper: Antichain, times: Times) -> Iterator[pa.Table]:
        if isinstance(updates, Checked):
            yield from (updates.table,) if updates.table.num_rows else ()
            return
        only = lower.time if lower.time is not None and upper.time == lower.time + 1 else None
        for table in iter_updates(self.schema, updates, time=only, times=times, whole=False, filling=self._filling()):
            check_times(table, lower, upper, times)
            yield table

    def _parse_producer(self, producer: object) -> tuple[str, int] | None:
        return parse_producer(producer)

    def _check_verb(self, verb: str) -> None:
        """Raise if a call is refused whatever it writes."""

    @abstractmethod
    def _committed_before(
        self, token: bytes, bounds: tuple[Antichain, Antichain], count: int, refusal: PersistError, spent: Spending
    ) -> Done:
        """The answer of a refused append that an earlier call had committed. Raises `refusal` if none had."""

    @abstractmethod
    def _producing(self) -> Machine:
        """The shard that remembers producers."""

    @abstractmethod
    def _bring(self, tables: Iterator[pa.Table], bounds: tuple[Antichain, Antichain], deadline: Deadline) -> Brought:
        """Make of updates what one commit sends. Raises nothing that leaves a doubt."""

    @abstractmethod
    def _brought_again(self, brought: Brought, deadline: Deadline) -> Brought:
        """The same, to be sent once more."""

    @abstractmethod
    def _count_of(self, brought: Brought) -> int: ...

    @abstractmethod
    def _commit_brought(
        self, brought: Brought, bounds: tuple[Antichain, Antichain], deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None, spent: Spending,
    ) -> Done:  # fmt: skip
        """Commit it to all places or to none. Raises Indeterminate, with the token, if that is not known."""

    @abstractmethod
    def _retire(self) -> None:
        """Retire the writer's ids. Idempotent."""

    def _told(self) -> tuple[str, dict[str, str]]:
        """What it writes, for messages, and as the field of errors."""
        return self._what, {"shard": self._shard}

    def _out_of_time(self, deadline: Deadline, why: str) -> TimedOut:
        """The error for a call whose deadline passed before anything of it was sent."""
        what, fields = self._told()
        return deadline.gave_up(what, f"as {why}", **fields)


def mute(write: OrderedWriter[Any, Any]) -> None:
    """Stop reporting appends that failed. Used when another error is being raised, which matters more."""
    if write._outbox is not None:
        write._outbox.mute()
