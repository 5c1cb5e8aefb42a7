"""What snapshots and changes are read from: shards, each of which is held at one state."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from persist_lib.core.state import State
from persist_lib.errors import Missing
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    from persist_lib.relation.reader import Reader, ReadHandle
    from persist_lib.relation.reader_lease import K, Reading


def kept_of(reader: Reader[Any, K]) -> K:
    """What a reader keeps, which its callers do not see."""
    return reader._kept


def resuming(stream: Callable[[], Iterator[pa.Table]], look_again: Callable[[Missing], object]) -> Iterator[pa.Table]:
    """The tables of `stream`. When a blob is gone, it is made again after `look_again`, from the last row on.

    It must have the same rows in the same order each time, as in every state that a reader may use: so it is exact to
    continue. `look_again` raises what ends the stream.
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


class Named(NamedTuple):
    """A shard, collection or table by its name, for messages and the fields of errors."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"shard {self.name}" if self.kind == "shard" else f"{self.kind} {self.name!r}"

    @property
    def fields(self) -> dict[str, str]:
        return {self.kind: self.name}


class Part(ABC):
    """One of the parts that a snapshot or changes are read from. It keeps that readable until `release`."""

    schema: Schema
    """The schema that its tables have."""

    def check_open(self) -> None:  # noqa: B027 - what is in memory is open
        """Raise the error that says why it cannot be read any more, if it cannot."""

    def release(self) -> None:  # noqa: B027 - what is in memory holds nothing
        """Stop keeping what is read from. Idempotent."""


class Place(Part):
    """One shard, of which a state is held, to read what happened at `earliest` or later."""

    def __init__(self, handle: ReadHandle, earliest: int, reading: Reading | None = None) -> None:
        self.handle, self.schema = handle, handle.schema
        self._lease = kept_of(handle)
        self._earliest, self._reading = earliest, reading or self._lease.acquire(earliest)

    @property
    def state(self) -> State:
        return self._reading.version.state

    def check_open(self) -> None:
        self._lease.check_open()

    def release(self) -> None:
        self._reading.release()

    def look_again(self, missing: Missing) -> None:
        """For a read-only client, take the newest state; otherwise raise the error that a missing blob means."""
        self._reading = self._lease.look_again(self._reading, self._earliest, missing)
