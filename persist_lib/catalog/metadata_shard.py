"""Small shards that hold metadata: read whole from the newest state, and changed by compare-and-append.

They are read without a lease, as only their newest contents (or what a hold keeps) are asked for. What one request
takes, a thousand should not take one after the other: `at_once`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from persist_lib.catalog.records import OF_SOURCES
from persist_lib.client import Client
from persist_lib.core.state import State
from persist_lib.errors import HoldConflict, ShardFinished, StillRead, UpperMismatch
from persist_lib.frontier import at
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.registration import next_time
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.schema import TIME, Schema
from persist_lib.shard.admin import claim
from persist_lib.shard.committer import until_decided

Row = dict[str, Any]


class Bodies:
    """A shard with a text `body` for each key of one column, read whole: one process's view of it."""

    def __init__(self, client: Client, shard: str, schema: Schema, what: str) -> None:
        self._client, self.shard, self._schema, self._what = client, shard, schema, what
        self._reader: ReadHandle | None = None

    def fetch(self) -> dict[Any, str]:
        """The bodies by key, read from the location; none where there is no shard yet."""
        return self._fetch()[0]

    def change(self, to: Callable[[dict[Any, str]], list[Row]], deadline: Deadline) -> None:
        """Append the rows that `to` makes of what is there, in one append at the next time; again after a lost race.

        The rows say `_diff`, and no time. No rows are no append. Raises TimedOut when others were always first.
        """
        with self._client.open_writer(self.shard, self._schema, layer=OF_SOURCES) as write:
            claim(write.machine, OF_SOURCES)
            while True:
                bodies, upper = self._fetch()
                if not (rows := to(bodies)):
                    return
                time = next_time(
                    self._schema, f"shard {write.shard}", at(upper), self._client.runtime, self._client.consensus.now
                )
                try:
                    append_once(write, [{**row, TIME: time} for row in rows], upper, time + 1, deadline)
                except UpperMismatch:
                    if deadline.has_passed():
                        raise deadline.gave_up(self._what, "as others were first") from None
                else:
                    return

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _fetch(self) -> tuple[dict[Any, str], int]:
        if self._reader is None:
            if self._client.machine(self.shard).try_fetch() is None:
                return {}, 0
            self._reader = unheld(self._client, self.shard, self._schema)
        upper = self._reader.fetch_upper().time or 0
        if upper == 0:
            return {}, 0
        (key,) = self._schema.key_names
        with self._reader.snapshot(upper - 1) as snapshot:
            return {row[key]: row["body"] for row in snapshot.to_pylist()}, upper


def finish_shard(client: Client, name: str, schema: Schema, hold: str = "") -> None:
    """Close a shard for good, release a hold on it, and let it go, as far as nobody reads it. Idempotent."""
    if client.machine(name).try_fetch() is None:
        return
    with suppress(ShardFinished, StillRead):
        with client.open_writer(name, schema, layer=OF_SOURCES) as write:
            write.finish()
        if hold:
            with suppress(HoldConflict):
                client.release_hold(name, hold)
        client.finish(name)


def unheld(client: Client, name: str, schema: Schema) -> ReadHandle:
    """A reader that holds nothing, so that opening it changes nothing. Raises NotFound, and SchemaMismatch."""
    machine = client.machine(name)
    if schema not in machine.fetch().state.schemas:
        client.open_reader(name, schema).close()  # raises SchemaMismatch
    return ReadHandle(machine, client.leases, schema, (client.url, client.consensus_url), read_only=True)


def append_once(write: WriteHandle, rows: list[dict[str, object]], lower: int, upper: int, deadline: Deadline) -> None:
    """Append at an exact upper, and settle an unknown outcome by repeating it, until the deadline.

    Raises UpperMismatch when that is certainly not committed, and Indeterminate when the deadline came first.
    """
    token = write.machine.runtime.token()
    until_decided(
        lambda _: write.compare_and_append(rows, lower, upper, timeout=deadline.left_s(), token=token), deadline
    )


THREADS = 16
FEW = 2
"""So many are done one after the other: to begin threads takes longer than a request to a database nearby."""
T = TypeVar("T")
Answer = TypeVar("Answer")


def at_once(runtime: Runtime, call: Callable[[T], Answer], things: Sequence[T]) -> list[Answer]:
    """Call `call` with each of `things`, in threads where they are many. Raises the first error, once all have ended.

    The calls after the first that fails are made or not.
    """
    if len(things) <= FEW:
        return [call(thing) for thing in things]
    with runtime.pool(min(THREADS, len(things)), "persist-shards") as pool:
        return list(pool.map(call, things))


def states_of(client: Client, names: Sequence[str]) -> list[State]:
    """The newest state of each shard, read from the location."""
    return at_once(client.runtime, lambda name: client.machine(name).fetch().state, names)
