"""What leads from the contents of a shard to what tasks staged: in one pass over both, in bounded memory.

A few staged rows are held in memory, and only their keys are looked up in the contents. More are merged with the
contents, which are streamed in the order of keys. The state of such a pass is held by a reader's id.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.core import commands as c
from persist_lib.core.plan.fan_in import row_bytes
from persist_lib.core.plan.requests import MergeTask, TaskInput
from persist_lib.core.state import Batch, Part, State, Version
from persist_lib.core.sums import Sums, total
from persist_lib.errors import InvalidUsage, Missing
from persist_lib.format.parts import decode_inline
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.ids import WriterId, format_reader_id
from persist_lib.kernel.columns import at_time, integers, is_same
from persist_lib.kernel.consolidate import I64_MAX
from persist_lib.kernel.keyset import (
    Counts,
    Keys,
    count_deleted,
    count_upserted,
    find_violation,
    one_row_each,
    replacing,
    touched,
)
from persist_lib.kernel.merge import merge_runs, pairs
from persist_lib.kernel.order import take
from persist_lib.location.wrap.deadline import within
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.relation import contents
from persist_lib.relation.key_lookup import Looking, violated
from persist_lib.relation.stage import Staged
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import number_of
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases, Registering
from persist_lib.shard.runs import Stored, inputs_of, overlapping

ONCE = at(1)
"""Beyond the time at which parts are written whose time the commit says."""


class Runs(NamedTuple):
    """Parts in the order of a batch, and where its runs start."""

    parts: tuple[Part, ...]
    starts: tuple[int, ...]

    def each(self) -> list[tuple[Part, ...]]:
        ends = (*self.starts[1:], len(self.parts))[: len(self.starts)]
        return [self.parts[start:end] for start, end in zip(self.starts, ends, strict=True)]


def laid_out(parts: Iterable[Part]) -> Runs:
    """As few runs as possible. Parts of one run follow each other; where bounds touch, parts may overlap."""
    runs: list[list[Part]] = []
    ends: list[tuple[bytes, int]] = []
    for part in sorted(parts, key=lambda part: part.key_lower):
        if ends and ends[0][0] < part.key_lower:
            _, run = heapq.heapreplace(ends, (part.key_upper, ends[0][1]))
        else:
            run = len(runs)
            runs.append([])
            heapq.heappush(ends, (part.key_upper, run))
        runs[run].append(part)
    starts: list[int] = []
    found: list[Part] = []
    for pieces in runs:
        starts.append(len(found))
        found += pieces
    return Runs(tuple(found), tuple(starts))


def batch_of(
    parts: Iterable[Part], sums: Sums, bounds: tuple[Antichain, Antichain] | None, table: pa.Table | None = None
) -> Built:
    """The batch of all these parts. Without bounds it is at time 0, for `core.outcomes.counted_at`."""
    runs = laid_out(parts)
    lower, upper = bounds or (MINIMUM, ONCE)
    batch = Batch(
        0, 0, lower, upper, MINIMUM, sums.count, sums.diff_sum, sums.fingerprint, runs.parts, runs.starts
    )  # fmt: skip
    return Built(batch, table=table)


def assembled(
    staged: Sequence[Staged], builder: Builder, schema: Schema, schemas: Sequence[Schema], inline_bytes: int
) -> Built:
    """One batch of all that was staged. What tasks answered inline becomes one inline part, or parts, of the builder.

    Raises DiffOverflow when a sum over several parts does not fit into 64 bits.
    """
    stored = [part for one in staged for part in one.parts if part.inline is None]
    if len({part.key for part in stored}) < len(stored):
        raise InvalidUsage("the same part is there twice, and would be appended twice; nothing was appended")
    laid = builder.lay(inline_tables(staged, schema, schemas), inline_bytes=inline_bytes)
    kept = [one for one in staged if any(part.inline is None for part in one.parts)]
    sums = total([laid.sums, *(one.sums for one in kept)])
    bounds = staged[0].bounds if staged else None
    built = batch_of([*stored, *laid.parts], sums, bounds, laid.table)
    most = laid.most + sum(one.most for one in kept)
    return builder.totalled(built) if most >= I64_MAX else built


def inline_tables(staged: Sequence[Staged], schema: Schema, schemas: Sequence[Schema]) -> Iterator[pa.Table]:
    """The rows that tasks answered inline."""
    for one in staged:
        for part in one.parts:
            if part.inline is not None:
                yield decode_inline("a task's answer", part.inline, schemas[part.schema], schema)


SMALL_BYTES = 16 << 20
"""Staged rows of at most about this size are held in memory, and looked up by key."""
DELETE = 1 << 32
"""The diff of a row that says that its key is to have no row. It is so large that however often a row is there,
as one to write and as one to delete, its sum tells both numbers, and the two never cancel each other."""
MOST_RUNS = 64
"""How many runs of staged parts are read at once: each holds up to 8 MiB, and there may be a run for each task."""
SHOWN = 5

Pair = tuple[pa.Table, pa.Table]


class Source:
    """Staged rows, and beside them what the contents have for the same keys, as of one version after another.

    `schema` is the shard's newest. Staged rows come as tables of `schema.updates`, contents as `schema.contents`.
    """

    def __init__(
        self, machine: Machine, leases: Leases, schema: Schema, staged: Sequence[Part],
        uploader: Callable[[], WriterId], *, everything: bool = False,
    ) -> None:  # fmt: skip
        self._machine, self._leases, self._schema, self._staged = machine, leases, schema, staged
        self._uploader, self._everything = uploader, everything
        self._runs: list[tuple[Part, ...]] | None = None
        self._small: pa.Table | None = None
        self._looking: Looking | None = None
        if self._is_small(sum(part.rows for part in staged)):
            tables = list(self.rows(machine.state))
            self._small = pa.concat_tables([empty_table(schema.updates), *tables])
            if not everything:
                self._looking = Looking(machine, schema, Keys.of(schema, self._small))

    @contextmanager
    def at(
        self, version: Version, names: Sequence[str], deadline: Deadline
    ) -> Iterator[tuple[Version, Iterator[Pair]]]:
        """Pairs of staged rows and contents, aligned by the columns `names`, and the version of which these are."""
        if self._small is not None and self._looking is not None:
            version, old = self._looking.contents(version, deadline)
            yield version, iter([(self._small, old)])
            return
        if self._small is not None and self._is_small(version.state.count):
            old = self._everything_of(version.state, deadline)
            if old is not None:
                yield version, iter([(self._small, old)])
                return
        with self._held() as held:
            state = held.state
            with self._machine.runtime.pool(self._machine.config.read_threads, "persist-difference") as pool:
                stored = self._stored(state)
                inputs = inputs_of(batch for batch in state.batches_at() if batch.count)
                if not self._everything:
                    least = min(part.key_lower for part in self._staged)
                    most = max(part.key_upper for part in self._staged)
                    inputs = tuple(overlapping(inputs, least, most + b"\0"))
                old = contents.stream(stored, inputs, self._machine.config.merge_bytes // 2, pool) if inputs else ()
                timed = (at_time(table, 0) for table in old)
                both = pairs(self.rows(state), timed, names, empty_table(self._schema.updates))
                yield held, ((new, rows.drop_columns([TIME])) for new, rows in both)

    def _is_small(self, rows: int) -> bool:
        return rows * row_bytes(self._schema) <= SMALL_BYTES

    def _stored(self, state: State) -> Stored:
        return Stored(self._machine.reads, self._machine.shard, state.schemas, self._schema)

    def _everything_of(self, state: State, deadline: Deadline) -> pa.Table | None:
        """All contents, without a hold; None if they are collected by then."""
        inputs = inputs_of(batch for batch in state.batches_at() if batch.count)
        merge_bytes, threads = self._machine.config.merge_bytes, self._machine.config.read_threads
        with self._machine.runtime.pool(threads, "persist-difference") as pool:
            stored = self._stored(state)
            try:
                tables = within(deadline, lambda: list(contents.stream(stored, inputs, merge_bytes, pool)))
            except Missing:
                return None
        return pa.concat_tables([empty_table(self._schema.contents), *tables])

    def rows(self, state: State) -> Iterator[pa.Table]:
        """All staged rows in order, each data once, in tables of bounded size."""
        inputs = [TaskInput(run, 0, None) for run in self._few_runs(state)]
        machine = self._machine
        streams = Stored(machine.blob, machine.shard, state.schemas, self._schema).streams(inputs)
        return merge_runs(streams, self._schema, merge_bytes=machine.config.merge_bytes // 2)

    def _few_runs(self, state: State) -> list[tuple[Part, ...]]:
        """The staged parts in runs that can be read together. If there are more, they are merged, some at a time."""
        if self._runs is None:
            runs = laid_out(self._staged).each()
            while len(runs) > MOST_RUNS:
                groups = [runs[start : start + MOST_RUNS] for start in range(0, len(runs), MOST_RUNS)]
                runs = [merged for group in groups if (merged := self._as_one(group, state))]
            self._runs = runs
        return self._runs

    def _as_one(self, runs: Sequence[tuple[Part, ...]], state: State) -> tuple[Part, ...]:
        """One run for several, written under the stage's id."""
        machine, config = self._machine, self._machine.config
        task = MergeTask(
            machine.shard, self._uploader(), tuple(TaskInput(run, 0, None) for run in runs), state.schemas,
            number_of(self._schema, state.schemas), 0, None, None, config.part_bytes, config.merge_bytes,
        )  # fmt: skip
        return run_task(task, machine.blob, machine.runtime.entropy).parts

    @contextmanager
    def _held(self) -> Iterator[Version]:
        """The newest version, whose objects are kept in the block."""
        machine, leases = self._machine, self._leases
        fresh, lease_ms = format_reader_id(machine.runtime.entropy()), machine.config.lease_ms
        leases.prepare()
        with Registering(leases, machine, fresh):
            machine.commit(lambda _state, now: c.RegisterReader(fresh, now + lease_ms, "a pass of a staged write"))
            leases.keep(machine, fresh)
        try:
            yield machine.version
        finally:
            leases.retire(machine, fresh)


