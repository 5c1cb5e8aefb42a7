"""Listening to a stream ahead of its seals: sealed updates, and what is not yet, in steps that are consistent."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.client import Client
from persist_lib.errors import TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.read.listen import Progress, Updates
from persist_lib.read.waiting import Patience
from persist_lib.streams.plan import from_unsealed
from persist_lib.streams.stream import sealed_upper

if TYPE_CHECKING:
    from persist_lib.streams.reader import StreamReader

BACK_OFF = 2


class Unsealed(NamedTuple):
    """Unsealed updates that arrived, and with a negative `_diff` those that were sealed: a table as in `Updates`."""

    table: pa.Table


StreamEvent = Updates | Unsealed | Progress


class StreamListen:
    """An iterator of `Updates`, `Unsealed` and `Progress`. To end its leases early, close it or use a `with` block.

    SUBTLE: each step takes one version of the unsealed shard, and sealed updates only as far as the stream was sealed
    in that version. So between two `Progress` each update moves from unsealed to sealed as a whole.
    """

    def __init__(
        self, client: Client, reader: StreamReader, as_of: int, until: Antichain, timeout_s: float | None
    ) -> None:
        self._client, self._until, self._timeout_s = client, until, timeout_s
        self._reader = reader.clone()
        self._sealed, self._unsealed = self._reader.sealed, self._reader.unsealed
        self._as_of: int = as_of
        self._arrived: int | None = None  # the last place in the order of arrival whose updates were given
        self.frontier = at(as_of + 1) if as_of < MAX_TIME else TOP
        self._steps = self._listen()

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        return next(self._steps)

    def close(self) -> None:
        """End the listener's leases. Idempotent."""
        self._steps.close()
        self._reader.close()

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> Generator[StreamEvent, None, None]:
        while True:
            self._wait()
            state = self._unsealed.machine.state
            upper, arrival = sealed_upper(state).meet(self._until), (state.upper.time or 0) - 1
            yield from self._unsealed_to(arrival)
            yield from self._sealed_to(upper)
            self.frontier = self.frontier.join(upper)
            yield Progress(self.frontier)
            if self._until <= self.frontier:
                self._reader.close()
                return

    def _wait(self) -> None:
        machine, config = self._unsealed.machine, self._client.config
        deadline = self._client.runtime.deadline(float("inf") if self._timeout_s is None else self._timeout_s)
        patience = Patience(machine, deadline, config.poll_s, BACK_OFF * config.poll_s)
        while (version := machine.fetch()).state.upper <= at((self._arrived or 0) + (self._arrived is not None)):
            if error := self._unsealed.expired(version.state):
                raise error
            if deadline.has_passed():
                raise TimedOut(
                    f"stream {self._reader.name!r}: nothing came after {self._reader.schema.show(self.frontier)} for "
                    f"{deadline.timeout_s:g} s. Nothing is lost: iterate on, or listen again from there",
                    timeout_s=deadline.timeout_s, frontier=self.frontier,
                )  # fmt: skip
            patience.pause(version.seqno)

    def _unsealed_to(self, arrival: int) -> Iterator[Unsealed]:
        schema = self._reader.schema
        if self._arrived is None:
            with self._unsealed.snapshot(arrival) as found:
                tables = [from_unsealed(schema, table) for table in found.batches()]
        else:
            with self._unsealed.changes(self._arrived, arrival) as changed:
                tables = [from_unsealed(schema, table) for table in changed.batches()]
        self._arrived = arrival
        if not self._unsealed.read_only:
            self._unsealed.let_go(at(arrival))
        yield from (Unsealed(table) for table in tables if table.num_rows)

    def _sealed_to(self, upper: Antichain) -> Iterator[Updates]:
        if upper <= self.frontier:
            return
        self._sealed.wait_for_upper(upper)
        last = MAX_TIME if upper.time is None else upper.time - 1
        with self._sealed.changes(self._as_of, last) as changed:
            yield from (Updates(table) for table in changed.batches() if table.num_rows)
        self._as_of = last
        if not self._sealed.read_only:
            self._sealed.let_go(at(last))


__all__ = ["StreamEvent", "StreamListen", "Unsealed"]
