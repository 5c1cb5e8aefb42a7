"""Reading: one handle, one reader id, snapshots as of a time, and listening to updates after a time.

A handle keeps history from its `since` on. As long as it does, every snapshot at or beyond that time has the same
contents, whichever client reads it and whenever. A read-only handle keeps nothing: other clients may give up the
history that it reads, and then it raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from persist_lib.arguments import parse_seconds, parse_text
from persist_lib.core.state import State
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import ReaderId
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.base_reader import Reader
from persist_lib.relation.changes import PlaceUpdates
from persist_lib.relation.held import Named
from persist_lib.relation.listen import Listen, Patience
from persist_lib.relation.reader_lease import ReaderLease
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.snapshot import Snapshot, snapshot_known
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.times import TimeLike

if TYPE_CHECKING:
    pass

PURPOSE_LETTERS = 200
"""The longest purpose of a reader, and owner of a writer. It is limited, as each copy of the state carries it."""


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
