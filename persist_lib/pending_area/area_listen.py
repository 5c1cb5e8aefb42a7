"""Listening to a collection: through the shard up to its upper, beyond it through the batches of one writer.

A reader takes from the pending area only what lies beyond the upper of a version that it holds, and lists after
it holds that version. A batch becomes garbage at a later seqno than any version whose upper is before the batch's. So
nothing that was listed is deleted while the version is held, that is until every object of the plan has been read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from persist_lib.convert.times import shown_times
from persist_lib.core.state import State
from persist_lib.errors import Corrupt, Diverged, Missing, NewerFormat
from persist_lib.format.parts import within
from persist_lib.format.paths import blob_key, pending_prefix
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.location.wrap.around import next_page
from persist_lib.pending_area.late_batches import first_exact, shard_sums
from persist_lib.pending_area.listing import Listing, fetch_listing, read_listing
from persist_lib.pending_area.objects import NONE, Batch, TimeSums, added, decode, sums_of
from persist_lib.relation.held import kept_of
from persist_lib.relation.listen import BACK_OFF, Event, Patience, Progress, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.follow import Follow
from persist_lib.schema.schema import Schema
from persist_lib.shard.runs import read_updates

log = logging.getLogger("persist.pending")
AROUND_S = 1.0
"""How long the writer that is followed may have nothing new before the others are looked at. That lists all of them."""


class Emitted:
    """The sums by time over `[lower, upper)` of what was read from the pending area and is not checked yet.

    What is read twice is compared at once, what was absorbed since with the shard.
    """

    def __init__(self, shard: str, schema: Schema) -> None:
        self._shard, self._schema = shard, schema
        self.lower = self.upper = 0
        self._sums = NONE
        self._from: tuple[tuple[int, int, str], ...] = ()

    def copy(self) -> Emitted:
        made = Emitted(self._shard, self._schema)
        made.lower, made.upper, made._sums, made._from = self.lower, self.upper, self._sums, self._from
        return made

    @property
    def is_empty(self) -> bool:
        return self.lower >= self.upper

    def add(self, lower: int, upper: int, sums: TimeSums, key: str) -> None:
        """Note that the updates with times in `[lower, upper)` were given, as the batch with this key has them.

        Raises Diverged if other updates were given for one of these times before.
        """
        if self.is_empty or lower > self.upper:
            self.lower = self.upper = lower
            self._sums, self._from = NONE, ()
        both = max(lower, self.lower), min(upper, self.upper)
        if both[0] < both[1]:
            self._compare(self._sums.between(*both), sums.between(*both), f"the pending batch {key} has")
        if upper > self.upper:
            self._sums = added([self._sums, sums.between(max(lower, self.upper), upper)])
            self._from = (*self._from, (self.upper, upper, key))
            self.upper = upper

    def check(self, upper: int, ours: TimeSums) -> None:
        """Compare what was given before `upper` with the sums of the shard over `[lower, upper)`, and forget it.

        Raises Diverged if they are not the same.
        """
        self._compare(self._sums.between(self.lower, upper), ours, "the shard has")
        self.forget(upper)

    def forget(self, upper: int) -> None:
        """Forget what was given before `upper`."""
        self.lower = min(upper, self.upper)
        self._sums = self._sums.between(self.lower, self.upper)
        self._from = tuple(one for one in self._from if one[1] > self.lower)

    def _compare(self, given: TimeSums, other: TimeSums, who: str) -> None:
        if (time := given.first_difference(other)) is None:
            return
        keys = [key for lower, upper, key in self._from if lower <= time < upper]
        raise Diverged(
            f"collection {self._shard}: at {self._schema.show(time)}, {who} other updates than this reader was given "
            f"from {' and '.join(keys) or 'another batch'}: the writers disagree. Drop what was read from that time "
            "on, and read again with merged_only=True, or once it is known who is right: `persist pending show`",
            collection=self._shard, shard=self._shard, time=time, keys=tuple(keys),
        )  # fmt: skip


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
            data = machine.blob.get(blob_key(machine.shard, name.key))
            if data is None:
                self._check_held(name.key)
                continue
            try:
                return decode(name, data, state.schemas)
            except (Corrupt, NewerFormat) as error:
                log.warning("collection %s: %s", machine.shard, error)  # another writer's is taken
        return None

    def _check_held(self, key: str) -> None:
        """A batch that was listed is gone. Raises Missing, unless this reader holds nothing."""
        if self._handle.read_only:
            return
        raise Missing(
            f"{pending_prefix(self._handle.machine.shard)}{key} was listed and is gone, though a live reader needs it. "
            "Nothing deletes such a batch: was it deleted by hand? Read again",
            key=key,
        )


def check_emitted(handle: ReadHandle, emitted: Emitted, state: State) -> None:
    """Compare what was given beyond the merged upper with what was absorbed since.

    What cannot be compared any more, as a read-only reader holds no history, is forgotten.
    """
    upper = emitted.upper if state.upper.time is None else min(emitted.upper, state.upper.time)
    first = first_exact(state, emitted.lower)
    if emitted.is_empty or upper <= emitted.lower:
        return
    if first is None or first > emitted.lower:
        emitted.forget(upper if first is None else min(first, upper))
    if emitted.lower < upper:
        machine = handle.machine
        emitted.check(upper, shard_sums(machine.reads, machine.shard, state, emitted.lower, upper))
