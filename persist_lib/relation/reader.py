"""Reading: one handle, one reader id, snapshots as of a time, changes between two, listening to what happens after.

A kind of reader says which times are complete and waits for them, and what it reads then. What callers pass, and the
errors for what cannot be read, are the same for all. The handle of a shard keeps history from its `since` on. As long
as it does, every snapshot at or beyond that time has the same contents, whichever client reads it and whenever. A
read-only handle keeps nothing: other clients may give up the history that it reads, and then it raises an error.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from persist_lib.arguments import not_pickled, parse_seconds, parse_text
from persist_lib.core.state import State
from persist_lib.errors import InvalidUsage, NotComplete, TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import ReaderId
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.changes import Changes, PlaceUpdates, UpdatesPart
from persist_lib.relation.held import Named
from persist_lib.relation.listen import Listen, Patience
from persist_lib.relation.reader_lease import K, ReaderLease
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.snapshot import Snapshot, snapshot_known
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leased, Leases
from persist_lib.times import TimeLike, Times

if TYPE_CHECKING:
    import pyarrow.compute as pc

S = TypeVar("S")
PURPOSE_LETTERS = 200
"""The longest purpose of a reader, and owner of a writer. It is limited, as each copy of the state carries it."""


class Reader(Leased, Generic[S, K]):
    """Reads one shard or collection; `S` is what its snapshots are. Safe to use from several threads."""

    named: Named
    """What is read, in messages."""
    schema: Schema
    """The columns that it reads."""
    around: Machine
    """A shard of it, with the clock and the settings that it uses."""
    read_only: bool
    """Whether it holds no history."""

    _kept: K
    """The history that it keeps."""

    @property
    def since(self) -> Antichain:
        """The earliest frontier at which this handle can read. Snapshots before it raise SinceViolation."""
        return self._kept.since

    @abstractmethod
    def fetch_upper(self) -> Antichain:
        """Read from the location up to where it is complete."""

    @abstractmethod
    def _contents(self, as_of: int | None, asked: Asked, deadline: Deadline) -> S:
        """The contents as of a time, once it is complete; None: the newest complete time."""

    @abstractmethod
    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:
        """Wait until a time is complete, and return it. None: the newest one, and `least` or later."""

    @abstractmethod
    def _parts(self, from_: int | None, to: int, deadline: Deadline) -> Sequence[UpdatesPart]:
        """What the updates in `(from_, to]`, which are complete, are read from."""

    @abstractmethod
    def _reach_upper(self, target: Antichain, deadline: Deadline) -> Antichain:
        """Wait until upper is there, and return it. Raises TimedOut."""

    def snapshot(
        self, as_of: TimeLike | None = None, *, columns: Sequence[str] | None = None,
        key: Sequence[object] | None = None, key_from: Sequence[object] | None = None,
        key_to: Sequence[object] | None = None, keys: object = None, filter: pc.Expression | None = None,
        diff: bool = False, timeout: float | None = None,
    ) -> S:  # fmt: skip
        """Return the contents as of a time (default: the newest complete time). Waits until upper has passed that time.

        Where no time is complete yet, the newest contents are empty, and the snapshot's `as_of` is -1. Where times are
        a clock, and the library has chosen them all (`append_now`, `upsert`, `delete`, `restore`), a client that may
        write completes a time that the store's clock has passed, by an append of nothing; never in mode `append`.

        `as_of` is an integer. Where times are a clock, it may also be a datetime, a pandas or numpy timestamp, or a
        text like "2026-11-22T12:00Z" or "1 hour ago"; the contents include updates at that very time.

        Each row is there as often as it was added. With `diff` each distinct row is there once, with a column `_diff`,
        its multiplicity. Rows cannot be read where a multiplicity is negative: InvalidUsage names one. A shard's rows
        come in the order of keys, a collection's shard by shard.

        `columns` are the columns to read (default: all). With `diff`, rows that are equal in them are one row, with the
        sum of their multiplicities, and none where that is 0. `filter` is a pyarrow expression on any columns of the
        data, such as `pyarrow.compute.field("cents") > 100`: only rows for which it is true count. `key` reads one key,
        or all keys that start with these values of the leading key columns; `key_from` and `key_to` read the keys in
        `[from, to)`. `keys` reads many keys: a table or frame of the key columns, or a list of dicts, of values (of a
        key of one column) or of tuples. A key that is given twice is read once, and what is read of keys is held in
        memory. Only parts and row groups that can hold such keys and rows are fetched.

        Raises SinceViolation for a time before since, NotComplete when upper has not passed the time after `timeout`
        seconds, LeaseExpired when this handle was retired, and SchemaChanged for a time at which a collection's rows
        cannot be given in the columns that this reader was opened with. A reader that was opened without a schema gives
        those of earlier times in the columns that they had then.
        """
        asked = Asked(columns, key, key_from, key_to, keys, filter, diff)
        time = None if as_of is None else self._times().as_of(as_of)
        return self._contents(time, asked, self._deadline(timeout))

    def changes(self, from_: TimeLike | None, to: TimeLike | None = None, *, timeout: float | None = None) -> Changes:
        """Return all changes after the time `from_`, up to and with the time `to`: the updates in `(from_, to]`.

        `to` is by default the newest complete time. Waits until upper has passed `to`. None for `from_` means from the
        beginning on. The contents as of `from_` and the changes add up to the contents as of `to`; there are none where
        both are one time. Where a collection was handed over in between, the difference is among them, at its time.
        Raises InvalidUsage when `to` is before `from_`, SinceViolation when `from_` is before since (None: when any
        history was given up), as exact times before it are gone, and NotComplete when upper has not passed the time
        after `timeout` seconds. Times are given as in `snapshot`.
        """
        first, last = parse_window(self._times(), from_, to)
        deadline = self._deadline(timeout)
        self._kept.check_since(first or 0)
        with Spending() as spent:
            end = self._reach(last, -1 if first is None else first, deadline)
        return Changes(self.named, self.schema, first, end, self._parts(first, end, deadline), spent)

    def wait_for_upper(self, frontier: object, timeout: float | None = None) -> Antichain:
        """Wait until upper is at or beyond `frontier`, and return upper. Raises TimedOut after `timeout` seconds."""
        return self._reach_upper(self._times().frontier(frontier, "frontier"), self._deadline(timeout))

    def downgrade_since(self, since: object) -> None:
        """Give up history before `since`. Reads of this handle that are under way can still be finished.

        Never moves back: a `since` before the handle's own changes nothing. Raises InvalidUsage for a read-only handle,
        and LeaseExpired when this handle was retired.
        """
        given = self._times().frontier(since, "since")
        if self.read_only:
            raise InvalidUsage("a read-only handle holds no history, so there is nothing to give up")
        self._kept.downgrade(given)

    __reduce__ = not_pickled("A reader", "Open one in the other process, or pass the splits of a snapshot")

    def _times(self) -> Times:
        return Times(self.schema.times, self.around.consensus.now)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.around.runtime.deadline(self.around.config.timeout_s if timeout is None else parse_seconds(timeout))

    def _not_there(self, upper: Antichain, target: int | Antichain | None, deadline: Deadline) -> TimedOut:
        is_clock = self.schema.times is not None
        hint = (
            '. If that time has passed and nothing came since then, write.advance_upper("now") says so'
            if is_clock
            else ""
        )
        waited = f"waited {deadline.timeout_s:g} s for upper to pass" if deadline.timeout_s else "upper has to pass"
        message = (
            f"{self.named}: {waited} {self._times().show(target)}, and upper is {self.schema.show(upper)}. "
            f"Nothing is lost; wait longer, or ask for an earlier time{hint}"
        )
        fields = {"timeout_s": deadline.timeout_s, "upper": upper, **self.named.fields}
        return NotComplete(message, as_of=target, **fields) if isinstance(target, int) else TimedOut(message, **fields)


def parse_window(times: Times, from_: TimeLike | None, to: TimeLike | None) -> tuple[int | None, int | None]:
    """The bounds of changes; None: from the beginning on, up to the newest time. Raises InvalidUsage out of order."""
    first = None if (start := times.start(from_, "from_")) < 0 else start
    last = None if to is None else times.as_of(to, "to")
    if first is not None and last is not None and last < first:
        what = f"to must be {times.show(first)} or later, got {times.show(last)}"
        raise InvalidUsage(f"changes go forward: {what}", from_=from_, to=to)
    return first, last


class ReadHandle(Reader[Snapshot, ReaderLease]):
    """Reads one shard. Safe to use from several threads."""

    def __init__(
        self,
        machine: Machine,
        leases: Leases,
        schema: Schema,
        urls: tuple[str, str],
        *,
        read_only: bool = False,
        purpose: str = "",
        original: ReaderId | None = None,
        completes: Callable[[State, int, Deadline], bool] | None = None,
    ) -> None:
        self.named, self.schema = Named("shard", machine.shard), schema.shown
        self.around = self.machine = machine
        self.urls = urls
        self.read_only = read_only
        self._completes = completes
        self._listeners: weakref.WeakValueDictionary[str, ReadHandle] = weakref.WeakValueDictionary()
        self._kept = ReaderLease(machine, leases, schema, read_only=read_only, purpose=purpose, original=original)

    @property
    def id(self) -> ReaderId | None:
        """This reader's id; None when it is closed, and for one that is read-only."""
        return self._kept.id

    @property
    def shard(self) -> str:
        """The shard's name."""
        return self.machine.shard

    @property
    def upper(self) -> Antichain:
        """The newest upper of the shard that this process has seen. `fetch_upper` reads it from the location."""
        return self.machine.state.upper

    def fetch_upper(self) -> Antichain:
        """Read the shard's current upper from the location."""
        state = self.machine.fetch().state
        self.machine.check_same(state)
        return state.upper

    def listen(self, as_of: TimeLike | None, *, until: object = TOP, timeout: float | None = None) -> Listen:
        """Return an iterator of what happens after `as_of`: updates at their exact times, and progress.

        None, and -1, which is the time of contents before anything was written, mean from the beginning on. The
        iterator waits for updates, and ends at the frontier `until` or when the shard is closed for writing. It
        raises TimedOut when nothing comes for `timeout` seconds (None: it waits for ever). The listener has a lease of
        its own, and keeps back no history that others give up. Where the shard's times are a clock, `as_of` and `until`
        may be given as in `snapshot`, and `_time` is a timestamp in UTC.
        """
        times = self._times()
        start, end = times.start(as_of), times.frontier(until, "until")
        timeout = None if timeout is None else parse_seconds(timeout)
        self._kept.check_not_closed()
        self._kept.check(self.machine.fetch().state, max(start, 0))
        handle = self
        if not self.read_only:
            handle = ReadHandle(self.machine, self._kept.leases, self.schema, self.urls, purpose="listen")
            self._listeners[handle.id or ""] = handle
            handle._kept.let_go(at(max(start, 0)))
            handle._kept.move_hold()
        return Listen(handle, start, end, timeout)

    def clone(self, *, purpose: str = "") -> ReadHandle:
        """Return another reader of the shard, with a lease of its own, that can read all that this one can now.

        It has the since and the seqno hold of this handle, not the newest ones, and moves on by itself. `purpose` is a
        short text that lists of readers show. Raises LeaseExpired when this handle was retired, and InvalidUsage where
        the shard has a format before 3. A read-only handle has no lease, and neither has its clone.
        """
        self._kept.check_not_closed()
        purpose = parse_text(purpose, "purpose", PURPOSE_LETTERS)
        return ReadHandle(
            self.machine, self._kept.leases, self.schema, self.urls,
            read_only=self.read_only, purpose=purpose, original=self.id, completes=self._completes,
        )  # fmt: skip

    def close(self) -> None:
        """Retire this reader and its listeners. Idempotent. since stays until another reader or a hold moves it."""
        for listener in list(self._listeners.values()):
            listener.close()
        self._kept.close()

    def _contents(self, as_of: int | None, asked: Asked, deadline: Deadline) -> Snapshot:
        rows = asked.of(self.schema, str(self.named))
        with Spending() as spent:
            chosen = self._reach(as_of, -1, deadline)
        held = self._kept.acquire(chosen if chosen >= 0 else self.machine.state.since.time or 0)
        return snapshot_known(self, chosen, rows, held, spent)

    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:
        target = time if time is not None or least < 0 else least
        state = self._wait(deadline, target)
        return max(least, _newest(state)) if time is None else time

    def _reach_upper(self, target: Antichain, deadline: Deadline) -> Antichain:
        return self._wait(deadline, target).upper

    def _parts(self, from_: int | None, to: int, deadline: Deadline) -> list[PlaceUpdates]:  # noqa: ARG002 - it is there
        return [PlaceUpdates(self, from_, to)]

    def _wait(self, deadline: Deadline, target: int | Antichain | None) -> State:
        """The state in which upper has passed a time, or is at or beyond a frontier; None: the newest one."""
        self._kept.check_not_closed()
        poll_s = self.machine.config.poll_s
        patience = Patience(self.machine, deadline, poll_s, poll_s)
        while True:
            version = patience.look()
            state = version.state
            self.machine.check_same(state)
            if isinstance(target, int):
                self._kept.check(state, target)
            elif state.is_finished() and target is None:
                self._kept.check(state, MAX_TIME)
            if target is None or (state.upper.has_passed(target) if isinstance(target, int) else target <= state.upper):
                return state
            if isinstance(target, int) and self._completes is not None and self._completes(state, target, deadline):
                continue
            if patience.is_over:
                raise self._not_there(state.upper, target, deadline)
            patience.pause(version.seqno)


def _newest(state: State) -> int:
    """The newest complete time: the last one before upper, or the last with data where upper is empty. -1: none yet."""
    if state.upper.time is not None:
        return state.upper.time - 1
    times = [part.time_upper for batch in state.trace for part in batch.parts]
    newest = max(times, default=0)
    return max(newest, state.since.time or 0)
