"""What snapshots and changes have in common: they hold the state that they read from until they are released.

Nothing that the state refers to is collected while it is held. A read-only client cannot hold a state: when a blob is
gone, it takes the newest state and goes on from there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from persist_lib.core.cost import Cost
from persist_lib.errors import InvalidUsage, Missing
from persist_lib.location.wrap.spending import Spending
from persist_lib.read.doors import Doors
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    from persist_lib.read.handle import ReadHandle, Reading


def resuming(stream: Callable[[], Iterator[pa.Table]], look_again: Callable[[Missing], object]) -> Iterator[pa.Table]:
    """The tables of `stream`. When a blob is gone, it is made again after `look_again`, and goes on after the last row.

    It must have the same rows in the same order each time. `look_again` raises what ends the stream.
    """
    done = 0
    while True:
        try:
            skip = done
            for table in stream():
                dropped = min(skip, table.num_rows)
                skip -= dropped
                fresh = table.slice(dropped)
                done += fresh.num_rows
                if fresh.num_rows:
                    yield fresh
        except Missing as missing:
            look_again(missing)
        else:
            return


class Held(Doors):
    """A table that is read from one state of a shard, for use in a `with` block."""

    def __init__(self, handle: ReadHandle, reading: Reading, spent: Spending) -> None:
        self._handle, self._reading, self._spent = handle, reading, spent
        self._is_released = False

    @abstractmethod
    def _named(self) -> str:
        """What it is, for the error after its release: `this snapshot of orders as of 7`."""

    @abstractmethod
    def _earliest(self) -> int:
        """The earliest time that it is about: since must not pass it."""

    @property
    def cost(self) -> Cost:
        """The cost so far of finding it and of reading it here.

        The cost of reading splits is counted in the processes that read them.
        """
        return self._spent.cost

    def shard_schema(self) -> Schema:
        """The schema that it is read in."""
        return self._handle.schema

    def check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        self._handle.check_open()
        if self._is_released:
            raise InvalidUsage(
                f"{self._named()} was released, so what it reads from may be gone; take a new one, and keep it until "
                "everything has been read",
                shard=self._handle.shard,
            )

    def release(self) -> None:
        """Stop keeping the state that is read from. Idempotent. Dropping the object does the same."""
        self._is_released = True
        self._reading.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _resuming(self, stream: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
        """The tables of `stream`. When a blob vanishes under a read-only client, go on from the newest state.

        SUBTLE: the rows are the same in every state that a reader may use, and come in the same order. So it is exact
        to go on after the last row.
        """
        return resuming(stream, self._look_again)

    def _look_again(self, missing: Missing) -> None:
        """For a read-only client, take the newest state; otherwise raise the error that a missing blob means."""
        self._reading = self._handle.look_again(self._reading, self._earliest(), missing)
