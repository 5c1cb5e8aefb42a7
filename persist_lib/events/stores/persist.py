r"""Event logs as collections: `persist:URL[:SHARD][:consensus=URL]`, as in `persist:file\:./data:ledger`.

An event is a row of a shard at a time that is its id. So Spark, DuckDB and everything else that reads shards reads the
log, as of any event, and the shard's upkeep keeps it. Snapshots and marks are rows of a second shard.

A hold of the shard says who writes: its fencing value is the writer's epoch. A takeover moves it, and then retires all
ids that append. A predecessor that finds its id retired registers again, so its registration is
built from the very state that has the hold, and refused unless the epoch is still its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

import persist_lib.client as clients
from persist_lib.arguments import UNREADABLE
from persist_lib.catalog.effects import check_free
from persist_lib.core import commands as c
from persist_lib.core.state import State
from persist_lib.errors import Corrupt, Fenced, InvalidUsage, LeaseExpired, NotFound, UpperMismatch
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.stores.shared import FORMAT, as_bytes, fenced, newer, take_option
from persist_lib.frontier import MINIMUM
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.registration import Registration
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import create_if_missing, retire_writers, schema_id
from persist_lib.shard.commit import Build, Committed, Machine
from persist_lib.shard.leases import Leases

Row = tuple[int, int, memoryview, memoryview]
DEFAULT = "events"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
HOLD = "events.writer"
LIMIT = 128 << 20
SCHEMA = Schema(
    key={"id": "int64 not null", "fragment": "int64 not null"},
    value={"payload": "binary not null", "head": "binary not null"},
)
NOTES = Schema(
    key={"space": "string not null", "id": "int64 not null", "fragment": "int64 not null"},
    value={"payload": "binary not null", "head": "binary not null"},
)


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fencing value of the hold: the log's format and name, and who writes it."""

    events: int
    log: str
    epoch: int = 0
    owner: str = ""


class _Format(msgspec.Struct):
    """All that the value says in every release."""

    events: int


def lock_of(state: State, where: str) -> Lock | None:
    """The lock in a state of a log's shard; None if there is none. Raises NewerFormat, and Corrupt."""
    hold = state.holds.get(HOLD)
    if hold is None:
        return None
    try:
        version = msgspec.json.decode(hold.opaque, type=_Format).events
        if version > FORMAT:
            raise newer(where, version)
        return msgspec.json.decode(hold.opaque, type=Lock)
    except UNREADABLE as error:
        raise Corrupt(
            f"{where}: its hold {HOLD!r} has the fencing value {hold.opaque!r}: {error}", key=where
        ) from error


class _Registration(Registration):
    """A writer id that is registered only if the epoch is still this writer's."""

    def __init__(self, machine: Machine, leases: Leases, epoch: int, owner: str, where: str) -> None:
        super().__init__(machine, leases, "ingest", owner, "events")
        self._epoch, self._where = epoch, where

    def _commit(self, build: Build, deadline: Deadline) -> Committed:
        def build_if_ours(state: State, now: int) -> c.Command:
            lock = lock_of(state, self._where)
            if lock is None or lock.epoch != self._epoch:
                raise fenced(self._where, self._epoch, 0 if lock is None else lock.epoch)
            return build(state, now)

        return super()._commit(build_if_ours, deadline)


