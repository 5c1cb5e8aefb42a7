"""The shard level, for those who need frontiers: handles of single shards, and all that these answer.

A table needs none of it. A shard is one definite collection of updates, written by appends that say which times they
cover, and read as of any time that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TypeVar
from weakref import WeakValueDictionary

from persist_lib.arguments import check_type, parse_flag, parse_seconds, parse_text, shown
from persist_lib.config import Config
from persist_lib.core.state import Version
from persist_lib.errors import InvalidUsage
from persist_lib.ids import check_not_kept, parse_token
from persist_lib.location import Location
from persist_lib.location.wrap.deadline import RetryingConsensus
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain import Worker
from persist_lib.maintain.client_calls import Upkeep
from persist_lib.relation.changes import Changes
from persist_lib.relation.listen import Listen, Progress, Updates
from persist_lib.relation.reader import PURPOSE_LETTERS, ReadHandle
from persist_lib.relation.registration import parse_bounds
from persist_lib.relation.restore import Restored, complete, restore
from persist_lib.relation.snapshot import Snapshot, Split
from persist_lib.relation.writer import Append, Appended, Batching, Changed, WriteHandle, append_together
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.evolution import fresh
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.admin import Terms, create_if_missing, known_schema, parse_layer
from persist_lib.shard.commit import Machines
from persist_lib.shard.leases import Leases
from persist_lib.shard.outcomes import Verdict, judge
from persist_lib.times import TimeLike

__all__ = [
    "Append",
    "Appended",
    "Batching",
    "Changed",
    "Changes",
    "Listen",
    "Progress",
    "ReadHandle",
    "Restored",
    "Shards",
    "Snapshot",
    "Split",
    "Updates",
    "Verdict",
    "WriteHandle",
]

H = TypeVar("H", WriteHandle, ReadHandle)


class Shards(Upkeep, Terms):
    """The calls of a client about single shards."""

    config: Config
    runtime: Runtime
    consensus: RetryingConsensus
    leases: Leases
    read_only: bool

    location: Location
    _machines: Machines
    _opened: Iterator[int]
    _handles: WeakValueDictionary[int, WriteHandle | ReadHandle]

    @property
    def url(self) -> str:
        """The URL of the blobs. Any process can open it."""
        return self.location.url

    @property
    def consensus_url(self) -> str:
        """The URL of Consensus. Any process can open it."""
        return self.location.consensus_url

    def _check_open(self) -> None:
        self._machines.check_open()

    def _check_free(self, name: str) -> None:
        """Raise NameTaken if there is a collection of this name, so that no shard of it should be made or written."""
        import_module("persist_lib.catalog.effects").check_free(self, name)

    def _keeping(self, handle: H) -> H:
        """The same handle, which ends with the client."""
        self._handles[next(self._opened)] = handle
        return handle

    def _writable(self, what: str) -> None:
        if self.read_only:
            raise InvalidUsage(f"{what} needs a client that may write; this one was opened with read_only=True")

    def shards(self) -> list[str]:
        """The names of all shards, finished ones included."""
        self._check_open()
        return sorted(self.consensus.list_keys())

    def open_shard(self, name: str, schema: Schema) -> tuple[WriteHandle, ReadHandle]:
        """Return handles to write and to read a shard. Creates the shard if it does not exist.

        Raises SchemaMismatch when the shard has another schema; nothing is changed then.
        """
        return self.open_writer(name, check_schema(schema)), self.open_reader(name, schema)

    def open_writer(
        self, name: str, schema: Schema, *, batching: Batching | None = None, owner: str = "", layer: str = ""
    ) -> WriteHandle:
        """Return a handle to write to a shard. Creates the shard if it does not exist.

        With `batching`, appends that `append_async` accepts are held back until they have that many bytes or that age
        (in seconds). Without it, each is written as soon as the append before it is done. `owner` is a short text that
        lists of writers show; shards of formats before 3 do not keep it. Raises SchemaMismatch when the shard has
        another schema, and OfLayer for the names that layers above shards keep for their own (`_catalog`,
        `streams.list`, …). `layer` is theirs to say.
        """
        self._writable("open_writer")
        check_schema(schema)
        owner, layer = parse_text(owner, "owner", PURPOSE_LETTERS), parse_layer(layer)
        if batching is not None:
            check_type(batching, Batching, "batching", "persist.Batching(bytes=8 << 20, age_s=1.0)")
        machine = self.machine(name)
        check_not_kept(machine.shard, layer)
        made = schema if layer else fresh(schema)
        create_if_missing(machine, made, self.config.format, None if layer else partial(self._check_free, name))
        number, known = known_schema(machine, schema)
        handle = WriteHandle(machine, self.leases, known, number, batching, owner, layer=layer)
        return self._keeping(handle)

    def open_reader(self, name: str, schema: Schema | None = None, *, purpose: str = "") -> ReadHandle:
        """Return a handle to read a shard, in the given `schema` or in the shard's newest.

        `purpose` is a short text that lists of readers show. Raises NotFound when there is no such shard, and
        SchemaMismatch when the shard does not have `schema`.
        """
        machine, purpose = self.machine(name), parse_text(purpose, "purpose", PURPOSE_LETTERS)
        if schema is not None:
            check_schema(schema)
        is_registered = not self.read_only and schema is not None  # by a command
        state = machine.state if is_registered and machine.is_recent else machine.newest().state
        machine.check_same(state)
        found = state.schemas[-1] if schema is None else known_schema(machine, schema)[1]
        completes = None if self.read_only else partial(complete, machine, partial(self.open_writer, name))
        handle = ReadHandle(
            machine, self.leases, found, (self.url, self.consensus_url),
            read_only=self.read_only, purpose=purpose, completes=completes,
        )  # fmt: skip
        return self._keeping(handle)

    def worker(self, name: str) -> Worker:
        """A maintenance worker on a shard, for use in a `with` block, which retires it at the end."""
        self._writable("worker")
        return Worker(self.machine(name), self.leases)

    def compare_and_append_many(
        self, appends: Iterable[Append], *, timeout: float | None = None, token: bytes | None = None
    ) -> list[Appended]:
        """Append to several shards at once. Either all of the appends are committed or none, even after a crash.

            client.compare_and_append_many([Append(orders, rows, 5, 6), Append(payments, others, 2, 3)])

        Each `Append` has the arguments of `write.compare_and_append(updates, expected_upper, new_upper)`. The writers
        must be handles of this client, each of another shard. Returns one `Appended` for each, in the same order; they
        have the token and the cost in common. `timeout` is in seconds.

        When one shard refuses its append (UpperMismatch, AlreadyProduced, LeaseExpired or ShardFinished, which name the
        shard), all of them are refused and nothing was written. After Indeterminate, repeat the call with the `token`
        that the error carries: the answer then says what happened to all of them. Raises InvalidUsage, before anything
        is uploaded, where Consensus has no transactions (S3 alone).
        """
        self._check_open()
        self._writable("compare_and_append_many")
        deadline = self.runtime.deadline(self.config.timeout_s if timeout is None else parse_seconds(timeout))
        token = None if token is None else parse_token(token)
        if not isinstance(appends, Iterable) or isinstance(appends, (str, bytes, Mapping)):
            raise InvalidUsage(f"appends must be a list of persist.Append: got {shown(appends)}")
        return append_together(list(appends), self.consensus, self.machine, deadline, token)

    @charged
    def restore(self, name: str, to: TimeLike, *, dry_run: bool = False, timeout: float | None = None) -> Restored:
        """Make a shard's contents what they were as of the time `to`, by one append of the difference at upper.

        History stays: what was written since is still read as of its times. If other writers append in the meantime,
        the difference is found again, until `timeout` seconds have passed. Appends nothing where the contents are the
        same already, so that the call may be repeated. With `dry_run` nothing is appended, and the answer says what
        would be: counts, and a sample of the rows.

        Where times are a clock, a time that the store's clock has passed may be restored to though nothing was written
        since: then the append, at now, also says that nothing comes there any more.

        Raises SinceViolation for a time before since, NotComplete for one that may still change, UpperMismatch for a
        shard that is closed for writing, TimedOut (nothing was appended), and NotFound.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        deadline = self.runtime.deadline(self.config.timeout_s if timeout is None else parse_seconds(timeout))
        if not dry_run:
            self._writable("restore")
        time = self._times(name, to).as_of(to, "to")
        reader = partial(self.open_reader, name, purpose="restore")
        return restore(reader, None if dry_run else partial(self.open_writer, name), time, deadline)

    def judge_append(self, name: str, token: bytes, expected_upper: object, new_upper: object) -> Verdict:
        """Find out what became of the append of `[expected_upper, new_upper)` with this token. Changes nothing.

        Use it for an append with an unknown outcome. Any process may have sent it, at any time in the past. The
        `answer` is `committed` (with its `seqno`), `never`, `open` (not committed yet, but it may still be) or
        `unknown`; the first two are certain. To decide one that is open, repeat the append with its token. Raises
        NotFound when there is no such shard.
        """
        token, machine = parse_token(token), self.machine(name)
        return judge(
            machine, token, *parse_bounds(expected_upper, new_upper, self._times(name, expected_upper, new_upper))
        )

    def inspect(self, name: str) -> Version:
        """Return the newest version of a shard's state: its metadata, unchanged. Raises NotFound."""
        return self.machine(name).fetch()