class Overwriting:
    """The changes that make the contents what was staged."""

    def __init__(self, machine: Machine, schema: Schema) -> None:
        self._machine, self._schema = machine, schema
        self.names = schema.key_names if schema.constraints else schema.names
        self.counts = Counts()

    def over(self, both: Iterator[Pair], time: int) -> Iterator[pa.Table]:
        for new, old in both:
            if self._schema.constraints:
                check(self._machine, self._schema, old.slice(0, 0), at_time(new.drop_columns([TIME]), time))
            wanted = new.drop_columns([TIME])
            if not is_same(wanted, old):
                yield replacing(self._schema, old, wanted)


class Upserting:
    """The changes that make each staged row the one row of its key, and leave no row of a key that is to be deleted."""

    def __init__(self, machine: Machine, schema: Schema) -> None:
        self._machine, self._schema = machine, schema
        self.names = schema.key_names
        self.counts = Counts()

    def over(self, both: Iterator[Pair], _time: int) -> Iterator[pa.Table]:
        """The changes, in order. `counts` then says what becomes of the keys."""
        self.counts = Counts()
        schema = self._schema
        for rows, old in both:
            if not rows.num_rows:
                continue
            diffs = integers(rows.column(DIFF))
            new = take(rows, np.flatnonzero(diffs % DELETE))
            gone = take(rows, np.flatnonzero(diffs // DELETE))
            wanted = one_row_each(schema, new.drop_columns([TIME, DIFF]))
            keys, deleted = Keys.of(schema, new), Keys.of(schema, gone)
            if len(keys) and deleted.found_in(new).any():
                raise self._both(take(deleted.table, np.flatnonzero(deleted.found_in(new))))
            before = take(old, np.union1d(keys.find(old), deleted.find(old)))
            changes = replacing(schema, before, wanted)
            self._count(count_upserted(keys, before, take(changes, keys.find(changes))))
            self._count(count_deleted(deleted, before))
            yield changes

    def _count(self, more: Counts) -> None:
        self.counts = Counts(*(a + b for a, b in zip(self.counts, more, strict=True)))

    def _both(self, keys: pa.Table) -> InvalidUsage:
        found = keys.slice(0, SHOWN).to_pylist()
        return InvalidUsage(
            f"shard {self._machine.shard}: {keys.num_rows} keys are both to be written and to be deleted, first "
            f"{shown(found)}. Which of them is meant only the caller can say: keep the last one of each key. Nothing "
            "was written",
            problem="key twice", keys=found, count=keys.num_rows,
        )  # fmt: skip


def check(machine: Machine, schema: Schema, old: pa.Table, updates: pa.Table) -> None:
    """Raise ConstraintViolated if these updates would break a constraint, given the contents before them."""
    if (found := find_violation(schema, old, updates)) is not None:
        raise violated(machine.shard, found, schema.times)


def check_all(machine: Machine, schema: Schema, both: Iterator[Pair], time: int | None) -> None:
    """The same for all staged rows, at `time` (None: at their own times)."""
    for new, old in both:
        timed = new if time is None else at_time(new.drop_columns([TIME]), time)
        keys, relevant = touched(schema, timed)
        if len(keys):
            mine = take(old, keys.find(old)).select(schema.contents.names)  # columns that are newer break nothing
            check(machine, schema, mine, relevant)
