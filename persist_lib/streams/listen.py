"""Listening to a stream ahead of its seals: sealed updates, and what is not yet, in steps that are consistent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.client import Client
from persist_lib.errors import Determinate, PersistError, TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.relation.listen import Patience, Progress, Updates
from persist_lib.streams.plan import from_unsealed
from persist_lib.streams.stream import sealed_upper

if TYPE_CHECKING:
    from persist_lib.shard.commit import Machine
    from persist_lib.streams.calls import Call
    from persist_lib.streams.committer import Committer
    from persist_lib.streams.reader import StreamReader

BACK_OFF = 2


class Unsealed(NamedTuple):
    """Unsealed updates that arrived, and with a negative `_diff` those that were sealed: a table as in `Updates`."""

    table: pa.Table


class Accepted(NamedTuple):
    """Updates that wait for their commit, which may still fail; once durable they come again, as other events."""

    table: pa.Table


StreamEvent = Updates | Unsealed | Accepted | Progress


class StreamListen:
    """An iterator of `Updates`, `Unsealed` and `Progress`. To end its leases early, close it or use a `with` block.

    With the `committer` of the runtime that writes the stream, also of `Accepted`.

    SUBTLE: each step takes one version of the unsealed shard, and sealed updates only as far as the stream was sealed
    in that version. So between two `Progress` each update moves from unsealed to sealed as a whole.
    """

    def __init__(
        self, client: Client, reader: StreamReader, as_of: int, until: Antichain, timeout_s: float | None,
        committer: Committer | None = None,
    ) -> None:  # fmt: skip
        self._client, self._until, self._timeout_s, self._committer = client, until, timeout_s, committer
        self._shown: set[Call] = set()  # the calls that wait for their commit, and were given as accepted
        self._reader = reader.clone()
        self._sealed, self._unsealed = self._reader.sealed, self._reader.unsealed
        self._as_of: int = as_of
        self._arrived: int | None = None  # the last place in the order of arrival whose updates were given
        self.frontier = at(as_of + 1) if as_of < MAX_TIME else TOP
        self._step: Iterator[None] | None = None  # the step that is under way
        self._due: StreamEvent | None = None
        self._is_midway = False  # whether a part of a step was given
        self._is_over = False
        self._failure: PersistError | None = None

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        while self._due is None:
            self._advance()
        is_midway = self._is_midway if isinstance(self._due, Accepted) else not isinstance(self._due, Progress)
        event, self._due, self._is_midway = self._due, None, is_midway
        return event  # SUBTLE: no call since it was taken, as in `read.listen`

    def close(self) -> None:
        """End the listener's leases. Idempotent."""
        self._step = None
        self._reader.close()

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> None:
        """Go on until something is due. Raises StopIteration at the end.

        SUBTLE: a failure or an interrupt may come at any call. A step notes how far it is only when all of it was
        given, so one of which nothing was given begins again; after a part of it, this listener cannot go on.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_over:
            self.close()
            raise StopIteration
        if self._step is None:
            if self._is_midway:
                self._failure = self._cut_short()
                raise self._failure
            self._step = self._wait()
        try:
            is_left = next(self._step, True) is None
        except BaseException:
            self._step = None
            raise
        if not is_left:
            self._step = None

    def _next_step(self) -> Iterator[None]:
        """Make due, one after the other, what came since the last step, and the progress that covers it."""
        state = self._unsealed.machine.state
        upper, arrival = sealed_upper(state).meet(self._until), (state.upper.time or 0) - 1
        unsealed: Iterator[StreamEvent] = self._unsealed_to(arrival)
        for event in chain(unsealed, self._sealed_to(upper)):
            self._due = event
            yield
        frontier = self.frontier.join(upper)
        as_of = self._as_of if upper <= self.frontier else _last(upper)
        is_over = self._until <= frontier
        self._due, self.frontier, self._arrived, self._as_of, self._is_over = (
            Progress(frontier), frontier, arrival, as_of, is_over,
        )  # fmt: skip
        yield
        for handle, reached in ((self._unsealed, arrival), (self._sealed, as_of)):
            if not handle.read_only:
                handle.let_go(at(reached))

    def _wait(self) -> Iterator[None]:
        """Wait until something came, and return the step that gives it."""
        machine, config = self._unsealed.machine, self._client.config
        deadline = self._client.runtime.deadline(float("inf") if self._timeout_s is None else self._timeout_s)
        patience = Patience(machine, deadline, config.poll_s, BACK_OFF * config.poll_s)
        while not self._has_come(machine, patience):
            if accepted := self._accepted():
                return self._preview(accepted)
            if error := self._unsealed.expired(machine.state):
                raise error
            if deadline.has_passed() if self._committer else patience.is_over:
                raise TimedOut(
                    f"stream {self._reader.name!r}: nothing came after {self._reader.schema.show(self.frontier)} for "
                    f"{deadline.timeout_s:g} s. Nothing is lost: iterate on, or listen again from there",
                    timeout_s=deadline.timeout_s, frontier=self.frontier,
                )  # fmt: skip
            if self._committer is None:
                patience.pause(machine.version.seqno)
            else:  # no store tells what is in this process
                deadline.pause(config.poll_s)
        return self._next_step()

    def _has_come(self, machine: Machine, patience: Patience) -> bool:
        """Whether the unsealed shard has come further than what was given.

        SUBTLE: the process that writes it does not ask the location, which would wait for the commit that is under way.
        """
        given = at(0 if self._arrived is None else self._arrived + 1)
        if self._committer is None:
            return given < patience.look().state.upper
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
                self._due = Accepted(table)
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
        with self._sealed.changes(self._as_of, _last(upper)) as changed:
            yield from (Updates(table) for table in changed.batches() if table.num_rows)

    def _cut_short(self) -> Determinate:
        show = self._reader.schema.show
        return Determinate(
            f"stream {self._reader.name!r}: listening was interrupted after a part of a step was delivered. Drop what "
            f"came after the progress to {show(self.frontier)}, and listen again from there",
            frontier=self.frontier, stream=self._reader.name,
        )  # fmt: skip


def _last(upper: Antichain) -> int:
    """The last time before a frontier."""
    return MAX_TIME if upper.time is None else upper.time - 1


__all__ = ["Accepted", "StreamEvent", "StreamListen", "Unsealed"]
