"""What a stream contains: the sealed part, which is definite, and on request what is not sealed yet, marked as such."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

from persist_lib.frontier import Antichain
from persist_lib.read.snapshot import Snapshot
from persist_lib.runtime.resource import Resource
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, Schema

Ahead = Literal["sealed", "durable", "accepted"]
"""How far a read looks: only what is sealed; what is durable as well; or also what waits for its commit."""
STATE = "_state"


class Contents(Resource):
    """The contents of a stream at one moment, for use in a `with` block: `sealed`, and beyond it `unsealed`.

    `sealed` is a snapshot of the sealed shard, None if nothing is sealed yet. `unsealed` and `accepted` are tables of
    updates with their times: those that are durable, and those that wait for their commit. None of them is at a time
    before `upper`, the sealed frontier.
    """

    def __init__(
        self, schema: Schema, upper: Antichain, sealed: Snapshot | None, unsealed: pa.Table, accepted: pa.Table
    ) -> None:
        self.schema, self.upper = schema, upper
        self.sealed, self.unsealed, self.accepted = sealed, unsealed, accepted

    def to_arrow(self) -> pa.Table:
        """All of it in one table: the columns, `_diff`, and `_state`: `sealed`, `unsealed` or `accepted`.

        These are updates: what is not sealed may take rows away. Add up `_diff` by the columns for the contents as they
        would be if all of it were sealed.
        """
        names = [*self.schema.names, DIFF]
        parts = {
            "sealed": empty_table(self.schema.contents) if self.sealed is None else self.sealed.consolidated_table(),
            "unsealed": self.unsealed,
            "accepted": self.accepted,
        }
        marked = [
            table.select(names).append_column(STATE, pa.repeat(pa.scalar(state), table.num_rows))
            for state, table in parts.items()
        ]
        return pa.concat_tables(marked)

    def release(self) -> None:
        """Stop keeping the state that is read from. Idempotent."""
        if self.sealed is not None:
            self.sealed.release()

    close = release
