"""How a table gets to new contents: by the difference, appended in one commit.

When another run was first, the difference is made again, against what that run stored. So the table always has the
contents of one run, never a mixture. A shard's old contents are read in bounded memory, those of a collection or a
timeline are held in memory, as the new ones are. What is not there is made on a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
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
from persist_lib.relation.registration import format_token, next_time
from persist_lib.relation.statements import Restore
from persist_lib.relation.writer import WriteHandle
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.table.carrier import Carrier
from persist_lib.table.opening import find_record, open_carrier

ATTEMPTS = 32
"""How often a run makes its difference again because other runs were first."""
_MODULUS = 1 << 64

Resolve = Callable[[Schema | None], Schema]


class Stored(NamedTuple):
    """What an append did. `as_of` is the time at which the shard has these contents, `updates` how many it wrote.

    `as_of` is -1 if there is no such time yet. `skipped` updates have times that the shard already had. `fingerprint`
    is that of the contents, and `attempts` how often the difference was made. `schema` is the table's. `seqno` is that
    of a shard; None where the catalog has the table.
    """

    as_of: int
    seqno: int | None
    updates: int
    skipped: int
    fingerprint: int
    schema: Schema
    attempts: int = 1

    def version(self, table: str) -> str:
        """The data version: the same for the same contents, at the same time if times are plain integers.

        The fingerprint is there for a location that was made again, where times start again. By a clock, the newest
        complete time moves on without a change.
        """
        at_ = f"{self.as_of}-" if self.schema.times is None else ""
        return f"{table}@{at_}{self.fingerprint % _MODULUS:016x}"


def store(client: Client, table: str, given: Given, resolve: Resolve) -> Stored:
    """Bring the table to these contents, or append these updates. Creates it, and adds columns, as needed.

    `resolve` answers the schema for the table's own one (None: there is no table yet). Raises UpperMismatch when other
    runs were first again and again.
    """
    try:
        shard = table if find_record(client, table) is None else None
    except NotFound:
        shard = table
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if shard is None:
                return _store_listed(client, table, given, resolve)._replace(attempts=attempt)
            with _writer(client, shard, resolve) as write:
                stored = _append_updates(client, write, given) if given.is_updates else _replace(client, write, given)
            return stored._replace(attempts=attempt)
        except (UpperMismatch, _Changed):
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


class _Changed(SchemaMismatch):
    """Another run changed the schema at the same moment."""


def _store_listed(client: Client, name: str, given: Given, resolve: Resolve) -> Stored:
    """The same of a table that the catalog has, by the statements and the writer of what carries it."""
    with client.controller().tables() as tables:
        carrier = open_carrier(client, name, None, lambda: tables)
        schema = resolve(carrier.schema)
        if schema != carrier.schema:
            carrier.evolve(schema, dry_run=False)
            carrier.close()  # what it has open is of the older columns
            carrier.schema = schema
        time = None if given.is_updates else 0
        updates = consolidate(schema, converted(schema, given, time, client.consensus.now))
        if given.is_updates:
            count, done = _append_listed(carrier, updates), None
        else:
            rows = updates.drop_columns([TIME])
            _check_contents(name, rows)
            done = carrier.execute(partial(Restore, name, rows=rows), token=None, timeout=None)
            count, after = done.count, fingerprint(schema, rows)
        found = carrier.describe()
        carrier.close()
    if done is None:
        after = sum(client.inspect(shard).state.fingerprint for shard in found.shards)
    as_of = (found.upper.time or 0) - 1 if done is None or done.time is None else done.time
    return Stored(as_of, None, count, updates.num_rows - count if given.is_updates else 0, after, schema)


def _append_listed(carrier: Carrier, updates: pa.Table) -> int:
    """Append updates with times of their own, but for those at times that the table already has. How many those are."""
    with carrier.writer() as write:
        upper = write.fetch_upper().time or 0
        fresh = updates.filter(pc.greater_equal(updates[TIME], pa.scalar(upper, pa.uint64())))
        if fresh.num_rows:
            write.compare_and_append(fresh, upper, pc.max(fresh[TIME]).as_py() + 1)
    return fresh.num_rows


def _writer(client: Client, shard: str, resolve: Resolve) -> WriteHandle:
    """A writer in the schema that `resolve` answers. The shard is created or evolved as needed."""
    try:
        stored = client.inspect(shard).state.schemas[-1].shown
    except NotFound:
        stored = None
    wanted = resolve(stored)
    try:
        if stored is not None and wanted != stored:
            client.evolve_schema(shard, wanted)
        return client.open_writer(shard, wanted)
    except (SchemaMismatch, Refused) as error:
        if client.inspect(shard).state.schemas[-1].shown == stored:
            raise
        raise _Changed(str(error), shard=shard) from error


def _replace(client: Client, write: WriteHandle, given: Given) -> Stored:
    version = write.machine.fetch()
    upper = _open_upper(write, version)
    time = next_time(write.schema, write.machine.shard, at(upper), client.runtime, client.consensus.now)
    new = consolidate(write.schema, converted(write.schema, given, time, client.consensus.now))
    _check_contents(write.shard, new)
    after = fingerprint(write.schema, new)
    with closing(_difference(client, write, new, upper, time)) as tables:
        first = next(tables, None)
        if first is None and upper > 0:
            return Stored(upper - 1, version.seqno, 0, 0, after, write.schema)
        token = format_token(client.runtime, at(upper), at(time + 1))  # says that the time was chosen here
        rows = chain([] if first is None else [first], tables)
        appended = write.compare_and_append(rows, upper, time + 1, token=token)
    return Stored(time, appended.seqno, appended.count, 0, after, write.schema)


def _check_contents(table: str, rows: pa.Table) -> None:
    if rows.num_rows and pc.min(rows[DIFF]).as_py() < 0:
        raise InvalidUsage(
            f"table {table}: contents cannot have a row a negative number of times. Give updates a column {TIME}",
            table=table,
        )


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