class PersistRecords:
    """See `api.RecordStore`."""

    def __init__(self, client: clients.Client, shard: str, opening: Opening) -> None:
        self.limit: int | None = LIMIT
        self._client, self._shard = client, shard
        self._where = f"shard {shard} of {client.url}"
        self._machine, self._notes = client.machine(shard), client.machine(f"{shard}.notes")
        if opening.create:
            self._create(opening)
        version = self._machine.try_fetch()
        lock = None if version is None else lock_of(version.state, self._where)
        if lock is None:
            raise NotFound(f"there is no event log in {self._where}. Check the URL; a writer makes one")
        self.log = bytes.fromhex(lock.log)
        self._epoch = 0
        self._writers: dict[str, WriteHandle] = {}
        self._readers: dict[str, ReadHandle] = {}

    def _create(self, opening: Opening) -> None:
        log = opening.runtime.entropy().to_bytes(8, "big").hex()
        for machine, schema in ((self._machine, SCHEMA), (self._notes, NOTES)):
            found = machine.try_fetch()
            if found is not None and lock_of(found.state, self._where) is not None:
                continue
            free = partial(check_free, self._client, machine.shard)
            create_if_missing(machine, schema, self._client.config.format, free)
            schema_id(machine, schema)

            def build(state: State, _now: int) -> c.SetHold:
                lock = lock_of(state, self._where) or Lock(FORMAT, log)
                return _set(state, lock)

            machine.commit(build)

    def claim(self, owner: str) -> int:
        def build(state: State, _now: int) -> c.SetHold:
            return _set(state, Lock(FORMAT, self.log.hex(), self._lock(state).epoch + 1, owner))

        self._epoch = self._lock(self._machine.commit(build).after).epoch

        def follow(state: State, _now: int) -> c.SetHold:
            found = lock_of(state, self._where)
            if found is not None and found.epoch > self._epoch:
                raise fenced(self._where, self._epoch, found.epoch)
            return _set(state, Lock(FORMAT, self.log.hex(), self._epoch, owner))

        self._notes.commit(follow)
        for machine, schema in ((self._machine, SCHEMA), (self._notes, NOTES)):
            retire_writers(machine)
            registration = _Registration(machine, self._client.leases, self._epoch, owner, self._where)
            self._writers[machine.shard] = WriteHandle(
                machine, self._client.leases, schema, schema_id(machine, schema), registration=registration
            )
        return self._epoch

    def _lock(self, state: State) -> Lock:
        lock = lock_of(state, self._where)
        if lock is None or lock.log != self.log.hex():
            raise Corrupt(f"{self._where} is another log than was opened ({lock})", key=self._where)
        return lock

    def last(self) -> int:
        upper = self._machine.fetch().state.upper
        if upper.is_top():
            raise InvalidUsage(f"{self._where} is closed for writing, so it is no event log any more")
        return max(0, (upper.time or 0) - 1)

    def discard(self, epoch: int, last: int) -> None:
        """Nothing: an append continues what is there, or is refused. So nothing lies beyond a gap."""
        self._check(epoch)
        if self.last() != last:
            raise self._taken()

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise self._taken()

    def _taken(self) -> Fenced:
        return fenced(self._where, self._epoch, self._lock(self._machine.fetch().state).epoch)

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        self._check(epoch)
        if events := [put for put in puts if put.key.space == EVENTS]:
            self._append(events)
        if notes := [put for put in puts if put.key.space != EVENTS]:
            spaces = pa.array([put.key.space for put in notes], pa.string())
            table = _table(notes).append_column("space", spaces)
            writer = self._writers[self._notes.shard]
            _again_if_expired(lambda: writer.upsert(table))

    def _append(self, puts: Sequence[Put]) -> None:
        """One append, each event at its own time. Its writer's id is live only while the epoch is this writer's."""
        first, last = puts[0].key.id, puts[-1].key.id
        lower = 0 if first == 1 else first
        times = pa.array([put.key.id for put in puts], pa.uint64())
        table = _table(puts).append_column("_time", times).append_column("_diff", pa.array([1] * len(puts), pa.int64()))
        writer, token = self._writers[self._shard], self._client.runtime.token()
        try:
            _again_if_expired(lambda: writer.compare_and_append(table, lower, last + 1, token=token))
        except UpperMismatch as error:
            lock = self._lock(self._machine.fetch().state)
            if lock.epoch != self._epoch:
                raise fenced(self._where, self._epoch, lock.epoch) from error
            raise Corrupt(
                f"{self._where} has an upper of {error.actual}, and its last event is {first - 1}: something else "
                "appended to it. Nothing was written",
                key=self._where,
            ) from error

    def get(self, key: Key) -> Held | None:
        if key.space == EVENTS:
            rows = self._rows(self._shard, key=(key.id, key.fragment))
        else:
            rows = self._rows(self._notes.shard, key=(key.space, key.id, key.fragment))
        return next((Held(key, head, payload) for _, _, payload, head in rows), None)

    def _rows(self, shard: str, **where: Any) -> Iterator[Row]:
        """The newest contents, in the order of keys."""
        reader = self._readers.get(shard)
        if reader is None:
            reader = self._readers[shard] = self._client.open_reader(shard, purpose="events")
        upper = reader.fetch_upper()
        if upper == MINIMUM:
            return iter(())
        tables = reader.snapshot(as_of=(upper.time or 1) - 1, **where, diff=True).batches()
        return (row for table in tables for row in _rows_of(table))

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        for id_, fragment, payload, head in self._rows(self._shard, key_from=(from_id,), key_to=(through + 1,)):
            yield Held(Key(EVENTS, id_, fragment), head, payload)

    def ids(self, space: str) -> list[int]:
        if self._notes.try_fetch() is None:
            return []
        return sorted(row[0] for row in self._rows(self._notes.shard, key=(space,)) if row[1] == 0)

    def remove(self, epoch: int, space: str, below: int) -> None:
        self._check(epoch)
        rows = self._rows(self._notes.shard, key=(space,))
        if keys := [(space, row[0], row[1]) for row in rows if row[0] < below]:
            writer = self._writers[self._notes.shard]
            _again_if_expired(lambda: writer.delete(keys))

    def close(self) -> None:
        for handle in (*self._writers.values(), *self._readers.values()):
            handle.close()
        self._writers.clear()
        self._readers.clear()
        self._client.close()


