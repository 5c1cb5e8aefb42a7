"""The reader of a collection with a pending area: definite up to the merged upper, beyond as fresh as its writers.

It reads the shard up to its upper, and beyond it the batches of one writer. It takes from the pending area only what
lies beyond the upper of a version that it holds, and lists after it holds that version. A batch becomes garbage at a
later seqno than any version whose upper is before the batch's. So nothing that was listed is deleted while the version
is held, that is until every object of the plan has been read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from copy import copy

import numpy as np
import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.convert.times import shown_times
from persist_lib.core.state import State
from persist_lib.errors import Missing, NotComplete, PersistError
from persist_lib.format.parts import within
from persist_lib.format.paths import blob_key, pending_prefix
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.multiplicity import built
from persist_lib.location.wrap.around import next_page
from persist_lib.pending_area.late_batches import Emitted, check_emitted
from persist_lib.pending_area.listing import Listing, fetch_batch, fetch_listing, read_listing
from persist_lib.pending_area.objects import Batch, sums_of
from persist_lib.relation.held import kept_of
from persist_lib.relation.listen import BACK_OFF, Event, Patience, Progress, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.follow import Follow
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Resource
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME
from persist_lib.shard.runs import read_updates
from persist_lib.times import TimeLike, Times

log = logging.getLogger("persist.pending")
AROUND_S = 1.0
"""How long the writer that is followed may have nothing new before the others are looked at. That lists all of them."""


class PendingListen(Follow[Event]):
    """An iterator of `Updates` and `Progress`. To end its lease early, close it or use a `with` block.

    `writer` is the one that is followed beyond the merged upper, and `emitted` notes what was given there.
    """

    def __init__(
        self, handle: ReadHandle, start: Antichain, until: Antichain, timeout_s: float | None, emitted: Emitted, *,
        merged_only: bool, owns: bool, is_eager: bool = False,
    ) -> None:  # fmt: skip
        shard = handle.machine.shard
        super().__init__(handle.machine.runtime, start, until, timeout_s, f"collection {shard}", shard=shard)
        self.writer: str | None = None
        self._handle, self._emitted, self._merged_only = handle, emitted, merged_only
        self._owns, self._is_eager = owns, is_eager
        self._after = ""  # behind which key of the writer to continue
        self._looked_s: float | None = None

    def close(self) -> None:
        super().close()
        if self._owns:
            self._handle.close()

    def _show(self, frontier: Antichain) -> str:
        return self._handle.schema.show(frontier)

    def _begin(self, deadline: Deadline) -> None:
        """Begin to wait. Stores send notifications only of what is merged, not of what writers put."""
        machine, poll_s = self._handle.machine, self._handle.machine.config.poll_s
        self._patience = Patience(machine, deadline, poll_s, BACK_OFF * poll_s, tells_all=self._merged_only)

    def _pause(self) -> None:
        self._patience.pause(self._handle.machine.version.seqno)

    def _fetch(self) -> Iterator[None]:
        """Make due what there is now beyond the frontier: for each batch its updates, then progress.

        Raises Diverged when what was given earlier is not what the shard has, and LeaseExpired and SinceViolation as
        any read.
        """
        if self.frontier.time is None:
            return
        machine = self._handle.machine
        machine.fetch()
        reading = kept_of(self._handle).acquire(max(0, self.frontier.time - 1))
        try:
            state = reading.version.state
            check_emitted(self._handle, self._emitted, state)
            yield from self._merged(state)
            while not self._merged_only and not self._is_done() and (batch := self._next(state)) is not None:
                yield from self._pending(batch, state)
        except Missing as missing:
            kept_of(self._handle).check_missing(reading, missing)
        finally:
            reading.release()

    def _merged(self, state: State) -> Iterator[None]:
        machine, schema = self._handle.machine, self._handle.schema
        for batch in state.trace:
            if self._is_done() or batch.upper <= self.frontier or self.frontier.time is None:
                continue
            upper = batch.upper.meet(self.until)
            tables: Iterable[pa.Table] = read_updates(
                machine.reads, machine.shard, (batch,), self.frontier.time, upper.time, state.schemas, schema
            )
            if self._handle.read_only:
                tables = list(tables)  # an object may vanish half way, and what was delivered must not come again
            yield from self._step(tables, upper, self._after)

    def _pending(self, batch: Batch, state: State) -> Iterator[None]:
        """The updates of a pending batch from the frontier on."""
        lower, upper = self.frontier.time or 0, batch.name.upper.meet(self.until)
        table = within(batch.table, lower, upper.time)
        sums = sums_of(state.schemas[-1], [table])
        self._emitted.add(lower, upper.time or MAX_TIME, sums, batch.name.key)
        key = blob_key(self._handle.machine.shard, batch.name.key)
        after = max(self._after, key) if batch.name.writer == self.writer else self._after
        yield from self._step([table.select(self._handle.schema.updates.names)], upper, after)

    def _step(self, tables: Iterable[pa.Table], upper: Antichain, after: str) -> Iterator[None]:
        for table in tables:
            if table.num_rows:
                self._due = Updates(shown_times(self._handle.schema, table)), True
                yield
        progress = Progress(upper), False
        self._due, self.frontier, self._after = progress, upper, after
        yield
        if self._owns and upper.time is not None:  # give up, at the next tick, what was delivered and checked
            least = upper.time if self._emitted.is_empty else min(upper.time, self._emitted.lower)
            kept_of(self._handle).let_go(at(max(0, least - 1)))

    def _next(self, state: State) -> Batch | None:
        """A sound batch that continues from the frontier; of the writer that is followed, if it has one."""
        if self.writer is not None and (batch := self._best(self._of_writer(self.writer), state)) is not None:
            return batch
        machine = self._handle.machine
        now = machine.runtime.monotonic()
        if self._looked_s is not None and not self._is_eager and now - self._looked_s < AROUND_S:
            return None
        self._looked_s = now
        batch = self._best(fetch_listing(machine), state)
        if batch is not None and batch.name.writer != self.writer:
            self.writer, self._after = batch.name.writer, ""
        return batch

    def _of_writer(self, writer: str) -> Listing:
        """The next batches of the writer that is followed: one request, where the store lists in pages."""
        machine, frontier = self._handle.machine, np.uint64(self.frontier.time or 0)
        prefix = f"{pending_prefix(machine.shard)}{writer}/"
        while True:
            page = next_page(machine.blob, prefix, self._after)
            listing = read_listing(machine.shard, page.entries)
            if page.is_last or not page.entries or (listing.rows["upper"] > frontier).any():
                return listing
            self._after = page.entries[-1].key  # these are all behind the frontier, for good

    def _best(self, listing: Listing, state: State) -> Batch | None:
        """The sound batch that continues from the frontier and reaches furthest; None if there is none."""
        frontier = np.uint64(self.frontier.time or 0)
        rows = listing.rows
        places = np.flatnonzero((rows["lower"] <= frontier) & (rows["upper"] > frontier))
        machine = self._handle.machine
        for place in sorted(places.tolist(), key=lambda place: -int(rows["upper"][place])):
            name = listing.name(place)
            found = fetch_batch(machine.blob, machine.shard, name, state.schemas)
            if isinstance(found, Batch):
                return found
            if found is not None:
                log.warning("collection %s: %s", machine.shard, found[1])  # another writer's is taken
            elif not self._handle.read_only:  # else this reader holds nothing
                raise Missing(
                    f"{pending_prefix(machine.shard)}{name.key} was listed and is gone, though a live reader needs it. "
                    "Nothing deletes such a batch: was it deleted by hand? Read again",
                    key=name.key,
                )
        return None


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
        self, as_of: TimeLike | None, *, until: object = TOP, merged_only: bool = False, timeout: float | None = None
    ) -> PendingListen:  # fmt: skip
        """Return an iterator of what happens after `as_of`: Updates at their exact times, and Progress.

        It follows the shard up to its upper, and one writer beyond it; when that one falls behind, another. It ends at
        the frontier `until`, or when the shard is closed. It raises Diverged when what it gave is not what was
        absorbed later, and TimedOut when nothing comes for `timeout` seconds (None: it waits for ever). It reads by a
        clone of this reader, which keeps what it has not compared yet.
        """
        times = Times(self.merged.schema.times, self.merged.machine.consensus.now)
        start, end = times.start(as_of), times.frontier(until, "until")
        timeout = None if timeout is None else parse_seconds(timeout)
        merged_only = parse_flag(merged_only, "merged_only")
        handle = self.merged.clone(purpose="listen") if not self.merged.read_only else self.merged
        try:
            kept_of(handle).acquire(max(start, 0)).release()  # raises SinceViolation
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
            return PendingReader(self.merged.clone(purpose="pending area"), copy(self._emitted))

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
