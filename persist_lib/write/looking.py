"""The contents of some keys as of a shard's upper, for calls that write what depends on them.

They are read from the newest state without a lease, so that looking changes nothing. What that state refers to may be
collected meanwhile, which is seen (Missing), and then a newer state is read.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from persist_lib.core.state import Batch, State, Version
from persist_lib.errors import Missing
from persist_lib.frontier import Antichain
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.lookup import look_up
from persist_lib.shard.runs import Stored, inputs_of, overlapping


class Looking:
    """The contents of some keys, read again as upper moves: then only what was appended since, where that can be told.

    Contents are tables of the shard's newest schema, consolidated. SUBTLE: they are the sum of all updates that there
    are, and not contents as of a time that a reader could name. So it does not matter how far since is.
    """

    def __init__(self, machine: Machine, keys: Keys) -> None:
        self._machine = machine
        self._keys = keys
        self._known: tuple[Antichain, Schema, pa.Table] | None = None

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
        schema, upper = state.schemas[-1], state.upper
        known = self._known
        if known is not None and known[1] == schema and _can_continue(state, known[0]):
            lower, tables = known[0], [known[2]]
            batches = [batch for batch in state.trace if lower < batch.upper]
        else:
            lower, tables, batches = Antichain(0), [], list(state.trace)
        found = self._read(state, schema, [batch for batch in batches if batch.count], lower)
        contents = consolidate(schema, pa.concat_tables([*tables, found]))
        self._known = upper, schema, contents
        return contents

    def _read(self, state: State, schema: Schema, batches: list[Batch], lower: Antichain) -> pa.Table:
        machine = self._machine
        stored = Stored(machine.reads, machine.shard, state.schemas, schema)
        inputs = overlapping(inputs_of(batches, lower.time or 0), None, None)
        with machine.runtime.pool(machine.config.read_threads, "persist-look") as pool:
            return look_up(stored, inputs, self._keys, None, pool)


def _can_continue(state: State, known: Antichain) -> bool:
    """Whether the updates since `known` can be told from those before it.

    SUBTLE: a compaction moves updates forward to its since. In a batch that it made of both, an update from before
    `known` looks like a later one if since is there or beyond.
    """
    newer = [batch for batch in state.trace if known < batch.upper]
    return all(known <= batch.lower or batch.since < known for batch in newer)
