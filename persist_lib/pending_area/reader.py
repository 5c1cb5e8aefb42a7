"""The reader of a collection with a pending area: definite up to the merged upper, beyond as fresh as its writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.errors import Determinate, Missing, NotComplete, PersistError, TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.multiplicity import built
from persist_lib.pending_area.emitted import Emitted
from persist_lib.pending_area.following import Follower, check_emitted, look_again
from persist_lib.relation.listen import BACK_OFF, Event, Patience, Progress
from persist_lib.relation.reader import ReadHandle
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME
from persist_lib.times import TimeLike, Times


class PendingReader:
    """Reads one collection. `merged` is the reader of its shard, for everything that shards offer.

    Its version is the seqno that it holds, its frontier its since; both are durable, and kept up by a lease. What it
    reads beyond `upper` is definite only if the writers agree. It keeps sums of that by time, compares them with the
    shard once that has these times, and raises Diverged where they differ. `merged_only=True` reads nothing beyond.
    """

    def __init__(self, merged: ReadHandle, emitted: Emitted | None = None) -> None:
        self.merged = merged
        self._emitted = emitted or Emitted(merged.shard, merged.schema)
        self._since = merged.since
        self._lock = threading.RLock()
        enrol(self, Stage.HANDLES)

    def after_fork_in_child(self) -> None:
        """Make a new lock, as a thread that exists only in the parent may hold the old one."""
        self._lock = threading.RLock()

    @property
    def shard(self) -> str:
        """The collection's name."""
        return self.merged.shard

    @property
    def since(self) -> Antichain:
        """The earliest frontier at which this reader can read."""
        return self.merged.since

    @property
    def upper(self) -> Antichain:
        """The merged upper, as this process knows it. What is before it is definite."""
        return self.merged.upper

    def contents(
        self, as_of: TimeLike, *, diff: bool = False, merged_only: bool = False, timeout: float | None = None
    ) -> pa.Table:
        """The contents as of a time, as one Arrow table: each row as often as it is there.

        With `diff` each distinct row is there once, with a last column `_diff`, its multiplicity.

        Waits until the shard, or else some writer, has passed that time. Raises NotComplete when none has after
        `timeout` seconds, Diverged when writers were found to disagree, SinceViolation for a time before since, and
        LeaseExpired when this reader was retired.
        """
        schema, is_diff = self.merged.schema, parse_flag(diff, "diff")
        time, table = self._contents(as_of, merged_only=merged_only, timeout=timeout)
        return table if is_diff else built(table, f"the contents of {self.shard} as of {schema.show(time)}")

    def _contents(self, as_of: TimeLike, *, merged_only: bool, timeout: float | None) -> tuple[int, pa.Table]:
        machine, schema = self.merged.machine, self.merged.schema
        time = Times(schema.times, machine.consensus.now).as_of(as_of, "as_of")
        timeout_s = machine.config.timeout_s if timeout is None else parse_seconds(timeout)
        deadline = machine.runtime.deadline(timeout_s)
        patience = Patience(machine, deadline, machine.config.poll_s, 10 * machine.config.poll_s, tells_all=False)
        upper = self.merged.fetch_upper()
        self._check()
        # Where since is upper, the shard does not tell any more what was there just before.
        is_before = bool(upper.time) and at((upper.time or 1) - 1) < self.since
        if parse_flag(merged_only, "merged_only") or upper.has_passed(time) or is_before:
            with self.merged.snapshot(time, timeout=deadline.left_s(), diff=True) as snapshot:
                return time, snapshot.to_arrow()
        held = [empty_table(schema.contents)]
        if upper.time:
            with self.merged.snapshot(upper.time - 1, timeout=deadline.left_s(), diff=True) as snapshot:
                held.append(snapshot.to_arrow())
        with self._lock:
            follower = Follower(
                self.merged, upper, at(time + 1) if time < MAX_TIME else TOP, self._emitted,
                merged_only=False, is_eager=True,
            )  # fmt: skip
            while True:
                held += [table.drop_columns([TIME]) for table in follower.tables()]
                if follower.is_done():
                    return time, consolidate(schema, pa.concat_tables(held))
                if deadline.has_passed():
                    raise NotComplete(
                        f"collection {self.shard}: waited {timeout_s:g} s for {schema.show(time)} to pass, and the "
                        f"writers have come to {schema.show(follower.frontier)}. Nothing is lost; wait longer, or ask "
                        "for an earlier time",
                        as_of=time, upper=follower.frontier, timeout_s=timeout_s, shard=self.shard,
                    )  # fmt: skip
                patience.pause(machine.version.seqno)

    def listen(
        self, as_of: TimeLike, *, until: object = TOP, merged_only: bool = False, timeout: float | None = None
    ) -> PendingListen:  # fmt: skip
        """Return an iterator of what happens after `as_of`: Updates at their exact times, and Progress.

        It follows the shard up to its upper, and one writer beyond it; when that one falls behind, another. It ends at
        the frontier `until`, or when the shard is closed. It raises Diverged when what it gave is not what was
        absorbed later, and TimedOut when nothing comes for `timeout` seconds (None: it waits for ever). It reads by a
        clone of this reader, which gives up history as it goes.
        """
        times = Times(self.merged.schema.times, self.merged.machine.consensus.now)
        start, end = times.as_of(as_of, "as_of"), times.frontier(until, "until")
        timeout = None if timeout is None else parse_seconds(timeout)
        merged_only = parse_flag(merged_only, "merged_only")
        handle = self.merged.clone(purpose="listen") if not self.merged.read_only else self.merged
        try:
            handle.acquire(start).release()  # raises SinceViolation
        except PersistError:
            if handle is not self.merged:
                handle.close()
            raise
        return PendingListen(handle, start, end, timeout, merged_only=merged_only, owns=handle is not self.merged)

    def downgrade_since(self, since: object) -> None:
        """Give up history before `since`, as far as what was read beyond upper is checked. Never moves back."""
        times = Times(self.merged.schema.times, self.merged.machine.consensus.now)
        self._check()
        with self._lock:
            self._since = self._since.join(times.frontier(since, "since"))
            least = TOP if self._emitted.is_empty else at(max(0, self._emitted.lower - 1))
        self.merged.downgrade_since(self._since.meet(least))

    def clone(self) -> PendingReader:
        """Return another reader with the same version and the same since, not the newest: one transition, durable."""
        with self._lock:
            return PendingReader(self.merged.clone(purpose="pending area"), self._emitted.copy())

    def _check(self) -> None:
        """Compare what was given beyond the merged upper with what was absorbed since, as this process knows it."""
        with self._lock:
            if not self._emitted.is_empty:
                reading = self.merged.acquire(max(0, self._emitted.lower - 1, self.since.time or 0))
                try:
                    check_emitted(self.merged, self._emitted, reading.version.state)
                except Missing as missing:
                    look_again(self.merged, reading.version, missing)
                finally:
                    reading.release()

    def close(self) -> None:
        """Retire this reader. Idempotent."""
        self.merged.close()

    __reduce__ = not_pickled("A reader", "Acquire one in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PendingListen:
    """An iterator of `Updates` and `Progress`. To end its lease early, close it or use a `with` block."""

    def __init__(
        self, handle: ReadHandle, as_of: int, until: Antichain, timeout_s: float | None, *,
        merged_only: bool, owns: bool,
    ) -> None:  # fmt: skip
        self._handle, self._timeout_s, self._owns = handle, timeout_s, owns
        self._emitted = Emitted(handle.shard, handle.schema)
        start = at(as_of + 1) if as_of < MAX_TIME else TOP
        self._follower = Follower(handle, start, until, self._emitted, merged_only=merged_only)
        self._looking: Iterator[None] = iter(())
        self._is_midway = False  # whether more of the last event's batch follows
        self._polled: list[Event] = []  # events that a `poll` took before it was interrupted
        self._polled_from = start
        self._failure: PersistError | None = None

    @property
    def frontier(self) -> Antichain:
        """How far the updates have been made due. What is due is delivered next."""
        return self._follower.frontier

    @property
    def writer(self) -> str | None:
        """The writer that is followed beyond the merged upper; None if none is yet."""
        return self._follower.writer

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._polled:
            event = self._polled[0]
            del self._polled[0]
            return event
        follower = self._follower
        while not self._has_due():
            if follower.is_done():
                self.close()
                raise StopIteration
            self._wait()
        (event, self._is_midway), follower.due = follower.due, None  # type: ignore[misc] # SUBTLE: no call from here on
        return event

    def poll(self) -> list[Event]:
        """Return the events that have come by now, without waiting. If it raises, none of them counts as delivered."""
        follower = self._follower
        if not self._polled:
            self._polled_from = follower.frontier
        try:
            for is_new in (False, True):  # what is left of an earlier look, and a new one
                while self._has_due():
                    self._polled += (follower.due[0],)  # type: ignore[index]
                    self._is_midway, follower.due = follower.due[1], None  # type: ignore[index]
                if not is_new and not follower.is_done():
                    self._looking = follower.look()
        except PersistError:
            follower.frontier, self._polled = self._polled_from, []
            raise
        events, self._polled = self._polled, []
        return events

    def _wait(self) -> None:
        """Look again, until something is due."""
        machine, follower = self._handle.machine, self._follower
        deadline = machine.runtime.deadline(float("inf") if self._timeout_s is None else self._timeout_s)
        poll_s = machine.config.poll_s
        # What writers put into the area, no store tells: only what is merged.
        patience = Patience(machine, deadline, poll_s, BACK_OFF * poll_s, tells_all=follower.merged_only)
        self._looking = follower.look()
        while not self._has_due() and not follower.is_done():
            if deadline.has_passed():
                raise TimedOut(
                    f"collection {machine.shard}: nothing came after {self._handle.schema.show(self.frontier)} for "
                    f"{deadline.timeout_s:g} s. Nothing is lost: iterate on, or listen again from there",
                    timeout_s=deadline.timeout_s, frontier=self.frontier,
                )  # fmt: skip
            patience.pause(machine.version.seqno)
            self._looking = follower.look()

    def _has_due(self) -> bool:
        """Whether there is an event to deliver now.

        SUBTLE: an interrupt may come after any call, and each event must be delivered once: see `read.listen`. A look
        that was interrupted between the updates of a batch and the progress that covers them cannot go on.
        """
        if self._failure is not None:
            raise self._failure
        if self._follower.due is None:
            try:
                next(self._looking, None)
            except PersistError as failure:
                self._failure = failure
                raise
            except BaseException:
                if self._follower.due is None:
                    self._failure = self._cut_short() if self._is_midway else None
                    self._looking = iter(())
                raise
            if self._is_progress():
                self._give_up()
        return self._follower.due is not None

    def _is_progress(self) -> bool:
        due = self._follower.due
        return due is not None and isinstance(due[0], Progress)

    def _cut_short(self) -> Determinate:
        return Determinate(
            f"collection {self._handle.shard}: listening was interrupted after a part of a batch was delivered. Drop "
            f"its updates at or after {self._handle.schema.show(self.frontier)}, and listen again from there",
            frontier=self.frontier, shard=self._handle.shard,
        )  # fmt: skip

    def _give_up(self) -> None:
        """Give up the history that was delivered and checked, at the next tick."""
        reached = self.frontier.time
        if not self._owns or reached is None:
            return
        least = reached if self._emitted.is_empty else min(reached, self._emitted.lower)
        self._handle.let_go(at(max(0, least - 1)))

    def close(self) -> None:
        """End the listener's lease. Idempotent."""
        self._looking = iter(())
        if self._owns:
            self._handle.close()

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
