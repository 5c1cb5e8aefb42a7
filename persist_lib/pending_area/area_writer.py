"""The writer of a pending area: it puts batches below its own name, and does nothing else.

It opens no database, registers nowhere, holds no lease and reads nothing. Credentials that allow PUT below
`<location>/blob/-pending/<collection>/<writer>/` are all that it needs.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from persist_lib.arguments import check_type, not_pickled, parse_seconds, shown
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.errors import Indeterminate, InvalidName, InvalidUsage
from persist_lib.format.paths import blob_key
from persist_lib.frontier import Antichain
from persist_lib.ids import NAME, ShardId, parse_shard_id
from persist_lib.location.open import Place, open_puts
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.retrying import retry
from persist_lib.pending_area.objects import encode
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.resource import Resource
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.times import Times

MOST_BYTES = 1 << 30
"""The most that the updates of one batch may take in memory: an absorber has all of it there."""
TIMEOUT_S = 60.0


class Put(msgspec.Struct, frozen=True):
    """A batch that is durable: its key below the shard's pending area, its updates after consolidation, its bytes."""

    key: str
    count: int
    size: int


class Writer(Resource):
    """Puts the batches of one writer of a collection. Safe to use from several threads, and as a context manager.

        with pending_area.Writer("s3://bucket/prefix", "readings", "edge-7", SCHEMA) as write:
            write.put([{"sensor": 1, "celsius": 20.5, "_time": 0}], 0, 60)

    `url` is where the location's blobs are; `collection` the name of its shard; `writer` the name of this writer, 1 to
    100 letters, digits, `_`, `-` or `.`. Names have to be unique: that is the user's affair. All writers of a
    collection write the same updates, each for as many of the times as it has seen. `schema` is the collection's.
    Nothing of this is looked up: a wrong name or schema is found when it is absorbed.
    """

    def __init__(
        self, url: Place, collection: str, writer: str, schema: Schema, *, runtime: Runtime | None = None
    ) -> None:  # fmt: skip
        self.collection: ShardId = parse_shard_id(collection)
        self.writer = parse_writer(writer)
        self.schema = check_no_constraints(check_schema(schema))
        self._runtime = Runtime() if runtime is None else check_type(runtime, Runtime, "runtime", "persist.Runtime()")
        self._puts = open_puts(url, runtime=self._runtime)
        self._closed = False

    def put(self, updates: object, lower: object, upper: object, *, timeout: float | None = None) -> Put:
        """Make all updates of the collection with times in `[lower, upper)` durable, as one object by one PUT.

        `updates` is what `WriteHandle.compare_and_append` takes: an Arrow table, a frame, rows. There may be none: then
        the batch says that nothing happened in these times. The same updates and times give the same object, so that a
        call may be repeated at any time, by any process. Failed requests are retried for `timeout` seconds (60).

        Raises InvalidUsage for updates outside of the times, an upper of TOP, and more than 1 GiB; Determinate when
        nothing was stored; and Indeterminate when the batch may have been stored: repeat the call.
        """
        times = Times(self.schema.times, self._runtime.clock_ms)
        low, up = times.frontier(lower, "lower"), times.frontier(upper, "upper")
        if low.time is None or up.time is None or not low < up:
            raise InvalidUsage(
                f"a pending batch covers times from its lower to below its upper, and both are times: got "
                f"[{times.show(low.time)}, {times.show(up.time)}). To close the collection, finish its shard",
                lower=lower, upper=upper,
            )  # fmt: skip
        deadline = self._runtime.deadline(TIMEOUT_S if timeout is None else parse_seconds(timeout))
        if self._closed:
            raise InvalidUsage(f"this writer of {self.collection} was closed. Nothing was stored; open a new one")
        name, data = encode(self.schema, self._table(updates, low, up, times), self.writer, low.time, up)
        key = blob_key(self.collection, name.key)
        try:
            within(deadline, lambda: retry(lambda: self._puts.set(key, data), is_idempotent=True, deadline=deadline))
        except Indeterminate as error:
            raise Indeterminate(
                f"pending area of {self.collection}: it is not known whether {name.key} was stored ({error}). Repeat "
                "the call: the same updates and times are stored once",
                key=key,
            ) from error
        return Put(name.key, name.count, len(data))

    def _table(self, updates: object, lower: Antichain, upper: Antichain, times: Times) -> pa.Table:
        only = lower.time if lower.time is not None and upper.time == lower.time + 1 else None
        held, size = [empty_table(self.schema.updates)], 0
        for table in iter_updates(self.schema, updates, time=only, times=times, whole=False):
            check_times(table, lower, upper, times)
            held.append(table)
            size += table.nbytes
            if size > MOST_BYTES:
                raise InvalidUsage(
                    f"a pending batch may take {MOST_BYTES:,} bytes in memory, and these updates take more. Nothing "
                    "was stored; put fewer times at once",
                    problem="size",
                )
        return pa.concat_tables(held)

    def close(self) -> None:
        """Close connections. Idempotent. What was put stays."""
        self._closed = True
        self._puts.close()

    __reduce__ = not_pickled("A writer", "Open one in the other process")

    def __repr__(self) -> str:
        return f"Writer({self.collection!r}, {self.writer!r})"


def parse_writer(name: object) -> str:
    """Check that `name` can be a writer's of a pending area: the same rule as for shards."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidName(
            f"a writer's name must be 1 to 100 letters, digits, '_', '-' or '.', starting with none of '-.': got "
            f"{shown(name)}",
            name=name,
        )
    return str(name)


def check_no_constraints(schema: Schema) -> Schema:
    """Raise InvalidUsage for a schema with constraints: a writer that reads nothing cannot check them."""
    if schema.constraints:
        raise InvalidUsage(
            f"the schema {schema} has constraints, which writers that read nothing cannot check. Use one without them "
            "for a pending area",
            schema=schema,
        )
    return schema
