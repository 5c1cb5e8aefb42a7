"""Writing: one handle, one writer id, appends by compare-and-set.

A writer registers at its first append. It looks after the shard a little as it goes: when the state carries as many
inline bytes as it may, it merges them into a part; when nobody rolls up, it does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from persist_lib.batch import Builder, Built
from persist_lib.core import commands as c
from persist_lib.core.compaction import Policy, plan_flush
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, State
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, LeaseExpired, PersistError
from persist_lib.frontier import MINIMUM, TOP, Antichain, parse_frontier
from persist_lib.ids import SeqNo, WriterId, format_writer_id
from persist_lib.leases import Leased, Leases
from persist_lib.location.deadline import within
from persist_lib.machine import Committed, Machine, refused
from persist_lib.maintain.compaction import carry_out, local_engine
from persist_lib.maintain.rollups import write_rollup
from persist_lib.schema import Schema
from persist_lib.updates import check_times, iter_updates

log = logging.getLogger("persist.write")
ROLLUP_S = 5.0
"""How long an append that is committed may be held up by the rollup that it found due."""


class Appended(msgspec.Struct, frozen=True):
    """An acknowledged append: committed at which seqno, upper from then on, how many updates, under which token."""

    seqno: SeqNo
    upper: Antichain
    count: int
    token: bytes
    attempts: int


class WriteHandle(Leased):
    """Appends to one shard. Safe to use from several threads; appends of one handle are ordered."""

    def __init__(self, machine: Machine, leases: Leases, schema: Schema, schema_id: int) -> None:
        self.machine = machine
        self.schema = schema
        self._schema_id = schema_id
        self._leases = leases
        self._lock = threading.RLock()
        self._id: WriterId | None = None
        self._closed = False
        self._tried_rollup = 0
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
        if self._closed:
            raise LeaseExpired(
                f"shard {self.shard}: this writer was closed. Nothing was changed; open a new handle",
                id="",
                shard=self.shard,
            )
        if self._id is None:
            fresh = format_writer_id(self.machine.runtime.entropy())
            lease_ms = self.machine.config.lease_ms
            self.machine.commit(lambda _state, now: c.RegisterWriter(fresh, "ingest", now + lease_ms))
            self._leases.keep(self.machine, fresh)
            self._dropped = weakref.finalize(self, self._leases.abandon, self.machine, fresh)
            self._dropped.atexit = False
            self._id = fresh
        return self._id

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
        of these wrote anything. After Indeterminate, repeat the call with the `token` it carries: it answers what
        happened.
        """
        lower, upper = _bounds(expected_upper, new_upper)
        with self._lock:
            with self._undoubted():
                built = self._build(updates, lower, upper)
            return self._commit(built, lambda built, _state: built.batch, c.CompareAndAppend, timeout, token)

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
        UpperMismatch when there is a gap before `lower`.
        """
        low, upper = _bounds(lower, new_upper)
        with self._lock:
            with self._undoubted():
                built = self._build(updates, low, upper, by_time=True)

            def rest(built: Built, state: State) -> Batch:
                is_overlap = low < state.upper and state.upper < upper
                return built.trimmed(state.upper) if is_overlap else built.batch

            return self._commit(built, rest, c.Append, timeout, token)

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Appended:
        """Say that nothing more happens before `new_upper`, from wherever upper is. A no-op when it is there."""
        upper = parse_frontier(new_upper, "new_upper")
        with self._lock:
            if upper <= self.upper:
                return Appended(self.machine.version.seqno, self.upper, 0, token=b"", attempts=0)
            built = Built(Batch(0, 0, MINIMUM, upper, MINIMUM, 0, 0, 0))

            def from_upper(built: Built, state: State) -> Batch:
                # Overtaken meanwhile it stays as it is: wholly covered, which is a success.
                return msgspec.structs.replace(built.batch, lower=state.upper) if state.upper < upper else built.batch

            return self._commit(built, from_upper, c.Append, timeout, None)

    def finish(self, expected_upper: object | None = None, *, timeout: float | None = None) -> Appended:
        """Say that nothing is ever written again: upper becomes the empty frontier. The data stays readable."""
        if expected_upper is None:
            return self.advance_upper(TOP, timeout=timeout)
        return self.compare_and_append([], expected_upper, TOP, timeout=timeout)

    def close(self) -> None:
        """Retire this writer. What it appended stays."""
        with self._lock:
            self._closed = True
            if (retired := self._forget_id()) is not None:
                self._leases.retire(self.machine, retired)

    def _builder(self) -> Builder:
        machine = self.machine
        return Builder(
            machine.shard, lambda: self.id, self.schema, self._schema_id, machine.blob, machine.config, machine.runtime
        )

    def _build(self, updates: object, lower: Antichain, upper: Antichain, *, by_time: bool = False) -> Built:
        only = lower.time if lower.time is not None and upper.time == lower.time + 1 else None

        def checked() -> object:
            for table in iter_updates(self.schema, updates, time=only):
                check_times(table, lower, upper)
                yield table

        room = INLINE_TOTAL_BYTES - self.machine.state.inline_size
        inline_bytes = min(self.machine.config.inline_bytes, max(room, INLINE_TOTAL_BYTES // 2))
        return self._builder().build(checked(), lower, upper, inline_bytes=inline_bytes, by_time=by_time)  # type: ignore[arg-type]

    def _commit(
        self,
        built: Built,
        place: Callable[[Built, State], Batch],
        kind: type[c.CompareAndAppend | c.Append],
        timeout: float | None,
        token: bytes | None,
    ) -> Appended:
        with self._undoubted():
            writer, lease_ms = self.id, self.machine.config.lease_ms
        token = token or self.machine.runtime.token()
        placed = built.batch

        def build(state: State, now: int) -> c.Command:
            nonlocal placed
            placed = place(built, state)
            return kind(writer, token, placed, now + lease_ms)

        while isinstance(answer := self.machine.try_commit(build, timeout, token), c.InlineFull):
            with self._undoubted():
                built = self._made_room(built)
        if isinstance(answer, Committed):
            self._housekeep(answer)
            return Appended(answer.seqno, answer.after.upper, placed.count, token, answer.attempts)
        if isinstance(answer, c.AlreadyDone):
            outcome = answer.outcome
            seqno, upper = (outcome.seqno, outcome.upper) if outcome else (self.machine.version.seqno, self.upper)
            return Appended(seqno, upper, 0 if outcome is None else placed.count, token, 0)
        error = refused(self.machine.shard, answer)
        if isinstance(error, LeaseExpired):
            self._forget_id()
        raise error

    def _forget_id(self) -> WriterId | None:
        """Stop using the id; answers it."""
        forgotten, self._id = self._id, None
        if self._dropped is not None:
            self._dropped.detach()
        if forgotten is not None:
            self._leases.drop(self.machine, forgotten)
        return forgotten

    @contextmanager
    def _undoubted(self) -> Iterator[None]:
        """What fails in here leaves no doubt about the append: it was not sent yet."""
        try:
            yield
        except Indeterminate as error:
            raise Determinate(
                f"shard {self.shard}: nothing was appended, as what comes before failed: {error.message}. Try again",
                shard=self.shard,
            ) from error

    def _made_room(self, built: Built) -> Built:
        """The same, to be tried again: the state has room now, or it became an object."""
        try:
            return built if self._flush() else self._builder().externalised(built)
        except LeaseExpired:
            self._forget_id()
            raise

    def _flush(self) -> bool:
        """Merge the newest inline batches into a part, so that the state has room again."""
        state = self.machine.state
        request = plan_flush(state, Policy(part_bytes=self.machine.config.part_bytes))
        if request is None or sum(batch.inline_size for batch in request.inputs) < INLINE_TOTAL_BYTES // 2:
            return False
        return carry_out(self.machine, self, request, local_engine(self.machine)).seqno is not None

    def _housekeep(self, committed: Committed) -> None:
        """Roll up when nobody does. What fails here fails after the append was committed, so it is only logged."""
        every = self.machine.config.rollup_every
        newest = max(committed.after.newest_rollup, self._tried_rollup - every)
        if committed.seqno - newest < 2 * every:
            return
        self._tried_rollup = committed.seqno
        try:
            with within(self.machine.runtime.deadline(ROLLUP_S)):
                write_rollup(self.machine, self.id)
        except PersistError as error:
            log.warning("shard %s: could not roll up after an append: %s", self.machine.shard, error)


def _bounds(lower: object, upper: object) -> tuple[Antichain, Antichain]:
    low, up = parse_frontier(lower, "expected_upper"), parse_frontier(upper, "new_upper")
    if not low < up:
        raise InvalidUsage(
            f"an append covers times from its lower to below its upper, so {low} must be before {up}",
            lower=low,
            upper=up,
        )
    return low, up
