"""The client: `open()` a location, open shards in it, and look after them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from persist_lib.arguments import (
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
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.state import Version
from persist_lib.errors import InvalidUsage, NotAllowed, PersistError
from persist_lib.ids import CATALOG, ShardId, check_not_kept, parse_shard_id, parse_token
from persist_lib.location import Location
from persist_lib.location.open import Place, scheme_of
from persist_lib.location.stack import open_stack, wrap
from persist_lib.location.wrap.metering import Metrics
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain import Survey, Surveyor, Worker
from persist_lib.maintain.compaction import Engine
from persist_lib.maintain.duties import Maintained, Upkeep
from persist_lib.maintain.worker import Progress
from persist_lib.relation.append_many import Append, append_together
from persist_lib.relation.reader import PURPOSE_LETTERS, ReadHandle
from persist_lib.relation.registration import parse_bounds
from persist_lib.relation.restore import Restored, complete, restore
from persist_lib.relation.writer import Appended, Batching, WriteHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.each import Each
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.admin import Terms, parse_layer
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.shard.outcomes import Verdict, judge
from persist_lib.shard.schemas import create_if_missing, schema_id
from persist_lib.times import TimeLike

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.table.table import Table
    from persist_lib.timeline.tables import Tables
    from persist_lib.timeline.transaction import Transaction


def open(  # noqa: A001 - `persist.open` is what users write
    url: Place | Location,
    consensus: Place | None = None,
    *,
    config: Config | None = None,
    prices: Prices | None = None,
    cache: CacheConfig | None = None,
    runtime: Runtime | None = None,
    read_only: bool = False,
    create: bool = True,
) -> Client:
    """Open a location and return a client of it.

    `url` is where the blobs are: a URL such as `file:./data` or `memory:`, a path (`./data`, or a `pathlib.Path`), or a
    location that is open already. `consensus` is the URL of Consensus, if that is elsewhere. A location that does not
    exist is created, unless `create` is false: then this raises NotFound. A read-only client never writes anything, not
    even a lease. Other clients may therefore delete data that it still reads; it then reads the newest state again and
    continues from there.

    `prices` turn the counted requests and bytes into dollars. Without them an S3 location has S3's list prices, and any
    other location is free; pass `persist.Prices()` to see what it would cost on S3. `cache` is short for the setting of
    that name: with it, the client does not read the same bytes from the location twice.
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


