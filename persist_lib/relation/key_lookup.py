"""The contents of some rows as of a shard's upper, for calls that write what depends on them.

They are read from the newest state without a lease, so that looking changes nothing. What that state refers to may be
collected by then, which is seen (Missing), and then a newer state is read.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from persist_lib.core import refusals as r
from persist_lib.core.state import Batch, State, Version
from persist_lib.errors import ConstraintViolated, Missing
from persist_lib.format.conform import conform
from persist_lib.format.predicate import Where
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.constraints import Violation, find_violation, touched
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.deadline import within
from persist_lib.relation.contents import stream
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import named_as
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.lookup import look_up
from persist_lib.shard.refusals import refused
from persist_lib.shard.runs import Stored, inputs_of, may_keep, overlapping
from persist_lib.times import Unit, show_time


class Looking:
    """The contents of some rows, read again as upper moves: then only what was appended since, where that can be told.

    Contents are tables of the shard's newest schema, with the names and types of the writer's, consolidated. SUBTLE:
    they are the sum of all updates that there are, and not contents as of a time that a reader could name. So it does
    not matter how far since is.
    """

    def __init__(self, machine: Machine, schema: Schema, keys: Keys | None, where: Where | None = None) -> None:
        """Of these keys; or of all rows, or those that `where` keeps, which are held in memory."""
        self._machine, self._schema, self._keys, self._where = machine, schema, keys, where
        self._known: tuple[Antichain, Schema, pa.Table] | None = None

    @property
    def schema(self) -> Schema:
        """That of the contents which were read last."""
        return self._schema if self._known is None else self._known[1]

    def contents(self, version: Version, deadline: Deadline) -> tuple[Version, pa.Table]:
        """The contents at `version`, and that; or at a newer version, if objects of this one are collected already."""
        while True:
            try:
                return version, within(deadline, partial(self._contents, version.state))
            except Missing:
                newer = within(deadline, self._machine.fetch)
                if newer.seqno == version.seqno:
                    raise
                version = newer

    def _contents(self, state: State) -> pa.Table:
        schema, upper = named_as(state.schemas[-1], self._schema), state.upper
        known = self._known
        if known is not None and known[1] == schema and _can_continue(state, known[0]):
            lower, tables = known[0], [known[2]]
            batches = [batch for batch in state.trace if lower < batch.upper]
        else:
            lower, tables, batches = Antichain(0), [], list(state.batches_at())
        found = self._read(state, schema, [batch for batch in batches if batch.count], lower)
        contents = consolidate(schema, pa.concat_tables([*tables, found]))
        self._known = upper, schema, contents
        return contents

    def _read(self, state: State, schema: Schema, batches: list[Batch], lower: Antichain) -> pa.Table:
        machine = self._machine
        stored = Stored(machine.reads, machine.shard, state.schemas, schema, where=self._where)
        inputs = overlapping(inputs_of(batches, lower.time or 0), None, None)
        inputs = may_keep(self._where, inputs, state.schemas, self._schema)
        with machine.runtime.pool(machine.config.read_threads, "persist-look") as pool:
            if self._keys is not None:
                return look_up(stored, inputs, self._keys, None, pool)
            found = stream(stored, inputs, machine.config.merge_bytes, pool)
            kept = found if self._where is None else map(self._where.kept, found)
            return pa.concat_tables([empty_table(schema.contents), *kept])


def _can_continue(state: State, known: Antichain) -> bool:
    """Whether the updates since `known` can be told from those before it.

    SUBTLE: a compaction moves updates forward to its since. In a batch that it made of both, an update from before
    `known` looks like a later one if since is there or beyond.
    """
    newer = [batch for batch in state.trace if known < batch.upper]
    return all(known <= batch.lower or batch.since < known for batch in newer)


WHAT = {"unique": "each key has at most one row, once", "non_negative": "no row's multiplicity is below 0"}


def check_constraints(
    machine: Machine, written: Schema, updates: pa.Table, lower: Antichain, deadline: Deadline
) -> None:
    """Raise ConstraintViolated if these updates, appended at `lower`, would break a constraint at any of their times.

    `updates` are consolidated, in the schema `written`. What dropped columns hold does not count. Does nothing when
    upper is beyond `lower` already: the append can only be refused, or have been committed before. Raises UpperMismatch
    when upper is before `lower`.
    """
    version = _at(machine, lower, deadline)
    if version is None:
        return
    schema = named_as(version.state.schemas[-1], written)
    keys, relevant = touched(schema, conform("the append", updates, schema))
    if not len(keys):
        return
    version, contents = Looking(machine, written, keys).contents(version, deadline)
    if version.state.upper != lower:
        return  # another writer was first, so that the commit is refused
    if schema.shown is not schema:
        schema = schema.shown
        contents = consolidate(schema, contents.select(schema.contents.names))
        relevant = consolidate(schema, relevant.select(schema.updates.names))
    if (found := find_violation(schema, contents, relevant)) is not None:
        raise violated(machine.shard, found, schema.times)


def violated(shard: ShardId, found: Violation, times: Unit | None) -> ConstraintViolated:
    """The error that names the constraint and the first few rows."""
    keys = "keys" if found.constraint == "unique" else "rows"
    return ConstraintViolated(
        f"shard {shard}: the schema says {found.constraint} ({WHAT[found.constraint]}), and after this append "
        f"{found.breaks} {keys} would break that at time {show_time(found.time, times)}, first {found.rows[:3]}. "
        f"Nothing was written. Retract what the shard holds for these keys in the same append, or use upsert",
        shard=shard, constraint=found.constraint, time=found.time, count=found.breaks, rows=found.rows,
    )  # fmt: skip


def _at(machine: Machine, lower: Antichain, deadline: Deadline) -> Version | None:
    """A version whose upper is `lower`; None if upper is beyond.

    All versions with the same upper have the same contents, so the one that this process knows will do.
    """
    version = machine.version
    if version.state.upper != lower:
        version = within(deadline, machine.fetch)
    upper = version.state.upper
    if upper < lower:
        raise refused(machine.shard, r.WrongUpper(lower, upper))
    return version if upper == lower else None
