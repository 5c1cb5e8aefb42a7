"""The objects of the pending area: the writer that puts them, and what is made of them by those who did not write them.

A batch is one part as shards have them, so that it can be adopted as it is. A batch without updates is an object
without bytes. The name has the digest of the bytes, which is checked before any value is used. All that a state would
say of a part is computed from the rows: nothing that a foreign object says of itself is believed.

A writer puts batches below its own name, and does nothing else: it opens no database, registers nowhere, holds no lease
and reads nothing. Credentials that allow PUT below `<location>/blob/-pending/<collection>/<writer>/` are all it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from persist_lib.arguments import check_type, not_pickled, parse_seconds
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.core.pending import PendingName
from persist_lib.core.state import Part
from persist_lib.errors import Corrupt, Damage, Indeterminate, InvalidUsage
from persist_lib.format.descriptions import Description, describe
from persist_lib.format.digest import CHUNK, WIDTH, digest
from persist_lib.format.parquet import PartFile, inner_keys, starts_of
from persist_lib.format.parts import encode_part
from persist_lib.format.paths import blob_key
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId, parse_name, parse_shard_id
from persist_lib.kernel.columns import integers
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.fingerprint import diffs_of, hash_rows
from persist_lib.kernel.keys import bounds
from persist_lib.kernel.order import is_sorted
from persist_lib.location.open import Place, open_puts
from persist_lib.location.wrap.deadline import retry, within
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import Resource
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME, Schema, check_schema
from persist_lib.times import Times

ADOPT_BYTES = 1 << 20
"""From this size on an object is adopted where it can be. Smaller ones would be many objects for every reader."""


class Batch(msgspec.Struct, frozen=True):
    """A pending batch whose bytes are what its name says.

    `table` has its updates as the shard's newest schema has them. `part` is how a state refers to the object if it is
    adopted; None where it cannot be, as another program or schema encoded it, or as it has no updates.
    """

    name: PendingName
    size: int
    table: pa.Table
    part: Part | None


def name_digest(data: bytes | memoryview) -> str:
    """The digest that is in the name of an object with these bytes: that of its chunks' digests, if it has several."""
    chunks = digest(data)
    return (chunks if len(chunks) == WIDTH else xxhash.xxh3_128_digest(chunks)).hex()


def encode(
    schema: Schema, table: pa.Table, writer: str, lower: int, upper: Antichain
) -> tuple[PendingName, bytes | memoryview]:
    """The name and the bytes of a batch. The same updates give the same bytes, in whatever order they come.

    Raises DiffOverflow if a sum of diffs does not fit in 64 bits.
    """
    table = consolidate(schema, table)
    data = encode_part(schema, 0, table).data if table.num_rows else b""
    return PendingName(writer, lower, upper, table.num_rows, name_digest(data)), data


def decode(name: PendingName, data: bytes, schemas: Sequence[Schema], *, adopt_from: int | None = None) -> Batch:
    """What a pending batch holds, as the newest of `schemas` has it.

    Objects of `adopt_from` bytes (ADOPT_BYTES) or more can be adopted; what that takes is not found out of others.
    Raises Corrupt if the bytes are not what the name says, or are no updates of that shard within those times.
    """
    if name_digest(data) != name.digest:
        raise _corrupt(name, f"its {len(data)} bytes do not have the digest in its name")
    if not data and not name.count:
        return Batch(name, 0, empty_table(schemas[-1].updates), None)
    newest = schemas[-1]
    try:
        file = PartFile(name.key, pa.BufferReader(data), newest)
        index = _schema_of(name, file.ids, schemas)
        table = file.read(use_threads=len(data) > CHUNK)  # of small objects several are read at once
        table.validate(full=True)  # a text that is no UTF-8 could be absorbed, and never be read again
    except Damage:
        raise
    except Exception as error:  # whatever a foreign object does to a decoder
        raise _corrupt(name, f"it does not decode as a part: {type(error).__name__}: {error}") from error
    _check(name, table, newest)
    is_large = len(data) >= (ADOPT_BYTES if adopt_from is None else adopt_from)
    part = _part(name, data, table, newest, index, file) if is_large and index == len(schemas) - 1 else None
    return Batch(name, len(data), table, part)


def _schema_of(name: PendingName, ids: Sequence[str], schemas: Sequence[Schema]) -> int:
    """The newest of the schemas that has exactly these columns."""
    for index in reversed(range(len(schemas))):
        if [column.id for column in schemas[index].columns] == list(ids):
            return index
    raise _corrupt(name, f"it has the columns {list(ids)}, and the shard has {schemas[-1].names}")


