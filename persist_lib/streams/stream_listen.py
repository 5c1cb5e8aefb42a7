"""Listening to a stream ahead of its seals: sealed updates, and what is not yet, in steps that are consistent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from persist_lib.client import Client
from persist_lib.errors import PersistError
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.relation.held import kept_of
from persist_lib.relation.listen import BACK_OFF, Patience, Progress, Updates
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.follow import Follow
from persist_lib.streams.commit_plan import from_unsealed
from persist_lib.streams.stream_state import sealed_upper

if TYPE_CHECKING:
    from persist_lib.streams.commit_plan import Call
    from persist_lib.streams.committer import Committer
    from persist_lib.streams.stream_reader import StreamReader


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
