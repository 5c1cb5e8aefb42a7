"""The commits of one group: bad lines, then the journal, then the data; each shard takes it once, by its producer.

There is no transaction over the three shards: S3 alone has none, and one way on all locations is proved once. Instead
each of the three appends is idempotent, what they append is the same whoever makes them and however often (see
`plan`), and the data comes last and decides: while it is not there, the next attempt makes all three again, of which
those that were there already are refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.ingesting.journal import BAD, JOURNAL, Run, Tally, group_row
from jobs.ingesting.plan import Group
from jobs.ingesting.work import Done
from persist_lib.client import Client
from persist_lib.convert.lines.debezium import DELETES, last_of_each_key
from persist_lib.core.state import Version
from persist_lib.errors import AlreadyProduced, TimedOut, UpperMismatch
from persist_lib.frontier import at
from persist_lib.kernel.columns import at_time, unpacked
from persist_lib.kernel.keyset import Keys, replacing
from persist_lib.relation.key_lookup import Looking
from persist_lib.relation.registration import next_time
from persist_lib.relation.writer import WriteHandle
from persist_lib.schema.schema import DIFF, DIFF_FIELD, Schema

TIMEOUT_S = 600.0


class Shards(NamedTuple):
    """The names of the three shards."""

    data: str
    bad: str
    journal: str


class Committed(NamedTuple):
    """What a commit came to. `was_there`: another program, or an earlier attempt, had committed this group."""

    tally: Tally
    updates: int
    was_there: bool
    last_file: int
    lines: int


class Committer:
    """Commits the groups of one run in their order."""

    def __init__(self, client: Client, shards: Shards, ingest: str, run: Run, before: tuple[int, int]) -> None:
        self._client, self._ingest, self._run = client, ingest, run
        self._producer = producer_name(ingest)
        self._before = before
        self.data = client.open_writer(shards.data, run.info.schema)
        self._bad = client.open_writer(shards.bad, BAD)
        self._journal = client.open_writer(shards.journal, JOURNAL)

    def close(self) -> None:
        """Retire the writers."""
        for write in (self.data, self._bad, self._journal):
            write.close()

    def commit(self, group: Group, done: Sequence[Done]) -> Committed:
        """Commit what the tasks of a group answered, in their order."""
        tally, bases = self._count(done)
        bad = self._bad_lines(done, bases)
        if bad.num_rows:
            append_once(self._bad, just(BAD, bad), (self._producer, group.number))
        row = group_row(self._ingest, self._run, group.number, tally, *self._before)
        append_once(self._journal, just(JOURNAL, row), (self._producer, group.number))
        updates = self._append(group, done)
        return Committed(tally, updates or 0, updates is None, *self._before)

    def _count(self, done: Sequence[Done]) -> tuple[Tally, list[int]]:
        """The sums; and for each chunk how many lines of its file come before it."""
        tally, bases = Tally(), []
        file, lines = self._before
        is_lines = self._run.settings.format != "parquet"  # there lines are counted in the file
        for counts in (counts for one in done for counts in one.counts):
            if counts.file != file:
                file, lines = counts.file, 0
            bases.append(lines if is_lines else 0)
            lines += counts.lines
            tally += Tally(counts.written, counts.bad, counts.silent, counts.lines)
        self._before = file, lines
        return tally, bases

    def _bad_lines(self, done: Sequence[Done], bases: Sequence[int]) -> pa.Table:
        at_chunk = 0
        tables = []
        for one in done:
            some = bases[at_chunk : at_chunk + len(one.counts)]
            at_chunk += len(one.counts)
            found = unpacked(one.bad)
            if not found.num_rows:
                continue
            base = np.repeat(np.array(some, np.int64), [counts.bad for counts in one.counts])
            tables.append(self._shown(found, base))
        return pa.concat_tables(tables) if tables else BAD.data.empty_table()

    def _shown(self, found: pa.Table, base: np.typing.NDArray[np.int64]) -> pa.Table:
        paths = pa.array([file.path for file in self._run.files])
        columns = [
            paths.take(found.column("file").combine_chunks()), pc.add(found.column("line"), pa.array(base + 1)),
            found.column("offset"), found.column("text"), found.column("reason"),
            pa.array([self._ingest] * found.num_rows), pa.array([self._run.number] * found.num_rows, pa.int64()),
        ]  # fmt: skip
        return pa.Table.from_arrays(
            [pa.chunked_array(c) if isinstance(c, pa.Array) else c for c in columns], schema=BAD.data
        )

    def _append(self, group: Group, done: Sequence[Done]) -> int | None:
        """Append the data; the number of updates, or None if it is there already."""
        producer = (self._producer, group.number)
        if any(one.changes is not None for one in done):
            changes = pa.concat_tables([unpacked(one.changes) for one in done if one.changes is not None])
            return append_once(self.data, by_key(self.data, changes), producer)
        staged = [pickle.loads(one.staged) for one in done if one.staged is not None]  # noqa: S301 - our own tasks made it
        staged = [one for one in staged if one.parts]
        if not staged and self._run.info.bounds is None:
            return append_once(self.data, just(self.data.schema, self.data.schema.data.empty_table()), producer)
        try:
            if not staged:
                lower, upper = self._run.info.bounds or (0, 1)
                return self.data.compare_and_append(
                    [], at(lower), at(upper), producer=producer, timeout=TIMEOUT_S
                ).count
            return self.data.append_staged(staged, producer=producer, timeout=TIMEOUT_S).count
        except AlreadyProduced:
            return None


def producer_name(ingest: str) -> str:
    """The name under which an ingest numbers its groups."""
    return f"ingest/{ingest}"


Makes = Callable[[Version], tuple[Version, pa.Table]]
"""Makes of a version what to append at its upper, and says at which version, where that had to be a newer one."""


def append_once(write: WriteHandle, make: Makes, producer: tuple[str, int]) -> int | None:
    """Append what `make` makes, at the next time. Returns the count; None if this number is there already."""
    machine = write.machine
    deadline = machine.runtime.deadline(TIMEOUT_S)
    while True:
        version = machine.fetch()
        last = version.state.producers.get(producer[0])
        if last is not None and last.sequence >= producer[1]:
            return None
        version, rows = make(version)
        upper = version.state.upper
        time = next_time(write.schema, machine.shard, upper, machine.runtime, machine.consensus.now)
        try:
            return write.compare_and_append(at_time(rows, time), upper, at(time + 1), producer=producer).count
        except AlreadyProduced:
            return None
        except UpperMismatch:
            if deadline.has_passed():
                raise TimedOut(
                    f"shard {machine.shard}: other writers were first for {TIMEOUT_S:g} s. Run again to continue from "
                    "here",
                    shard=machine.shard,
                ) from None


def just(schema: Schema, rows: pa.Table) -> Makes:
    """These rows, once each, whatever the shard has."""
    counted = (
        rows
        if DIFF in rows.column_names
        else rows.append_column(DIFF_FIELD, pa.array(np.ones(rows.num_rows, np.int64)))
    )
    table = pa.Table.from_arrays(counted.columns, schema=schema.contents)
    return lambda version: (version, table)


def by_key(write: WriteHandle, changes: pa.Table) -> Makes:
    """What to append so that each key has what its last change says. `changes` are in their order."""
    schema, machine = write.schema, write.machine
    last = last_of_each_key(schema, changes)
    looking = Looking(machine, schema, Keys.of(schema, last))
    new = last.filter(pc.invert(last.column(DELETES))).drop_columns([DELETES])
    _, rows = just(schema, new)(machine.version)

    def make(version: Version) -> tuple[Version, pa.Table]:
        version, old = looking.contents(version, machine.runtime.deadline(TIMEOUT_S))
        return version, replacing(schema, old, rows)

    return make
