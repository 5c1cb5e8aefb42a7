"""The client: `open()` a location, open shards in it, and look after them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
)
from persist_lib.config import CacheConfig, Config, usual_where
from persist_lib.core.cost import Cost, Prices
from persist_lib.core.plan.compaction import Policy
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.ids import CATALOG, ShardId
from persist_lib.location import Location
from persist_lib.location.open import Place, scheme_of
from persist_lib.location.stack import open_stack, wrap
from persist_lib.location.wrap.metering import Metrics
from persist_lib.maintain import Survey, Surveyor
from persist_lib.maintain.duties import Maintained
from persist_lib.maintain.merge_tasks import Engine
from persist_lib.maintain.pauses import Pauses
from persist_lib.maintain.worker import Progress
from persist_lib.relation.ordered_writer import mute
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.each import Each
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine, Machines
from persist_lib.shard.leases import Leases
from persist_lib.shard.log import IN_TURN
from persist_lib.shards import Shards
from persist_lib.telemetry import look

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.sources.sources import Sources
    from persist_lib.streams.lifecycle import ClientStreams
    from persist_lib.streams.stream_reader import StreamReader
    from persist_lib.streams.stream_writer import StreamWriter
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
    look()
    return Client(url, consensus, config, runtime, prices=prices, read_only=read_only, create=create)


class Client(Shards):
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
        self._is_far = scheme_of(location.url).tells_requests
        config = usual_where(config, reads=self._is_far, rows=scheme_of(location.consensus_url).tells_requests)
        self.prices = prices or scheme_of(location.url).prices
        self.config = config
        self.runtime = runtime
        self.read_only = read_only or location.read_only
        self.blob, self.consensus, self.reads = stack.blob, stack.consensus, stack.reads
        self._meter, self._cache, self._lookups = stack.meter, stack.cache, stack.lookups
        shareable = not location.consensus_url.startswith("memory:")
        self.leases = Leases(config, runtime, (location.url, location.consensus_url) if shareable else None)
        self._machines = self.machine = Machines(weakref.WeakMethod(self._make_machine), self.url)
        self._inner: LayerClient | None = None
        self._pauses = Pauses(
            stack.blob, stack.consensus, runtime, config.timeout_s, partial(_owner_names, weakref.ref(self))
        )  # fmt: skip
        self._surveyor = Surveyor(
            stack.blob, stack.reads, stack.consensus, self._machines.get, config, runtime, self.policy(),
            read_only=self.read_only, pauses=self._pauses,
        )  # fmt: skip
        self._handles = weakref.WeakValueDictionary()
        self._opened = itertools.count()
        self._tables: Tables | None = None
        self._streams: dict[str, ClientStreams] = {}

    def _make_machine(self, shard: ShardId, member: str) -> Machine:
        machine = Machine(shard, self.blob, self.consensus, self.config, self.runtime, self.reads, member)
        machine.table_of = partial(_table_of, weakref.ref(self))
        machine.lookups = self._lookups
        machine.opens_by = self.runtime if self._is_far else IN_TURN
        machine.may_begin, machine.allot = self._pauses.check, self._pauses.allot
        return machine

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

        What a stream, a pending area or an event log feeds is read as any other, and refuses other writers. With a
        `schema`, one that is not there is made, on a shard; its times are milliseconds where the schema does not say
        so. With columns that it had before some were added, it is read and written in these. Raises SchemaMismatch when
        the table has another schema, and NotFound when it is not there and no schema is given, and for the former name
        of a table that was renamed; then nothing is changed.
        """
        from persist_lib.table.opening import open_carrier, open_promoted  # noqa: PLC0415 - tables stand on the client
        from persist_lib.table.table import Table  # noqa: PLC0415 - as they do

        self._check_open()
        timelines = partial(timelines_of, self)
        carrier = open_carrier(self, name, schema, timelines)
        return Table(carrier, self._check_open, partial(open_promoted, self, timelines))

    def tables(self) -> list[str]:
        """The names of all tables, whatever carries them, sorted.

        Costs a list, and a read of each shard that this client does not know yet.
        """
        from persist_lib.table.opening import tables_in  # noqa: PLC0415 - tables stand on the client

        return tables_in(self)

    @overload
    def stream(self, name: str, schema: None = None) -> StreamReader: ...
    @overload
    def stream(
        self, name: str, schema: Schema, *, reentrance_id: str = "", owner: str = ""
    ) -> tuple[StreamWriter, StreamReader]: ...
    def stream(
        self, name: str, schema: Schema | None = None, *, reentrance_id: str = "", owner: str = ""
    ) -> StreamReader | tuple[StreamWriter, StreamReader]:
        """Open a stream, which feeds the table of its name: with a `schema` to write and to read it, else to read it.

            write, read = db.stream("readings", schema, reentrance_id="gateway-1")
            write.write(rows)
            write.seal(10)
            db.table("readings").read()

        With a schema, a stream that is not there is made. A location has one program that writes streams: the first
        such call makes this client the one, with the `reentrance_id` and `owner` of `streams.open`, until it is closed
        or `write.runtime` is stopped; later calls may leave them out. Raises what `streams.open` and its
        `create_or_load` and `load` raise (Locked, Fenced, SchemaMismatch, NameTaken, NotFound), and InvalidUsage for
        another `reentrance_id`.
        """
        from persist_lib.streams.lifecycle import ClientStreams  # noqa: PLC0415 - streams stand on the client

        self._check_open()
        streams = self._streams.get("") or self._streams.setdefault("", ClientStreams(self))  # no lock: see `Machines`
        return streams.open(name, schema, reentrance_id, owner)

    def sources(self) -> Sources:
        """The sources of this location, to declare and to run them: outside data that feeds tables."""
        return self.controller().sources()

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
        return timelines_of(self).transaction(timeline, timeout=timeout)

    def heartbeat(self) -> None:
        """Renew the leases that are due, before this call returns. A background thread does the same by itself."""
        self._check_open()
        self.leases.tick()

    def close(self) -> None:
        """Close all handles and release the location. Idempotent. Later calls raise an error that says it is closed."""
        streams = [streams.close for streams in list(self._streams.values())]  # first, as they write what they accepted
        handles = [partial(self._close_handle, number) for number in reversed(list(self._handles))]
        _do_all([*streams, *handles, self.leases.close, self._machines.close, self.location.close])

    def _close_handle(self, number: int) -> None:
        if (handle := self._handles.get(number)) is not None:
            try:
                handle.close()
            except Exception:
                self._handles.pop(number, None)
                raise
            self._handles.pop(number, None)  # last: after an interrupt the handle is still there for the next `close`

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for streams in list(self._streams.values()):
                streams.__exit__(kind, error, trace)
            for handle in list(self._handles.values()):
                if isinstance(handle, WriteHandle):
                    mute(handle)
        self.close()

    __reduce__ = not_pickled(
        "A client", "Pass client.url and client.consensus_url, or the splits of a snapshot, and open them there"
    )


