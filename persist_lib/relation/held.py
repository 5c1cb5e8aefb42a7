"""What is read from shards, each of which is held at one state: the base of snapshots and of changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from persist_lib.core.cost import Cost
from persist_lib.core.state import State
from persist_lib.errors import InvalidUsage, Missing
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.conversions import Doors
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    from persist_lib.relation.base_reader import Reader
    from persist_lib.relation.reader import ReadHandle
    from persist_lib.relation.reader_lease import K, Reading


def kept_of(reader: Reader[Any, K]) -> K:
    """What a reader keeps, which its callers do not see."""
    return reader._kept


def resuming(stream: Callable[[], Iterator[pa.Table]], look_again: Callable[[Missing], object]) -> Iterator[pa.Table]:
    """The tables of `stream`. When a blob is gone, it is made again after `look_again`, from the last row on.

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


class Named(NamedTuple):
    """A shard, collection or table by its name, for messages and the fields of errors."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"shard {self.name}" if self.kind == "shard" else f"{self.kind} {self.name!r}"

    @property
    def fields(self) -> dict[str, str]:
        """The fields of errors about it."""
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
        """The state that is held."""
        return self._reading.version.state

    def check_open(self) -> None:
        self._lease.check_open()

    def release(self) -> None:
        self._reading.release()

    def resuming(self, stream: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
        """The tables of `stream`. When a blob vanishes under a read-only client, continue from the newest state.

        The rows are the same in every state that a reader may use, and come in the same order. So it is exact
        to continue after the last row.
        """
        return resuming(stream, self.look_again)

    def look_again(self, missing: Missing) -> None:
        """For a read-only client, take the newest state; otherwise raise the error that a missing blob means."""
        self._reading = self._lease.look_again(self._reading, self._earliest, missing)


P = TypeVar("P", bound=Part)


class Held(Doors, Generic[P]):
    """A table that is read from parts, for use in a `with` block. `name` is that of what it is of."""

    def __init__(self, of: Named, schema: Schema, parts: Sequence[P], spent: Spending) -> None:
        self._of, self._schema, self._parts, self._spent = of, schema, parts, spent
        self._is_released = False

    @abstractmethod
    def _named(self) -> str:
        """What it is, for the error after its release: `this snapshot of shard orders as of 7`."""

    @property
    def name(self) -> str:
        """The name of the shard, collection or table."""
        return self._of.name

    @property
    def cost(self) -> Cost:
        """The cost so far of finding it and of reading it here.

        The cost of reading splits is counted in the processes that read them.
        """
        return self._spent.cost

    @property
    def is_released(self) -> bool:
        """Whether it was released, so that it keeps nothing any more."""
        return self._is_released

    def _shard_schema(self) -> Schema:
        """The schema that it is read in."""
        return self._schema

    def _check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        for part in self._parts:
            part.check_open()
        if self._is_released:
            raise InvalidUsage(
                f"{self._named()} was released, so what it reads from may be gone; take a new one, and keep it until "
                "everything has been read",
                **self._of.fields,
            )  # fmt: skip

    def release(self) -> None:
        """Stop keeping the states that are read from. Idempotent. Dropping the object does the same."""
        self._is_released = True
        for part in self._parts:
            part.release()