class Client(Upkeep, Terms):
    """One process's view of a location. Safe to use from several threads, and as a context manager.

    `close` retires the readers and writers that this client registered.
    """

    def __init__(
        self,
        url: Place | Location,
        consensus: Place | None,
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
        self._inner: LayerClient | None = None
        self._surveyor = Surveyor(
            stack.blob, stack.reads, stack.consensus, self._machines.get, config, runtime, self.policy(),
            read_only=self.read_only,
        )  # fmt: skip
        self._handles: weakref.WeakValueDictionary[int, WriteHandle | ReadHandle] = weakref.WeakValueDictionary()
        self._opened = itertools.count()
        self._tables: Tables | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """The URL of the blobs. Any process can open it."""
        return self.location.url

    @property
    def consensus_url(self) -> str:
        """The URL of Consensus. Any process can open it."""
        return self.location.consensus_url

    def machine(self, name: str) -> Machine:
        """The shard's machine: one per shard and client, shared by all handles."""
        self._check_open()
        shard = parse_shard_id(name)
        return self._machines.get(shard) or self._made(self._machines, shard)

    def _made(self, machines: dict[ShardId, Machine], shard: ShardId, member: str = "") -> Machine:
        """A machine that is there from now on.

        SUBTLE: this takes no lock, as a fork could happen while another thread holds it. When two threads make a
        machine at once, both get the first one.
        """
        machine = Machine(shard, self.blob, self.consensus, self.config, self.runtime, self.reads, member)
        found = machines.setdefault(shard, machine)
        self._check_open()  # a `close` that comes after this check finds the machine
        return found

    def metrics(self) -> Metrics:
        """The operations that this client has asked of its location so far, by kind, and what they cost.

        Each attempt counts, retries included.
        """
        operations = self._meter.counts()
        cost = sum((count.cost for count in operations.values()), self._meter.elsewhere())
        return Metrics(operations, cost, self._cache.counts() if self._cache else None, self.leases.failures)

    def charge(self, cost: Cost) -> None:
        """Count the cost of work that another process, such as a Spark task, did for this client.

        It is added to this client's metrics, and to the cost of the call that is under way.
        """
        check_type(cost, Cost, "cost", "the cost that a call answered")
        for name in cost.__struct_fields__:
            check = parse_number if name == "dollars" else parse_integer
            check(getattr(cost, name), name)
        self._meter.charge(cost)

    def shards(self) -> list[str]:
        """The names of all shards, finished ones included."""
        self._check_open()
        return sorted(self.consensus.list_keys())

    def survey(
        self,
        *,
        done: Mapping[str, Iterable[str]] = MappingProxyType({}),
        most: int | None = None,
        seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Survey:
        """Find out on which shards which duty has work. Costs one request, and a few for each shard that has changed.

        What the others call for was remembered: by this client, and in the location, unless that is read-only. Changed
        shards are read until there are none, until `most` were read, or until `seconds` have passed; the oldest look
        comes first. `done` names duties that the caller has just carried out, and on which shards, with nothing left to
        do: these are read first, and the duty is not due on them until they change. Changes no shard. Damage in a shard
        does not stop the survey: the answer lists it in `unread`.
        """
        self._check_open()
        found = self._surveyor.survey(done, most, seconds, progress)
        self._check_open()  # a `close` in the meantime made every shard unreadable
        return found

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
        create_if_missing(machine, schema, self.config.format, None if layer else partial(check_free, self, name))
        handle = WriteHandle(machine, self.leases, schema, schema_id(machine, schema), batching, owner, layer=layer)
        self._handles[next(self._opened)] = handle
        return handle

    def open_reader(self, name: str, schema: Schema | None = None, *, purpose: str = "") -> ReadHandle:
        """Return a handle to read a shard, in the given `schema` or in the shard's newest.

        `purpose` is a short text that lists of readers show. Raises NotFound when there is no such shard, and
        SchemaMismatch when the shard does not have `schema`.
        """
        machine, purpose = self.machine(name), parse_text(purpose, "purpose", PURPOSE_LETTERS)
        if schema is not None:
            check_schema(schema)
        state = machine.fetch().state
        machine.check_same(state)
        schemas = state.schemas
        if schema is not None:
            schema_id(machine, schema)
        completes = None if self.read_only else partial(complete, machine, partial(self.open_writer, name))
        handle = ReadHandle(
            machine, self.leases, schemas[-1] if schema is None else schema, (self.url, self.consensus_url),
            read_only=self.read_only, purpose=purpose, completes=completes,
        )  # fmt: skip
        self._handles[next(self._opened)] = handle
        return handle

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

    def controller(self, *, catalog: str | None = None) -> Controller:
        """The controller of this location's collections: it creates, changes, describes, hands over and drops them.

        `catalog` names the shard that lists them, if it is not the usual one.
        """
        # Collections stand on this client, not the other way round: this one way up is by name.
        self._check_open()
        if catalog is not None:
            self.machine(catalog)  # raises InvalidName
        storage = import_module("persist_lib.catalog")
        found: Controller = storage.Controller(self) if catalog is None else storage.Controller(self, catalog=catalog)
        return found

    def table(self, name: str, schema: Schema | None = None) -> Table:
        """Open a table, whatever carries it: a shard, a collection, or a timeline.

        With a `schema`, one that is not there is made, on a shard; its times are milliseconds where the schema does not
        say so. With columns that it had before some were added, it is read and written in these. Raises SchemaMismatch
        when the table has another schema, and NotFound when it is not there and no schema is given; then nothing is
        changed.
        """
        from persist_lib.table.opening import open_carrier, open_promoted  # noqa: PLC0415 - tables stand on the client
        from persist_lib.table.table import Table  # noqa: PLC0415 - as they do

        self._check_open()
        carrier = open_carrier(self, name, schema, self._timelines)
        return Table(carrier, self._check_open, partial(open_promoted, self, self._timelines))

    def tables(self) -> list[str]:
        """The names of all tables, whatever carries them, sorted.

        Costs a list, and a read of each shard that this client does not know yet.
        """
        from persist_lib.table.opening import tables_in  # noqa: PLC0415 - tables stand on the client

        return tables_in(self)

    @overload
    def maintain(
        self, name: None = None, *, policy: Policy | None = None, engine: Engine | None = None, dry_run: bool = False,
        alone: bool = False,
    ) -> dict[str, Maintained]: ...  # fmt: skip
    @overload
    def maintain(
        self, name: str, *, policy: Policy | None = None, engine: Engine | None = None, dry_run: bool = False,
        alone: bool = False,
    ) -> Maintained: ...  # fmt: skip
    def maintain(
        self, name: str | None = None, *, policy: Policy | None = None, engine: Engine | None = None,
        dry_run: bool = False, alone: bool = False,
    ) -> Maintained | dict[str, Maintained]:  # fmt: skip
        """Carry out all duties of upkeep on a shard, or on all that there is, before this call returns.

        Without a name: first those of collections and timelines, then those of each shard; the answers are by shard.
        What fails stops none of the others, and the gravest failure is raised at the end. That error keeps its own
        type, and has two more fields: `failed` (messages, by duty or by shard) and `done` (answers, by the same). With
        `dry_run` nothing is changed, and the answers say what would be done. May be repeated at any time. `alone` is as
        in `compact`.
        """
        one = partial(super().maintain, policy=policy, engine=engine, dry_run=dry_run, alone=alone)
        if name is not None:
            return one(name)
        tried = Each[Any]()
        if self.machine(CATALOG).try_fetch() is not None:
            tried.add(["collections and timelines"], lambda _: self.controller().tend(dry_run=dry_run), PersistError)
            tried.done.clear()
        tried.add(self.shards(), one, PersistError)
        tried.check("maintain: {} shards")
        return tried.done

    def transaction(self, timeline: str = "default", *, timeout: float | None = None) -> Transaction:
        """Begin a transaction over the tables of a timeline with a WAL: all of its changes at one time, or none.

            with db.transaction() as t:
                t.update("accounts", {"cents": pc.field("cents") - 10}, keys=[1])
                t.insert("entries", [{"entry": "e1", "cents": 10}])

        `timeout` is in seconds, for each of its calls. Raises InvalidUsage where there is no such timeline, or it has
        no WAL.
        """
        self._check_open()
        return self._timelines().transaction(timeline, timeout=timeout)

    def _timelines(self) -> Tables:
        """The tables of timelines, of which this client has each open once."""
        if self._tables is None:
            self._tables = self.controller().tables()
        return self._tables

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

    def heartbeat(self) -> None:
        """Renew the leases that are due, before this call returns. A background thread does the same by itself."""
        self._check_open()
        self.leases.tick()

    def close(self) -> None:
        """Close all handles and release the location. Idempotent. Later calls raise an error that says it is closed."""
        handles = [partial(self._close_handle, number) for number in reversed(list(self._handles))]
        _do_all([*handles, self.leases.close, self._end, self.location.close])

    def _close_handle(self, number: int) -> None:
        if (handle := self._handles.get(number)) is not None:
            try:
                handle.close()
            except Exception:
                self._handles.pop(number, None)
                raise
            self._handles.pop(number, None)  # last: after an interrupt the handle is still there for the next `close`

    def _end(self) -> None:
        self._closed = True
        inner = {} if self._inner is None else self._inner.members
        for machine in [*self._machines.values(), *inner.values()]:
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


class LayerClient(Client):
    """A client as collections use it: it names whose members their shards are. All else is the client's that it is of.

    A member takes nothing by its own name, also not of a handle that the same program opened by that before.
    """

    def __init__(self, outer: Client) -> None:
        self._outer = outer
        self.members: dict[ShardId, Machine] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def machine(self, name: str) -> Machine:
        return self.members.get(ShardId(name)) or self._outer.machine(name)

    def know_members(self, shards: Iterable[str], member: str) -> None:
        """Know that these shards may be members, and whose."""
        for name in shards:
            if ShardId(name) not in self.members:
                self._made(self.members, ShardId(name), member)

    def close(self) -> None:
        self._outer.close()


def for_layers(client: Client) -> LayerClient:
    """The same client as collections use it."""
    if isinstance(client, LayerClient):
        return client
    if client._inner is None:  # noqa: SLF001 - of this module
        client._inner = LayerClient(client)  # noqa: SLF001
    return client._inner  # noqa: SLF001


def check_free(client: Client, name: str) -> None:
    """Raise NameTaken if there is a collection of this name, so that no shard of it should be made or written.

    Only the usual catalog is looked at, if this client may read it. Where the shard is there already, a collection that
    is just being given the name is refused it: one change of the catalog decides.
    """
    try:
        if client.machine(CATALOG).try_fetch() is None:
            return
    except NotAllowed:  # a shard server gives this client no right to know what collections there are
        return
    import_module("persist_lib.catalog.effects").check_free(client, name)


def _do_all(steps: Sequence[Callable[[], None]]) -> None:
    """Do the steps one after the other, each even if those before it failed.

    SUBTLE: this is no stack of callbacks (ExitStack). An interrupt while such a stack is filled would make it do the
    last steps without the first. It halves, as a client may have more handles than Python has room for calls.
    """
    if len(steps) > 1:
        half = len(steps) // 2
        try:
            _do_all(steps[:half])
        finally:
            _do_all(steps[half:])
    elif steps:
        steps[0]()
