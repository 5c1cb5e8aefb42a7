"""How a shard gets to new contents: by the difference, appended with one compare-and-append.

When another run was first, the difference is made again, against what that run stored. So the shard always has the
contents of one run, never a mixture. The old contents are read in bounded memory; the new ones are held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from itertools import chain
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from orchestration.io.tables import Given, converted
from persist_lib.client import Client
from persist_lib.core.state import Version
from persist_lib.errors import InvalidUsage, NotFound, Refused, SchemaMismatch, UpperMismatch
from persist_lib.frontier import at
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.fingerprint import fingerprint
from persist_lib.kernel.merge import merge_runs
from persist_lib.relation.next_time import next_time
from persist_lib.relation.writer import WriteHandle
from persist_lib.schema.schema import DIFF, TIME, Schema

ATTEMPTS = 32
"""How often a run makes its difference again because other runs were first."""
_MODULUS = 1 << 64

Resolve = Callable[[Schema | None], Schema]


class Stored(NamedTuple):
    """What an append did. `as_of` is the time at which the shard has these contents, `updates` how many it wrote.

    `as_of` is -1 if there is no such time yet. `skipped` updates have times that the shard already had. `fingerprint`
    is that of the contents, and `attempts` how often the difference was made. `schema` is the shard's.
    """

    as_of: int
    seqno: int
    updates: int
    skipped: int
    fingerprint: int
    schema: Schema
    attempts: int = 1

    def version(self, shard: str) -> str:
        """The data version: the same for the same contents at the same time.

        The fingerprint is there for a location that was made again, where times start again.
        """
        return f"{shard}@{self.as_of}-{self.fingerprint % _MODULUS:016x}"


def store(client: Client, shard: str, given: Given, resolve: Resolve) -> Stored:
    """Bring the shard to these contents, or append these updates. Creates the shard, and adds columns, as needed.

    `resolve` answers the schema for the shard's own one (None: there is no shard yet). Raises UpperMismatch when other
    runs were first again and again.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _writer(client, shard, resolve) as write:
                stored = _append_updates(client, write, given) if given.is_updates else _replace(client, write, given)
            return stored._replace(attempts=attempt)
        except (UpperMismatch, _Changed):
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


class _Changed(SchemaMismatch):
    """Another run changed the schema at the same moment."""


def _writer(client: Client, shard: str, resolve: Resolve) -> WriteHandle:
    """A writer in the schema that `resolve` answers. The shard is created or evolved as needed."""
    try:
        stored = client.inspect(shard).state.schemas[-1]
    except NotFound:
        stored = None
    wanted = resolve(stored)
    try:
        if stored is not None and wanted != stored:
            client.evolve_schema(shard, wanted)
        return client.open_writer(shard, wanted)
    except (SchemaMismatch, Refused) as error:
        if client.inspect(shard).state.schemas[-1] == stored:
            raise
        raise _Changed(str(error), shard=shard) from error


def _replace(client: Client, write: WriteHandle, given: Given) -> Stored:
    version = write.machine.fetch()
    upper = _open_upper(write, version)
    time = next_time(write.schema, write.machine.shard, at(upper), client.runtime, client.consensus.now)
    new = consolidate(write.schema, converted(write.schema, given, time, client.consensus.now))
    if new.num_rows and pc.min(new[DIFF]).as_py() < 0:
        raise InvalidUsage(
            f"shard {write.shard}: contents cannot have a row a negative number of times. Give updates a column {TIME}",
            shard=write.shard,
        )
    after = fingerprint(write.schema, new)
    with closing(_difference(client, write, new, upper, time)) as tables:
        first = next(tables, None)
        if first is None and upper > 0:
            return Stored(upper - 1, version.seqno, 0, 0, after, write.schema)
        appended = write.compare_and_append(chain([] if first is None else [first], tables), upper, time + 1)
    return Stored(time, appended.seqno, appended.count, 0, after, write.schema)


def _difference(client: Client, write: WriteHandle, new: pa.Table, upper: int, time: int) -> Generator[pa.Table]:
    """The updates at `time` that turn the newest contents, before `upper`, into `new`, in order, in windows."""
    if upper == 0:
        yield from ([new] if new.num_rows else [])
        return
    with client.open_reader(write.shard, write.schema) as read, read.snapshot(upper - 1, diff=True) as snapshot:
        old = (_retracted(write.schema, table, time) for table in snapshot.batches())
        yield from (table for table in merge_runs([old, iter([new])], write.schema) if table.num_rows)


def _retracted(schema: Schema, contents: pa.Table, time: int) -> pa.Table:
    times = pa.repeat(pa.scalar(time, pa.uint64()), contents.num_rows)
    diffs = pc.negate_checked(contents[DIFF])
    return pa.table([*contents.select(schema.names).columns, times, diffs], schema=schema.updates)


def _append_updates(client: Client, write: WriteHandle, given: Given) -> Stored:
    """Append updates with their own times. Times that the shard already has are skipped.

    Without updates nothing is appended, as that would declare a time complete whose updates are yet to come.
    """
    updates = consolidate(write.schema, converted(write.schema, given, None, client.consensus.now))
    upper, count = _open_upper(write, write.machine.fetch()), 0
    if updates.num_rows:
        times = pc.min_max(updates[TIME]).as_py()
        count = write.append(updates, min(times["min"], upper), times["max"] + 1).count
    after = write.machine.fetch()
    skipped = updates.num_rows - count
    return Stored(_open_upper(write, after) - 1, after.seqno, count, skipped, after.state.fingerprint, write.schema)


def _open_upper(write: WriteHandle, version: Version) -> int:
    upper = version.state.upper.time
    if upper is None:
        raise InvalidUsage(
            f"shard {write.shard} is closed for writing, so no asset can be stored in it", shard=write.shard
        )
    return upper
