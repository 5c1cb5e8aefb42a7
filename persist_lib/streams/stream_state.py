"""One stream as the runtime that writes it knows it: how far it has come, and what of it is not sealed yet.

All of this is what is durable for certain. It changes only after a commit whose outcome is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.client import Client
from persist_lib.core.state import State
from persist_lib.errors import UpperMismatch
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME, Antichain
from persist_lib.kernel.consolidate import consolidate
from persist_lib.relation.append_many import Append
from persist_lib.relation.changes import changes_known
from persist_lib.relation.conversions import selected
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.writer import WriteHandle
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.schemas import schema_id
from persist_lib.streams.commit_plan import (
    AT,
    SEALER,
    Step,
    as_number,
    as_unsealed,
    as_upper,
    below,
    beyond,
    from_unsealed,
    nbytes,
    u64,
    unsealed_schema,
)
from persist_lib.streams.lock import HOLD, FencedRegistration, WriterLock
from persist_lib.streams.stream_list import Record

FEW_TABLES = 8
"""So many pieces of unsealed updates are not put together, however small they are."""


def sealed_upper(state: State) -> Antichain:
    """How far a stream is sealed, as its unsealed shard says it."""
    produced = state.producers.get(SEALER)
    return as_upper(None if produced is None else produced.sequence)


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

    def newest_sealed(self) -> int:
        """The newest sealed time; where the stream is sealed for good, the last possible one."""
        return MAX_TIME if self.upper.time is None else self.upper.time - 1

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
        return [
            Append(self.write_sealed, _chained(step.direct(), self.moved(step)), step.lower, step.upper),
            Append(self.write_unsealed, _chained(gone, added), a, a + 1, (SEALER, as_number(step.upper))),
        ]

    def apply(self, step: Step) -> None:
        """Note what was committed."""
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


def _chained(*iterables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    return chain.from_iterable(iterables)


def _together(tables: list[pa.Table]) -> list[pa.Table]:
    """The same updates in fewer pieces: each is copied as often as the pieces double."""
    while len(tables) > FEW_TABLES and tables[-2].num_rows <= 2 * tables[-1].num_rows:
        tables = [*tables[:-2], pa.concat_tables(tables[-2:]).combine_chunks()]
    return tables