def _again_if_expired(call: Any) -> None:
    """Call again if the lease had ended, as after a long pause: the handle registers again, if it may."""
    try:
        call()
    except LeaseExpired:
        call()


def _table(puts: Sequence[Put]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array([put.key.id for put in puts], pa.int64()),
            "fragment": pa.array([put.key.fragment for put in puts], pa.int64()),
            "payload": pa.array([as_bytes(put.body) for put in puts], pa.binary()),
            "head": pa.array([put.head for put in puts], pa.binary()),
        }
    )


def _rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows: id, fragment, payload, head. The payloads are views of Arrow's memory."""
    for batch in table.select(["id", "fragment", "payload", "head"]).to_batches():
        ids, fragments, payloads, heads = (batch.column(at) for at in range(4))
        for at in range(batch.num_rows):
            payload, head = payloads[at].as_buffer(), heads[at].as_buffer()
            yield ids[at].as_py(), fragments[at].as_py(), memoryview(payload).cast("B"), memoryview(head).cast("B")


def _set(state: State, lock: Lock) -> c.SetHold:
    """The command that makes this the lock, if the lock is still as in `state`. The hold keeps the whole history."""
    hold = state.holds.get(HOLD)
    since = state.since if hold is None else hold.since
    return c.SetHold(HOLD, since, None if hold is None else hold.opaque, msgspec.json.encode(lock))


def open_persist(options: Sequence[str], opening: Opening) -> PersistRecords:
    """Open a log: `persist:URL[:SHARD][:consensus=URL]`."""
    places, consensus = take_option(options, "consensus")
    if not 1 <= len(places) <= 2 or len(consensus) > 1 or not all(places):
        raise InvalidUsage(
            r"a store of events in a shard is persist:URL[:SHARD][:consensus=URL], with \: for each colon in the URLs, "
            r"as in persist:file\:./data:ledger"
        )
    shard = places[1] if len(places) == 2 else DEFAULT
    if not NAME.fullmatch(shard):
        raise InvalidUsage(f"a log's shard must be 1 to 100 letters, digits, '.', '-' and '_': got {shard!r}")
    client = clients.open(
        places[0], consensus[0] if consensus else None, runtime=opening.runtime, create=opening.create,
        read_only=not opening.create,
    )  # fmt: skip
    try:
        return PersistRecords(client, shard, opening)
    except BaseException:
        client.close()
        raise


KIND = Kind(open_persist)
