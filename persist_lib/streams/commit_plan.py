"""What one commit does to each stream, given the calls that share it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.errors import DiffOverflow
from persist_lib.frontier import Antichain, at
from persist_lib.ids import MOST_SEQUENCE
from persist_lib.kernel.columns import array_of
from persist_lib.kernel.consolidate import I64_MIN
from persist_lib.relation.appends import Pending
from persist_lib.schema.schema import DIFF, TIME, Column, Schema


class Op(msgspec.Struct, frozen=True):
    """A checked part of a call: what it does to the stream of this name. One of the three is set."""

    stream: str
    table: pa.Table | None = None
    upper: Antichain | None = None
    since: Antichain | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call(Pending):
    """One accepted call."""

    ops: tuple[Op, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether it shares no commit: it moves both a since and something else."""
        return self.moves_since and self.appends

    def is_followed_by(self, other: Pending) -> bool:
        """Whether one commit may do both.

        A seal and a move of since are two transitions of the same shard, so they are two commits.
        """
        return (
            isinstance(other, Call)
            and not other.is_alone
            and self.appends == other.appends
            and self.deadline.ends <= other.deadline.ends
        )

    def written(self, stream: str) -> list[pa.Table]:
        return [op.table for op in self.ops if op.stream == stream and op.table is not None]

    @property
    def moves_since(self) -> bool:
        return any(op.since is not None for op in self.ops)

    @property
    def appends(self) -> bool:
        return any(op.since is None for op in self.ops)


AT = "_at"
"""The key column of an unsealed shard that has the time of an update. Its `_time` is the order of arrival."""
SEALER = "seal"
"""The producer by which an unsealed shard remembers how far its stream is sealed."""
LAST_TIME = MOST_SEQUENCE - 1
"""The latest time of a stream: the frontier behind it is the last sequence number, and means the empty frontier."""


@dataclass(slots=True)
class Step:
    """What one commit does to one stream: new updates, and its frontiers after it (since None: as it is)."""

    lower: Antichain
    upper: Antichain
    tables: list[pa.Table] = field(default_factory=list)
    since: Antichain | None = None

    @property
    def seals(self) -> bool:
        return self.lower < self.upper

    def fresh(self) -> list[pa.Table]:
        """The new updates that stay unsealed."""
        return (
            self.tables
            if not self.seals
            else [kept for table in self.tables if (kept := beyond(table, self.upper)).num_rows]
        )

    def direct(self) -> list[pa.Table]:
        """The new updates that this very commit seals: they never enter the unsealed shard."""
        return [kept for table in self.tables if (kept := below(table, self.upper)).num_rows] if self.seals else []


def plan(ops: Iterable[Op], uppers: Mapping[str, Antichain]) -> dict[str, Step]:
    """The net effect of calls in their order, by stream. `uppers` are the frontiers before them."""
    steps: dict[str, Step] = {}
    for op in ops:
        step = steps.setdefault(op.stream, Step(uppers[op.stream], uppers[op.stream]))
        if op.table is not None:
            step.tables.append(op.table)
        if op.upper is not None:
            step.upper = step.upper.join(op.upper)
        if op.since is not None:
            step.since = op.since if step.since is None else step.since.join(op.since)
    for step in steps.values():
        if len(step.tables) > 1:
            step.tables = [pa.concat_tables(step.tables).combine_chunks()]
    return steps


def below(table: pa.Table, upper: Antichain) -> pa.Table:
    """The updates with times before `upper`."""
    return table if upper.time is None else table.filter(pc.less(table.column(TIME), u64(upper.time)))


def beyond(table: pa.Table, upper: Antichain) -> pa.Table:
    """The updates with times at or beyond `upper`."""
    if upper.time is None:
        return table.slice(0, 0)
    return table if upper.time == 0 else table.filter(pc.greater_equal(table.column(TIME), u64(upper.time)))


@lru_cache(maxsize=256)
def unsealed_schema(schema: Schema) -> Schema:
    """The schema of the shard that has the unsealed updates of a stream with this schema."""
    return Schema(key=(Column(AT, "uint64", nullable=False), *schema.key), value=schema.value)


def as_unsealed(schema: Schema, table: pa.Table, arrival: int, *, retracts: bool = False) -> pa.Table:
    """Updates of a stream as updates of its unsealed shard, at a place in the order of arrival."""
    if retracts:
        check_negatable(table)
    diffs = table.column(DIFF)
    when = pa.repeat(u64(arrival), table.num_rows)
    columns = [table.column(TIME), *(table.column(name) for name in schema.names), when]
    columns.append(pc.negate_checked(diffs) if retracts else diffs)
    return pa.Table.from_arrays(columns, schema=unsealed_schema(schema).updates)


def check_negatable(table: pa.Table) -> None:
    """Raise DiffOverflow for a diff of -2**63, which has no opposite, so that it could never be taken back."""
    if table.num_rows and pc.min(table.column(DIFF)).as_py() == I64_MIN:
        raise DiffOverflow(
            "a diff of -2**63 has no opposite in 64 bits, so a seal could not take it from the unsealed updates. "
            "Nothing was written; write it as two updates, at two times, or write less"
        )


def from_unsealed(schema: Schema, contents: pa.Table) -> pa.Table:
    """Contents of an unsealed shard as updates of its stream."""
    columns = [*(contents.column(name) for name in schema.names), contents.column(AT), contents.column(DIFF)]
    return pa.table(columns, schema=schema.updates)


def as_number(upper: Antichain) -> int:
    """A frontier as the sequence number of the producer that seals."""
    return MOST_SEQUENCE if upper.time is None else upper.time


def as_upper(number: int | None) -> Antichain:
    """The frontier that a sequence number says; None: nothing was sealed yet."""
    return Antichain(None) if number == MOST_SEQUENCE else at(number or 0)


def nbytes(tables: Sequence[pa.Table]) -> int:
    """Bytes of tables."""
    return sum(table.nbytes for table in tables)


def u64(time: int) -> pa.Scalar:
    """A time in Arrow. `pa.scalar` would import pandas for it, which takes longer than many writes."""
    return array_of(np.array([time], np.uint64))[0]