def _check(name: PendingName, table: pa.Table, schema: Schema) -> None:
    """Raise Corrupt unless these are as many updates as the name says, within its times, such as the schema allows."""
    if table.num_rows != name.count or not table.num_rows:
        raise _corrupt(name, f"it holds {table.num_rows} updates")
    times = integers(table.column(TIME))
    if int(times.min()) < name.lower or not name.upper.has_passed(int(times.max())):
        raise _corrupt(name, f"it holds times from {times.min()} to {times.max()}")
    whole = [field.name for field in schema.updates if not field.nullable]
    if nulls := [name for name in whole if table.column(name).null_count]:
        raise _corrupt(name, f"it has nulls in {nulls}, which the shard does not allow")
    if not integers(table.column(DIFF)).all():
        raise _corrupt(name, "it has updates whose diff is 0")


def _part(
    name: PendingName, data: bytes, table: pa.Table, schema: Schema, index: int, file: PartFile
) -> Part | None:  # fmt: skip
    """How a state refers to the object; None unless it is in all respects what this library would have written."""
    if not is_sorted(schema, table) or consolidate(schema, table, "split").num_rows != table.num_rows:
        return None
    if not _notes_are_true(table, schema, file):
        return None
    said: Description = describe(schema, table)
    return Part(
        name.key, len(data), table.num_rows, digest(data), said.key_lower, said.key_upper, said.time_lower,
        said.time_upper, index, None, said.earliest,
    )  # fmt: skip


def _notes_are_true(table: pa.Table, schema: Schema, file: PartFile) -> bool:
    """Whether the keys that the object notes of its row groups are those of its rows: ranges of keys are read by them.

    A writer whose schema has the same columns with another key notes others.
    """
    groups, place = [], 0
    for rows in file.group_rows:
        groups.append(table.slice(place, rows))
        place += rows
    keys = [inner_keys(schema, group) for group in groups]
    starts = [starts_of(schema, group, inner) for group, inner in zip(groups, keys, strict=True)]
    noted = file.inner_keys() or [[] for _ in groups]
    return file.bounds == [bounds(schema, group) for group in groups] and noted == keys and file.starts() == starts


def _corrupt(name: PendingName, why: str) -> Corrupt:
    return Corrupt(
        f"the pending batch {name.key} is not what its name says: {why}. It was skipped; nothing was changed",
        key=name.key,
    )


U64 = npt.NDArray[np.uint64]


class TimeSums(NamedTuple):
    """For each time that has updates, ascending: their diff sum and their fingerprint, modulo 2**64."""

    times: U64
    diffs: U64
    prints: U64

    def between(self, lower: int, upper: int) -> TimeSums:
        """Those of the times in `[lower, upper)`."""
        first, last = np.searchsorted(self.times, np.array([lower, upper], np.uint64))
        return TimeSums(*(column[first:last] for column in self))

    def first_difference(self, other: TimeSums) -> int | None:
        """The earliest time at which both are not the same; None if there is none."""
        both = added([self, TimeSums(other.times, np.negative(other.diffs), np.negative(other.prints))])
        return int(both.times[0]) if len(both.times) else None


NONE = TimeSums(*(np.empty(0, np.uint64) for _ in range(3)))


def sums_of(schema: Schema, tables: Iterable[pa.Table]) -> TimeSums:
    """The sums by time over the updates of these tables."""
    total = NONE
    for table in tables:
        if table.num_rows:
            diffs = diffs_of(table)
            prints = hash_rows(schema, table) * diffs
            times = table.column(TIME).to_numpy().astype(np.uint64, copy=False)
            total = added([total, TimeSums(times, diffs, prints)])
    return total


def added(sums: Iterable[TimeSums]) -> TimeSums:
    """All of them together; times at which they cancel out are left out."""
    columns = [np.concatenate(column) for column in zip(*sums, strict=True)]
    times, order = np.unique(columns[0], return_inverse=True)
    totals = []
    for values in columns[1:]:
        total = np.zeros(len(times), np.uint64)
        np.add.at(total, order, values)
        totals.append(total)
    kept = (totals[0] != 0) | (totals[1] != 0)
    return TimeSums(times[kept], totals[0][kept], totals[1][kept])


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
    return parse_name(name, "writer")


def check_no_constraints(schema: Schema) -> Schema:
    """Raise InvalidUsage for a schema with constraints: a writer that reads nothing cannot check them."""
    if schema.constraints:
        raise InvalidUsage(
            f"the schema {schema} has constraints, which writers that read nothing cannot check. Use one without them "
            "for a pending area",
            schema=schema,
        )
    return schema
