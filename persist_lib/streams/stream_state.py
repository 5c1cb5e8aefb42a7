"""One stream as the runtime that writes it knows it: how far it has come, what of it is not sealed yet, and commits.

All of this is what is durable for certain. It changes only after a commit whose outcome is known. What one commit does
to each stream, given the calls that share it, is a plan (`plan`), and pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.client import Client
from persist_lib.core.state import State
from persist_lib.errors import DiffOverflow, UpperMismatch
from persist_lib.format.predicate import Where
from persist_lib.frontier import Antichain, at
from persist_lib.ids import MOST_SEQUENCE
from persist_lib.kernel.columns import array_of
from persist_lib.kernel.consolidate import I64_MIN, consolidate
from persist_lib.relation.appends import Pending
from persist_lib.relation.changes import changes_known
from persist_lib.relation.conversions import selected
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.writer import Append, WriteHandle
from persist_lib.schema.schema import DIFF, TIME, Column, Schema
from persist_lib.shard.admin import schema_id
from persist_lib.shard.commit import Machine
from persist_lib.streams.lock import HOLD, FencedRegistration, WriterLock
from persist_lib.streams.stream_list import Record


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
        if not self.seals:
            return self.tables
        return [kept for table in self.tables if (kept := beyond(table, self.upper)).num_rows]

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


def nbytes(tables: Sequence[pa.Table]) -> int:
    """Bytes of tables."""
    return sum(table.nbytes for table in tables)


def u64(time: int) -> pa.Scalar:
    """A time in Arrow. `pa.scalar` would import pandas for it, which takes longer than many writes."""
    return array_of(np.array([time], np.uint64))[0]


FEW_TABLES = 8
"""So many pieces of unsealed updates are not put together, however small they are."""


def sealed_upper(state: State) -> Antichain:
    """How far a stream is sealed, as its unsealed shard says it: by the sequence number of the producer that seals."""
    produced = state.producers.get(SEALER)
    number = 0 if produced is None else produced.sequence
    return Antichain(None) if number == MOST_SEQUENCE else at(number)


class Stream:
    """A stream with its two shards. Loading it needs the lock, and its predecessors fenced off.

    Unsealed updates of up to `room` bytes are read into memory.
    """

    def __init__(
        self, client: Client, name: str, record: Record, schema: Schema, lock: WriterLock, owner: str, room: int
    ) -> None:
        self.name, self.record, self.schema = name, record, schema
        self.sealed, self.unsealed = client.machine(record.sealed), client.machine(record.unsealed)
        self._client = client
        hidden = unsealed_schema(schema)
        if schema in self.sealed.state.schemas and hidden not in self.unsealed.fetch().state.schemas:
            client.evolve_schema(record.unsealed, hidden)  # the sealed shard was given columns
        self.write_sealed = _writer(client, self.sealed, schema, lock, owner)
        self.write_unsealed = _writer(client, self.unsealed, hidden, lock, owner)
        self._reader: ReadHandle | None = None
        self.kept: list[pa.Table] | None = []
        """The unsealed updates in memory; None: they are too many, and read back where they are needed."""
        self.size = 0
        """Bytes of what is in memory."""
        self._load(lock, room)

    def _load(self, lock: WriterLock, room: int) -> None:
        sealed, state = self.sealed.fetch().state, self.unsealed.fetch().state
        self.upper = sealed_upper(state)
        self.arrival = state.upper.time or 0
        self.since = sealed.holds[HOLD].since
        if sealed.upper != self.upper:
            lock.check()  # a successor may have sealed between the two fetches
            raise UpperMismatch(
                f"stream {self.name!r} is sealed up to {self.schema.show(self.upper)}, and the upper of its shard "
                f"{self.sealed.shard} is {self.schema.show(sealed.upper)}: something else than a stream has appended "
                "to it. Nothing was changed. Only read that shard; its updates are there. The stream cannot continue",
                shard=self.sealed.shard, expected=self.upper, actual=sealed.upper,
            )  # fmt: skip
        self.keep_again(room)

    def spill(self) -> None:
        """Keep the unsealed updates in memory no longer."""
        self.kept, self.size = None, 0

    def keep_again(self, most_bytes: int) -> None:
        """Read the unsealed updates back into memory, if they take at most that much."""
        found: list[pa.Table] = []
        for table in self.read_back(Antichain(None)):
            found.append(table)
            if nbytes(found) > most_bytes:
                self.spill()
                return
        self.kept, self.size = found, nbytes(found)

    def read_back(self, upper: Antichain) -> Iterator[pa.Table]:
        """The durable unsealed updates with times before `upper`, in tables of bounded size, read from the shard.

        Not by a snapshot, which has one number for each row, and none where a sum is beyond 64 bits. What is
        written and retracted may come as two updates here, which are added up where they are appended.
        """
        if self.arrival == 0:
            return
        if self._reader is None:
            urls = (self._client.url, self._client.consensus_url)
            self._reader = ReadHandle(
                self.unsealed, self._client.leases, self.write_unsealed.schema, urls, read_only=True
            )
        where = Where.of(self._reader.schema.data, None if upper.time is None else pc.field(AT) < u64(upper.time))
        names = [AT, *self.schema.names, DIFF]
        with changes_known(self._reader, None, self.arrival - 1, earliest=self.arrival - 1) as found:
            for table in selected(found, names, where):
                yield consolidate(self.schema, from_unsealed(self.schema, table), "split")

    def moved(self, step: Step) -> Iterator[pa.Table]:
        """The durable unsealed updates that this step seals."""
        if self.kept is None:
            return self.read_back(step.upper)
        return (found for table in self.kept if (found := below(table, step.upper)).num_rows)

    def appends(self, step: Step) -> list[Append]:
        """The appends of this step: to the unsealed shard, and where it seals to the sealed one."""
        a = self.arrival
        added = (as_unsealed(self.schema, table, a) for table in step.fresh())
        if not step.seals:
            return [Append(self.write_unsealed, added, a, a + 1)]
        gone = (as_unsealed(self.schema, table, a, retracts=True) for table in self.moved(step))
        number = MOST_SEQUENCE if step.upper.time is None else step.upper.time
        return [
            Append(self.write_sealed, chain(step.direct(), self.moved(step)), step.lower, step.upper),
            Append(self.write_unsealed, chain(gone, added), a, a + 1, (SEALER, number)),
        ]

    def apply(self, step: Step) -> None:
        self.arrival += 1
        if self.kept is not None:
            fresh = step.fresh()
            if step.seals:
                self.kept = [left for table in self.kept if (left := beyond(table, step.upper)).num_rows]
                self.size = nbytes(self.kept)
            self.kept = _together([*self.kept, *fresh])
            self.size += nbytes(fresh)
        self.upper = step.upper

    def close(self) -> None:
        try:
            self.write_sealed.close()
        finally:
            self.write_unsealed.close()


def _writer(client: Client, machine: Machine, schema: Schema, lock: WriterLock, owner: str) -> WriteHandle:
    registration = FencedRegistration(machine, client.leases, lock, owner)
    number = schema_id(machine, schema)
    return WriteHandle(machine, client.leases, schema, number, registration=registration)


def _together(tables: list[pa.Table]) -> list[pa.Table]:
    """The same updates in fewer pieces: each is copied as often as the pieces double."""
    while len(tables) > FEW_TABLES and tables[-2].num_rows <= 2 * tables[-1].num_rows:
        tables = [*tables[:-2], pa.concat_tables(tables[-2:]).combine_chunks()]
    return tables