class LayerClient(Client):
    """A client as collections use it: it names whose members their shards are. All else is the client's that it is of.

    A member takes nothing by its own name, also not of a handle that the same program opened by that before.
    """

    def __init__(self, outer: Client, epoch: int | None = None) -> None:
        self._outer, self.machine = outer, partial(outer._machines.of_layer, most=epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def know_members(self, shards: Iterable[str], member: str) -> None:
        """Know that these shards may be members, and whose."""
        self._outer._machines.know_members(shards, member)

    def in_epoch(self, epoch: int) -> LayerClient:
        """The same, for a handle of a collection in an epoch: in a later one it is refused, and never names that."""
        return LayerClient(self._outer, epoch)

    def close(self) -> None:
        self._outer.close()


def for_layers(client: Client) -> LayerClient:
    """The same client as collections use it."""
    if isinstance(client, LayerClient):
        return client
    if client._inner is None:
        client._inner = LayerClient(client)
    return client._inner


def _table_of(client: weakref.ref[Client], collection: str) -> str:
    """The name that a collection has now, by its id; empty where it has none, or that cannot be found out."""
    if (found := client()) is not None:
        with suppress(PersistError):
            return str(import_module("persist_lib.catalog.catalog").name_of(for_layers(found), collection))
    return ""


def _owner_names(client: weakref.ref[Client]) -> Callable[[str], str]:
    """What finds the name of what a shard belongs to, by one look at the catalog."""
    if (found := client()) is None:
        raise AssertionError("it is asked for a client that is there")
    name_of: Callable[[str], str] = import_module("persist_lib.sources.kinds").owners_of(found).name_of
    return name_of


def timelines_of(client: Client) -> Tables:
    """The tables of timelines, of which a client has each open once."""
    if client._tables is None:
        client._tables = client.controller().tables()
    return client._tables


def _do_all(steps: Sequence[Callable[[], None]]) -> None:
    """Do the steps one after the other, each even if those before it failed. Raises the first interrupt, or last error.

    This is no stack of callbacks (ExitStack), and calls nothing but the steps. An interrupt while such a stack
    is filled, or within such a call, would leave out steps.
    """
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - raised below
            if failure is None or isinstance(failure, Exception):
                failure = error
    if failure is not None:
        raise failure
