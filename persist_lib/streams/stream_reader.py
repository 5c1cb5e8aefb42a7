"""Reading one stream: what is sealed, as any reader of its shard; on request also what is not sealed yet.

A listener ahead of the seals gives sealed updates, and what is not, in steps that are consistent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_seconds, shown
from persist_lib.client import Client
from persist_lib.convert.times import shown_times
from persist_lib.core.state import State
from persist_lib.errors import InvalidUsage, PersistError, SinceViolation
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.kernel.columns import at_time
from persist_lib.relation.held import kept_of
from persist_lib.relation.listen import BACK_OFF, Event, Listen, Patience, Progress, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.row_selection import RowSelection
from persist_lib.relation.snapshot import Snapshot, consolidated_table, snapshot_known
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.follow import Follow
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Resource
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.streams.committer import Committer, deadline_of
from persist_lib.streams.stream_list import Record
from persist_lib.streams.stream_state import Call, beyond, from_unsealed, sealed_upper, unsealed_schema
from persist_lib.times import Times


class Unsealed(NamedTuple):
    """Unsealed updates that arrived, and with a negative `_diff` those that were sealed: a table as in `Updates`."""

    table: pa.Table


class Accepted(NamedTuple):
    """Updates that wait for their commit, which may still fail; once durable they come again, as other events."""

    table: pa.Table


StreamEvent = Updates | Unsealed | Accepted | Progress


class StreamListen(Follow[StreamEvent]):
    """An iterator of `Updates`, `Unsealed` and `Progress`. To end its leases early, close it or use a `with` block.

    With the `committer` of the runtime that writes the stream, also of `Accepted`.

    Each step takes one version of the unsealed shard, and sealed updates only as far as the stream was sealed
    in that version. So between two `Progress` each update moves from unsealed to sealed as a whole.
    """

    def __init__(
        self, client: Client, reader: StreamReader, as_of: int, until: Antichain, timeout_s: float | None,
        committer: Committer | None = None,
    ) -> None:  # fmt: skip
        start, name = at(as_of + 1) if as_of < MAX_TIME else TOP, f"stream {reader.name!r}"
        super().__init__(client.runtime, start, until, timeout_s, name, stream=reader.name)
        self._poll_s, self._committer = client.config.poll_s, committer
        self._shown: set[Call] = set()  # the calls that wait for their commit, and were given as accepted
        self._reader = reader.clone()
        self._sealed, self._unsealed = self._reader.sealed, self._reader.unsealed
        self._arrived: int | None = None  # the last place in the order of arrival whose updates were given

    def close(self) -> None:
        super().close()
        self._reader.close()

    def _show(self, frontier: Antichain) -> str:
        return self._reader.schema.show(frontier)

    def _keeps(self, _failure: PersistError) -> bool:
        """A step of which nothing was given begins again after any failure."""
        return False

    def _begin(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._patience = Patience(self._unsealed.machine, deadline, self._poll_s, BACK_OFF * self._poll_s)

    def _look(self) -> bool:
        """Whether there is an event to deliver. Raises LeaseExpired."""
        if self._has_come():
            self._steps = self._fetch()
        elif accepted := self._accepted():
            self._steps = self._preview(accepted)
        elif error := kept_of(self._unsealed).expired(self._unsealed.machine.state):
            raise error
        return self._has_due()

    def _pause(self) -> None:
        """Wait until there may be more. Stores send no notifications of what is in this process."""
        if self._committer is None:
            self._patience.pause(self._unsealed.machine.version.seqno)
        else:
            self._deadline.pause(self._poll_s)

    def _fetch(self) -> Iterator[None]:
        """Make due, one after the other, what came since the last step, and the progress that covers it."""
        state = self._unsealed.machine.state
        upper, arrival = sealed_upper(state).meet(self.until), (state.upper.time or 0) - 1
        unsealed: Iterator[StreamEvent] = self._unsealed_to(arrival)
        for event in chain(unsealed, self._sealed_to(upper)):
            self._due = event, True
            yield
        frontier = self.frontier.join(upper)
        progress = Progress(frontier), False
        self._due, self.frontier, self._arrived = progress, frontier, arrival
        yield
        for handle, reached in ((self._unsealed, arrival), (self._sealed, _last(frontier))):
            if not handle.read_only:
                kept_of(handle).let_go(at(reached))

    def _has_come(self) -> bool:
        """Whether the unsealed shard has come further than what was given.

        The process that writes it does not ask the location, which would wait for the commit that is under way.
        """
        machine, given = self._unsealed.machine, at(0 if self._arrived is None else self._arrived + 1)
        if self._committer is None:
            return given < self._patience.look().state.upper
        if self._committer.streams[self._reader.name].arrival <= (given.time or 0):
            return False
        return given < machine.state.upper or given < machine.fetch().state.upper

    def _accepted(self) -> list[Call]:
        """The calls that wrote to the stream, wait for their commit, and were not given."""
        if self._committer is None:
            return []
        waiting = self._committer.waiting()
        self._shown &= set(waiting)
        self._committer.check()
        return [call for call in waiting if call not in self._shown and call.written(self._reader.name)]

    def _preview(self, calls: list[Call]) -> Iterator[None]:
        for call in calls:
            for table in call.written(self._reader.name):
                self._due = Accepted(table), False
                yield
            self._shown |= {call}

    def _unsealed_to(self, arrival: int) -> Iterator[Unsealed]:
        schema = self._reader.schema
        given = (
            self._unsealed.snapshot(arrival, diff=True)
            if self._arrived is None
            else self._unsealed.changes(self._arrived, arrival)
        )
        with given as found:
            tables = [from_unsealed(schema, table) for table in found.batches()]
        yield from (Unsealed(table) for table in tables if table.num_rows)

    def _sealed_to(self, upper: Antichain) -> Iterator[Updates]:
        if upper <= self.frontier:
            return
        self._sealed.wait_for_upper(upper)
        with self._sealed.changes(_last(self.frontier), _last(upper)) as changed:
            yield from (Updates(table) for table in changed.batches() if table.num_rows)


def _last(upper: Antichain) -> int:
    """The last time before a frontier."""
    return MAX_TIME if upper.time is None else upper.time - 1


Ahead = Literal["sealed", "durable", "accepted"]
"""How far a read looks: only what is sealed; what is durable as well; or also what waits for its commit."""
STATE = "_state"


class Contents(Resource):
    """The contents of a stream at one moment, for use in a `with` block: `sealed`, and beyond it `unsealed`.

    `sealed` is a snapshot of the sealed shard, None if nothing is sealed yet. `unsealed` and `accepted` are tables of
    updates with their times: those that are durable, and those that wait for their commit. None of them is at a time
    before `upper`, the sealed frontier.
    """

    def __init__(
        self, schema: Schema, upper: Antichain, sealed: Snapshot | None, unsealed: pa.Table, accepted: pa.Table
    ) -> None:
        self.schema, self.upper = schema, upper
        self.sealed, self.unsealed, self.accepted = sealed, unsealed, accepted

    def to_arrow(self) -> pa.Table:
        """All of it in one table: the columns, `_diff`, and `_state`: `sealed`, `unsealed` or `accepted`.

        These are updates: what is not sealed may take rows away. Add up `_diff` by the columns for the contents as they
        would be if all of it were sealed.
        """
        names = [*self.schema.names, DIFF]
        parts = {
            "sealed": empty_table(self.schema.contents) if self.sealed is None else consolidated_table(self.sealed),
            "unsealed": self.unsealed,
            "accepted": self.accepted,
        }
        marked = [
            table.select(names).append_column(STATE, pa.repeat(pa.scalar(state), table.num_rows))
            for state, table in parts.items()
        ]
        return pa.concat_tables(marked)

    def release(self) -> None:
        """Stop keeping the state that is read from. Idempotent."""
        if self.sealed is not None:
            self.sealed.release()

    close = release


class StreamReader:
    """Reads one stream. Safe to use from several threads.

    It keeps the sealed history from its `since` on, as any reader does, until it is closed or `downgrade_since` gives
    it up. In a read-only runtime it keeps nothing.
    """

    def __init__(self, client: Client, name: str, record: Record, schema: Schema, committer: Committer | None) -> None:
        self._client, self._committer = client, committer
        self.name, self.schema, self.record = name, schema, record
        self._sealed: ReadHandle | None = None
        self._unsealed: ReadHandle | None = None
        self._lock = threading.Lock()
        enrol(self, Stage.HANDLES, _renew)

    @property
    def sealed(self) -> ReadHandle:
        """The reader of the sealed shard."""
        with self._lock:
            if self._sealed is None:
                self._sealed = self._client.open_reader(self.record.sealed, self.schema, purpose=f"stream {self.name}")
            return self._sealed

    @property
    def unsealed(self) -> ReadHandle:
        """The reader of the shard that has what is not sealed yet."""
        with self._lock:
            if self._unsealed is None:
                hidden = unsealed_schema(self.schema)
                self._unsealed = self._client.open_reader(self.record.unsealed, hidden, purpose=f"stream {self.name}")
            return self._unsealed

    @property
    def since(self) -> Antichain:
        """The earliest frontier at which this reader can read."""
        return self.sealed.since

    def fetch_upper(self) -> Antichain:
        """Read how far the stream is sealed from the location."""
        return self.sealed.fetch_upper()

    def wait_for_upper(self, frontier: object, timeout: float | None = None) -> Antichain:
        """Wait until the stream is sealed up to `frontier`, and return how far it is. Raises TimedOut."""
        return self.sealed.wait_for_upper(frontier, timeout)

    def downgrade_since(self, since: object) -> None:
        """Give up history before `since`, as far as this reader is concerned."""
        self.sealed.downgrade_since(since)

    def snapshot(self, as_of: object = None, *, timeout: float | None = None, **what: Any) -> Snapshot:
        """The sealed contents as of a time (default: the newest sealed time). Waits until the time is sealed.

        Arguments and errors are those of `ReadHandle.snapshot`.
        """
        return self.sealed.snapshot(as_of, timeout=timeout, **what)

    def contents(self, *, ahead: Ahead = "durable", timeout: float | None = None) -> Contents:
        """What the stream contains now: what is sealed, and beyond it what `ahead` says, as of one moment.

        `sealed`: nothing more. `durable`: the unsealed updates that are durable. `accepted`: also those that wait for
        their commit, which may still fail; only the process that writes the stream knows of them, and it does not ask
        the location then.
        """
        committer = self._writing(ahead)
        deadline = deadline_of(self._client, timeout)
        while True:
            try:
                return self._contents(ahead, committer)
            except SinceViolation:  # history was given up between the two reads
                if deadline.has_passed():
                    raise
                deadline.pause(self._client.config.poll_s)

    def listen(
        self, as_of: object, *, ahead: Ahead = "sealed", until: object = TOP, timeout: float | None = None
    ) -> Listen | StreamListen:
        """What happens after `as_of`: sealed updates at their times, and progress. See `ReadHandle.listen`.

        With `ahead="durable"` unsealed updates come as well, as `Unsealed`: those that arrive, and when they are sealed
        their retraction. So at each progress all that came adds up to what the stream contains, sealed or not. With
        `ahead="accepted"`, in the runtime that writes the stream, writes come first as `Accepted`, before they are
        durable. These count for nothing: they come again as the others when they are durable, or never, if they fail.
        """
        committer = self._writing(ahead)
        if ahead == "sealed":
            return self.sealed.listen(as_of, until=until, timeout=timeout)
        times = Times(self.schema.times, self._client.consensus.now)
        start, end = times.start(as_of), times.frontier(until, "until")
        timeout_s = None if timeout is None else parse_seconds(timeout)
        return StreamListen(self._client, self, start, end, timeout_s, committer)

    def close(self) -> None:
        """End its leases. Idempotent."""
        for handle in (self._sealed, self._unsealed):
            if handle is not None:
                handle.close()

    def clone(self) -> StreamReader:
        """Another reader of the same stream, with leases of its own."""
        return StreamReader(self._client, self.name, self.record, self.schema, self._committer)

    __reduce__ = not_pickled("A stream's reader", "Open the stream's sealed shard in the other process")

    def _writing(self, ahead: Ahead) -> Committer | None:
        """The committer of what is read, if a read looks ahead to what it accepted. Raises InvalidUsage."""
        if ahead not in get_args(Ahead):
            raise InvalidUsage(f"ahead is one of {get_args(Ahead)}: got {shown(ahead)}", ahead=ahead)
        if ahead == "accepted" and self._committer is None:
            raise InvalidUsage("what waits for its commit is known only to the runtime that writes the stream")
        return self._committer if ahead == "accepted" else None

    def _contents(self, ahead: Ahead, committer: Committer | None) -> Contents:
        nothing = empty_table(self.schema.updates)
        if ahead == "sealed":
            upper = self.sealed.fetch_upper()
            return Contents(self.schema, upper, self._as_of(upper), nothing, nothing)
        sealed = self.sealed  # its lease comes first: it keeps what is sealed when the unsealed updates are read
        if committer is not None:
            return self._known(committer, sealed)
        state = self.unsealed.machine.fetch().state
        upper, unsealed = sealed_upper(state), self._rows(state)
        # SUBTLE: unsealed first, then sealed; and sealed as far as it was when the unsealed were read.
        sealed.wait_for_upper(upper)
        return Contents(self.schema, upper, self._as_of(upper), beyond(_table(self.schema, unsealed), upper), nothing)

    def _known(self, committer: Committer, sealed: ReadHandle) -> Contents:
        """The same with what waits for its commit, as this process knows all of it, without waiting for that commit."""
        committer.check()
        # What is noted of commits and what waits for one belong together: nothing is in both.
        with committer.applying:
            stream = committer.streams[self.name]
            accepted = [table for call in committer.waiting() for table in call.written(self.name)]
            unsealed = list(stream.read_back(TOP)) if stream.kept is None else stream.kept
            upper, snapshot = stream.upper, None
            if upper != at(0):
                # Not through `snapshot`, which would read the newest state, and wait for the commit that is under way.
                snapshot = snapshot_known(sealed, _last(upper), RowSelection(sealed.schema))
        return Contents(self.schema, upper, snapshot, _table(self.schema, unsealed), _table(self.schema, accepted))

    def _as_of(self, upper: Antichain) -> Snapshot | None:
        if upper == at(0):
            return None
        return self.sealed.snapshot(None if upper.time is None else upper.time - 1)

    def _rows(self, state: State) -> list[pa.Table]:
        if not (arrival := state.upper.time or 0):
            return []
        with self.unsealed.snapshot(arrival - 1, diff=True) as snapshot:
            found = [from_unsealed(self.schema, table) for table in snapshot.batches()]
        if not self.unsealed.read_only:
            kept_of(self.unsealed).let_go(at(arrival - 1))
        return found


def _renew(read: StreamReader) -> None:
    read._lock = threading.Lock()


def _table(schema: Schema, tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables([empty_table(schema.updates), *tables])


def persisted_source(
    read: StreamReader | ReadHandle, as_of: object, *, until: object = TOP, timeout: float | None = None
) -> Iterator[Event]:
    """The sealed contents as of a time as updates at that time, then sealed updates and progress, as `listen` has them.

    Waits until `as_of` is sealed, and then for what comes, until the frontier `until`; raises TimedOut when nothing
    comes for `timeout` seconds (None: it waits for ever). Close the iterator, or exhaust it, to end its lease. All that
    it gives up to a progress adds up to the contents at that frontier.
    """
    handle = read.sealed if isinstance(read, StreamReader) else read
    schema = handle.schema
    start = Times(schema.times, handle.machine.consensus.now).as_of(as_of)
    with (
        handle.snapshot(start, timeout=timeout, diff=True) as snapshot,
        handle.listen(start, until=until, timeout=timeout) as news,
    ):
        for table in snapshot.batches():
            yield Updates(shown_times(schema, at_time(table, start)))
        snapshot.release()
        yield Progress(at(start + 1) if start < MAX_TIME else TOP)
        yield from news
