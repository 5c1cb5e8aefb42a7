"""The runtime: the streams of one location, opened to write them all, or only to read."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Literal

import msgspec

from persist_lib.arguments import did_you_mean, not_pickled
from persist_lib.catalog.effects import check_free
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.formats import PRODUCERS, format_for
from persist_lib.core.holds import layer_of
from persist_lib.errors import InvalidUsage, NameTaken, NotFound
from persist_lib.frontier import Antichain
from persist_lib.relation.appends import Appended
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Resource
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.admin import schema_id
from persist_lib.shard.commit import Wanted
from persist_lib.streams.committer import Committer, deadline_of
from persist_lib.streams.lock import WriterLock, fence
from persist_lib.streams.stream_list import LAYER, Catalog, Record, parse_stream_name, shard_name
from persist_lib.streams.stream_reader import StreamReader
from persist_lib.streams.stream_state import AT, Stream, unsealed_schema
from persist_lib.streams.stream_writer import StreamWriter, multi_write

Mode = Literal["full", "read"]
RETENTION = 100
"""How many places in the order of arrival an unsealed shard keeps behind its newest: readers are just behind it."""
THREADS = 16


class Described(msgspec.Struct, frozen=True):
    """A stream as a list shows it: its shards, and how far it is sealed and compacted."""

    name: str
    sealed: str
    unsealed: str
    upper: Antichain
    since: Antichain


class Shared:
    """What all clones of a runtime have in common: the client, the list of streams, the committer if it writes."""

    def __init__(self, client: Client, *, owns_client: bool, committer: Committer | None, owner: str) -> None:
        self.client, self.committer, self.owner = client, committer, owner
        self.catalog = Catalog(client)
        self.readers: weakref.WeakSet[StreamReader] = weakref.WeakSet()
        self.clones = 1
        self._owns_client = owns_client
        self.is_stopped = False
        self.after_fork_in_child()
        enrol(self, Stage.HANDLES)

    def after_fork_in_child(self) -> None:
        self.loading = threading.Lock()
        """Held while a stream is created or loaded, so that two threads do not do it at once, and to count clones."""

    def stop(self, deadline: Deadline) -> None:
        """Finish what was accepted, take nothing more, and let go of everything. Idempotent."""
        if self.is_stopped:
            return
        self.is_stopped = True
        with ExitStack() as left:
            if self._owns_client:
                left.callback(self.client.close)
            left.callback(self.catalog.close)
            for reader in list(self.readers):
                left.callback(reader.close)
            if self.committer is not None:
                self.committer.stop(deadline)


class Streams(Resource):
    """The streams of a location. `open` makes one. Safe to use from several threads, and as a context manager.

    A runtime that writes is the only one of its location, as long as it holds the writer's lock. `clone` gives another
    handle of it; it stops when the last is closed, or with `stop`. Whether it is stopped or killed, what its futures
    acknowledged stays.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._is_closed = False

    @property
    def mode(self) -> Mode:
        """`full` if it writes, `read` if it only reads."""
        return "read" if self._shared.committer is None else "full"

    @property
    def epoch(self) -> int:
        """The epoch of the writer's lock under which it writes; 0 for one that only reads."""
        return 0 if self._shared.committer is None else self._shared.committer.lock.epoch

    @property
    def client(self) -> Client:
        """The client of the location. Sealed shards can be read and maintained through it."""
        return self._shared.client

    def create_or_load(self, name: str, schema: Schema) -> tuple[StreamWriter, StreamReader]:
        """The handles to write and to read a stream, which is created if there is none.

        Raises SchemaMismatch when the stream has another schema, NameTaken when a shard of that name is not a stream,
        Fenced when another runtime took over, and InvalidUsage in a runtime that only reads.
        """
        committer = self._writing("create_or_load")
        name, schema = parse_stream_name(name), check_columns(schema)
        committer.check()
        with self._shared.loading:
            if name not in committer.streams:
                record = self._shared.catalog.fetch().get(name)
                if record is None:
                    record = self._create(committer, name, schema)
                committer.add(self._load(committer, name, record, schema))
        stream = committer.streams[name]
        schema_id(stream.sealed, schema)  # raises SchemaMismatch
        if stream.schema != schema:
            raise InvalidUsage(
                f"stream {name!r} is open in this runtime with the schema {stream.schema}: open it with that one",
                stream=name,
            )
        return StreamWriter(self, committer, name, schema), self._reader(name, stream.record, schema)

    def load(self, name: str, schema: Schema | None = None) -> StreamReader:
        """The handle to read a stream, in the given schema or in its newest. Raises NotFound when there is none."""
        self._check_open()
        name = parse_stream_name(name)
        record = (found := self._shared.catalog.fetch()).get(name)
        if record is None:
            meant = did_you_mean(name, [one for one, other in found.items() if not other.dropped])
            raise NotFound(
                f"there is no stream {name!r} in {self.client.url}. {meant}create_or_load of a runtime that writes "
                "makes one",
                stream=name,
            )
        newest = self.client.machine(record.sealed).fetch().state.schemas[-1]
        return self._reader(name, record, newest if schema is None else check_schema(schema))

    def multi_write(self, parts: object, *, timeout: float | None = None) -> Future[Appended]:
        """Make several calls as one, of one stream or of several: all take effect, or none, also after a crash.

            runtime.multi_write([Write(orders, rows), Seal(orders, 10), AllowCompaction(payments, 5)])

        A seal and a move of since of the same stream cannot be in one call. The future is as those of the writers.
        """
        return multi_write(self._writing("multi_write"), parts, timeout)

    def list(self) -> list[Described]:
        """The streams of the location, by name, read from it."""
        self._check_open()
        found = []
        for name, record in sorted(self._shared.catalog.fetch().items()):
            if not record.dropped:
                state = self.client.machine(record.sealed).fetch().state
                found.append(Described(name, record.sealed, record.unsealed, state.upper, state.since))
        return found

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until the calls that were made before this one have ended. Raises TimedOut; they continue then."""
        committer = self._writing("flush")
        committer.settle(committer.deadline(timeout))

    def clone(self) -> Streams:
        """Another handle of the same runtime. The runtime stops when the last one is closed."""
        self._check_open()
        with self._shared.loading:
            self._shared.clones += 1
        return Streams(self._shared)

    def close(self) -> None:
        """Close this handle; the last one stops the runtime. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with self._shared.loading:
                self._shared.clones -= 1
                left = self._shared.clones
            if left == 0:
                self._shared.stop(deadline_of(self._shared.client, None))

    def stop(self, *, timeout: float | None = None) -> None:
        """Finish what was accepted, take nothing more, and release the writer's lock, for all clones. Idempotent.

        What is not committed after `timeout` seconds fails. An error that no caller got from a future is raised.
        """
        deadline = deadline_of(self._shared.client, timeout)
        self._is_closed = True
        self._shared.stop(deadline)

    __reduce__ = not_pickled("A runtime of streams", "Open one in the other process: one that only reads")

    def _reader(self, name: str, record: Record, schema: Schema) -> StreamReader:
        schema_id(self.client.machine(record.sealed), schema)
        reader = StreamReader(self.client, name, record, schema, self._shared.committer)
        self._shared.readers.add(reader)
        return reader

    def _create(self, committer: Committer, name: str, schema: Schema) -> Record:
        """Create a stream by one commit: both shards, the row of the list, and the row of the lock."""
        client, format_ = self.client, format_for(self.client.config.format, schema)
        if format_ < PRODUCERS:
            raise InvalidUsage(
                f"streams need shards of format {PRODUCERS} or newer, and the settings say {format_}: raise it once "
                "all programs know that format"
            )
        found = client.machine(name).try_fetch()
        if found is not None and not found.state.is_finished():
            raise NameTaken(
                f"there is a shard {name!r} in {client.url} already, and it is not a stream. Nothing was created; "
                "choose another name",
                stream=name, shard=name,
            )  # fmt: skip
        check_free(client, name)
        record = Record(shard_name(client, name))
        beside = [
            committer.lock.row(),
            Wanted(client.machine(record.sealed), lambda _state, _now: c.Create(schema, format_)),
            Wanted(client.machine(record.unsealed), lambda _state, _now: c.Create(unsealed_schema(schema), format_)),
        ]
        self._shared.catalog.change({name: record}, beside, committer.deadline(None))
        return record

    def _load(self, committer: Committer, name: str, record: Record, schema: Schema) -> Stream:
        """Load a stream. What its creation left undone when it failed half way is done first."""
        schema_id(self.client.machine(record.sealed), schema)  # raises SchemaMismatch
        if layer_of(self.client.machine(record.unsealed).fetch().state) != LAYER:
            self.client.set_retention(record.unsealed, RETENTION, layer=LAYER)
        fence(self.client, record, committer.lock)
        return Stream(self.client, name, record, schema, committer.lock, self._shared.owner, committer.room())

    def _writing(self, what: str) -> Committer:
        self._check_open()
        if self._shared.committer is None:
            raise InvalidUsage(f"{what} needs a runtime that writes; this one was opened with mode='read'")
        return self._shared.committer

    def is_stopped(self) -> bool:
        """Whether it takes no more calls, as it was stopped or closed."""
        return self._is_closed or self._shared.is_stopped

    def _check_open(self) -> None:
        if self.is_stopped():
            raise InvalidUsage(
                f"this runtime of the streams of {self.client.url} was stopped. Nothing was changed; open a new one"
            )


def take_over(client: Client, catalog: Catalog, lock: WriterLock) -> None:
    """Fence off all predecessors, in all streams. Call this once the lock is taken."""
    records = [record for record in catalog.fetch().values() if not record.dropped]
    with client.runtime.pool(THREADS, "persist-streams") as pool:
        for _ in pool.map(lambda record: fence(client, record, lock), records):
            pass


def check_columns(schema: Schema) -> Schema:
    """Check that a stream can have this schema, and return it. Raises InvalidUsage."""
    if not check_schema(schema).all_plain or schema.fills:
        raise InvalidUsage(f"a stream has no columns with defaults: got {schema}", schema=schema)
    if schema.constraints:
        raise InvalidUsage(
            f"a stream has no constraints, and this schema has {', '.join(schema.constraints)}: a write is durable "
            "before it is sealed, so it could not be refused any more. Check before you write",
            schema=schema,
        )
    if AT in schema.names:
        raise InvalidUsage(f"a stream has no column {AT!r}: its unsealed updates have their time there", schema=schema)
    return schema
