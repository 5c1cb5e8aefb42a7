"""The client: `open()` a location, open shards in it, and look after them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from persist_lib.arguments import (
    check_callable,
    check_type,
    not_pickled,
    parse_flag,
    parse_integer,
    parse_number,
    parse_seconds,
    parse_text,
    shown,
)
from persist_lib.config import CacheConfig, Config
from persist_lib.core.cost import Cost, Prices
from persist_lib.core.formats import FIRST, NEWEST
from persist_lib.core.plan.compaction import Policy, policy_of
from persist_lib.core.state import Version
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import ShardId, parse_shard_id, parse_token
from persist_lib.location import Location
from persist_lib.location.open import scheme_of
from persist_lib.location.stack import open_stack, wrap
from persist_lib.location.wrap.metering import Metrics
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain import (
    Adder,
    Audited,
    Census,
    Collected,
    Compacted,
    Engine,
    Expired,
    Maintained,
    Repaired,
    Retained,
    RolledUp,
    Scrubbed,
    Upgraded,
    Worker,
    audit_orphans,
    collect,
    compact,
    expire,
    maintain,
    repair,
    retain,
    roll_up,
    scrub,
    take_census,
    upgrade,
)
from persist_lib.read.handle import ReadHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.shard.outcomes import Verdict, judge
from persist_lib.shard.schemas import create_if_missing, schema_id
from persist_lib.shard.terms import Terms
from persist_lib.write.appending import parse_bounds
from persist_lib.write.handle import Appended, Batching, WriteHandle
from persist_lib.write.many import Append, append_together

Progress = Callable[[int, int], None]
PURPOSE_LETTERS = 200


def open(  # noqa: A001 - `persist.open` is what users write
    url: str | Location,
    consensus: str | None = None,
    *,
    config: Config | None = None,
    prices: Prices | None = None,
    cache: CacheConfig | None = None,
    runtime: Runtime | None = None,
    read_only: bool = False,
    create: bool = True,
) -> Client:
    """Open a location: `file:./data`, `memory:`, or blobs at `url` and Consensus elsewhere; or one that is open
    already.

    A location that does not exist is created, unless `create` is false (then NotFound). A read-only client never writes
    anything anywhere, not even a lease: what it reads may be collected under its eyes, and it then looks again at the
    newest state.

    `prices` turn what is counted into dollars. Without them an S3 location has S3's list prices, and any other one is
    free; `persist.Prices()` says what it would cost on S3. With a `cache` (short for the setting), what was read once
    is not asked for again.
    """
    config = Config() if config is None else check_type(config, Config, "config", "persist.Config(lease_ms=60_000)")
    runtime = Runtime() if runtime is None else check_type(runtime, Runtime, "runtime", "persist.Runtime()")
    if prices is not None:
        check_type(prices, Prices, "prices", "persist.Prices(egress_gib=0.09)")
    if cache is not None:
        check_type(cache, CacheConfig, "cache", "persist.CacheConfig(memory_bytes=1 << 30)")
        config = config.model_copy(update={"cache": cache})
    read_only, create = parse_flag(read_only, "read_only"), parse_flag(create, "create")
    return Client(url, consensus, config, runtime, prices=prices, read_only=read_only, create=create)


class Client(Terms):
    """One process's view of a location. Thread-safe; a context manager; `close` retires what it registered."""

    def __init__(
        self,
        url: str | Location,
        consensus: str | None,
        config: Config,
        runtime: Runtime,
        *,
        prices: Prices | None,
        read_only: bool,
        create: bool,
    ) -> None:
        if not isinstance(url, Location):
            create = create and not read_only
            stack = open_stack(url, consensus, config, runtime, prices=prices, create=create, read_only=read_only)
        elif consensus is not None:
            raise InvalidUsage("a location that is open has its consensus already; leave out consensus=")
        else:
            stack = wrap(url, config, runtime, prices=prices)
        self.location = location = stack.location
        self.prices = prices or scheme_of(location.url).prices
        self.config = config
        self.runtime = runtime
        self.read_only = read_only or location.read_only
        self.blob, self.consensus, self.reads = stack.blob, stack.consensus, stack.reads
        self._meter, self._cache = stack.meter, stack.cache
        shareable = not location.consensus_url.startswith("memory:")
        self.leases = Leases(config, runtime, (location.url, location.consensus_url) if shareable else None)
        self._machines: dict[ShardId, Machine] = {}
        self._handles: weakref.WeakValueDictionary[int, WriteHandle | ReadHandle] = weakref.WeakValueDictionary()
        self._opened = itertools.count()
        self._closed = False

    @property
    def url(self) -> str:
        """Where the blobs are, for any process."""
        return self.location.url

    @property
    def consensus_url(self) -> str:
        """Where Consensus is, for any process."""
        return self.location.consensus_url

    def machine(self, name: str) -> Machine:
        """The shard's machine: one per shard and client, shared by all handles."""
        self._check_open()
        shard = parse_shard_id(name)
        if (found := self._machines.get(shard)) is None:
            # SUBTLE: no lock, which a fork could find held. Of two machines made at once both threads get the first.
            machine = Machine(shard, self.blob, self.consensus, self.config, self.runtime, self.reads)
            found = self._machines.setdefault(shard, machine)
            self._check_open()  # who closes after this finds the machine
        return found

    def metrics(self) -> Metrics:
        """What this client asked of its location so far, by kind of operation; each attempt counts."""
        operations = self._meter.counts()
        cost = sum((count.cost for count in operations.values()), self._meter.elsewhere())
        return Metrics(operations, cost, self._cache.counts() if self._cache else None, self.leases.failures)

    def charge(self, cost: Cost) -> None:
        """Count what another process spent for this client, and for the call that is under way, as Spark's tasks do."""
        check_type(cost, Cost, "cost", "the cost that a call answered")
        for name in cost.__struct_fields__:
            check = parse_number if name == "dollars" else parse_integer
            check(getattr(cost, name), name)
        self._meter.charge(cost)

    def shards(self) -> list[str]:
        """The names of all shards, finished ones included."""
        self._check_open()
        return sorted(self.consensus.list_keys())

    def open_shard(self, name: str, schema: Schema) -> tuple[WriteHandle, ReadHandle]:
        """Handles to write and read a shard, which is created if there is none.

        Raises SchemaMismatch when the shard has another schema; nothing is changed then.
        """
        return self.open_writer(name, check_schema(schema)), self.open_reader(name, schema)

    def open_writer(self, name: str, schema: Schema, *, batching: Batching | None = None) -> WriteHandle:
        """A handle to write; creates the shard if there is none.

        With `batching`, what `append_async` accepts is held back until it is many bytes or old; without, it is written
        as soon as the append before it is done.
        """
        self._writable("open_writer")
        check_schema(schema)
        if batching is not None:
            check_type(batching, Batching, "batching", "persist.Batching(bytes=8 << 20, age_s=1.0)")
        machine = self.machine(name)
        create_if_missing(machine, schema, self.config.format)
        handle = WriteHandle(machine, self.leases, schema, schema_id(machine, schema), batching)
        self._handles[next(self._opened)] = handle
        return handle

    def open_reader(self, name: str, schema: Schema | None = None, *, purpose: str = "") -> ReadHandle:
        """A handle to read, in the given schema or the newest. Raises NotFound when there is no such shard."""
        machine, purpose = self.machine(name), parse_text(purpose, "purpose", PURPOSE_LETTERS)
        if schema is not None:
            check_schema(schema)
        schemas = machine.fetch().state.schemas
        if schema is not None:
            schema_id(machine, schema)
        handle = ReadHandle(
            machine, self.leases, schemas[-1] if schema is None else schema, (self.url, self.consensus_url),
            read_only=self.read_only, purpose=purpose,
        )  # fmt: skip
        self._handles[next(self._opened)] = handle
        return handle

    def worker(self, name: str) -> Worker:
        """A maintenance worker for a `with` block."""
        self._writable("worker")
        return Worker(self.machine(name), self.leases)

    def policy(self, policy: Policy | None = None) -> Policy:
        """How this client plans: `policy`, or its settings. What `policy` leaves open is as the settings say."""
        if policy is not None:
            check_type(policy, Policy, "policy", "persist.Policy(weight=0.5)")
        return policy_of(self.config, policy, self.prices)

    def census(self, name: str, policy: Policy | None = None) -> Census:
        """What the shard is made of, in numbers."""
        return take_census(self.machine(name), self.policy(policy))

    def maintain(
        self,
        name: str,
        *,
        policy: Policy | None = None,
        engine: Engine | None = None,
        dry_run: bool = False,
    ) -> Maintained:
        """All duties, here and now. One that fails keeps no other from being done; the gravest is raised at the end.

        The error is of that failure's own kind, and has `failed` (a message) and `done` (the answer) by duty.
        """
        policy, dry_run = self.policy(policy), parse_flag(dry_run, "dry_run")
        _check_engine(engine)
        return maintain(self.machine(name), self.leases, policy=policy, engine=engine, dry_run=dry_run)

    @charged
    def compact(
        self,
        name: str,
        *,
        policy: Policy | None = None,
        engine: Engine | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Compacted:
        """Merge what is in debt."""
        policy, dry_run = self.policy(policy), parse_flag(dry_run, "dry_run")
        _check_engine(engine)
        _check_progress(progress)
        with Worker(self.machine(name), self.leases) as worker:
            return compact(worker.machine, worker, policy=policy, engine=engine, dry_run=dry_run, progress=progress)

    @charged
    def roll_up(self, name: str, *, force: bool = False, dry_run: bool = False) -> RolledUp:
        """Copy the state to Blob, if that is due."""
        force, dry_run = parse_flag(force, "force"), parse_flag(dry_run, "dry_run")
        with Worker(self.machine(name), self.leases) as worker:
            return roll_up(worker.machine, worker, force=force, dry_run=dry_run)

    def expire(self, name: str, *, dry_run: bool = False) -> Expired:
        """Retire readers and writers whose lease has ended."""
        return expire(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"))

    def retain(self, name: str, *, dry_run: bool = False) -> Retained:
        """Move the retention hold as the policy says."""
        return retain(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"))

    def collect(self, name: str, *, dry_run: bool = False, progress: Progress | None = None) -> Collected:
        """Delete the garbage that nobody can reach, and truncate the log."""
        _check_progress(progress)
        return collect(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"), progress=progress)

    def audit_orphans(self, name: str, *, dry_run: bool = False, progress: Progress | None = None) -> Audited:
        """Delete objects that nobody can ever link."""
        _check_progress(progress)
        return audit_orphans(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"), progress=progress)

    def scrub(
        self, name: str, *, after: int = 0, engine: Adder | None = None, progress: Progress | None = None
    ) -> Scrubbed:
        """Re-read and verify every batch. Changes nothing."""
        _check_engine(engine)
        _check_progress(progress)
        after = parse_integer(after, "after", 0, MAX_TIME)
        return scrub(self.machine(name), after=after, engine=engine, progress=progress)

    def compare_and_append_many(
        self, appends: Iterable[Append], *, timeout: float | None = None, token: bytes | None = None
    ) -> list[Appended]:
        """Append to several shards at once: all of it or nothing, for every reader and after every crash.

            client.compare_and_append_many([Append(orders, rows, 5, 6), Append(payments, others, 2, 3)])

        Each is as `write.compare_and_append(updates, expected_upper, new_upper)`, on writers of this client, each of
        another shard; the answers are in their order, with one token and cost in common. What one shard refuses
        (UpperMismatch, LeaseExpired, ShardFinished: each says which) is refused for all, and nothing was written. After
        Indeterminate, repeat the call with the `token` it carries: it answers what happened, for all. InvalidUsage
        where Consensus has no transactions (S3 alone), before anything is uploaded.
        """
        self._check_open()
        self._writable("compare_and_append_many")
        deadline = self.runtime.deadline(self.config.timeout_s if timeout is None else parse_seconds(timeout))
        token = None if token is None else parse_token(token)
        if not isinstance(appends, Iterable) or isinstance(appends, (str, bytes, Mapping)):
            raise InvalidUsage(f"appends must be a list of persist.Append: got {shown(appends)}")
        return append_together(list(appends), self.consensus, self.machine, deadline, token)

    def judge_append(self, name: str, token: bytes, expected_upper: object, new_upper: object) -> Verdict:
        """What became of the append of `[expected_upper, new_upper)` with this token. Changes nothing.

        For an append with an unknown outcome, by whatever process and however long ago. The `answer` is `committed`
        (with its `seqno`), `never`, `open` (not by now, but it may still come) or `unknown`; the first two are certain.
        To decide what is open, repeat the append with its token. Raises NotFound when there is no such shard.
        """
        return judge(self.machine(name), parse_token(token), *parse_bounds(expected_upper, new_upper))

    def upgrade(self, name: str, to: int = NEWEST, *, dry_run: bool = False) -> Upgraded:
        """Write the shard's log in a newer format from now on; the newest that this release knows, by default.

        For when every program that uses the shard knows that format: older ones refuse the shard from then on, with
        NewerFormat, before they do anything. There is no way back. A shard that has the format, or is finished, is left
        as it is. Raises InvalidUsage for a format that this release does not know, or that is older than the shard's.
        """
        to, dry_run = parse_integer(to, "to", FIRST, NEWEST), parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("upgrade")
        return upgrade(self.machine(name), to, dry_run=dry_run)

    def repair(self, name: str, *, dry_run: bool = False) -> Repaired:
        """Take back the newest versions of a shard that nobody can read, and all after them. Do a dry run first.

        For a log that is damaged, or holds a row that no reader decodes: up to the first such version the shard is as
        it was, and what was appended from there on is gone. Only for when nobody else uses the shard: clients that have
        seen what is taken back raise HistoryRegressed from then on. Changes nothing where every version can be read.

        Raises NewerFormat where a newer release wrote the log: upgrade instead. Raises Missing when a repair would not
        make the shard readable.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("repair")
        return repair(self.machine(name), dry_run=dry_run)

    def inspect(self, name: str) -> Version:
        """The newest version of a shard's state, as it is."""
        return self.machine(name).fetch()

    def heartbeat(self) -> None:
        """Renew leases that are due, here and now: what the background does by itself."""
        self._check_open()
        self.leases.tick()

    def close(self) -> None:
        """Retire all handles and release the location. Idempotent. Whatever is called after that says so."""
        handles = [partial(self._close_handle, number) for number in reversed(list(self._handles))]
        _do_all([*handles, self.leases.close, self._end, self.location.close])

    def _close_handle(self, number: int) -> None:
        if (handle := self._handles.get(number)) is not None:
            try:
                handle.close()
            except Exception:
                self._handles.pop(number, None)
                raise
            self._handles.pop(number, None)  # after an interrupt it is still there, to be closed by the next call

    def _end(self) -> None:
        self._closed = True
        for machine in list(self._machines.values()):
            machine.close(self._was_closed())

    def _was_closed(self) -> str:
        return f"this client of {self.url} was closed; open a new one with persist.open"

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidUsage(self._was_closed(), url=self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for handle in list(self._handles.values()):
                if isinstance(handle, WriteHandle):
                    handle.mute()
        self.close()

    __reduce__ = not_pickled(
        "A client", "Pass client.url and client.consensus_url, or the splits of a snapshot, and open them there"
    )

    def _writable(self, what: str) -> None:
        if self.read_only:
            raise InvalidUsage(f"{what} needs a client that may write; this one was opened with read_only=True")


def _check_engine(engine: object) -> None:
    if engine is not None:
        check_callable(engine, "engine", "merge tasks that answers their results, or None")


def _check_progress(progress: object) -> None:
    if progress is not None:
        check_callable(progress, "progress", "how many are done and how many there are, or None")


def _do_all(steps: Sequence[Callable[[], None]]) -> None:
    """One after the other, each whatever becomes of those before it.

    SUBTLE: no stack of callbacks. Interrupted while it is filled, it would do the last steps without the first.
    """
    if steps:
        try:
            steps[0]()
        finally:
            _do_all(steps[1:])
