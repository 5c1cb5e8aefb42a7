"""What a reader chose, and all instances must agree on, such as a snapshot: committed first, then read back.

A choice is a sequence of bytes in a shard of the source. It is committed whole, by the first process; what others bring
is left out. Whatever an instance then uses is what it reads here. One that is certain never to be used can be followed
by another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from persist_lib.catalog.metadata_shard import finish_shard, unheld
from persist_lib.catalog.names import OF_SOURCES
from persist_lib.client import Client
from persist_lib.errors import Determinate, HoldConflict, NotFound, ShardFinished, UpperMismatch
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.sources.protocol import HOLD

SCHEMA = Schema(key={"number": "int64 not null"}, value={"bytes": "binary not null"})
"""SUBTLE: not unique, which one append is by itself: to check it, all of the append would be held in memory.

Those that an earlier release made are.
"""
PATIENCE_S = 30 * 86_400.0
"""How long the making of a choice may take. What takes its time is a copy of a table."""


class Choice(NamedTuple):
    """What was chosen, part by part. `number` is how many were chosen before it."""

    number: int
    parts: Iterator[bytes]


class Choices:
    """The choice of one source."""

    def __init__(self, client: Client, shard: str) -> None:
        self._client, self.shard = client, shard

    def create(self, fence: bytes) -> None:
        """Make room for it, and hold that. Idempotent."""
        self._client.open_writer(self.shard, self._schema, layer=OF_SOURCES).close()
        with suppress(HoldConflict):
            self._client.set_hold(self.shard, HOLD, 0, opaque=fence, expected=None)

    @cached_property
    def _schema(self) -> Schema:
        version = self._client.machine(self.shard).try_fetch()
        return version.state.schemas[-1] if version is not None and version.state.schemas else SCHEMA

    def find(self) -> Choice | None:
        """What was chosen last; None as long as nothing was. Raises ShardFinished once that is forgotten."""
        reader = unheld(self._client, self.shard, self._schema)
        upper = reader.fetch_upper().time
        if upper is None:
            raise ShardFinished(f"the choice {self.shard} was made, used and forgotten", shard=self.shard)
        return None if upper == 0 else Choice(upper - 1, self._read(upper - 1))

    def _read(self, number: int) -> Iterator[bytes]:
        reader = unheld(self._client, self.shard, self._schema)
        try:
            reader.fetch_upper()
            with reader.changes(number - 1 if number else None, number) as changes:
                for table in changes.batches():
                    for one in table.column("bytes"):
                        yield one.as_py()
        except (ShardFinished, NotFound) as error:
            raise Determinate(f"the choice {self.shard} was forgotten while it was read: others were faster") from error

    def commit(self, chosen: Iterable[bytes], number: int = 0) -> None:
        """Commit all of it at once, unless another process was first. Look at `find` for what it is then.

        With a `number`, in place of the one before, which must be certain never to be used. Raises Indeterminate when
        it is not known whether it is committed; `find` tells that too.
        """
        with (
            self._client.open_writer(self.shard, self._schema, layer=OF_SOURCES) as write,
            suppress(UpperMismatch, ShardFinished),
        ):
            rows = (_row(place, data, number) for place, data in enumerate(chosen))
            write.compare_and_append(rows, number, number + 1, timeout=PATIENCE_S)

    def forget(self) -> None:
        """Take it away, as it will not be asked for again. Idempotent."""
        finish_shard(self._client, self.shard, self._schema, HOLD)


def _row(place: int, data: bytes, time: int) -> pa.Table:
    return pa.table(
        {"number": [place], "bytes": pa.array([data], pa.binary()), TIME: pa.array([time], pa.uint64()), DIFF: [1]}
    )
