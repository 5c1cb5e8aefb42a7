"""The reader of a collection with a pending area: definite up to the merged upper, beyond as fresh as its writers."""

from __future__ import annotations

import threading

import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.errors import Missing, NotComplete, PersistError
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.multiplicity import built
from persist_lib.pending_area.area_listen import Emitted, PendingListen, check_emitted
from persist_lib.relation.held import kept_of
from persist_lib.relation.listen import Patience, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.resource import Resource
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME
from persist_lib.times import TimeLike, Times


class PendingReader(Resource):
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
            news = PendingListen(
                self.merged, upper, at(time + 1) if time < MAX_TIME else TOP, None, self._emitted, merged_only=False,
                owns=False, is_eager=True,
            )  # fmt: skip
            while True:
                held += [event.table.drop_columns([TIME]) for event in news.poll() if isinstance(event, Updates)]
                if news.until <= news.frontier:
                    return time, consolidate(schema, pa.concat_tables(held))
                if deadline.has_passed():
                    raise NotComplete(
                        f"collection {self.shard}: waited {timeout_s:g} s for {schema.show(time)} to pass, and the "
                        f"writers have come to {schema.show(news.frontier)}. Nothing is lost; wait longer, or ask "
                        "for an earlier time",
                        as_of=time, upper=news.frontier, timeout_s=timeout_s, shard=self.shard,
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
            kept_of(handle).acquire(start).release()  # raises SinceViolation
        except PersistError:
            if handle is not self.merged:
                handle.close()
            raise
        first, emitted = at(start + 1) if start < MAX_TIME else TOP, Emitted(handle.shard, handle.schema)
        owns = handle is not self.merged
        return PendingListen(handle, first, end, timeout, emitted, merged_only=merged_only, owns=owns)

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
                reading = kept_of(self.merged).acquire(max(0, self._emitted.lower - 1, self.since.time or 0))
                try:
                    check_emitted(self.merged, self._emitted, reading.version.state)
                except Missing as missing:
                    kept_of(self.merged).check_missing(reading, missing)
                finally:
                    reading.release()

    def close(self) -> None:
        """Retire this reader. Idempotent."""
        self.merged.close()

    __reduce__ = not_pickled("A reader", "Acquire one in the other process")
